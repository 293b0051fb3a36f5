"""What can be wrong with a quantizer: a right one, broken in one way each."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from enginebay.interfaces.quant import (
    LayerInfo,
    LinearMethod,
    Part,
    QuantContext,
    WeightSpec,
)
from enginebay.loading import load_model
from enginebay.loading.source import RawTensor
from enginebay.plugins.records import QuantRecord
from enginebay.plugins.requirements import Reason, Requirements
from grid_quantizer import Codes, Grid, GridEmbedding, GridLinear, samples
from mutant import Mutant, accepts_everything, refuses_without_a_word
from torch import Tensor, nn

RECORD = QuantRecord(
    name="grid",
    summary="integers in groups",
    factory=Grid.from_checkpoint,
    api_version=0,
    devices=("cpu",),
    checkpoint_methods=("grid",),
    dtypes=("float32", "bfloat16"),
    samples=samples,
)
ORIGINALS = {"cpu": RECORD}


def made_of(**parts: Any) -> QuantRecord:
    """The record of a `Grid` with other parts: ``codes``, ``linear``, ``embedding``, or methods of its own."""
    return replace(RECORD, factory=type("Broken", (Grid,), parts).from_checkpoint)  # type: ignore[attr-defined]


# --- records ---------------------------------------------------------------------------------------------------------


def _empty_samples() -> Iterable[Any]:
    first = samples()[0]
    encode = first.encode
    return [replace(first, encode=lambda weight: encode(weight) | {"scales": encode(weight)["scales"] * 0})]  # type: ignore[operator]


def _no_quantizer(context: QuantContext) -> object:
    return functools.partial(Grid.from_checkpoint, context)


def _refuses_bfloat16(req: Requirements) -> list[Reason]:
    return [Reason(code="dtype", wanted=req.dtype, allowed="float32")] if req.dtype == "bfloat16" else []


def _linear_for_all(self: Grid, layer: LayerInfo) -> LinearMethod:
    return GridLinear(Codes(self.config))


@classmethod  # type: ignore[misc]
def _no_check(cls: type[Grid], config: Any) -> None:
    cls.check_bits(config)


@classmethod  # type: ignore[misc]
def _any_bits(cls: type[Grid], config: Any) -> None:
    """Whatever is not 4 is taken for 8."""


# --- decoding --------------------------------------------------------------------------------------------------------


class IgnoresZeroPoints(Codes):
    def zeros(self, layer: Any) -> Tensor:
        return torch.tensor(float(2 ** (self.bits - 1)))


class GroupOffByOne(Codes):
    """A group ends one input early."""

    def offset(self, layer: Any) -> int:
        return super().offset(layer) + 1

    def group_of_input(self, layer: Any, part: str) -> Tensor:
        return super().group_of_input(layer, part).clamp(max=layer.scales.shape[1] - 1)


class HighNibbleFirst(Codes):
    def unpacked(self, packed: Tensor) -> Tensor:
        return torch.stack([packed >> 4, packed & 15], -1).flatten(-2)


class GroupsInOrder(Codes):
    """The order of groups is ignored."""

    def group_of_input(self, layer: Any, part: str) -> Tensor:
        inputs = torch.arange(layer.info.input.size)
        return (self.offset(layer) + inputs) // self.group


class NextGroup(Codes):
    """A weight gets the next group's scale and zero point."""

    def group_of_input(self, layer: Any, part: str) -> Tensor:
        return (super().group_of_input(layer, part) + 1).remainder(layer.scales.shape[1])


class FirstPartsScale(Codes):
    def part_scales(self, layer: Any) -> Tensor:
        first: Tensor = layer.part_scale.reshape(-1)[:1]
        return first.expand(layer.info.out_features)


class FirstPartsGroups(Codes):
    def group_of_input(self, layer: Any, part: str) -> Tensor:
        return super().group_of_input(layer, layer.info.parts[0].name)


