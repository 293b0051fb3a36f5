"""The loader: from a catalogue entry, or a local file, to validated records in a pluggy manager.

It replaces pluggy's ``load_setuptools_entrypoints``, which skips same-named plugins of other groups in silence, lets
the first of two clashing distributions win, and keeps a plugin with a misspelt hook. It imports a plugin only when one
asks for it. It does not choose between plugins; the resolver does.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pluggy

from enginebay.errors import PluginConflictError, PluginError, PluginNotFoundError
from enginebay.plugins import hookspecs
from enginebay.plugins.catalogue import Catalogue, conflict_message
from enginebay.plugins.hookspecs import PROJECT, PROVISION_HOOKS
from enginebay.plugins.identity import PluginIdentity, compare_plugin_sets
from enginebay.plugins.local import import_local
from enginebay.plugins.metadata import Entry
from enginebay.plugins.observers import Observers
from enginebay.plugins.records import Record
from enginebay.plugins.registration import check_api_version, explain, provided, register


@dataclass(frozen=True)
class LoadedPlugin:
    """A validated record and whose it is."""

    identity: PluginIdentity
    record: Record
    #: the name under which its module is registered in pluggy
    plugin_name: str


def _observes(manager: pluggy.PluginManager, plugin: Any) -> bool:
    return any(caller.name not in PROVISION_HOOKS.values() for caller in manager.get_hookcallers(plugin) or ())


@dataclass(frozen=True)
class BrokenPlugin:
    """A candidate that could not be loaded, kept so that the report can name it."""

    kind: str
    name: str
    #: the distributions, or files, that claim the name
    origin: str
    error: PluginError
    #: ``broken``, ``conflict`` or ``disabled``
    code: str = "broken"


class PluginLoader:
    """Loads plugins once each; asking again gives the same object."""

    def __init__(self, catalogue: Catalogue | None = None) -> None:
        self.catalogue = Catalogue.discover() if catalogue is None else catalogue
        self.manager = pluggy.PluginManager(PROJECT)
        self.manager.add_hookspecs(hookspecs)
        self._loaded: dict[tuple[str, str], LoadedPlugin] = {}
        self._local: dict[tuple[str, str], list[LoadedPlugin]] = {}
        self._local_files: dict[Path, PluginIdentity] = {}
        self._local_modules: set[str] = set()

    def load(self, kind: str, name: str) -> LoadedPlugin:
        """The plugin of that kind and name, imported and checked.

        Raises `PluginNotFoundError`, `PluginConflictError` or a `PluginError` that says what is wrong with it and whose
        it is; the plugin's own exception is its ``__cause__``.
        """
        if local := self._local.get((kind, name)):
            origins = [plugin.identity.origin for plugin in local]
            origins += [entry.origin for entry in self.catalogue.claims(kind, name)]
            if len(origins) > 1:
                raise PluginConflictError(conflict_message(kind, name, origins))
            return local[0]
        entry = self.catalogue.find(kind, name, also=self._local_names(kind))
        if (kind, name) not in self._loaded:
            self._loaded[kind, name] = self._load_entry(entry)
        return self._loaded[kind, name]

    def add_local(self, reference: str, base: Path | None = None) -> PluginIdentity:
        """Load a plugin file named in YAML; its records join the candidates.

        Parameters
        ----------
        reference
            A ``.py`` file, or a package's folder or ``__init__.py``.
        base
            The folder that a relative reference starts from: the YAML file's; None: the working directory.

        Returns
        -------
        PluginIdentity
            Of the kind ``local``: the file's path and hash, also where it only observes.
        """
        local = import_local(reference, base)
        if local.path in self._local_files:
            return self._local_files[local.path]
        where = f"local plugin {local.path}"
        register(self.manager, local.module, local.module_name, where)
        found: list[LoadedPlugin] = []
        for kind in PROVISION_HOOKS:
            for record in provided(self.manager, local.module_name, kind, where, required=False):
                check_api_version(record, kind, where)
                identity = PluginIdentity(kind, record.name, str(local.path), sha256=local.sha256)
                found.append(LoadedPlugin(identity, record, local.module_name))
        if not found and not _observes(self.manager, local.module):
            self.manager.unregister(local.module)
            raise PluginError(
                f"{where}: its hooks return no record, so it adds nothing. Return one, or do not name it."
            )
        for plugin in found:
            self._local.setdefault((plugin.identity.kind, plugin.record.name), []).append(plugin)
        self._local_modules.add(local.module_name)
        own = PluginIdentity("local", local.path.stem, str(local.path), sha256=local.sha256)
        self._local_files[local.path] = own
        return own

    def names(self, kind: str) -> tuple[str, ...]:
        """The names of a kind that can be asked for: installed ones and those of local files."""
        return tuple(dict.fromkeys([*self.catalogue.names(kind), *(name for name, _ in self._local_names(kind))]))

    def candidates(self, kind: str) -> tuple[list[LoadedPlugin], list[BrokenPlugin]]:
        """Load every plugin of a kind; those that cannot be used come back with the reason, never in silence."""
        loaded: list[LoadedPlugin] = []
        broken: list[BrokenPlugin] = []
        for name in self.names(kind):
            try:
                loaded.append(self.load(kind, name))
            except PluginError as error:
                broken.append(self._broken(kind, name, error))
        return loaded, broken

    def identities(self, chosen: Iterable[PluginIdentity]) -> tuple[PluginIdentity, ...]:
        """The set to send to every process: what was chosen, and every local file."""
        return tuple(sorted({*chosen, *self._local_files.values()}))

    def load_set(self, parent: Iterable[PluginIdentity]) -> tuple[PluginIdentity, ...]:
        """Load exactly what a parent process resolved; any difference is a `PluginMismatchError` that names both."""
        wanted = sorted(parent)
        files = [identity for identity in wanted if identity.kind == "local"]
        compare_plugin_sets(files, [self.add_local(identity.distribution) for identity in files])
        own: list[PluginIdentity] = []
        for identity in wanted:
            if identity.kind != "local":
                with contextlib.suppress(PluginNotFoundError):  # missing here: the comparison says so
                    own.append(self.load(identity.kind, identity.name).identity)
        compare_plugin_sets(wanted, self.identities(own))
        return self.identities(own)

    def observers(self, chosen: Iterable[PluginIdentity]) -> Observers:
        """The observers among the chosen plugins and the local files; a candidate that lost does not observe."""
        names = {self.load(i.kind, i.name).plugin_name for i in chosen if i.kind != "local"}
        return Observers(self.manager, names | self._local_modules)

    def _local_names(self, kind: str) -> list[tuple[str, str]]:
        return [(name, p.identity.origin) for (k, name), found in self._local.items() if k == kind for p in found]

    def _broken(self, kind: str, name: str, error: PluginError) -> BrokenPlugin:
        origins = [entry.origin for entry in self.catalogue.named(kind, name)]
        origins += [origin for local, origin in self._local_names(kind) if local == name]
        code = "broken"
        if isinstance(error, PluginConflictError):
            code = "conflict"
        elif not self.catalogue.claims(kind, name):
            code = "disabled"
        return BrokenPlugin(kind, name, "; ".join(origins), error, code)

    def _load_entry(self, entry: Entry) -> LoadedPlugin:
        where = f"plugin {entry.kind}:{entry.name} ({entry.origin})"
        plugin = self._import(entry, where)
        plugin_name = register(self.manager, plugin, entry.value, where)
        records = provided(self.manager, plugin_name, entry.kind, where, required=True)
        record = next((r for r in records if r.name == entry.name), None)
        if record is None:
            raise PluginError(
                f"{where}: {PROVISION_HOOKS[entry.kind]} of {entry.value} returned no record named {entry.name!r}, but "
                f"{', '.join(repr(r.name) for r in records) or 'none'}. "
                "The entry point and the record must have one name."
            )
        check_api_version(record, entry.kind, where)
        identity = PluginIdentity(entry.kind, entry.name, entry.distribution, version=entry.version)
        return LoadedPlugin(identity, record, plugin_name)

    def _import(self, entry: Entry, where: str) -> Any:
        try:
            plugin: Any = importlib.import_module(entry.module)
            for attribute in filter(None, entry.attribute.split(".")):
                plugin = getattr(plugin, attribute)
        # A plugin may raise anything while it is imported, SystemExit included; all of it is reported as the plugin's.
        except (Exception, SystemExit) as error:
            others = "".join(
                f"\n  {copy.origin} is another copy of it, which is shadowed: one of them may be stale"
                for copy in self.catalogue.shadowed_copies(entry.distribution)
            )
            raise PluginError(f"{where} cannot be imported: {explain(error)}{others}") from error
        return plugin
