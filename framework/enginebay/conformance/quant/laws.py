"""The laws of a quantizer."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from enginebay.conformance.claims import Undeclared, home, require_accepted, require_refused
from enginebay.conformance.quant import cases, faults
from enginebay.conformance.quant.cases import BrokenSetting, Case
from enginebay.conformance.quant.checkpoint import DOWN, EMBEDDING, LAYER, OUTPUT, QUERY, Shape, draw
from enginebay.conformance.quant.checks import (
    assert_logits,
    assert_products,
    assert_rows,
    calls,
    dense_weight,
    skipping,
)
from enginebay.conformance.quant.trial import Layers, Trial, held, loaded, off_weight
from enginebay.conformance.suite import Conformance, Settings, cases_from
from enginebay.errors import EngineBayError, ModelError, WeightsError
from enginebay.interfaces.quant import EmbeddingMethod, LinearMethod, Quantizer
from enginebay.kernels.cpu.library import library
from enginebay.kernels.cpu.recording import Recording
from enginebay.layers.embedding import VocabEmbedding
from enginebay.layers.linear import Linear
from enginebay.loading.source import RawTensor
from enginebay.plugins.records import Kind, QuantRecord

#: numbers of ranks that every size divides by
WORLDS = (2, 4)


class QuantConformance(Conformance):
    """What every quantizer keeps, on checkpoints of its record's samples, loaded as the engine loads them."""

    kind: ClassVar[Kind] = "quant"
    decisive: ClassVar[tuple[str, ...]] = ("products_equal_the_reference",)

    # --- the record

    @cases_from("exact")
    def test_samples_stand_for_their_weights(self, record: QuantRecord, case: Case) -> None:
        """What a sample encodes means nearly the weights that went in: a law on empty tensors would prove nothing."""
        sample = case.sample
        matrix = torch.randn(4 * sample.out_unit, 4 * sample.in_unit, generator=torch.Generator().manual_seed(0))
        given = matrix.clone()
        meant = sample.dequantize(dict(sample.encode(given)))
        assert meant.dtype == torch.float32, f"{sample} is decoded to {meant.dtype}, not float32"
        assert meant.shape == matrix.shape, (
            f"{sample} is decoded to shape {list(meant.shape)}, not {list(matrix.shape)}"
        )
        error = float((meant - matrix).norm() / matrix.norm())
        assert error <= 0.6, (
            f"{sample} means something else than the weights that were encoded: relative error {error:.3g}"
        )

    def test_every_declared_method_has_a_sample(self, record: QuantRecord) -> None:
        """Each of the record's ``checkpoint_methods`` is some sample's ``quant_method``, and no sample has another."""
        if record.samples is None:
            pytest.skip("the record has no samples, of which checkpoints could be made")
        methods = {sample.config.get("quant_method") for sample in cases.samples(record)}
        assert methods == set(record.checkpoint_methods), (
            f"samples are of {sorted(map(str, methods))}, the record declares {sorted(record.checkpoint_methods)}"
        )

    @cases_from("exact")
    def test_factory_gives_a_quantizer(self, record: QuantRecord, settings: Settings, case: Case) -> None:
        """Of each sample's settings the factory builds a `Quantizer`, which gives each kind of layer a method of that kind."""
        trial = Trial(record, case, settings.device)
        quantizer = trial.quantizer()
        assert isinstance(quantizer, Quantizer)
        model = trial.build(draw(case.sample, Shape()), quantizer, device="meta")
        for layer in model.modules():
            if not isinstance(layer, Linear | VocabEmbedding):
                continue
            method, wanted = (
                quantizer.method_for(layer.info),
                LinearMethod if isinstance(layer, Linear) else EmbeddingMethod,
            )
            assert method is None or isinstance(method, wanted), f"{layer.name} is given {method!r}"

    def test_what_is_declared_is_accepted(self, record: QuantRecord) -> None:
        """A demand within the record's own fields is refused for nothing but the machine."""
        for dtype in record.dtypes:
            for method in record.checkpoint_methods:
                demand = cases.demand(record, home(record), dtype=dtype, quant_method=method)
                require_accepted(record, demand, f"{method} in {dtype}")

    @cases_from("undeclared")
    def test_what_is_not_declared_is_refused(self, record: QuantRecord, case: Undeclared) -> None:
        """A demand beyond the record's fields is refused, by a reason that says what was wanted and what would do."""
        here = home(record)
        beyond = cases.demand(record, **({"hardware": here} | dict(case.changes)))
        require_refused(record, beyond, cases.demand(record, here), case)

    @cases_from("broken_settings")
    def test_settings_that_are_not_honoured_are_refused(
        self, record: QuantRecord, settings: Settings, case: BrokenSetting
    ) -> None:
        """A setting without meaning to the quantizer, or a value that it does not know, is a `ModelError` that names it."""
        trial = Trial(record, case.case, settings.device)
        with pytest.raises(EngineBayError) as caught:
            trial.build(draw(case.case.sample, Shape()), trial.quantizer(dict(case.config)), device="meta")
        assert isinstance(caught.value, ModelError), f"{case} is a {type(caught.value).__name__}, not a ModelError"
        assert case.key in str(caught.value), f"{case}: the error does not name {case.key}: {caught.value}"

    # --- the answer

    @cases_from("every")
    def test_products_equal_the_reference(self, record: QuantRecord, settings: Settings, case: Case) -> None:
        """``apply(x)`` is ``x @ W.T`` for 1, 7 and 32 tokens, where `W` is what the sample says that the tensors mean."""
        trial = Trial(record, case, settings.device)
        checkpoint, layers = loaded(trial)
        assert_products(trial, layers.down, held(layers.down.info, checkpoint.matrices))

    @cases_from("every")
    def test_fused_parts_keep_their_own_scales(self, record: QuantRecord, settings: Settings, case: Case) -> None:
        """Query, key and value of unequal sizes, and gate and up, each of another magnitude, side by side in one layer."""
        trial = Trial(record, case, settings.device)
        checkpoint, layers = loaded(trial)
        for layer in (layers.gate_up, layers.qkv):
            assert_products(trial, layer, held(layer.info, checkpoint.matrices))

    @cases_from("exact")
    def test_the_bias_is_added(self, record: QuantRecord, settings: Settings, case: Case) -> None:
        """``apply(x, bias)`` adds it."""
        trial = Trial(record, case, settings.device)
        checkpoint, layers = loaded(trial)
        matrix, bias = held(layers.output.info, checkpoint.matrices), checkpoint.tensors[f"{OUTPUT}.bias"]
        assert_products(trial, layers.output, matrix, bias)

    @cases_from("every")
    def test_dense_weight_equals_the_reference(self, record: QuantRecord, settings: Settings, case: Case) -> None:
        """``dense_weight()`` is what the sample says that the tensors mean, rounded once to the compute dtype."""
        trial = Trial(record, case, settings.device)
        checkpoint, layers = loaded(trial)
        for layer in layers.linear:
            dense = dense_weight(layer)
            assert dense.dtype == trial.dtype, f"{layer.name}: {dense.dtype}"
            matrix = held(layer.info, checkpoint.matrices)
            assert dense.shape == matrix.shape, f"{layer.name}: {list(dense.shape)}"
            share = off_weight(trial, dense, matrix)
            assert share <= 1, f"{layer.name}: a weight is off by {share:.3g} times what one rounding explains"

    # --- embeddings and heads

    @cases_from("exact")
    def test_embedding_rows_equal_the_reference(self, record: QuantRecord, settings: Settings, case: Case) -> None:
        """``embed(ids)`` gives the rows of the ids, in any order and with repetitions."""
        trial = Trial(record, case, settings.device)
        checkpoint, layers = loaded(trial)
        assert_rows(trial, layers.embedding, checkpoint.matrices[EMBEDDING])

    @cases_from("exact")
    def test_logits_equal_the_reference(self, record: QuantRecord, settings: Settings, case: Case) -> None:
        """An untied head's logits are the products with its own rows."""
        trial = Trial(record, case, settings.device)
        checkpoint, layers = loaded(trial)
        assert_logits(trial, layers.head, held(layers.head.info, checkpoint.matrices))

    @cases_from("exact")
    def test_a_tied_head_is_the_embedding(self, record: QuantRecord, settings: Settings, case: Case) -> None:
        """Of a tied matrix, stored once, both rows and logits are right (C52, C58)."""
        trial = Trial(record, case, settings.device)
        checkpoint, layers = loaded(trial, Shape(tied=True))
        assert layers.head is layers.embedding
        assert_rows(trial, layers.embedding, checkpoint.matrices[EMBEDDING])
        assert_logits(trial, layers.head, held(layers.embedding.info, checkpoint.matrices))

    # --- ranks

    @cases_from("exact")
    def test_column_ranks_hold_their_outputs(self, record: QuantRecord, settings: Settings, case: Case) -> None:
        """Each of 2 and of 4 ranks gives its share of a layer's outputs, of each part, as the whole layer's slice."""
        trial = Trial(record, case, settings.device)
        for world in WORLDS:
            for rank in range(world):
                checkpoint, layers = loaded(trial, rank=rank, world=world)
                for layer in (layers.gate_up, layers.qkv):
                    assert_products(trial, layer, held(layer.info, checkpoint.matrices))

    @cases_from("exact")
    def test_row_ranks_hold_their_inputs(self, record: QuantRecord, settings: Settings, case: Case) -> None:
        """Each of 2 and of 4 ranks multiplies its share of the inputs by that slice of the matrix; one adds the bias (C53)."""
        trial = Trial(record, case, settings.device)
        for world in WORLDS:
            for rank in range(world):
                checkpoint, layers = loaded(trial, rank=rank, world=world)
                assert_products(trial, layers.down, held(layers.down.info, checkpoint.matrices))
                bias = None if rank else checkpoint.tensors[f"{OUTPUT}.bias"]
                assert_products(trial, layers.output, held(layers.output.info, checkpoint.matrices), bias)

    @cases_from("exact")
    def test_vocabulary_ranks_hold_their_rows(self, record: QuantRecord, settings: Settings, case: Case) -> None:
        """Each of 2 and of 4 ranks has its share of the vocabulary, counted from 0, for rows and for logits."""
        trial = Trial(record, case, settings.device)
        for world in WORLDS:
            for rank in range(world):
                checkpoint, layers = loaded(trial, rank=rank, world=world)
                assert_rows(trial, layers.embedding, held(layers.embedding.info, checkpoint.matrices))
                assert_logits(trial, layers.head, held(layers.head.info, checkpoint.matrices))

    @cases_from("with_units")
    def test_a_cut_unit_is_refused_or_padded(self, record: QuantRecord, settings: Settings, case: Case) -> None:
        """Where ranks cut a group or block, the start is refused by the layer's name, or their products are right (C57)."""
        trial = Trial(record, case, settings.device)
        checkpoint = draw(case.sample, Shape(uneven=True))
        for rank in range(2):
            try:
                trial.build(checkpoint, trial.quantizer(), rank, 2, device="meta")
            except ModelError as error:
                assert f"{LAYER}.mlp." in str(error), f"the error names no layer that is cut: {error}"  # noqa: PT017
                continue
            layers = trial.load(checkpoint, rank, 2)
            for layer in (layers.gate_up, layers.down):
                assert_products(trial, layer, held(layer.info, checkpoint.matrices))

    # --- names

    @cases_from("exact")
    def test_the_checkpoint_is_read_strictly(self, record: QuantRecord, settings: Settings, case: Case) -> None:
        """Each tensor of a plain layer and of a fused part that is missing, renamed or unknown is an error naming it (C56)."""
        trial = Trial(record, case, settings.device)
        for fault in faults.name_faults(draw(case.sample, Shape()), (DOWN, QUERY)):
            with pytest.raises(WeightsError) as caught:
                trial.load(fault.checkpoint)
            for name in fault.named:
                assert name in str(caught.value), f"{fault}: the error does not name {name}: {caught.value}"

    @cases_from("exact")
    def test_encodings_it_does_not_know_are_refused(self, record: QuantRecord, settings: Settings, case: Case) -> None:
        """``decode`` of an unknown encoding, or of too few bytes of a known one, is a `WeightsError` that names the tensor."""
        quantizer = Trial(record, case, settings.device).quantizer()
        raws = [RawTensor("model.some.weight", (4, 64), torch.zeros(4, 64, dtype=torch.uint8), "enginebay:unknown")]
        if case.sample.gguf_type is not None:
            size = (2, 2 * case.sample.in_unit)
            rows = case.sample.encode(torch.ones(size))["weight"]
            raws.append(RawTensor("model.some.weight", size, rows[:, 1:], f"gguf:{case.sample.gguf_type}"))
        for raw in raws:
            with pytest.raises(WeightsError, match=r"model\.some\.weight"):
                quantizer.decode(raw, torch.float32)

    @cases_from("with_skip_lists")
    def test_skipped_modules_stay_plain(self, record: QuantRecord, settings: Settings, case: Case) -> None:
        """Modules that the skip list names are read plain: by whole name, part by part of a fused layer, by prefix (C54)."""
        fused = [f"{LAYER}.self_attn.{part}_proj" for part in "qkv"]
        for entries in ([DOWN], fused, [f"{LAYER}.mlp"]):
            trial = skipping(Trial(record, case, settings.device), entries)
            modules = draw(case.sample, Shape()).matrices
            plain = frozenset(m for m in modules if any(m == e or m.startswith(f"{e}.") for e in entries))
            checkpoint, layers = loaded(trial, Shape(plain=plain))
            for layer in layers.linear:
                bias = checkpoint.tensors[f"{OUTPUT}.bias"] if layer is layers.output else None
                assert_products(trial, layer, held(layer.info, checkpoint.matrices), bias)

    @cases_from("with_skip_lists")
    def test_skipped_names_end_at_a_dot(self, record: QuantRecord, settings: Settings, case: Case) -> None:
        """A skip list that names ``model.layers.1`` says nothing of ``model.layers.10`` (C54)."""
        trial = Trial(record, case, settings.device)
        layer = Layers(trial.build(draw(case.sample, Shape()), trial.quantizer(), device="meta")).down
        wanted = trial.quantizer().method_for(layer.info)
        assert wanted is not None, f"{layer.name} is plain without a skip list"
        near = skipping(trial, [DOWN.replace("layers.0", "layers.1"), "model.layers.1"]).quantizer()
        info = replace(layer.info, name=DOWN.replace("layers.0", "layers.10"))
        method = near.method_for(info)
        assert method is not None, "model.layers.10 is taken for a part of model.layers.1, which the skip list names"
        assert method.weights(info) == wanted.weights(layer.info)

    @cases_from("with_skip_lists")
    def test_half_a_fused_layer_is_not_mixed_up(self, record: QuantRecord, settings: Settings, case: Case) -> None:
        """A skip list that names one part of a fused layer is refused by the layer's or part's name, or honoured (C54)."""
        trial = skipping(Trial(record, case, settings.device), [QUERY])
        checkpoint = draw(case.sample, Shape(plain=frozenset([QUERY])))
        try:
            trial.build(checkpoint, trial.quantizer(), device="meta")
        except ModelError as error:
            assert f"{LAYER}.self_attn.q" in str(error), f"the error names no layer: {error}"  # noqa: PT017
            return
        layers = trial.load(checkpoint)
        assert_products(trial, layers.qkv, held(layers.qkv.info, checkpoint.matrices))

    # --- conduct

    @cases_from("exact")
    def test_inputs_are_left_alone(self, record: QuantRecord, settings: Settings, case: Case) -> None:
        """Neither activations nor ids are written to, and a second call gives what the first gave."""
        trial = Trial(record, case, settings.device)
        _, layers = loaded(trial)
        for call in calls(trial, layers, 7):
            before = call.given.clone()
            first, second = call(call.given).clone(), call(call.given)
            assert torch.equal(call.given, before), f"{call.name} changed what it was given"
            assert torch.equal(first, second), f"{call.name} gave another result the second time"

    @cases_from("every")
    def test_results_have_the_compute_dtype(self, record: QuantRecord, settings: Settings, case: Case) -> None:
        """Products, rows and logits are ``[T, out]`` in the compute dtype, on the device of what was given."""
        trial = Trial(record, case, settings.device)
        _, layers = loaded(trial)
        for call in calls(trial, layers, 7):
            out = call(call.given)
            assert out.dtype == trial.dtype, f"{call.name} gave {out.dtype}"
            assert out.device == call.given.device, f"{call.name} gave a tensor on {out.device}"
            assert tuple(out.shape) == (7, call.width), f"{call.name} gave shape {list(out.shape)}"

    @cases_from("exact")
    def test_an_empty_batch_gives_no_rows(self, record: QuantRecord, settings: Settings, case: Case) -> None:
        """A batch of no tokens is no error: ``[0, out]``."""
        trial = Trial(record, case, settings.device)
        _, layers = loaded(trial)
        for call in calls(trial, layers, 7):
            out = call(call.given[:0])
            assert tuple(out.shape) == (0, call.width), f"{call.name} of no tokens gave shape {list(out.shape)}"

    @cases_from("on_cpu")
    def test_what_is_replayable_can_be_replayed(self, record: QuantRecord, settings: Settings, case: Case) -> None:
        """What a method that is said to be `replayable` computes is seen by a recording: a replay on other inputs is right."""
        if library() is None:
            pytest.skip("no kernels are compiled on this machine, so nothing is recorded")
        trial = Trial(record, case, settings.device)
        _, layers = loaded(trial)
        for call in calls(trial, layers, 7):
            if call.is_lookup or not call.layer.method.replayable:  # embedding stays outside of recordings
                continue
            others = trial.batch(call.layer, 7, seed=1)
            wanted = call(others).clone()
            recording = Recording()
            with recording.record():
                out = call(call.given)
            if recording.foreign:  # the engine sees them too, and runs such a step from Python
                continue
            call.given.copy_(others)
            recording.replay()
            assert torch.equal(out, wanted), f"{call.name} is said to be replayable, and a replay gave another result"

    # --- cases

    @classmethod
    def exact(cls, record: QuantRecord, settings: Settings) -> list[Case]:
        """Every sample in the most exact dtype."""
        return cases.exact_cases(record)

    @classmethod
    def every(cls, record: QuantRecord, settings: Settings) -> list[Case]:
        """Samples in every dtype."""
        return cases.all_cases(record, settings)

    @classmethod
    def with_units(cls, record: QuantRecord, settings: Settings) -> list[Case]:
        """Samples that have a unit to cut."""
        return [c for c in cases.exact_cases(record) if max(c.sample.in_unit, c.sample.out_unit) > 1]

    @classmethod
    def with_skip_lists(cls, record: QuantRecord, settings: Settings) -> list[Case]:
        """Samples whose settings can name modules left plain."""
        return [c for c in cases.exact_cases(record) if c.sample.skip_key is not None]

    @classmethod
    def on_cpu(cls, record: QuantRecord, settings: Settings) -> list[Case]:
        """Samples in every dtype, on CPU."""
        return cases.all_cases(record, settings) if settings.device == "cpu" else []

    @classmethod
    def broken_settings(cls, record: QuantRecord, settings: Settings) -> list[BrokenSetting]:
        """Settings that nobody can honour."""
        return [broken for case in cases.exact_cases(record) for broken in cases.broken_settings(case)]

    @classmethod
    def undeclared(cls, record: QuantRecord, settings: Settings) -> list[Undeclared]:
        """What the record lacks."""
        return cases.undeclared(record)
