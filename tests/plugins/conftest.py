"""A fake site-packages: distributions made of a dist-info and a module, in a temporary folder on ``sys.path``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from enginebay.plugins.catalogue import DISABLE_VARIABLE, Catalogue
from enginebay.plugins.loader import PluginLoader
from enginebay.plugins.requirements import AttentionSpec, Hardware, Requirements


@dataclass
class FakeSite:
    root: Path
    more: list[Path] = field(default_factory=list)

    def module(self, name: str, source: str) -> Path:
        path = self.root / f"{name}.py"
        path.write_text(source)
        return path

    def dist_info(
        self,
        distribution: str,
        version: str,
        entry_points: Mapping[str, Mapping[str, str]],
        *,
        where: Path | None = None,
        metadata: bool = True,
        record: bool = True,
    ) -> Path:
        """Write metadata only; `entry_points` is ``{kind: {name: value}}``."""
        path = (where or self.root) / f"{distribution.replace('-', '_')}-{version}.dist-info"
        path.mkdir(parents=True)
        if metadata:
            text = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\nSummary: about {distribution}\n"
            (path / "METADATA").write_text(text)
        if record:
            (path / "RECORD").write_text("")
        lines = []
        for kind, entries in entry_points.items():
            lines += [f"[enginebay.{kind}]", *(f"{name} = {value}" for name, value in entries.items())]
        if lines:
            (path / "entry_points.txt").write_text("\n".join(lines) + "\n")
        return path

    def attention(
        self, name: str, *, distribution: str = "", version: str = "1.0", record: str = "", body: str = ""
    ) -> Path:
        """A distribution with one attention plugin; `record` adds keyword arguments, `body` goes above the hook."""
        distribution = distribution or f"eb-{name}"
        module = distribution.replace("-", "_")
        base = (
            f"name={name!r}, summary='fake', factory=print, api_version=0, dtypes=('float32',), kv_dtypes=('float32',)"
        )
        self.module(
            module,
            "from enginebay import hookimpl\n"
            "from enginebay.plugins.records import *\n"
            f"{body}\n"
            "@hookimpl\n"
            "def enginebay_attention_backends():\n"
            f"    return [AttentionRecord(**{{**dict({base}), **dict({record})}})]\n",
        )
        return self.dist_info(distribution, version, {"attention": {name: module}})

    def other(self, kind: str, hook: str, record: str, name: str, distribution: str = "") -> Path:
        """A distribution with one plugin of another kind; `record` is the whole expression."""
        distribution = distribution or f"eb-{kind}-{name.lower()}"
        module = distribution.replace("-", "_")
        self.module(
            module,
            "from enginebay import hookimpl\n"
            "from enginebay.plugins.records import *\n"
            f"@hookimpl\ndef {hook}():\n    return [{record}]\n",
        )
        return self.dist_info(distribution, "1.0", {kind: {name: module}})

    def folder(self, name: str) -> Path:
        """A further directory, searched after those before it."""
        path = self.root.parent / name
        path.mkdir()
        self.more.append(path)
        return path

    def catalogue(self, disabled: str | None = "") -> Catalogue:
        return Catalogue.discover([str(self.root), *map(str, self.more)], known=(), disabled=disabled)

    def loader(self, disabled: str | None = "") -> PluginLoader:
        return PluginLoader(self.catalogue(disabled))

    # the six classics

    def clashing(self) -> None:
        """Two distributions claim attention:acme."""
        self.attention("acme", distribution="acme-one", version="1.0")
        self.attention("acme", distribution="acme-two", version="2.0")

    def stale(self) -> tuple[Path, Path]:
        """The metadata of an uninstalled copy in a directory before the live one, which has a plugin more."""
        early = self.dist_info("eb-moved", "0.9", {"attention": {"old": "eb_moved"}})
        live = self.dist_info(
            "eb-moved", "1.0", {"attention": {"old": "eb_moved", "new": "eb_moved"}}, where=self.folder("later")
        )
        return early, live

    def broken_import(self) -> None:
        self.attention("broken", body="import a_module_that_nobody_has")

    def misspelt_hook(self) -> None:
        self.module(
            "eb_misspelt",
            "from enginebay import hookimpl\n@hookimpl\ndef enginebay_attention_backend():\n    return []\n",
        )
        self.dist_info("eb-misspelt", "1.0", {"attention": {"misspelt": "eb_misspelt"}})

    def wrong_api(self) -> None:
        self.attention("future", record="api_version=2")


@pytest.fixture
def fake_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSite]:
    root = tmp_path / "site"
    root.mkdir()
    monkeypatch.delenv(DISABLE_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(root))
    before = set(sys.modules)
    yield FakeSite(root)
    for name in set(sys.modules) - before:
        if name.startswith(("eb_", "acme_", "_enginebay_local_")):
            del sys.modules[name]


@pytest.fixture
def requirements() -> Requirements:
    """A small float32 model on a CPU."""
    return Requirements(
        hardware=Hardware(device="cpu"),
        dtype="float32",
        kv_dtype="float32",
        architecture="LlamaForCausalLM",
        attention=(AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125),),
    )
