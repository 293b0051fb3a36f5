"""``enginebay conformance run``: exit statuses, reports, refusals."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from enginebay.cli import cli
from enginebay.conformance.report import markdown

LOCAL = """\
from enginebay import hookimpl
from enginebay.plugins.records import AttentionRecord


def make(context):
    from enginebay_torch_attention.backend import TorchAttention

    class Mine(TorchAttention):
        def attend(self, layer, query, cache, batch, state, out, lse=None):
            super().attend(layer, query, cache, batch, state, out, lse)
            {fault}

    return Mine(context)


@hookimpl
def enginebay_attention_backends():
    return [
        AttentionRecord(
            name="mine", summary="mine", factory=make, api_version=0, dtypes=("float32",), kv_dtypes=("float32",),
            head_dims=(64,), devices=("cpu",), host_lens="exact",
        )
    ]
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["conformance", "run", *arguments])


def test_a_local_plugin_passes_and_the_reports_say_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(LOCAL.format(fault="pass"))
    result = run(
        "attention:mine", "--local", str(file), "--report", "md,json,junit", "--out", str(tmp_path / "reports")
    )
    assert result.exit_code == 0, capfd.readouterr().out
    stem = tmp_path / "reports" / "conformance-attention-mine"
    data = json.loads(stem.with_suffix(".json").read_text())
    (plugin,) = data["plugins"]
    assert (plugin["verdict"], plugin["name"], plugin["distribution"]) == ("passed", "mine", str(file))
    assert len(plugin["sha256"]) == 64
    assert stem.with_suffix(".md").read_text() == markdown(data)
    cases = sum(sum(law["cases"].values()) for law in plugin["laws"])
    suite = ElementTree.parse(stem.with_suffix(".xml")).getroot()[0]
    assert int(suite.attrib["tests"]) == cases > 20


def test_a_broken_plugin_fails_by_the_law_s_name(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(LOCAL.format(fault="out[-1] = 0"))
    assert run("attention:mine", "--local", str(file)).exit_code == 1
    text = capfd.readouterr().out
    assert "test_output_equals_float32" in text
    assert "attention:mine on cpu, core: failed" in text


def test_a_plugin_for_another_device_is_not_judged(capfd: pytest.CaptureFixture[str]) -> None:
    result = run("attention:flash_attention")
    assert result.exit_code == 2
    assert "nothing that runs the plugin could be run" in result.stderr


def test_no_law_of_that_name_proves_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("attention:torch", "--laws", "no_such_law").exit_code not in (0, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["torch"], "'torch' is not KIND:NAME, such as attention:torch"),
        (["attention:"], "is not KIND:NAME"),
        (["atention:torch"], "Did you mean 'attention'?"),
        (["attention:torch", "--report", "html"], "--report html: there are junit, json, md"),
    ],
)
def test_what_cannot_be_run_is_refused(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert message in result.stderr


def test_an_unknown_plugin_is_an_error_that_lists_what_there_is(capfd: pytest.CaptureFixture[str]) -> None:
    result = run("attention:torhc", "--report", "md")
    assert result.exit_code == 1
    assert "no installed plugin of the kind attention is named 'torhc'. Did you mean 'torch'?" in result.stderr
    assert capfd.readouterr() == ("", ""), "pytest is not started, and no report is announced"


def test_a_plugin_that_cannot_be_imported_is_an_error_of_one_message(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("raise RuntimeError('no such kernel')\n")
    result = run("attention:broken", "--local", str(file))
    assert result.exit_code == 1
    assert "no such kernel" in result.stderr
    assert "Traceback" not in result.stderr


def test_without_pytest_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run("attention:torch")
    assert result.exit_code == 1
    assert "pip install 'enginebay[conformance]'" in result.stderr
