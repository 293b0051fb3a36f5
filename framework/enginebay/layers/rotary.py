"""Rotary position tables for every rope type of transformers, computed by transformers' own functions.

Each kind of layer has one table ``[P, 2, R]`` of cosines and signed sines for positions ``0 … P - 1`` (``P`` =
max_model_len, ``R`` rotated features), computed in float32 and kept in the compute dtype: a step only looks rows up.

Two types depend on how long a sequence is in transformers, which a cache shared by sequences of all lengths cannot
follow (keys already written would have to turn). Here one set of frequencies holds for the whole run:

* ``dynamic`` equals its unscaled form up to max_position_embeddings; a longer max_model_len is refused.
* ``longrope`` takes its long factors if max_model_len exceeds the original length, else the short ones. A run meant for
  short sequences only should say so with max_model_len.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from enginebay.errors import ModelError
from enginebay.kernels.rope import apply_rope_

_COMMON_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_LENGTH = "original_max_position_embeddings"
#: (required, optional) keys of each type beyond the common ones
_KEYS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "default": (frozenset(), frozenset()),
    "linear": (frozenset({"factor"}), frozenset()),
    "dynamic": (frozenset({"factor"}), frozenset()),
    "yarn": (
        frozenset({"factor", _LENGTH}),
        frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
    ),
    "longrope": (frozenset({"short_factor", "long_factor", _LENGTH}), frozenset({"attention_factor", "factor"})),
    "llama3": (frozenset({"factor", _LENGTH, "low_freq_factor", "high_freq_factor"}), frozenset()),
    "proportional": (frozenset(), frozenset({"factor"})),
}


class Rotary(nn.Module):
    """One rotary table, shared by all layers of a type.

    Parameters
    ----------
    config
        The Hugging Face configuration.
    layer_type
        Which entry of nested ``rope_parameters`` to take; None where they are flat.
    max_model_len
        Positions of the table.

    Raises
    ------
    ModelError
        An unknown or misspelt parameter, or a max_model_len that the type does not reach.
    """

    table: Tensor

    def __init__(
        self, config: Any, layer_type: str | None, max_model_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        limit = position_limit(config, layer_type)
        if max_model_len > limit:
            raise ModelError(
                f"max_model_len {max_model_len} is beyond position {limit}, the last that the model's rope "
                f"({_parameters(config, layer_type)['rope_type']}) covers; set max_model_len to at most {limit}"
            )
        inv_freq, scaling = _frequencies(config, layer_type, max_model_len)
        self.rotary_dim = 2 * inv_freq.shape[0]
        # No step runs on meta tensors: only the shape counts there.
        table = (
            torch.empty(max_model_len, 2, self.rotary_dim, dtype=dtype, device=device)
            if device.type == "meta"
            else _table(inv_freq, scaling, max_model_len).to(device=device, dtype=dtype)
        )
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> None:
        """Rotate ``x [T, H, D]`` in place by positions int64 ``[T]``."""
        apply_rope_(x, positions, self.table)


def position_limit(config: Any, layer_type: str | None = None) -> int:
    """Positions that the configuration's rope covers: its own length, stretched where the type says by how much.

    Raises
    ------
    ModelError
        The rope parameters are not valid.
    """
    parameters = _parameters(config, layer_type)
    length = int(config.max_position_embeddings)
    if parameters["rope_type"] == "linear":
        return int(length * parameters["factor"])
    if parameters["rope_type"] == "yarn":
        # transformers lets the factor be null: it is then implied by the two lengths
        return max(length, int(parameters[_LENGTH] * (parameters["factor"] or 1.0)))
    return length


def _parameters(config: Any, layer_type: str | None) -> dict[str, Any]:
    """The checked rope parameters of a layer type, standardised by transformers."""
    config.standardize_rope_params()
    parameters = config.rope_parameters
    if not parameters:
        raise ModelError(f"{config.model_type}: the configuration has no rope_parameters")
    where = "rope_parameters"
    nested = {key: value for key, value in parameters.items() if isinstance(value, Mapping)}
    if nested:
        where = f"rope_parameters.{layer_type}"
        if layer_type not in nested:
            raise ModelError(f"{where} is missing; the configuration has {', '.join(sorted(nested))}")
        parameters = nested[layer_type]
    return _checked(dict(parameters), where, frozenset(config.ignore_keys_at_rope_validation or ()))


def _checked(parameters: dict[str, Any], where: str, model_keys: frozenset[str]) -> dict[str, Any]:
    rope_type = parameters.setdefault("rope_type", parameters.get("type", "default"))
    if rope_type not in _KEYS:
        raise ModelError(f"{where}.rope_type {rope_type!r} is not supported; supported: {', '.join(_KEYS)}")
    required, optional = _KEYS[rope_type]
    missing = sorted(required - parameters.keys())
    if missing:
        raise ModelError(f"{where}: rope type {rope_type!r} needs {', '.join(missing)}")
    known = sorted(required | optional | _COMMON_KEYS)
    for key in parameters:
        if key not in known and key not in model_keys:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise ModelError(f"{where}.{key}: unknown key for rope type {rope_type!r}; {hint}")
    return parameters


def _frequencies(config: Any, layer_type: str | None, max_model_len: int) -> tuple[Tensor, float]:
    """Inverse frequencies float32 ``[R / 2]``, and the factor on cosines and sines."""
    parameters = _parameters(config, layer_type)
    rope_type = parameters["rope_type"]
    if rope_type == "default":
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        width = int(head_dim * (parameters.get("partial_rotary_factor") or 1.0))
        return 1.0 / (parameters["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float) / width)), 1.0
    nested = any(isinstance(value, Mapping) for value in config.rope_parameters.values())
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](
        config,
        torch.device("cpu"),
        # dynamic: its own length, where the scaling has no effect (position_limit allows no more)
        seq_len=None if rope_type == "dynamic" else max_model_len,
        layer_type=layer_type if nested else None,
    )
    return inv_freq, float(scaling)


def _table(inv_freq: Tensor, scaling: float, length: int) -> Tensor:
    angles = torch.arange(length, dtype=torch.float)[:, None] * inv_freq  # [P, R / 2]
    cos, sin = angles.cos() * scaling, angles.sin() * scaling
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
