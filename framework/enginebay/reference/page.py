"""The page of one kind: its hook, record, interface and laws, in Markdown. What it says stands in the source, not here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from enginebay.conformance.suite_names import SUITE_OF_KIND, SUITES
from enginebay.plugins.hookspecs import PROVISION_HOOKS
from enginebay.plugins.records import API_VERSION, RECORD_TYPES, Kind, Record
from enginebay.reference.source import FieldText, ModuleText

#: the command that writes all pages, from the root of the project
COMMAND = "enginebay plugins reference --out docs/plugins/reference"

#: kind -> the modules to show, each with the names to show of it; none: all that are public
_SHOWN: dict[Kind, dict[str, tuple[str, ...]]] = {
    "attention": {
        "enginebay.interfaces.attention": (),
        "enginebay.interfaces.batch": ("GroupBatch", "PhaseBatch", "Bucket"),
        "enginebay.plugins.requirements": ("AttentionSpec",),
        "enginebay.plugins.records": ("KVLayout",),
    },
    "executor": {"enginebay.interfaces.executor": ()},
    "model": {"enginebay.interfaces.model": ()},
    "quant": {"enginebay.interfaces.quant": (), "enginebay.interfaces.quant_sample": ()},
    "sampler": {"enginebay.interfaces.sampler": ()},
    "scheduler": {"enginebay.interfaces.scheduler": ()},
}
#: how YAML names a plugin of a kind
_YAML: dict[Kind, str] = {
    "attention": "`attention: {backend: NAME}`",
    "executor": "`executor: {backend: NAME}`",
    "model": "none: NAME is the checkpoint's architecture, such as `LlamaForCausalLM`",
    "quant": "`quant: {method: NAME}`, or by the checkpoint's own setting",
    "sampler": "`sampler: {processors: [NAME]}`",
    "scheduler": "`scheduler: {policy: NAME}`",
}


def reference_page(kind: Kind) -> str:
    """What a plugin of `kind` implements, as Markdown."""
    record = RECORD_TYPES[kind]
    facts = {
        "in YAML": _YAML[kind],
        "entry-point group": f"`enginebay.{kind}`",
        "hook": f"`{PROVISION_HOOKS[kind]}`",
        "record": f"`enginebay.plugins.records.{record.__name__}`",
        "API version": str(API_VERSION[kind]),
        "suite": f"`enginebay.conformance.{SUITE_OF_KIND[kind]}`" if kind in SUITE_OF_KIND else "none yet",
    }
    lines = [
        f"# The kind {kind}",
        "",
        f"Written by `{COMMAND}`; it is not edited.",
        "",
        *_table("", "", rows=facts.items()),
    ]
    lines += [
        "",
        "## The hook",
        "",
        *_code(ModuleText.of("enginebay.plugins.hookspecs").stubs([PROVISION_HOOKS[kind]])),
    ]
    lines += ["", "## The record", "", *_table("field", "type", "default", "what it says", rows=_record_rows(record))]
    for module, names in _SHOWN[kind].items():
        text = ModuleText.of(module)
        lines += ["", f"## `{module}`", "", *([] if names else [text.docstring, ""]), *_code(text.stubs(names))]
    lines += ["", "## What `check` is asked, and answers", ""]
    lines += _code(ModuleText.of("enginebay.plugins.requirements").stubs(["Hardware", "Requirements", "Reason"]))
    if kind in SUITE_OF_KIND:
        lines += ["", "## The laws", "", f"`enginebay conformance run {kind}:NAME` tries each on NAME.", ""]
        lines += _table("law", "what it demands", rows=laws_of(kind))
    return "\n".join(lines) + "\n"


def laws_of(kind: Kind) -> Iterator[tuple[str, str]]:
    """Each law of a kind in the order that it is tried in, and the first paragraph of its docstring."""
    from importlib import import_module

    suite = getattr(import_module(SUITES[SUITE_OF_KIND[kind]]), SUITE_OF_KIND[kind])
    for base in reversed(suite.__mro__):
        for name, law in vars(base).items():
            if name.startswith("test_"):
                yield f"`{name.removeprefix('test_')}`", _one_line((law.__doc__ or "").partition("\n\n")[0])


def _record_rows(record: type[Record]) -> Iterator[tuple[str, ...]]:
    text = ModuleText.of("enginebay.plugins.records")
    own, common = list(text.fields(record.__name__)), list(text.fields("Record"))
    for field in sorted(common + own, key=lambda field: field.default != ""):
        yield (
            f"`{field.name}`",
            f"`{field.annotation}`",
            f"`{field.default}`" if field.default else "must be given",
            _says(field),
        )


def _says(field: FieldText) -> str:
    return _one_line(field.text)


def _one_line(text: str) -> str:
    """Docstring marks as Markdown's."""
    return re.sub(r"``(.+?)``", r"`\1`", " ".join(text.split()))


def _code(stubs: list[str]) -> list[str]:
    return ["```python", "\n\n\n".join(stubs), "```"]


def _table(*head: str, rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    for row in (head, ("---",) * len(head), *rows):
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
