"""The pages of docs/plugins/reference: current, complete, and printed for who has only the installed package."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from enginebay import conformance
from enginebay.cli import cli
from enginebay.conformance.suite import laws
from enginebay.conformance.suite_names import SUITE_OF_KIND
from enginebay.plugins.hookspecs import PROVISION_HOOKS
from enginebay.plugins.records import KINDS, RECORD_TYPES, Kind
from enginebay.reference.page import COMMAND, laws_of, reference_page

PAGES = Path(__file__).parents[2] / "docs" / "plugins" / "reference"


def reference(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["plugins", "reference", *arguments])


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_in_the_docs_is_current(kind: Kind) -> None:
    assert (PAGES / f"{kind}.md").read_text(encoding="utf-8") == reference_page(kind), f"run: {COMMAND}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_has_every_field_of_the_record_and_the_hook(kind: Kind) -> None:
    page = reference_page(kind)
    assert f"def {PROVISION_HOOKS[kind]}()" in page
    for field in fields(RECORD_TYPES[kind]):
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{field.name}` |")]
        assert not row.endswith("|  |"), f"{field.name} has no #: comment in enginebay.plugins.records"


@pytest.mark.parametrize("kind", SUITE_OF_KIND)
def test_a_page_has_every_law_of_the_suite(kind: Kind) -> None:
    listed = dict(laws_of(kind))
    assert {f"`{law}`" for law in laws(getattr(conformance, SUITE_OF_KIND[kind]))} == set(listed)
    assert all(listed.values())


def test_the_command_prints_one_page_or_writes_all(tmp_path: Path) -> None:
    assert reference("sampler").output == reference_page("sampler")
    assert reference("--out", str(tmp_path / "deep")).exit_code == 0
    assert sorted(file.stem for file in (tmp_path / "deep").iterdir()) == sorted(KINDS)


def test_what_is_no_kind_is_refused() -> None:
    result = reference("atention")
    assert result.exit_code == 1
    assert "'atention' is not a kind" in result.stderr
    assert "Did you mean 'attention'?" in result.stderr
    assert "or --out DIR for the pages of all" in reference().stderr
