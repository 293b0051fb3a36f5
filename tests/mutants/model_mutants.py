"""What can be wrong with a model: Llama or Qwen3 as they are in the tree, broken in one way each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from enginebay.errors import ModelError
from enginebay.interfaces.model import Build, CausalLM, ModelContext, WeightMap
from enginebay.interfaces.quant import Shard
from enginebay.kernels.cpu import ops
from enginebay.layers.decoder import DecoderLM, DecoderOptions
from enginebay.layers.decoder_layer import GatedMLP, SelfAttention
from enginebay.plugins.records import ModelRecord
from enginebay.plugins.requirements import Reason, Requirements
from enginebay_llama import enginebay_models as llama_models
from enginebay_llama.model import LlamaForCausalLM as Llama
from enginebay_qwen import enginebay_models as qwen_models
from enginebay_qwen.model import Qwen3ForCausalLM as Qwen3
from mutant import Mutant
from torch import Tensor, nn

LLAMA = next(iter(llama_models()))
QWEN3 = next(record for record in qwen_models() if record.name == "Qwen3ForCausalLM")
ORIGINALS = {"cpu": LLAMA}

States = tuple[Tensor, Tensor]


def record_of(model: Callable[[Any, Build], nn.Module], record: ModelRecord = LLAMA) -> ModelRecord:
    """The record of a mutant."""
    return replace(record, factory=lambda context: model(context.config, context.build))


# --- the record


@dataclass(frozen=True, kw_only=True)
class AnyArchitecture(ModelRecord):
    """Takes every decoder for a Llama."""

    def _capability_reasons(self, req: Requirements) -> list[Reason]:
        return []


@dataclass(frozen=True, kw_only=True)
class RanksUnread(ModelRecord):
    """Declares how many ranks it serves, and does not compare."""

    def _capability_reasons(self, req: Requirements) -> list[Reason]:
        return [reason for reason in super()._capability_reasons(req) if reason.code != "tensor_parallel"]


def _layers_alone(context: ModelContext) -> nn.Module:
    return Llama(context.config, context.build).layers


class OwnTensor(Llama):
    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        self.register_buffer("mask", torch.ones(1024, 1024).tril(), persistent=False)


class SkipsHeadNorms(DecoderLM):
    """Qwen3 for a Qwen2 without biases: what is left over of the checkpoint is declared unused."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build, DecoderOptions(qkv_bias=config.attention_bias))
        self.weight_map = replace(self.weight_map, ignored=("*_norm.weight",))


# --- the answer


class NoFinalNorm(Llama):
    def final_norm(self, hidden: Tensor, residual: Tensor) -> Tensor:
        return hidden + residual


class GateForUp(Llama):
    def __init__(self, config: Any, build: Any) -> None:
        original = build.gate_up
        build.gate_up = lambda *args, **changes: original(*args, **changes, parts=("up_proj", "gate_proj"))
        super().__init__(config, build)


class HeadNormsUnused(Qwen3):
    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        norms: list[Any] = []
        for layer in self.attention_layers:
            norms += [layer.q_norm, layer.k_norm]
            layer.q_norm = layer.k_norm = None
        self.unused = nn.ModuleList(norms)


class WindowUnread(DecoderLM):
    def __init__(self, config: Any, build: Build) -> None:
        bias = config.attention_bias
        super().__init__(config, build, DecoderOptions(qkv_bias=bias, output_bias=bias, qk_norm=True))


class PaddedVocabulary(Llama):
    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head.method.logits(self.lm_head, hidden)


class OwnPositions(Llama):
    """A model that does not rotate by the positions that it is given."""

    def places(self, positions: Tensor) -> Tensor:
        raise NotImplementedError

    def forward_layers(
        self, hidden: Tensor, residual: Tensor | None, positions: Tensor, start: int, end: int
    ) -> States:
        return super().forward_layers(hidden, residual, self.places(positions), start, end)


class PlaceInTheStep(OwnPositions):
    def places(self, positions: Tensor) -> Tensor:
        return torch.arange(len(positions))


class DecodesOneBehind(OwnPositions):
    def places(self, positions: Tensor) -> Tensor:
        return (positions - 1).clamp_min(0) if len(positions) == 1 else positions


class KeepsByPosition(Llama):
    """Keeps the embedding that stood at a position first, as a model with a cache of its own does."""

    def forward_layers(
        self, hidden: Tensor, residual: Tensor | None, positions: Tensor, start: int, end: int
    ) -> States:
        kept = vars(self).setdefault("kept", {})
        rows = [kept.setdefault(place, row.clone()) for place, row in zip(positions.tolist(), hidden, strict=True)]
        return super().forward_layers(torch.stack(rows), residual, positions, start, end)


