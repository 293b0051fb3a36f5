"""The decoder that most language models are: pre-norm, grouped-query attention, gated MLP, one residual stream.

A model plugin gives it the configuration and what differs (`DecoderOptions`). It reads the usual Hugging Face fields
and refuses values that it does not implement.

Shapes: ``T`` tokens, ``L`` tokens whose logits are wanted, ``d`` model width, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from enginebay.errors import ModelError
from enginebay.interfaces.model import Build, CausalLM, WeightMap
from enginebay.kernels.activation import gelu_mul, gelu_tanh_mul, silu_mul
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
    #: sliding window of each layer in tokens, None for full attention; empty: all full
    windows: tuple[int | None, ...] = ()


class SelfAttention(nn.Module):
    """Projections around an attention layer."""

    def __init__(self, config: Any, build: Build, options: DecoderOptions, prefix: str, window: int | None) -> None:
        super().__init__()
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.qkv_proj = build.qkv(f"{prefix}.qkv_proj", hidden, heads, kv_heads, head_dim, bias=options.qkv_bias)
        self.o_proj = build.linear(f"{prefix}.o_proj", heads * head_dim, hidden, bias=options.output_bias, split="row")
        spec = AttentionSpec(
            num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=head_dim**-0.5, window=window
        )
        self.attn = build.attention(
            spec,
            q_norm=build.norm(f"{prefix}.q_norm", head_dim, eps) if options.qk_norm else None,
            k_norm=build.norm(f"{prefix}.k_norm", head_dim, eps) if options.qk_norm else None,
            rope=build.rotary(config),
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
        if config.hidden_act not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ModelError(f"hidden_act {config.hidden_act!r} is not supported; supported: {known}")
        self._activation = ACTIVATIONS[config.hidden_act]
        self.gate_up_proj = build.gate_up(f"{prefix}.gate_up_proj", hidden, width, bias=options.mlp_bias)
        self.down_proj = build.linear(f"{prefix}.down_proj", width, hidden, bias=options.mlp_bias, split="row")

    def forward(self, hidden: Tensor) -> Tensor:
        """``[T, d]`` to ``[T, d]``."""
        out: Tensor = self.down_proj(self._activation(self.gate_up_proj(hidden)))
        return out


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm that first adds what came before to the residual stream."""

    def __init__(self, config: Any, build: Build, options: DecoderOptions, prefix: str, window: int | None) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = build.norm(f"{prefix}.input_layernorm", hidden, eps)
        self.self_attn = SelfAttention(config, build, options, f"{prefix}.self_attn", window)
        self.post_attention_layernorm = build.norm(f"{prefix}.post_attention_layernorm", hidden, eps)
        self.mlp = GatedMLP(config, build, options, f"{prefix}.mlp")

    def forward(self, hidden: Tensor, residual: Tensor | None, positions: Tensor) -> tuple[Tensor, Tensor]:
        """``(hidden, residual)`` in and out, ``[T, d]`` each; `residual` is overwritten, None before any layer."""
        if residual is None:
            hidden, residual = self.input_layernorm(hidden), hidden
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(hidden, positions)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class DecoderLM(CausalLM):
    """Embedding, decoder layers, final norm and head, under the names that Llama's checkpoints use."""

    def __init__(self, config: Any, build: Build, options: DecoderOptions) -> None:
        super().__init__(config, build)
        windows = options.windows or (None,) * config.num_hidden_layers
        if len(windows) != config.num_hidden_layers:
            raise ModelError(f"{len(windows)} layer types for {config.num_hidden_layers} layers")
        vocab, hidden = config.vocab_size, config.hidden_size
        self.embed_tokens = build.embedding("model.embed_tokens", vocab, hidden)
        self.layers.extend(
            DecoderLayer(config, build, options, f"model.layers.{i}", window) for i, window in enumerate(windows)
        )
        self.norm = build.norm("model.norm", hidden, config.rms_norm_eps)
        tied = config.tie_word_embeddings
        self.lm_head = build.head("lm_head", vocab, hidden, tied_to=self.embed_tokens if tied else None)
        self.weight_map = WeightMap(
            ignored=("model.layers.*.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"),
            tied=(("lm_head", "model.embed_tokens"),) if tied else (),
        )

    def embed(self, input_ids: Tensor) -> Tensor:
        """See `CausalLM.embed`."""
        out: Tensor = self.embed_tokens(input_ids)
        return out

    def forward_layers(
        self, hidden: Tensor, residual: Tensor | None, positions: Tensor, start: int, end: int
    ) -> tuple[Tensor, Tensor]:
        """See `CausalLM.forward_layers`."""
        for layer in self.layers[start:end]:
            hidden, residual = layer(hidden, residual, positions)
        if residual is None:
            raise ModelError(f"no layer in [{start}, {end})")
        return hidden, residual

    def final_norm(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """See `CausalLM.final_norm`."""
        out: Tensor = self.norm(hidden, residual)[0]
        return out

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.compute_logits`."""
        return self.lm_head.logits(hidden)
