"""The support matrix, and the page that is its output."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner
from enginebay.cli.plugins import plugins
from enginebay.plugins.matrix import support_matrix
from enginebay.plugins.records import HND, NHD, AttentionRecord
from enginebay.plugins.requirements import Reason, Requirements

PAGE = Path(__file__).parents[2] / "docs" / "support_matrix.md"
COMMAND = "enginebay plugins matrix --distribution enginebay"


def picky(req: Requirements) -> list[Reason]:
    """Queries and cache in
    one dtype.

    More that the table has no room for.
    """
    return []


PLAIN = AttentionRecord(
    name="plain", summary="s", factory=print, api_version=0, dtypes=("float32",), kv_dtypes=("float32",)
)
RICH = AttentionRecord(
    name="rich",
    summary="s",
    factory=print,
    api_version=0,
    requires_dist=("acme>=2",),
    devices=("cuda",),
    dtypes=("bfloat16", "float16"),
    kv_dtypes=("bfloat16", "float8_e4m3fn"),
    head_dims=(64, 128),
    layouts=(HND, NHD),
    kernel_blocks=(1,),
    window=True,
    soft_cap=True,
    sinks=True,
    host_lens="upper_bound",
    graph_support="single_token_decode",
    min_capability=(9, 0),
    priority=15,
    phase_priority={"prefill": 30},
    check=picky,
)


def rows(page: str) -> dict[str, list[str]]:
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("|")]
    return {line[0]: line[1:] for line in lines[2:]}


def test_one_column_a_backend_by_name() -> None:
    page = support_matrix([RICH, PLAIN], "the command")
    assert "`the command`" in page
    assert "|  | `plain` | `rich` |\n| --- | --- | --- |\n" in page
    assert rows(page) == {
        "devices": ["cpu, cuda", "cuda"],
        "min. capability": ["any", "sm_90"],
        "needs": ["none", "acme>=2"],
        "phases": ["decode, prefill", "decode, prefill"],
        "dtypes": ["float32", "bfloat16, float16"],
        "KV dtypes": ["float32", "bfloat16"],
        "fp8 KV": ["no", "yes"],
        "head sizes": ["any", "64, 128"],
        "kernel blocks": ["multiples of 16", "any"],
        "layouts": ["NHD", "HND, NHD"],
        "sliding window": ["no", "yes"],
        "soft cap": ["no", "yes"],
        "sinks": ["no", "yes"],
        "graphs": ["never", "single token decode"],
        "host lengths": ["none", "upper bound"],
        "priority": ["0", "decode 15, prefill 30"],
        "further condition": ["none", "Queries and cache in one dtype"],
    }


def test_the_page_is_what_the_records_say() -> None:
    result = CliRunner().invoke(plugins, COMMAND.split()[2:])
    assert result.exit_code == 0, result.output
    assert PAGE.read_text(encoding="utf-8") == result.stdout, f"run: {COMMAND} > docs/{PAGE.name}"
