"""The attention bay is filled phase by phase, with backends that can share one KV cache.

Each phase gets the highest priority that fits it, among combinations that agree on layout and block size. What a
backend computes is not known here.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from enginebay.errors import ConfigError, ResolutionError
from enginebay.plugins.loader import LoadedPlugin, PluginLoader
from enginebay.plugins.negotiation import common_kv_dtype, negotiate_layout
from enginebay.plugins.records import AttentionRecord, Record
from enginebay.plugins.requirements import Reason, Requirements
from enginebay.plugins.resolver import fitting, resolve
from enginebay.plugins.selection import AUTO, AttentionSelection, Selection
from enginebay.plugins.suggest import did_you_mean


def resolve_attention(
    wanted: str | Mapping[str, str],
    source: str | Mapping[str, str],
    requirements: Requirements,
    loader: PluginLoader,
) -> AttentionSelection:
    """Choose a backend for every phase of the requirements, and the cache that they share.

    Parameters
    ----------
    wanted
        A backend's name or ``"auto"`` for all phases, or one for each phase; a phase left out is ``"auto"``.
    source
        Where `wanted` comes from, as a whole or by phase.
    requirements
        What the run demands; ``block_size`` None leaves the block size to the backends.
    loader
        Installed and local plugins.
    """
    phases = requirements.phases
    names = _by_phase(wanted, phases, AUTO)
    sources = _by_phase(source, phases, "default")
    if len({(names[p], sources[p]) for p in phases}) == 1 and names[phases[0]] != AUTO:
        whole = resolve("attention", names[phases[0]], sources[phases[0]], requirements, loader)
        return _agree(dict.fromkeys(phases, whole), requirements)
    chosen = {
        phase: resolve("attention", names[phase], sources[phase], _only(requirements, phase), loader, label=phase)
        for phase in phases
        if names[phase] != AUTO
    }
    records = {phase: _record(selection.chosen) for phase, selection in chosen.items()}
    autos = [phase for phase in phases if phase not in chosen]
    records |= _best_combination(autos, list(records.values()), requirements, loader)
    if len(autos) == len(phases) and len({record.name for record in records.values()}) == 1:
        whole = resolve("attention", AUTO, AUTO, requirements, loader)
        return _agree(dict.fromkeys(phases, whole), requirements)
    for phase in autos:
        others = [record for other, record in records.items() if other != phase]
        chosen[phase] = resolve(
            "attention",
            AUTO,
            AUTO,
            _only(requirements, phase),
            loader,
            label=phase,
            against=lambda record, others=others: _discord(_record(record), others, requirements),  # type: ignore[misc]
        )
    return _agree({phase: chosen[phase] for phase in phases}, requirements)


def _best_combination(
    autos: Sequence[str], fixed: Sequence[AttentionRecord], requirements: Requirements, loader: PluginLoader
) -> dict[str, AttentionRecord]:
    """The records for the phases left to auto with the greatest sum of priorities that agree among all."""
    able = [fitting("attention", _only(requirements, phase), loader) for phase in autos]
    for phase, candidates in zip(autos, able, strict=True):
        if not candidates:  # raises, with every candidate's reasons
            resolve("attention", AUTO, AUTO, _only(requirements, phase), loader, label=phase)
    combinations = sorted(itertools.product(*able), key=_priority, reverse=True)
    agreeing = [c for c in combinations if not _discord_among([*fixed, *map(_loaded_record, c)], requirements)]
    if not agreeing:  # raises, with every candidate's layouts and blocks
        negotiate_layout(
            [(r, requirements.attention) for r in [*fixed, *map(_loaded_record, combinations[0])]],
            requirements.block_size,
        )
    best = [c for c in agreeing if _priority(c) == _priority(agreeing[0])]
    if len(best) > 1:
        raise ResolutionError(
            "attention: auto cannot choose between plugins of equal priority:\n"
            + "\n".join(
                "  "
                + ", ".join(f"{p}: {c.record.name} ({c.identity.origin})" for p, c in zip(autos, choice, strict=True))
                for choice in best
            )
            + "\nName one under attention.backend."
        )
    return dict(zip(autos, map(_loaded_record, best[0]), strict=True))


def _agree(phases: Mapping[str, Selection], requirements: Requirements) -> AttentionSelection:
    records = list({s.bay: _record(s.chosen) for s in phases.values()}.values())
    layout, block_size = negotiate_layout([(r, requirements.attention) for r in records], requirements.block_size)
    return AttentionSelection(
        phases=dict(phases),
        layout=layout,
        block_size=block_size,
        kv_dtype=common_kv_dtype(records, requirements.kv_dtype),
    )


def _by_phase(value: str | Mapping[str, str], phases: Sequence[str], default: str) -> dict[str, str]:
    if isinstance(value, str):
        return dict.fromkeys(phases, value)
    for key in value:
        if key not in phases:
            raise ConfigError(
                f"attention.backend.{key}: not a phase; known: {', '.join(phases)}.{did_you_mean(key, phases)}"
            )
    return {phase: value.get(phase, default) for phase in phases}


def _only(requirements: Requirements, phase: str) -> Requirements:
    return replace(requirements, phases=(phase,))


def _record(record: Record | None) -> AttentionRecord:
    assert isinstance(record, AttentionRecord)
    return record


def _loaded_record(plugin: LoadedPlugin) -> AttentionRecord:
    return _record(plugin.record)


def _priority(combination: Sequence[LoadedPlugin]) -> int:
    return sum(plugin.record.priority for plugin in combination)


def _discord(record: AttentionRecord, others: Sequence[AttentionRecord], requirements: Requirements) -> list[Reason]:
    if text := _discord_among([record, *others], requirements):
        names = ", ".join(other.name for other in others)
        return [Reason(code="kv_cache", detail=f"it cannot share a KV cache with {names}: {text}")]
    return []


def _discord_among(records: Sequence[AttentionRecord], requirements: Requirements) -> str:
    """Why these backends cannot share a cache; empty if they can."""
    try:
        negotiate_layout([(r, requirements.attention) for r in records], requirements.block_size)
    except ResolutionError as error:
        return str(error)
    return ""
