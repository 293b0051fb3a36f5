from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.plugins.conftest import FakeSite

WATCH = "seen = []\n@hookimpl\ndef enginebay_step_finished(step):\n    seen.append(step)\n"
HEAD = "from enginebay import hookimpl\n"


def test_nobody_listens(fake_site: FakeSite) -> None:
    fake_site.attention("acme")
    loader = fake_site.loader()
    observers = loader.observers([loader.load("attention", "acme").identity])
    assert not observers.wants_engine_started
    assert not observers.wants_step_finished
    assert not observers.wants_request_finished
    assert not observers.wants_engine_stopped
    observers.step_finished(1)  # harmless


def test_only_the_chosen_plugin_observes(fake_site: FakeSite) -> None:
    fake_site.attention("chosen", body=WATCH)
    fake_site.attention("loser", body=WATCH)
    loader = fake_site.loader()
    loaded, _ = loader.candidates("attention")
    chosen = next(p for p in loaded if p.record.name == "chosen")
    observers = loader.observers([chosen.identity])
    assert observers.wants_step_finished
    assert not observers.wants_request_finished
    observers.step_finished("step")
    assert sys.modules["eb_chosen"].seen == ["step"]
    assert sys.modules["eb_loser"].seen == []


def test_local_file_observes_every_hook(fake_site: FakeSite, tmp_path: Path) -> None:
    (tmp_path / "watch.py").write_text(
        HEAD
        + "seen = []\n"
        + "".join(
            f"@hookimpl\ndef enginebay_{hook}({argument}):\n    seen.append(('{hook}', {argument}))\n"
            for hook, argument in [
                ("engine_started", "engine"),
                ("step_finished", "step"),
                ("request_finished", "request"),
                ("engine_stopped", "engine"),
            ]
        )
    )
    loader = fake_site.loader()
    loader.add_local("watch.py", tmp_path)
    observers = loader.observers([])
    assert observers.wants_engine_started
    assert observers.wants_request_finished
    assert observers.wants_engine_stopped
    observers.engine_started(1)
    observers.step_finished(2)
    observers.request_finished(3)
    observers.engine_stopped(4)
    (module,) = loader.manager.get_plugins()
    assert module.seen == [
        ("engine_started", 1),
        ("step_finished", 2),
        ("request_finished", 3),
        ("engine_stopped", 4),
    ]


def test_failing_observer_is_reported_once_and_others_go_on(
    fake_site: FakeSite, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "bad.py").write_text(HEAD + "@hookimpl\ndef enginebay_step_finished():\n    raise KeyError('oops')\n")
    (tmp_path / "good.py").write_text(HEAD + WATCH)
    loader = fake_site.loader()
    loader.add_local("bad.py", tmp_path)
    loader.add_local("good.py", tmp_path)
    observers = loader.observers([])
    observers.step_finished(1)
    observers.step_finished(2)
    good = next(p for p in loader.manager.get_plugins() if hasattr(p, "seen"))
    assert good.seen == [1, 2]
    assert len(caplog.records) == 1
    assert "bad" in caplog.text
    assert "oops" in caplog.text