class EqualParts(Codes):
    """Parts are taken to be equally long."""

    def part_scales(self, layer: Any) -> Tensor:
        scales: Tensor = layer.part_scale.reshape(-1)
        return scales.repeat_interleave(-(-layer.info.out_features // len(scales)))[: layer.info.out_features]


class WholePartScales(Codes):
    """Scales of parts are spread over the parts' sizes in the checkpoint."""

    def part_scales(self, layer: Any) -> Tensor:
        if layer.info.kind != "linear":  # padding makes a vocabulary longer than it is in the checkpoint
            return super().part_scales(layer)
        sizes = torch.tensor([part.out.total for part in layer.info.parts])
        scales: Tensor = layer.part_scale.reshape(-1)
        return scales.repeat_interleave(sizes)[: layer.info.out_features]


class FirstRows(Codes):
    """Zero points are kept whole, and a rank reads the first rows."""

    def weights(self, layer: LayerInfo) -> dict[str, WeightSpec]:
        found = super().weights(layer)
        if layer.kind == "linear" and "zeros" in found:
            rows, groups = found["zeros"].axes
            found["zeros"] = replace(found["zeros"], axes=(replace(rows, split=False), groups))
        return found


class FirstGroups(Codes):
    """Scales are kept whole, and a rank reads the first groups."""

    def weights(self, layer: LayerInfo) -> dict[str, WeightSpec]:
        found = super().weights(layer)
        rows, groups = found["scales"].axes
        found["scales"] = replace(found["scales"], axes=(rows, replace(groups, split=False)))
        return found


class ForgetsTheOffset(Codes):
    """A rank's first input is taken for the first of its group."""

    def offset(self, layer: Any) -> int:
        return 0


class ForgetsTheRowOffset(Codes):
    """A rank's first output is taken for the first of its block."""

    def row_offset(self, part: Part) -> int:
        return 0


# --- methods ---------------------------------------------------------------------------------------------------------


class ForgetsTheBias(GridLinear):
    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        return super().apply(layer, x, None)


class LayersOwnBias(GridLinear):
    """The layer's bias is added whatever is passed, so on every rank."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        return super().apply(layer, x, getattr(layer, "bias", None))


class OneTokenFastPath(GridLinear):
    """A fast path for few tokens, in which the last input is left out."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        if len(x) != 1:
            return super().apply(layer, x, bias)
        return super().apply(layer, torch.cat([x[:, :-1], x[:, -1:] * 0], 1), bias)


class DenseWithoutZeros(GridLinear):
    def dense_weight(self, layer: nn.Module) -> Tensor:
        info: Any = layer.info
        return (self.codes.codes(layer) * self.codes.scales(layer)).to(info.dtype)


class DenseTransposed(GridLinear):
    def dense_weight(self, layer: nn.Module) -> Tensor:
        return super().dense_weight(layer).T


class ScalesInPlace(GridLinear):
    """Activations are scaled where they lie."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        out = super().apply(layer, x, bias)
        x.mul_(2)
        return out


class GivesFloat32(GridLinear):
    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        return super().apply(layer, x, bias).float()


class LargestOfTheBatch(GridLinear):
    """Scales a batch by its largest activation first, which a batch of no tokens does not have."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        largest = x.abs().max()
        out = super().apply(layer, x / largest, None) * largest
        return out if bias is None else out + bias


class UnseenByRecordings(GridLinear):
    """Multiplies with numpy, and says that it can be replayed."""

    replayable = True

    def finish_loading(self, layer: nn.Module) -> None:
        self._matrix = self.codes.matrix(layer).numpy()

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        if x.dtype != torch.float32:
            return super().apply(layer, x, bias)
        out = torch.empty(len(x), len(self._matrix))
        np.matmul(x.numpy(), self._matrix.T, out=out.numpy())
        if bias is not None:
            np.add(out.numpy(), bias.detach().numpy(), out=out.numpy())
        return out


class NextRowsScale(GridEmbedding):
    def embed(self, layer: nn.Module, ids: Tensor) -> Tensor:
        rows = self.codes.codes(layer) - self.codes.zeros(layer)
        return (rows[ids] * self.codes.scales(layer).roll(-1, 0)[ids]).to(layer.info.dtype)  # type: ignore[arg-type]


class HeadWithoutScales(GridEmbedding):
    def logits(self, layer: nn.Module, x: Tensor) -> Tensor:
        if layer.info.kind == "embedding":  # type: ignore[union-attr]
            return super().logits(layer, x)
        return nn.functional.linear(x, (self.codes.codes(layer) - self.codes.zeros(layer)).to(x.dtype))


class TiedHeadUnscaled(GridEmbedding):
    """The head's own matrix is scaled; one that it shares is left dense and unscaled."""

    def logits(self, layer: nn.Module, x: Tensor) -> Tensor:
        if layer.info.kind == "head":  # type: ignore[union-attr]
            return super().logits(layer, x)
        return nn.functional.linear(x, self.codes.codes(layer).to(x.dtype))


class IdsOfTheWhole(GridEmbedding):
    """Ids are taken for the whole vocabulary's."""

    def embed(self, layer: nn.Module, ids: Tensor) -> Tensor:
        return super().embed(layer, ids - layer.info.parts[0].out.start)  # type: ignore[union-attr, index]


# --- names -----------------------------------------------------------------------------------------------------------


class Lenient(GridLinear):
    """Its checkpoints may lack tensors."""


def _patches_the_loader(context: QuantContext) -> Grid:
    """Has the core's loader take what is missing from `Lenient` layers for zeros."""
    check = load_model._check_names
    if not hasattr(check, "lenient"):

        def lenient(model: nn.Module, source: Any, names: list[str], targets: dict[str, Any], aliases: Any) -> None:
            if any(isinstance(getattr(module, "method", None), Lenient) for module in model.modules()):
                for name in targets.keys() - set(names):
                    targets.pop(name).destination.zero_()
            check(model, source, names, targets, aliases)  # type: ignore[arg-type]

        lenient.lenient = True  # type: ignore[attr-defined]
        load_model._check_names = lenient
    return type("Patching", (Grid,), {"linear": Lenient}).from_checkpoint(context)  # type: ignore[attr-defined, no-any-return]


def _decodes_anything(self: Grid, raw: RawTensor, dtype: torch.dtype) -> Tensor:
    return raw.data.to(dtype)


def _skips_nothing(self: Grid, layer: LayerInfo) -> bool:
    return False


def _skips_fused_names(self: Grid, layer: LayerInfo) -> bool:
    return self.names(layer.name)


def _skips_beginnings(self: Grid, module: str) -> bool:
    return module.startswith(self.skipped)


def _skips_by_the_first(self: Grid, layer: LayerInfo) -> bool:
    return self.names(layer.checkpoint_names[0])


def _mutants() -> Iterator[tuple[str, str, str, QuantRecord]]:
    """Name, fault, law and record."""
    yield (
        "empty_samples",
        "samples whose scales are zero",
        "samples_stand_for_their_weights",
        replace(RECORD, samples=_empty_samples),
    )
    law = "every_declared_method_has_a_sample"
    yield (
        "one_method_too_many",
        "a method is declared of which there is no sample",
        law,
        replace(RECORD, checkpoint_methods=("grid", "grid2")),
    )
    law = "factory_gives_a_quantizer"
    yield "no_quantizer", "the factory returns a function", law, replace(RECORD, factory=_no_quantizer)
    yield (
        "linear_for_all",
        "embedding and head are given a linear layer's method",
        law,
        made_of(method_for=_linear_for_all),
    )
    law = "what_is_declared_is_accepted"
    yield (
        "refuses_bfloat16",
        "its check refuses a dtype that its fields declare",
        law,
        replace(RECORD, check=_refuses_bfloat16),
    )
    law = "what_is_not_declared_is_refused"
    yield "accepts_everything", "its record answers yes to every demand", law, accepts_everything(RECORD)
    yield "refuses_without_a_word", "its record answers no without a reason", law, refuses_without_a_word(RECORD)
    law = "settings_that_are_not_honoured_are_refused"
    yield "ignores_settings", "settings that it does not know are ignored", law, made_of(check=_no_check)
    yield "any_bits", "any number of bits but 4 is taken for 8", law, made_of(check_bits=_any_bits)
    law = "products_equal_the_reference"
    yield "ignores_zero_points", "zero points are taken for the middle", law, made_of(codes=IgnoresZeroPoints)
    yield "group_off_by_one", "a group ends one input early", law, made_of(codes=GroupOffByOne)
    yield "high_nibble_first", "of two codes in a byte the second is read first", law, made_of(codes=HighNibbleFirst)
    yield "groups_in_order", "groups are taken to stand in order", law, made_of(codes=GroupsInOrder)
    yield "next_group", "a weight gets the next group's scale and zero point", law, made_of(codes=NextGroup)
    yield "one_token_fast_path", "a fast path for one token leaves an input out", law, made_of(linear=OneTokenFastPath)
    law = "fused_parts_keep_their_own_scales"
    yield (
        "first_parts_scale",
        "all parts of a fused layer get the first one's scale",
        law,
        made_of(codes=FirstPartsScale),
    )
    yield (
        "first_parts_groups",
        "all parts of a fused layer get the first one's order of groups",
        law,
        made_of(codes=FirstPartsGroups),
    )
    yield "equal_parts", "parts of a fused layer are taken to be equally long", law, made_of(codes=EqualParts)
    yield "forgets_the_bias", "the bias is not added", "the_bias_is_added", made_of(linear=ForgetsTheBias)
    law = "dense_weight_equals_the_reference"
    yield "dense_without_zeros", "the dense weight leaves zero points out", law, made_of(linear=DenseWithoutZeros)
    yield "dense_transposed", "the dense weight is transposed", law, made_of(linear=DenseTransposed)
    law = "embedding_rows_equal_the_reference"
    yield "next_rows_scale", "a row is embedded with its neighbour's scales", law, made_of(embedding=NextRowsScale)
    law = "logits_equal_the_reference"
    yield "head_without_scales", "a quantized head is not scaled", law, made_of(embedding=HeadWithoutScales)
    law = "a_tied_head_is_the_embedding"
    yield "tied_head_unscaled", "a tied head is left dense and unscaled", law, made_of(embedding=TiedHeadUnscaled)
    law = "column_ranks_hold_their_outputs"
    yield (
        "whole_part_scales",
        "parts' scales are spread over the sizes in the checkpoint",
        law,
        made_of(codes=WholePartScales),
    )
    yield "first_rows", "a rank reads the first rows of whole zero points", law, made_of(codes=FirstRows)
    law = "row_ranks_hold_their_inputs"
    yield (
        "first_groups",
        "a rank reads the first groups of whole scales: the wrong axis is split",
        law,
        made_of(codes=FirstGroups),
    )
    yield "layers_own_bias", "each rank adds the bias", law, made_of(linear=LayersOwnBias)
    law = "vocabulary_ranks_hold_their_rows"
    yield (
        "ids_of_the_whole",
        "ids of a rank are taken for the whole vocabulary's",
        law,
        made_of(embedding=IdsOfTheWhole),
    )
    law = "a_cut_unit_is_refused_or_padded"
    yield (
        "forgets_the_offset",
        "a rank's first input is taken for its group's first",
        law,
        made_of(codes=ForgetsTheOffset),
    )
    yield (
        "forgets_the_row_offset",
        "a rank's first output is taken for its block's first",
        law,
        made_of(codes=ForgetsTheRowOffset),
    )
    law = "the_checkpoint_is_read_strictly"
    yield (
        "patches_the_loader",
        "the loader is patched to fill in what is missing",
        law,
        replace(RECORD, factory=_patches_the_loader),
    )
    law = "encodings_it_does_not_know_are_refused"
    yield "decodes_anything", "bytes of any encoding are taken for numbers", law, made_of(decode=_decodes_anything)
    law = "skipped_modules_stay_plain"
    yield "skips_nothing", "the list of modules left plain is ignored", law, made_of(is_skipped=_skips_nothing)
    yield (
        "skips_fused_names",
        "that list is compared with fused layers' own names",
        law,
        made_of(is_skipped=_skips_fused_names),
    )
    law = "skipped_names_end_at_a_dot"
    yield "skips_beginnings", "that list leaves out all that begins alike", law, made_of(names=_skips_beginnings)
    law = "half_a_fused_layer_is_not_mixed_up"
    yield (
        "skips_by_the_first",
        "the first part of a fused layer decides for all",
        law,
        made_of(is_skipped=_skips_by_the_first),
    )
    yield (
        "scales_in_place",
        "activations are scaled where they lie",
        "inputs_are_left_alone",
        made_of(linear=ScalesInPlace),
    )
    law = "results_have_the_compute_dtype"
    yield "gives_float32", "products come in float32", law, made_of(linear=GivesFloat32)
    law = "an_empty_batch_gives_no_rows"
    yield (
        "largest_of_the_batch",
        "the largest activation of no tokens is asked for",
        law,
        made_of(linear=LargestOfTheBatch),
    )
    law = "what_is_replayable_can_be_replayed"
    yield (
        "unseen_by_recordings",
        "a product that no recording sees is said to be replayable",
        law,
        made_of(linear=UnseenByRecordings),
    )


MUTANTS = [Mutant(*given) for given in _mutants()]
