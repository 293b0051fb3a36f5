"""The support matrix: what attention backends declare, as a Markdown table. It reads records and judges nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from enginebay.plugins.records import AttentionRecord
from enginebay.plugins.requirements import FP8

_HEADER = """\
# Attention backends: support matrix

What each backend's record declares; the resolver refuses everything else. This page is the output of
`{command}`; it is not edited.

* *min. capability*: least CUDA compute capability. *kernel blocks*: a cache block is a multiple of one of these.
* *host lengths*: what of the rows' lengths planning reads on the host. *graphs*: decode steps that may be captured.
* *priority*: where several fit, `auto` takes the highest, phase by phase.
"""


def _words(values: Iterable[object]) -> str:
    return ", ".join(map(str, values)) or "none"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _blocks(record: AttentionRecord) -> str:
    return "any" if 1 in record.kernel_blocks else f"multiples of {' or '.join(map(str, record.kernel_blocks))}"


def _capability(record: AttentionRecord) -> str:
    if record.min_capability is None:
        return "any" if "cuda" in record.devices else "none"
    return "sm_{}{}".format(*record.min_capability)


def _priority(record: AttentionRecord) -> str:
    by_phase = record.phase_priorities()
    if len(set(by_phase.values())) == 1:
        return str(next(iter(by_phase.values())))
    return ", ".join(f"{phase} {priority}" for phase, priority in by_phase.items())


def _condition(record: AttentionRecord) -> str:
    text = "" if record.check is None else (record.check.__doc__ or "own check")
    return " ".join(text.strip().partition("\n\n")[0].split()).rstrip(".") or "none"


_ROWS: dict[str, Callable[[AttentionRecord], str]] = {
    "devices": lambda r: _words(r.devices),
    "min. capability": _capability,
    "needs": lambda r: _words(r.requires_dist or r.requires),
    "phases": lambda r: _words(r.phases),
    "dtypes": lambda r: _words(r.dtypes),
    "KV dtypes": lambda r: _words(d for d in r.kv_dtypes if d != FP8),
    "fp8 KV": lambda r: _yes(FP8 in r.kv_dtypes),
    "head sizes": lambda r: "any" if r.head_dims is None else _words(r.head_dims),
    "kernel blocks": _blocks,
    "layouts": lambda r: _words(layout.name for layout in r.layouts),
    "sliding window": lambda r: _yes(r.window),
    "soft cap": lambda r: _yes(r.soft_cap),
    "sinks": lambda r: _yes(r.sinks),
    "graphs": lambda r: r.graph_support.replace("_", " "),
    "host lengths": lambda r: r.host_lens.replace("_", " "),
    "priority": _priority,
    "further condition": _condition,
}


def support_matrix(records: Iterable[AttentionRecord], command: str) -> str:
    """A page with one column a backend, ordered by name.

    Parameters
    ----------
    records
        The backends to show.
    command
        What prints the page, for its head.
    """
    columns = sorted(records, key=lambda record: record.name)
    lines = [
        ["", *(f"`{record.name}`" for record in columns)],
        ["---"] * (len(columns) + 1),
        *([title, *(cell(record) for record in columns)] for title, cell in _ROWS.items()),
    ]
    table = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
    return f"{_HEADER.format(command=command)}\n{table}\n"
