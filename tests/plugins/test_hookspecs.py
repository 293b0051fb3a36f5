"""Every hookspec's docstring holds a complete plugin; here each one is taken out, installed and loaded."""

from __future__ import annotations

import inspect
import textwrap
import tomllib
from typing import TYPE_CHECKING

import pytest
from enginebay.plugins import hookspecs
from enginebay.plugins.hookspecs import PROVISION_HOOKS
from enginebay.plugins.records import API_VERSION, KINDS, RECORD_TYPES
from enginebay.plugins.registration import HOOKS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.plugins.conftest import FakeSite

OBSERVERS = sorted(set(HOOKS) - set(PROVISION_HOOKS.values()))


def code_blocks(hook: str) -> list[str]:
    """The literal blocks (``::``) of a hookspec's docstring."""
    blocks: list[list[str]] = []
    inside = False
    for line in (inspect.getdoc(getattr(hookspecs, hook)) or "").splitlines():
        if line and not line.startswith(" "):
            inside = line.endswith("::")
            if inside:
                blocks.append([])
        elif inside:
            blocks[-1].append(line)
    return [textwrap.dedent("\n".join(block)).strip() + "\n" for block in blocks]


def test_every_kind_has_a_hook_a_record_type_and_a_version() -> None:
    assert tuple(PROVISION_HOOKS) == KINDS == tuple(RECORD_TYPES) == tuple(API_VERSION)
    assert all(record_type.kind == kind for kind, record_type in RECORD_TYPES.items())
    assert set(PROVISION_HOOKS.values()) < set(HOOKS)


@pytest.mark.parametrize("kind", KINDS)
def test_docstring_of_a_provision_hook_is_a_working_plugin(fake_site: FakeSite, kind: str) -> None:
    source, project = code_blocks(PROVISION_HOOKS[kind])
    ((name, module),) = tomllib.loads(project)["project"]["entry-points"][f"enginebay.{kind}"].items()
    fake_site.module(module, source)
    fake_site.dist_info("eb-doc", "1.0", {kind: {name: module}})
    assert fake_site.loader().load(kind, name).record.name == name


@pytest.mark.parametrize("hook", OBSERVERS)
def test_docstring_of_an_observation_hook_is_a_working_observer(fake_site: FakeSite, tmp_path: Path, hook: str) -> None:
    (source,) = code_blocks(hook)
    (tmp_path / "watch.py").write_text(source)
    loader = fake_site.loader()
    loader.add_local("watch.py", tmp_path)
    assert getattr(loader.observers([]), f"wants_{hook.removeprefix('enginebay_')}")
