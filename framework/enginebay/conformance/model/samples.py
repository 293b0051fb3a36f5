"""Which tiny models are tried: what transformers' configuration of an architecture is by default, made small, and changed.

What can be changed is read off the configuration itself, so that a field that a plugin has never heard of is tried too.
Weights are `enginebay.conformance.model.twin`'s.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from enginebay.errors import PluginError
from enginebay.plugins.records import ModelRecord

#: positions of the tiny models, which far positions stay below
MAX_POSITIONS = 65536
#: sizes of the tiny models, of which a configuration takes the fields that it has
SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
#: tokens that a sliding layer of a tiny model sees: fewer than a prompt has
WINDOW = 3
#: fields that do not speak of the computation, or have a law of their own; beside those of every configuration
_NOT_TRIED = frozenset(
    {
        "bos_token_id",
        "eos_token_id",
        "initializer_range",
        "max_position_embeddings",
        "pad_token_id",
        "rope_parameters",
        "tie_word_embeddings",
        "use_cache",
    }
)
#: what a field may be that is None by default
_INSTEAD_OF_NONE: dict[str, Any] = {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.5}
#: the furthest positions tried, of each rope type; the first is within every type's original length
REACHES = (500, 1_001, 8_001, 60_001)
#: parameters of each rope type; longrope's factors are one a rotated pair and made where that is known
ROPE_TYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": MAX_POSITIONS // 4},
    "longrope": {"original_max_position_embeddings": 512},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "proportional": {"partial_rotary_factor": 0.5},
}


@dataclass(frozen=True)
class Sample:
    """A tiny configuration: the default one, with some fields changed; without any, a plugin may not refuse it."""

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        return self.name


DEFAULT = Sample("default")


@dataclass(frozen=True)
class Far:
    """A rope type, and the furthest position that it is tried at."""

    sample: Sample
    reach: int

    @property
    def positions(self) -> list[int]:
        """A prompt's positions: a few at the start and at each distance up to the furthest."""
        return [0, 1, 2] + [p for reach in REACHES if reach <= self.reach for p in (reach - 2, reach - 1, reach)]

    def __str__(self) -> str:
        return f"{self.sample}, {self.reach}"


@dataclass(frozen=True)
class Shared:
    """A configuration, and the number of ranks that share it."""

    sample: Sample
    world: int

    def __str__(self) -> str:
        return f"{self.sample}, {self.world} ranks"


def tiny_config(record: ModelRecord) -> Any:
    """The default configuration, made small.

    Raises
    ------
    PluginError
        transformers does not know the architecture by the record's name, and the record gives no configuration.
    """
    if record.tiny_config is not None:
        return record.tiny_config()
    import transformers

    model = getattr(transformers, record.name, None)
    if model is None:
        raise PluginError(
            f"model plugin {record.name}: the installed transformers has no class of that name to compare with; give the "
            "record a tiny_config, and register the model with transformers' AutoModelForCausalLM in it"
        )
    default = model.config_class()
    sizes = {name: value for name, value in SIZES.items() if _has(default, name)}
    if getattr(default, "sliding_window", None) is not None:
        sizes["sliding_window"] = WINDOW
    if kinds := dict.fromkeys(getattr(default, "layer_types", None) or ()):
        sizes["layer_types"] = list(itertools.islice(itertools.cycle(kinds), SIZES["num_hidden_layers"]))
    return model.config_class(**sizes)


def config_of(record: ModelRecord, sample: Sample) -> Any:
    """A sample's configuration; whatever transformers raises where it does not take the values."""
    tiny = tiny_config(record)
    return type(tiny).from_dict(tiny.to_dict() | dict(sample.changes)) if sample.changes else tiny


def plain(record: ModelRecord) -> list[Sample]:
    """The default, and one with sliding windows where they are optional."""
    return [DEFAULT, *windowed(record)[:1]]


def windowed(record: ModelRecord) -> list[Sample]:
    """Where sliding windows are optional: switched on, and given and not used."""
    tiny = tiny_config(record)
    if getattr(tiny, "sliding_window", None) is not None or not _has(tiny, "sliding_window"):
        return []
    if not _has(tiny, "use_sliding_window"):
        return [Sample("sliding_window", {"sliding_window": WINDOW})]
    window = {"sliding_window": WINDOW, "max_window_layers": 2, "layer_types": None}
    return [
        Sample("use_sliding_window", window | {"use_sliding_window": True}),
        Sample("use_sliding_window off", window | {"use_sliding_window": False}),
    ]


