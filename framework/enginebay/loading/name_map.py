"""How a model's weights are called in the checkpoint. Plain text patterns; it knows no tensor.

A model gives each layer the checkpoint's own path when it builds it, so most models have nothing to declare but what to
ignore. Where a checkpoint spells paths otherwise, `WeightMap.renames` says so with templates in which ``{word}`` stands
for one path segment and ``{word*}`` for one or more.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from functools import lru_cache

from enginebay.errors import ModelError

_FIELD = re.compile(r"\{(\w+)(\*?)\}")


@dataclass(frozen=True)
class WeightMap:
    """The declarative part of weight loading."""

    #: (module path in the model, module path in the checkpoint) templates; the first that matches a whole path wins
    renames: tuple[tuple[str, str], ...] = ()
    #: `fnmatch` patterns of checkpoint tensors that may be there and are not used
    ignored: tuple[str, ...] = ()
    #: (module, module whose weights it shares) for each tied matrix: the first may be missing, or present and equal
    tied: tuple[tuple[str, str], ...] = ()

    def checkpoint_module(self, module: str) -> str:
        """The checkpoint's path of a model's module path."""
        for pattern, replacement in self.renames:
            match = _compiled(pattern).fullmatch(module)
            if match is not None:
                return _filled(replacement, match)
        return module

    def is_ignored(self, name: str) -> bool:
        """Whether a checkpoint tensor is declared unused."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.ignored)


def _filled(template: str, match: re.Match[str]) -> str:
    captured = match.groupdict()

    def value(field: re.Match[str]) -> str:
        if field[1] not in captured:
            raise ModelError(f"weight map: {template!r} uses {field[0]}, which its pattern does not have")
        return captured[field[1]]

    return _FIELD.sub(value, template)


@lru_cache(maxsize=256)
def _compiled(template: str) -> re.Pattern[str]:
    """A template as a regular expression with one group a field."""
    out, end = "", 0
    for found in _FIELD.finditer(template):
        out += re.escape(template[end : found.start()])
        out += f"(?P<{found[1]}>.+)" if found[2] else f"(?P<{found[1]}>[^.]+)"
        end = found.end()
    return re.compile(out + re.escape(template[end:]))
