"""The attention bay is filled part by part, with backends that can share one KV cache.

A part is one phase of one group of layers; groups are the kinds of cache that the model has. Cache tensors are shared by
all of them, so every part must agree on layout, block size and KV dtype. Parts left to ``auto`` get the greatest sum of
priorities among the combinations that agree. What a backend computes is not known here.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace

from enginebay.errors import ResolutionError
from enginebay.plugins.loader import LoadedPlugin, PluginLoader
from enginebay.plugins.negotiation import CacheUser, common_kv_dtype, negotiate_layout
from enginebay.plugins.records import AttentionRecord, Record
from enginebay.plugins.requirements import Reason, Requirements
from enginebay.plugins.resolver import fitting, resolve
from enginebay.plugins.selection import AUTO, AttentionPart, AttentionSelection, Selection


@dataclass(frozen=True)
class Wish:
    """What was asked for one part."""

    #: a backend's name, or ``"auto"``
    name: str = AUTO
    #: where it was written
    source: str = "default"


def resolve_attention(
    wishes: Mapping[AttentionPart, Wish], requirements: Requirements, loader: PluginLoader
) -> AttentionSelection:
    """Choose a backend for every part, and the cache that they share.

    Parameters
    ----------
    wishes
        One for each phase of each group of layers.
    requirements
        What the run demands; a part is asked for its own phase and its own layers only. ``block_size`` None leaves the
        block size to the backends.
    loader
        Installed and local plugins.

    Raises
    ------
    ResolutionError
        A named backend does not fit, nothing fits a part, equal priorities, or backends that cannot share a cache.
    """
    bay = _Bay(tuple(wishes), requirements, loader)
    selections: dict[AttentionPart, Selection] = {}
    for scope in bay.scopes({part: wish for part, wish in wishes.items() if wish.name != AUTO}):
        wish = wishes[scope.parts[0]]
        named = resolve("attention", wish.name, wish.source, bay.only(scope.parts), loader, label=scope.label)
        selections |= dict.fromkeys(scope.parts, named)
    records = {part: _record(selection.chosen) for part, selection in selections.items()}
    autos = [part for part in wishes if part not in records]
    records |= bay.best_combination(autos, records)
    for scope in bay.scopes({part: records[part].name for part in autos}):
        others = {part: record for part, record in records.items() if part not in scope.parts}

        def against(
            record: Record, parts: tuple[AttentionPart, ...] = scope.parts, others: _Records = others
        ) -> list[Reason]:
            return bay.reasons({**dict.fromkeys(parts, _record(record)), **others}, others)

        best = resolve("attention", AUTO, AUTO, bay.only(scope.parts), loader, label=scope.label, against=against)
        selections |= dict.fromkeys(scope.parts, best)
    layout, block_size = negotiate_layout(bay.users(records), requirements.block_size)
    return AttentionSelection(
        parts={part: selections[part] for part in wishes},
        layout=layout,
        block_size=block_size,
        kv_dtype=common_kv_dtype(records.values(), requirements.kv_dtype),
    )


_Records = Mapping[AttentionPart, AttentionRecord]


@dataclass(frozen=True)
class _Scope:
    """Parts with one answer."""

    #: empty: all parts; else a phase, a group, or both
    label: str
    parts: tuple[AttentionPart, ...]

    @property
    def path(self) -> str:
        """Where YAML may name a backend for these parts."""
        groups = {group for group, _ in self.parts}
        below = f"groups.{self.label}" if self.label.partition(".")[0] in groups else self.label
        return ".".join(filter(None, ("attention.backend", below)))


@dataclass(frozen=True)
class _Bay:
    parts: tuple[AttentionPart, ...]
    requirements: Requirements
    loader: PluginLoader

    def scopes(self, answers: Mapping[AttentionPart, Hashable]) -> list[_Scope]:
        """The parts by answer, in as few words as will do: all together, else whole phases, else groups, else parts."""
        groups, phases = (tuple(dict.fromkeys(words)) for words in zip(*self.parts, strict=True))
        candidates = [
            _Scope("", self.parts),
            *(_Scope(phase, tuple((group, phase) for group in groups)) for phase in phases),
            *(_Scope(group, tuple((group, phase) for phase in phases)) for group in groups),
            *(_Scope(".".join(part), (part,)) for part in self.parts),
        ]
        left = dict(answers)
        found = []
        for scope in candidates:
            if left.keys() >= set(scope.parts) and len({left[part] for part in scope.parts}) == 1:
                found.append(scope)
                for part in scope.parts:
                    del left[part]
        return found

    def only(self, parts: Iterable[AttentionPart]) -> Requirements:
        """The requirements, with the phases and layers of `parts` alone."""
        groups, phases = (tuple(dict.fromkeys(words)) for words in zip(*parts, strict=True))
        specs = tuple(spec for spec in self.requirements.attention if spec.cache_kind in groups)
        return replace(self.requirements, phases=phases, attention=specs)

    def users(self, records: _Records) -> list[CacheUser]:
        """Who reads the cache, for the negotiation."""
        return [
            CacheUser(
                records[scope.parts[0]],
                self.only(scope.parts).attention,
                ".".join(filter(None, ("attention", scope.label))),
            )
            for scope in self.scopes({part: record.name for part, record in records.items()})
        ]

    def discord(self, records: _Records) -> str:
        """Why these backends cannot share a cache; empty if they can."""
        try:
            negotiate_layout(self.users(records), self.requirements.block_size)
        except ResolutionError as error:
            return str(error)
        return ""

    def reasons(self, records: _Records, others: _Records) -> list[Reason]:
        """Reasons against the candidate that stands in `records` besides `others`."""
        if not (text := self.discord(records)):
            return []
        names = ", ".join(dict.fromkeys(record.name for record in others.values())) or "itself"
        return [Reason(code="kv_cache", detail=f"it cannot share a KV cache with {names}: {text}")]

    def best_combination(self, autos: list[AttentionPart], fixed: _Records) -> dict[AttentionPart, AttentionRecord]:
        """The records for the parts left to auto: the greatest sum of priorities that agrees among all."""
        able = {part: fitting("attention", self.only([part]), self.loader) for part in autos}
        for scope in self.scopes({part: None for part in autos if not able[part]}):
            # raises, with every candidate's reasons
            resolve("attention", AUTO, AUTO, self.only(scope.parts), self.loader, label=scope.label)

        def priority(combination: tuple[LoadedPlugin, ...]) -> float:
            pairs = zip(autos, combination, strict=True)
            return sum(plugin.record.priority_for(self.only([part])) for part, plugin in pairs)

        ranked = sorted(itertools.product(*able.values()), key=priority, reverse=True)
        best: list[tuple[LoadedPlugin, ...]] = []
        for combination in ranked:
            if best and priority(combination) < priority(best[0]):
                break
            if not self.discord({**fixed, **_by_part(autos, combination)}):
                best.append(combination)
        if not best:
            raise self._disagreement({**fixed, **_by_part(autos, ranked[0])}, named=fixed)
        if len(best) > 1:
            raise self._tie(autos, best)
        return _by_part(autos, best[0])

    def _disagreement(self, records: _Records, named: _Records) -> ResolutionError:
        ways = []
        for scope in self.scopes({part: record.name for part, record in named.items()}):
            others = {part: record for part, record in records.items() if part not in scope.parts}
            ways.append((scope, self._able(scope, others)))
        whole = _Scope("", self.parts)
        ways.append((whole, self._able(whole, {})))
        lines = [f"  {scope.path}: {' or '.join(names)}" for scope, names in ways if names]
        hint = (
            "What would work, each by itself:\n" + "\n".join(lines) if lines else "No installed backend fits all of it."
        )
        return ResolutionError(f"{self.discord(records)}\n{hint}")

    def _able(self, scope: _Scope, others: _Records) -> list[str]:
        """Backends that fit all parts of a scope and share a cache with the others."""
        candidates = [plugin.record for plugin in fitting("attention", self.only(scope.parts), self.loader)]
        return [
            record.name
            for record in candidates
            if not self.discord({**dict.fromkeys(scope.parts, _record(record)), **others})
        ]

    def _tie(self, autos: list[AttentionPart], best: list[tuple[LoadedPlugin, ...]]) -> ResolutionError:
        choices = {
            part: tuple(dict.fromkeys(f"{p.record.name} ({p.identity.origin})" for p in plugins))
            for part, plugins in zip(autos, zip(*best, strict=True), strict=True)
        }
        lines = [
            f"  {scope.path}: {' or '.join(choices[scope.parts[0]])}"
            for scope in self.scopes({part: names for part, names in choices.items() if len(names) > 1})
        ]
        return ResolutionError(
            "attention: auto cannot choose between plugins of equal priority. Name one:\n" + "\n".join(lines)
        )


def _by_part(parts: Iterable[AttentionPart], plugins: Iterable[LoadedPlugin]) -> dict[AttentionPart, AttentionRecord]:
    return {part: _record(plugin.record) for part, plugin in zip(parts, plugins, strict=True)}


def _record(record: Record | None) -> AttentionRecord:
    assert isinstance(record, AttentionRecord)
    return record