class FirstRowsPlaces(OwnPositions):
    def places(self, positions: Tensor) -> Tensor:
        return positions[0] + torch.arange(len(positions))


class TableOf4096(OwnPositions):
    def places(self, positions: Tensor) -> Tensor:
        return positions.clamp_max(4095)


class Float32Scale(Llama):
    def compute_logits(self, hidden: Tensor) -> Tensor:
        return super().compute_logits(hidden) * torch.ones(1, dtype=torch.float32)


# --- what the configuration says


def changed(config: Any, **fields: Any) -> Any:
    """A copy of a configuration."""
    config = copy.deepcopy(config)
    for name, value in fields.items():
        setattr(config, name, value)
    return config


class UnscaledRope(Llama):
    def __init__(self, config: Any, build: Build) -> None:
        theta = config.rope_parameters["rope_theta"]
        super().__init__(changed(config, rope_parameters={"rope_type": "default", "rope_theta": theta}), build)


class AlwaysUntied(Llama):
    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(changed(config, tie_word_embeddings=False), build)


class TiedUnchecked(Llama):
    """Declares a tied head unused instead of tied."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        if config.tie_word_embeddings:
            self.weight_map = WeightMap(ignored=("lm_head.*",))


class BiasUnread(DecoderLM):
    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build, DecoderOptions(mlp_bias=config.mlp_bias))
        self.weight_map = replace(self.weight_map, ignored=("*_proj.bias",) if config.attention_bias else ())


class AlwaysSilu(Llama):
    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(changed(config, hidden_act="silu"), build)


class EpsilonOfItsOwn(Llama):
    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(changed(config, rms_norm_eps=1e-6), build)


class RefusesWithoutAName(Llama):
    def __init__(self, config: Any, build: Build) -> None:
        if config.hidden_act != "silu":
            raise ModelError("this configuration is not supported")
        super().__init__(config, build)


# --- loading


class IgnoresWhatItDoesNotKnow(Llama):
    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        self.weight_map = replace(self.weight_map, ignored=("*",))


class IgnoresScales(Llama):
    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        self.weight_map = replace(self.weight_map, ignored=(*self.weight_map.ignored, "*_scale"))


# --- cut and shared


class FirstOfEveryStage(Llama):
    """Takes the first layer that it runs for the model's first."""

    def forward_layers(
        self, hidden: Tensor, residual: Tensor | None, positions: Tensor, start: int, end: int
    ) -> States:
        return super().forward_layers(hidden, None, positions, start, end)


class KeepsTheResidual(Llama):
    """Passes the residual stream from stage to stage in an attribute."""

    def embed(self, input_ids: Tensor) -> Tensor:
        self.stream: Tensor | None = None
        return super().embed(input_ids)

    def forward_layers(
        self, hidden: Tensor, residual: Tensor | None, positions: Tensor, start: int, end: int
    ) -> States:
        hidden, self.stream = super().forward_layers(hidden, getattr(self, "stream", None), positions, start, end)
        return hidden, self.stream


class ScalesInForward(Llama):
    """Rescales the embeddings in `forward`, which no pipeline calls, and undoes it in `embed`."""

    def embed(self, input_ids: Tensor) -> Tensor:
        return super().embed(input_ids) / 2

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        hidden = self.embed(input_ids) * 2
        return self.final_norm(*self.forward_layers(hidden, None, positions, 0, len(self.layers)))


class SumsNothing(Llama):
    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        for layer in self.modules():
            if isinstance(layer, GatedMLP):
                layer.down_proj._reduce = None


class OthersColumns(Llama):
    """Each rank loads the columns that belong to its opposite."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        for layer in self.modules():
            if isinstance(layer, SelfAttention):
                info = layer.o_proj.info
                first, stop, total = info.input.start, info.input.stop, info.input.total
                layer.o_proj.info = replace(info, input=Shard(total - stop, total - first, total))


class WrongAxis(Llama):
    """Splits the MLP's last matrix by rows of the output."""

    def __init__(self, config: Any, build: Any) -> None:
        original = build.linear

        def linear(name: str, *sizes: int, split: Any = None, **changes: Any) -> Any:
            return original(name, *sizes, split="column" if name.endswith("down_proj") else split, **changes)

        build.linear = linear
        super().__init__(config, build)


# --- replay


class OwnOperator(Llama):
    def final_norm(self, hidden: Tensor, residual: Tensor) -> Tensor:
        return super().final_norm(hidden, residual) * 1.0


class PositionsThroughNumpy(OwnPositions):
    """Copies positions on the host, where no recording sees it."""

    def places(self, positions: Tensor) -> Tensor:
        self.kept = torch.empty_like(positions)
        self.kept.numpy()[:] = positions.numpy()
        return self.kept


