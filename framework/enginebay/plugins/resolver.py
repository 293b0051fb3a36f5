"""The resolver: which plugin fills a bay, and why.

It knows requirements and records. It never replaces an explicit choice: what was named and does not fit is an error
that lists every reason. ``auto`` takes the highest priority among those that fit, and settles no tie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from enginebay.errors import PluginError, ResolutionError
from enginebay.plugins.loader import BrokenPlugin, LoadedPlugin, PluginLoader
from enginebay.plugins.records import ExecutorRecord, Record, SchedulerRecord
from enginebay.plugins.registration import explain
from enginebay.plugins.requirements import Reason, Requirements
from enginebay.plugins.selection import ASYNC_SCHEDULING, AUTO, Rejected, Selection, SwitchedOff

#: further reasons against a candidate, beyond its own answer
Against = Callable[[Record], list[Reason]]


def resolve(
    kind: str,
    wanted: str,
    source: str,
    requirements: Requirements,
    loader: PluginLoader,
    *,
    label: str = "",
    against: Against | None = None,
) -> Selection:
    """Fill one bay.

    Parameters
    ----------
    kind
        The bay.
    wanted
        A plugin's name, or ``"auto"``. For models ``"auto"`` is the plugin named like the architecture.
    source
        Where `wanted` comes from: ``"yaml"``, ``"cli"``, ``"env"``, ``"default"``.
    requirements
        What the run demands.
    loader
        Installed and local plugins. Only what `wanted` needs is imported.
    label
        The part of the bay, for the report and for messages: a phase.
    against
        Reasons from outside the record, e.g. no common layout with what is chosen for another phase.
    """
    resolver = _Resolver(kind, source, requirements, loader, label, against)
    if wanted != AUTO:
        return resolver.explicit(wanted)
    if kind == "model":
        return resolver.model()
    if kind == "quant" and requirements.quant_method is None:
        return resolver.empty("the weights are not quantized")
    return resolver.auto()


def fitting(kind: str, requirements: Requirements, loader: PluginLoader) -> list[LoadedPlugin]:
    """Every plugin of a kind that fits."""
    resolver = _Resolver(kind, AUTO, requirements, loader, "", None)
    return [plugin for plugin in loader.candidates(kind)[0] if not resolver._explained(plugin).reasons]


class _Resolver:
    def __init__(
        self,
        kind: str,
        source: str,
        requirements: Requirements,
        loader: PluginLoader,
        label: str,
        against: Against | None,
    ) -> None:
        self.kind, self.source, self.requirements, self.loader = kind, source, requirements, loader
        self.label, self.against = label, against
        self.bay = f"{kind}.{label}" if label else kind

    def explicit(self, wanted: str) -> Selection:
        plugin = self.loader.load(self.kind, wanted)
        reasons = self._reasons(plugin)
        if not reasons:
            return self._select(plugin, wanted, self.source, ())
        others = [self._explained(p) for p in self.loader.candidates(self.kind)[0] if p.record.name != wanted]
        able = [rejected for rejected in others if not rejected.reasons]
        raise ResolutionError(
            f"{self.bay}: {wanted} ({plugin.identity.origin}), named by {self.source}, does not fit:\n"
            + "\n".join(f"    {reason}" for reason in reasons)
            + "\n  installed and fitting: "
            + (", ".join(f"{r.name} ({r.origin})" for r in able) or "none")
        )

    def model(self) -> Selection:
        if not self.requirements.architecture:
            raise ResolutionError("model: the configuration names no architecture (config.json, key 'architectures')")
        plugin = self.loader.load(self.kind, self.requirements.architecture)
        if reasons := self._reasons(plugin):
            raise ResolutionError(
                f"{self.bay}: {plugin.record.name} ({plugin.identity.origin}) does not fit:\n"
                + "\n".join(f"    {reason}" for reason in reasons)
            )
        return self._select(plugin, AUTO, AUTO, ())

    def empty(self, note: str) -> Selection:
        return Selection(
            kind=self.kind, wanted=AUTO, source=AUTO, chosen=None, identity=None, label=self.label, note=note
        )

    def auto(self) -> Selection:
        loaded, broken = self.loader.candidates(self.kind)
        answers = [(plugin, self._explained(plugin)) for plugin in loaded]
        rejected = [answer for _, answer in answers if answer.reasons] + [_rejected_broken(b) for b in broken]
        able = sorted((plugin for plugin, answer in answers if not answer.reasons), key=self._priority, reverse=True)
        if not able:
            raise ResolutionError(
                f"{self.bay}: no installed plugin fits this run:\n" + (_listing(rejected) or "  none is installed")
            )
        best, *rest = able
        if ties := [p for p in rest if self._priority(p) == self._priority(best)]:
            names = [p.record.name for p in (best, *ties)]
            raise ResolutionError(
                f"{self.bay}: auto cannot choose between plugins of equal priority {self._priority(best):g}:\n"
                + "\n".join(f"  {p.record.name} ({p.identity.origin})" for p in (best, *ties))
                + f"\nName one: {self._yaml_path()}: {' or '.join(names)}."
            )
        rejected += [Rejected(p.record.name, p.identity.origin, (self._lower_priority(p, best),)) for p in rest]
        return self._select(best, AUTO, AUTO, rejected)

    def _priority(self, plugin: LoadedPlugin) -> float:
        return plugin.record.priority_for(self.requirements)

    def _lower_priority(self, plugin: LoadedPlugin, best: LoadedPlugin) -> Reason:
        detail = f"it fits, but its priority {self._priority(plugin):g} is below {self._priority(best):g}"
        return Reason(code="priority", detail=detail)

    def _reasons(self, plugin: LoadedPlugin) -> list[Reason]:
        try:
            reasons = list(plugin.record.supports(self.requirements).reasons)
        except Exception as error:  # a record's check is the plugin's code and may raise anything
            raise PluginError(f"plugin {plugin.identity}: its supports() failed: {explain(error)}") from error
        return reasons + (self.against(plugin.record) if self.against is not None else [])

    def _explained(self, plugin: LoadedPlugin) -> Rejected:
        try:
            reasons = self._reasons(plugin)
        except PluginError as error:
            reasons = [Reason(code="broken", detail=str(error))]
        return Rejected(plugin.record.name, plugin.identity.origin, tuple(reasons))

    def _select(self, plugin: LoadedPlugin, wanted: str, source: str, rejected: Iterable[Rejected]) -> Selection:
        return Selection(
            kind=self.kind,
            wanted=wanted,
            source=source,
            chosen=plugin.record,
            identity=plugin.identity,
            label=self.label,
            rejected=tuple(rejected),
            switched_off=tuple(_switches(plugin, self.requirements)),
        )

    def _yaml_path(self) -> str:
        key = {"attention": "backend", "executor": "backend", "quant": "method", "scheduler": "policy"}[self.kind]
        return f"{self.kind}.{key}"


def _switches(plugin: LoadedPlugin, requirements: Requirements) -> Iterable[SwitchedOff]:
    record = plugin.record
    if not requirements.async_scheduling:
        return
    if isinstance(record, SchedulerRecord) and not record.async_scheduling:
        why = "its record declares async_scheduling=False"
        yield SwitchedOff(ASYNC_SCHEDULING, str(plugin.identity), why)
    if isinstance(record, ExecutorRecord) and record.max_concurrent_batches == 1:
        why = "its record declares max_concurrent_batches=1"
        yield SwitchedOff(ASYNC_SCHEDULING, str(plugin.identity), why)


def _rejected_broken(broken: BrokenPlugin) -> Rejected:
    hint = "" if broken.code == "disabled" else "enginebay plugins doctor shows more"
    return Rejected(broken.name, broken.origin, (Reason(code=broken.code, detail=str(broken.error), hint=hint),))


def _listing(rejected: Iterable[Rejected]) -> str:
    return "\n".join(
        "\n".join([f"  {r.name} ({r.origin}):", *(f"    {reason}" for reason in r.reasons)]) for r in rejected
    )