def settings(record: ModelRecord) -> list[Sample]:
    """One field changed in each; some change nothing, which only transformers can tell."""
    from transformers import PreTrainedConfig

    tiny, found = tiny_config(record), []
    not_tried = _NOT_TRIED | PreTrainedConfig().to_dict().keys()
    for name, value in sorted(tiny.to_dict().items()):
        if name in not_tried or name.startswith("_"):
            continue
        changes = {"layer_types": None} if name == "num_hidden_layers" and _has(tiny, "layer_types") else {}
        found += [Sample(f"{name}={_short(other)}", changes | {name: other}) for other in _others(name, value)]
    return found


def tied(record: ModelRecord) -> list[Sample]:
    """A head that is the embedding, and one that is not."""
    if not _has(tiny_config(record), "tie_word_embeddings"):
        return []
    return [Sample(word, {"tie_word_embeddings": word == "tied"}) for word in ("tied", "untied")]


def far(record: ModelRecord) -> list[Far]:
    """Every rope type at every distance."""
    tiny = tiny_config(record)
    given = getattr(tiny, "rope_parameters", None)
    if not given:
        return []
    nested = any(isinstance(value, Mapping) for value in given.values())
    samples = []
    for rope_type, parameters in ROPE_TYPES.items():
        made = _with_factors(rope_type, parameters, tiny)
        changed = {kind: dict(v) | made for kind, v in given.items()} if nested else dict(given) | made
        samples.append(Sample(rope_type, {} if changed == given else {"rope_parameters": changed}))
    limit = int(tiny.max_position_embeddings)
    return [Far(sample, reach) for sample in samples for reach in REACHES if reach < limit]


def shared(record: ModelRecord) -> list[Shared]:
    """Tied, untied and windowed over each number of ranks that the record allows and that divides the heads."""
    tiny, most = tiny_config(record), record.max_tensor_parallel
    heads = int(getattr(tiny, "num_attention_heads", 0) or 4)
    worlds = [world for world in (2, 4) if heads % world == 0 and (most is None or world <= most)]
    return [Shared(sample, world) for sample in tied(record) + windowed(record)[:1] for world in worlds]


def _with_factors(rope_type: str, parameters: dict[str, Any], tiny: Any) -> dict[str, Any]:
    made = {"rope_type": rope_type} | parameters
    if rope_type == "longrope":
        pairs = (getattr(tiny, "head_dim", None) or tiny.hidden_size // tiny.num_attention_heads) // 2
        made["short_factor"] = [1.0 + 0.05 * pair for pair in range(pairs)]
        made["long_factor"] = [2.0 + 0.5 * pair for pair in range(pairs)]
    return made


def _others(name: str, value: Any) -> Iterable[Any]:
    """Other values of a field, of the kind that it has."""
    rule = next((rule for kind, rule in _RULES.items() if isinstance(value, kind)), None)
    if value is None:
        return [_INSTEAD_OF_NONE[name]] if name in _INSTEAD_OF_NONE else []
    return [] if rule is None else rule(value)


def _other_words(value: str) -> list[str]:
    """Other activations, if the value is one."""
    from transformers.activations import ACT2FN

    return [word for word in ("silu", "gelu", "gelu_pytorch_tanh", "relu") if word != value] if value in ACT2FN else []


def _other_order(value: list[Any]) -> list[list[Any]]:
    """A list by layers, moved on by one."""
    return [value[1:] + value[:1]] if len(set(map(str, value))) > 1 else []


#: a bool is an int too, so it comes first
_RULES: dict[type, Callable[[Any], list[Any]]] = {
    bool: lambda value: [not value],
    int: lambda value: [2 * value] if value > 0 else [],
    # an epsilon that would show beside the mean square of a tiny model
    float: lambda value: [0.1 if 0 < value < 1e-3 else 2 * value] if value > 0 else [],
    str: _other_words,
    list: _other_order,
}


def _short(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _has(config: Any, name: str) -> bool:
    return name in config.to_dict() or name in getattr(config, "attribute_map", {})
