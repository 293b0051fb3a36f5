"""One layer of the shared decoder: attention and gated MLP on a residual stream, and what families change in it.

It reads the usual Hugging Face fields and refuses values that it does not implement. It knows nothing of what comes
before and after the layers (`enginebay.layers.decoder`).

Shapes: ``T`` tokens, ``d`` model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from enginebay.errors import ModelError
from enginebay.interfaces.model import Build
from enginebay.kernels.activation import gelu_mul, gelu_tanh_mul, silu_mul
from enginebay.layers.norm import RMSNorm
from enginebay.plugins.requirements import AttentionSpec

#: gated activations by the configuration's ``hidden_act``
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu_mul,
    "swish": silu_mul,
    "gelu": gelu_mul,
    "gelu_pytorch_tanh": gelu_tanh_mul,
}


@dataclass(frozen=True, kw_only=True)
class DecoderOptions:
    """What differs between the families that share this decoder."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    #: RMS norms over the head size of queries and keys
    qk_norm: bool = False
    #: norms scale by one plus their weight, in float32
    unit_offset_norms: bool = False
    #: attention's and the MLP's results are normalised too, before they join the residual stream
    post_norms: bool = False
    #: the configuration's field that names the gated activation
    activation_field: str = "hidden_act"
    #: sliding window of each layer in tokens, None for full attention; empty: all full
    windows: tuple[int | None, ...] = ()
    #: ``rope_parameters`` are nested: each layer rotates by the entry that its ``layer_types`` names
    rope_by_layer_type: bool = False
    #: scale of attention scores; None: one over the root of the head size
    attention_scale: float | None = None
    #: soft caps of attention scores and of logits: ``cap * tanh(x / cap)``
    attention_cap: float | None = None
    logit_cap: float | None = None
    #: what embeddings are multiplied by, itself rounded to the compute dtype
    embedding_scale: float | None = None


def head_size(config: Any) -> int:
    """The configuration's ``head_dim``, or the width that each head has where it states none."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def layer_windows(config: Any) -> tuple[int | None, ...]:
    """Each layer's sliding window in tokens, or None, by ``layer_types``.

    ``use_sliding_window: false``, where a family has the field, makes every layer full, whatever ``layer_types`` and
    ``sliding_window`` say; transformers has folded ``max_window_layers`` and patterns into ``layer_types`` already.

    Raises
    ------
    ModelError
        A layer type is not known, or a sliding layer has no window.
    """
    windows: list[int | None] = []
    for index, layer_type in enumerate(config.layer_types):
        if layer_type not in ("full_attention", "sliding_attention"):
            raise ModelError(
                f"layer_types[{index}] {layer_type!r} is not supported; full_attention, sliding_attention are"
            )
        sliding = layer_type == "sliding_attention" and getattr(config, "use_sliding_window", True)
        if sliding and config.sliding_window is None:
            raise ModelError(f"layer_types[{index}] is sliding_attention, but sliding_window is not set")
        windows.append(config.sliding_window if sliding else None)
    return tuple(windows)


class SelfAttention(nn.Module):
    """Projections around layer `index`'s attention."""

    def __init__(self, config: Any, build: Build, options: DecoderOptions, prefix: str, index: int) -> None:
        super().__init__()
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, head_size(config)
        hidden = config.hidden_size
        self.qkv_proj = build.qkv(f"{prefix}.qkv_proj", hidden, heads, kv_heads, head_dim, bias=options.qkv_bias)
        self.o_proj = build.linear(f"{prefix}.o_proj", heads * head_dim, hidden, bias=options.output_bias, split="row")
        spec = AttentionSpec(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5 if options.attention_scale is None else options.attention_scale,
            window=options.windows[index] if options.windows else None,
            soft_cap=options.attention_cap,
        )

        def norm(name: str) -> RMSNorm | None:
            if not options.qk_norm:
                return None
            eps, offset = config.rms_norm_eps, options.unit_offset_norms
            return build.norm(f"{prefix}.{name}", head_dim, eps, unit_offset=offset)

        self.attn = build.attention(
            spec,
            q_norm=norm("q_norm"),
            k_norm=norm("k_norm"),
            rope=build.rotary(config, config.layer_types[index] if options.rope_by_layer_type else None),
        )

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """``[T, d]`` to ``[T, d]``."""
        out: Tensor = self.o_proj(self.attn(self.qkv_proj(hidden), positions))
        return out


class GatedMLP(nn.Module):
    """``down(act(gate(x)) * up(x))``."""

    def __init__(self, config: Any, build: Build, options: DecoderOptions, prefix: str) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.intermediate_size
        activation = getattr(config, options.activation_field)
        if activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ModelError(f"{options.activation_field} {activation!r} is not supported; supported: {known}")
        self._activation = ACTIVATIONS[activation]
        self.gate_up_proj = build.gate_up(f"{prefix}.gate_up_proj", hidden, width, bias=options.mlp_bias)
        self.down_proj = build.linear(f"{prefix}.down_proj", width, hidden, bias=options.mlp_bias, split="row")

    def forward(self, hidden: Tensor) -> Tensor:
        """``[T, d]`` to ``[T, d]``."""
        out: Tensor = self.down_proj(self._activation(self.gate_up_proj(hidden)))
        return out


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm that first adds what came before to the residual stream."""

    def __init__(self, config: Any, build: Build, options: DecoderOptions, prefix: str, index: int) -> None:
        super().__init__()

        def norm(name: str) -> RMSNorm:
            eps, offset = config.rms_norm_eps, options.unit_offset_norms
            return build.norm(f"{prefix}.{name}", config.hidden_size, eps, unit_offset=offset)

        self.input_norm = norm("input_layernorm")
        self.self_attn = SelfAttention(config, build, options, f"{prefix}.self_attn", index)
        self.mlp_input_norm = norm("pre_feedforward_layernorm" if options.post_norms else "post_attention_layernorm")
        self.mlp = GatedMLP(config, build, options, f"{prefix}.mlp")
        self.attention_output_norm = norm("post_attention_layernorm") if options.post_norms else None
        self.mlp_output_norm = norm("post_feedforward_layernorm") if options.post_norms else None

    def forward(self, hidden: Tensor, residual: Tensor | None, positions: Tensor) -> tuple[Tensor, Tensor]:
        """``(hidden, residual)`` in and out, ``[T, d]`` each; `residual` is overwritten, None before any layer."""
        if residual is None:
            hidden, residual = self.input_norm(hidden), hidden
        else:
            hidden, residual = self.input_norm(hidden, residual)
        hidden = self.self_attn(hidden, positions)
        if self.attention_output_norm is not None:
            hidden = self.attention_output_norm(hidden)
        hidden, residual = self.mlp_input_norm(hidden, residual)
        hidden = self.mlp(hidden)
        if self.mlp_output_norm is not None:
            hidden = self.mlp_output_norm(hidden)
        return hidden, residual