LOGITS, LOADED = "logits_equal_transformers", "every_saved_tensor_is_loaded"
SETTINGS, DIFFERS = "settings_are_honoured_or_refused", "a_checkpoint_that_differs_is_refused_by_name"
UNDECLARED, TIED = "what_is_not_declared_is_refused", "a_tied_head_is_the_embedding"
FAR, STAGES, RANKS = "far_positions_equal_transformers", "stages_equal_the_whole", "ranks_equal_the_whole"

_MODELS: tuple[tuple[str, str, str, Callable[[Any, Build], CausalLM]], ...] = (
    ("own_tensor", "a mask is made on the CPU, whatever the device", "the_network_is_built_without_memory", OwnTensor),
    ("no_final_norm", "the last norm is loaded and not applied", LOGITS, NoFinalNorm),
    ("gate_for_up", "gate and up projections are swapped", LOGITS, GateForUp),
    ("padded_vocabulary", "logits of the vocabulary's padding are not cut off", LOGITS, PaddedVocabulary),
    ("place_in_the_step", "positions are places in the step", "chunks_equal_the_whole", PlaceInTheStep),
    ("decodes_one_behind", "a lone token's position is one too low", "decode_steps_equal_the_whole", DecodesOneBehind),
    ("keeps_by_position", "what stood at a position first is kept", "a_resumed_request_goes_on", KeepsByPosition),
    ("first_rows_places", "positions go on from the first row's", "rows_of_a_batch_do_not_mix", FirstRowsPlaces),
    ("float32_scale", "a float32 tensor widens the logits", "the_compute_dtype_is_kept", Float32Scale),
    ("unscaled_rope", "every rope type is the default one", FAR, UnscaledRope),
    ("table_of_4096", "positions stop at 4095", FAR, TableOf4096),
    ("always_untied", "a tied head is looked for in the checkpoint", TIED, AlwaysUntied),
    ("tied_unchecked", "a tied head that differs from the embedding is ignored", TIED, TiedUnchecked),
    ("bias_unread", "attention_bias is not read, and biases are ignored", SETTINGS, BiasUnread),
    ("always_silu", "hidden_act is not read", SETTINGS, AlwaysSilu),
    ("epsilon_of_its_own", "rms_norm_eps is not read", SETTINGS, EpsilonOfItsOwn),
    ("refuses_without_a_name", "an activation is refused without a word of it", SETTINGS, RefusesWithoutAName),
    ("ignores_the_unknown", "every tensor that it does not know is ignored", DIFFERS, IgnoresWhatItDoesNotKnow),
    ("ignores_scales", "scales are ignored", DIFFERS, IgnoresScales),
    ("first_of_every_stage", "a stage's first layer drops the residual stream", STAGES, FirstOfEveryStage),
    ("keeps_the_residual", "the residual stream is passed on in an attribute", STAGES, KeepsTheResidual),
    ("scales_in_forward", "embeddings are scaled outside the stages", STAGES, ScalesInForward),
    ("sums_nothing", "partial sums of ranks are not added", RANKS, SumsNothing),
    ("others_columns", "a rank loads another's columns", RANKS, OthersColumns),
    ("wrong_axis", "a matrix is split along the wrong axis", RANKS, WrongAxis),
    (
        "own_operator",
        "a torch operator of a replayable model",
        "a_replayable_model_runs_no_operator_of_its_own",
        OwnOperator,
    ),
)

MUTANTS = [
    Mutant(
        "any_architecture",
        "its record accepts every architecture",
        UNDECLARED,
        AnyArchitecture(name=LLAMA.name, summary="", factory=LLAMA.factory, api_version=0),
    ),
    Mutant(
        "ranks_unread",
        "its record accepts more ranks than it declares",
        UNDECLARED,
        RanksUnread(name=LLAMA.name, summary="", factory=LLAMA.factory, api_version=0, max_tensor_parallel=2),
    ),
    Mutant(
        "layers_alone",
        "the factory returns the layers",
        "the_network_is_built_without_memory",
        replace(LLAMA, factory=_layers_alone),
    ),
    Mutant(
        "skips_head_norms",
        "tensors that it has no layer for are declared unused",
        LOADED,
        record_of(SkipsHeadNorms, QWEN3),
    ),
    Mutant("head_norms_unused", "norms of queries and keys are not applied", LOGITS, record_of(HeadNormsUnused, QWEN3)),
    Mutant("window_unread", "sliding windows are not read", LOGITS, record_of(WindowUnread, QWEN3)),
    *(Mutant(name, fault, law, record_of(model)) for name, fault, law, model in _MODELS),
    Mutant(
        "positions_through_numpy",
        "positions are copied by numpy, where no recording sees it",
        "replayed_steps_read_the_step",
        record_of(PositionsThroughNumpy),
        shown_here=ops.has_linear(),
    ),
]
