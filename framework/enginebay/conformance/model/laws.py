"""The laws of a model."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from enginebay.conformance.claims import require_refused
from enginebay.conformance.model import samples
from enginebay.conformance.model.checks import (
    TOLERANCE,
    assert_logits,
    assert_names,
    assert_refused,
    distance,
    opened,
    rounded,
    twin,
    with_head,
    words,
)
from enginebay.conformance.model.faults import faults
from enginebay.conformance.model.lab import ModelLab
from enginebay.conformance.model.operators import own_operators
from enginebay.conformance.model.ranks import on_ranks
from enginebay.conformance.model.running import KernelDecode, Runner, overwrite
from enginebay.conformance.model.samples import DEFAULT, Far, Sample, Shared
from enginebay.conformance.suite import Conformance, Settings, cases_from, hardware
from enginebay.errors import EngineBayError, WeightsError
from enginebay.interfaces.model import CausalLM
from enginebay.kernels.cpu import ops
from enginebay.layers.parallel import Communicator
from enginebay.loading.hf_config import load_hf_config
from enginebay.loading.load_model import expected_tensors
from enginebay.plugins.records import Kind, ModelRecord
from enginebay.plugins.requirements import Requirements
from enginebay.worker.cpu_replay import DecodeReplays

#: two prompts longer than a tiny model's window and than several blocks
IDS = (3, 17, 91, 5, 44, 8, 60, 2, 33, 71, 12)
OTHER = (9, 64, 1, 27, 88, 50, 13, 13, 4)


class ModelConformance(Conformance):
    """What every model keeps, beside transformers' model of the same configuration and weights.

    The configuration is transformers' default for the architecture, made small, or the record's `ModelRecord.tiny_config`.
    """

    kind: ClassVar[Kind] = "model"
    decisive: ClassVar[tuple[str, ...]] = ("logits_equal_transformers",)

    @pytest.fixture
    def lab(self, record: ModelRecord, settings: Settings, runs_here: None) -> ModelLab:
        """Builds the plugin's models where the run was asked for."""
        return ModelLab(record.factory, settings.device)

    # --- the record

    def test_what_is_not_declared_is_refused(self, record: ModelRecord, settings: Settings) -> None:
        """Another architecture is refused, and more ranks than declared are, by reasons that say what would do."""
        own = Requirements(
            hardware=hardware(settings.device), dtype="float32", kv_dtype="float32", architecture=record.name
        )
        demands = {"another architecture": replace(own, architecture=f"Not{record.name}")}
        if (most := record.max_tensor_parallel) is not None:
            demands[f"tensor parallel {most + 1}"] = replace(own, tensor_parallel=most + 1)
        for what, demand in demands.items():
            require_refused(record, demand, own, what)

    def test_the_network_is_built_without_memory(self, record: ModelRecord, lab: ModelLab) -> None:
        """On the meta device the factory gives a `CausalLM` with layers, all its tensors there, as `explain` needs it."""
        model = lab.build(samples.tiny_config(record), device="meta")
        assert isinstance(model, CausalLM), f"the factory gave {type(model).__name__}, no CausalLM"
        assert len(model.layers) > 0, "the model has no layers, so that no pipeline could cut it"
        placed = itertools.chain(model.named_parameters(), model.named_buffers())
        real = [name for name, tensor in placed if not tensor.is_meta]
        assert real == [], f"built on meta, {', '.join(real)} take memory; make tensors through `build`"

    def test_every_saved_tensor_is_loaded(self, record: ModelRecord, lab: ModelLab, tmp_path: Path) -> None:
        """The tensors that transformers saves are the tensors that the model wants, by name and shape; none is ignored."""
        made = twin(record, DEFAULT)
        wanted = expected_tensors(lab.build(load_hf_config(made.write(tmp_path)), device="meta"))
        saved = {name: tuple(tensor.shape) for name, tensor in made.tensors.items()}
        assert sorted(saved.keys() - wanted.keys()) == [], "tensors of the checkpoint that the model does not load"
        assert sorted(wanted.keys() - saved.keys()) == [], "tensors that the model wants and the checkpoint has not"
        assert wanted == saved

    # --- the answer

    @cases_from("plain")
    def test_logits_equal_transformers(self, record: ModelRecord, lab: ModelLab, tmp_path: Path, case: Sample) -> None:
        """A prompt in one piece gives transformers' logits in float32, one row a token, padding of the vocabulary cut."""
        made = twin(record, case)
        got = Runner(opened(lab, made.write(tmp_path), case)).step({0: IDS})
        assert_logits(got, made.logits(IDS), "a prompt in one piece")

    @cases_from("plain")
    def test_chunks_equal_the_whole(self, record: ModelRecord, lab: ModelLab, tmp_path: Path, case: Sample) -> None:
        """A prompt in chunks of odd sizes, over block edges and inside windows, gives the logits of the whole."""
        made = twin(record, case)
        runner = Runner(opened(lab, made.write(tmp_path), case))
        got = torch.cat([runner.step({0: IDS[start:end]}) for start, end in ((0, 3), (3, 5), (5, 11))])
        assert_logits(got, made.logits(IDS), "a prompt in chunks of 3, 2 and 6")

    @cases_from("plain")
    def test_decode_steps_equal_the_whole(
        self, record: ModelRecord, lab: ModelLab, tmp_path: Path, case: Sample
    ) -> None:
        """Tokens computed one by one, the first included, give the logits of the whole."""
        made = twin(record, case)
        runner = Runner(opened(lab, made.write(tmp_path), case))
        got = torch.cat([runner.step({0: [token]}) for token in IDS])
        assert_logits(got, made.logits(IDS), "tokens one by one")

    @cases_from("plain")
    def test_a_resumed_request_goes_on(self, record: ModelRecord, lab: ModelLab, tmp_path: Path, case: Sample) -> None:
        """Preempted, and computed anew in other blocks with all its tokens as prompt, a request has the same logits.

        Its blocks then serve another request, which sees nothing of it.
        """
        made = twin(record, case)
        runner = Runner(opened(lab, made.write(tmp_path), case))
        runner.step({0: IDS[:6]})
        runner.step({0: IDS[6:7]})
        runner.release(0)
        got = torch.cat([runner.step({1: IDS[:9]}), runner.step({1: IDS[9:10]}), runner.step({1: IDS[10:]})])
        assert_logits(got, made.logits(IDS), "a request that was preempted and computed anew")
        assert_logits(runner.step({0: OTHER}), made.logits(OTHER), "a request in the blocks of one that was preempted")

    @cases_from("plain")
    def test_rows_of_a_batch_do_not_mix(self, record: ModelRecord, lab: ModelLab, tmp_path: Path, case: Sample) -> None:
        """Rows that decode, go on with a prompt, and begin one in a step of their own lengths keep their own logits."""
        made = twin(record, case)
        runner = Runner(opened(lab, made.write(tmp_path), case), num_rows=4)
        third, fourth = IDS[::-1], OTHER[2:8]
        runner.step({0: IDS[:9], 1: OTHER[:3]})
        got = runner.rows({0: IDS[9:10], 1: OTHER[3:8], 2: third, 3: fourth[:1]})
        last = runner.rows({0: IDS[10:], 1: OTHER[8:], 3: fourth[1:]})
        first, second = made.logits(IDS), made.logits(OTHER)
        begun = made.logits(fourth)
        wanted = {0: first[9:10], 1: second[3:8], 2: made.logits(third), 3: begun[:1]}
        for row, expected in wanted.items():
            assert_logits(got[row], expected, f"row {row} of a step that decodes and prefills")
        for row, expected in {0: first[10:], 1: second[8:], 3: begun[1:]}.items():
            assert_logits(last[row], expected, f"row {row} of the step after it")

    def test_the_compute_dtype_is_kept(self, record: ModelRecord, lab: ModelLab, tmp_path: Path) -> None:
        """In bfloat16 logits are bfloat16, and no further from the float32 ones than a few times transformers' are."""
        made = twin(record, DEFAULT)
        got = Runner(replace(lab, dtype=torch.bfloat16).open(made.write(tmp_path))).step({0: IDS})
        assert got.dtype == torch.bfloat16, f"a bfloat16 model gave {got.dtype} logits"
        exact = made.logits(IDS)
        allowed = 3 * distance(rounded(made).logits(IDS), exact) + 0.01
        error = distance(got, exact)
        assert error <= allowed, (
            f"bfloat16 logits are off the float32 ones by {error:.3g}, rounding explains {allowed:.3g}"
        )

    # --- what the configuration says

    @cases_from("far")
    def test_far_positions_equal_transformers(
        self, record: ModelRecord, lab: ModelLab, tmp_path: Path, case: Far
    ) -> None:
        """Tokens thousands of positions apart see each other as in transformers, by every rope type, or it is refused."""
        made = twin(record, case.sample)
        # longrope takes its factors by the longest sequence that a run is for
        files, most = made.write(tmp_path), max(case.reach + 1, 64)
        try:
            model = lab.open(files, max_model_len=most)
        except EngineBayError as error:
            if not case.sample.changes:
                raise
            assert_names(error, ["rope", "rotary", *words(case.sample)])
            return
        runner, positions = Runner(model), case.positions
        ids = [(7 * place + 3) % 90 for place in range(len(positions))]
        got = runner.run(runner.prepare({0: ids}, {0: positions}))
        assert_logits(got, made.logits(ids, positions), f"positions up to {case.reach}")

    @cases_from("tied")
    @pytest.mark.parametrize("saved", ["absent", "equal", "other", "zero"])
    def test_a_tied_head_is_the_embedding(
        self, record: ModelRecord, lab: ModelLab, tmp_path: Path, case: Sample, saved: str
    ) -> None:
        """``tie_word_embeddings`` alone says whether the head is the embedding, whatever of it the checkpoint holds.

        A tied head may be saved if it is equal; an untied one must be there, be it zero.
        """
        made = twin(record, case)
        embedding, tied = made.tensors[made.embedding], case.changes["tie_word_embeddings"]
        other = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(1)) * 0.2
        heads = {"absent": None, "equal": embedding, "other": other, "zero": torch.zeros_like(embedding)}
        head = heads[saved]
        files = made.write(tmp_path, {made.head: None if head is None else head.clone()})
        if saved in ("other", "zero") if tied else head is None:
            with pytest.raises(EngineBayError) as caught:
                lab.open(files)
            assert_names(caught.value, [made.head, "tie_word_embeddings"])
            return
        expected = made if tied or head is None else with_head(made, head)
        got = Runner(opened(lab, files, case)).step({0: IDS})
        assert_logits(got, expected.logits(IDS), f"{case} embeddings, the head {saved}")

    @cases_from("settings_")
    def test_settings_are_honoured_or_refused(
        self, record: ModelRecord, lab: ModelLab, tmp_path: Path, case: Sample
    ) -> None:
        """A configuration field that changes transformers' logits changes the plugin's alike, or is refused by its name."""
        made = twin(record, case)
        expected = made.logits(IDS)
        declared = case in samples.windowed(record)
        if not declared and distance(twin(record, DEFAULT).logits(IDS), expected) <= TOLERANCE:
            pytest.skip("transformers' logits do not depend on it")
        try:
            model = lab.open(made.write(tmp_path))
        except WeightsError:
            return  # it changes the checkpoint, and strict loading has seen it
        except EngineBayError as error:
            assert_names(error, words(case))
            return
        assert_logits(Runner(model).step({0: IDS}), expected, f"with {case}")

    # --- loading

    @pytest.mark.parametrize("fault", ["missing", "renamed", "of another shape", "of integers", "not asked for"])
    def test_a_checkpoint_that_differs_is_refused_by_name(
        self, record: ModelRecord, lab: ModelLab, tmp_path: Path, fault: str
    ) -> None:
        """Each tensor in turn: without it, under another name, or with other contents, loading is an error that names it.

        So is every tensor more: a bias, a scale, a further layer's.
        """
        made = twin(record, DEFAULT)
        for number, (name, changes) in enumerate(faults(made, fault).items()):
            assert_refused(lab, made.write(tmp_path / str(number), changes), name, f"{name} is {fault}")

    # --- cut and shared

    @cases_from("plain")
    def test_stages_equal_the_whole(self, record: ModelRecord, lab: ModelLab, tmp_path: Path, case: Sample) -> None:
        """Cut before any layer, the two parts in models of their own, the hidden states alone passed on, nothing changes."""
        made = twin(record, case)
        files = made.write(tmp_path)
        layers = len(opened(lab, files, case).layers)
        for cut in range(1, layers):
            first, last = Runner(opened(lab, files, case)), Runner(opened(lab, files, case))
            logits = []
            for ids in (IDS[:7], IDS[7:]):
                ahead, behind = first.prepare({0: ids}), last.prepare({0: ids})
                with torch.no_grad():
                    states = first.model.embed(ahead.input_ids)
                    states, residual = first.model.forward_layers(states, None, ahead.positions, 0, cut)
                    states, residual = states.clone(), residual.clone()
                    states, residual = last.model.forward_layers(states, residual, behind.positions, cut, layers)
                    logits.append(last.model.compute_logits(last.model.final_norm(states, residual)))
            assert_logits(torch.cat(logits), made.logits(IDS), f"cut before layer {cut} of {layers}")

    @cases_from("shared")
    def test_ranks_equal_the_whole(self, record: ModelRecord, lab: ModelLab, tmp_path: Path, case: Shared) -> None:
        """Each of several ranks, with its own shards of every tensor, has the logits of the whole."""
        made, world = twin(record, case.sample), case.world
        files = made.write(tmp_path)
        opened(lab, files, case.sample)  # skips what is refused whatever the ranks

        def work(rank: int, comm: Communicator) -> Tensor:
            runner = Runner(lab.open(files, rank=rank, world=world, comm=comm))
            return torch.cat([runner.step({0: IDS[:8]}), runner.step({0: IDS[8:9]}), runner.step({0: IDS[9:]})])

        for rank, logits in enumerate(on_ranks(world, work)):
            assert_logits(logits, made.logits(IDS), f"rank {rank} of {world}")

    # --- replay

    @cases_from("all_settings")
    def test_a_replayable_model_runs_no_operator_of_its_own(
        self, record: ModelRecord, lab: ModelLab, tmp_path: Path, case: Sample
    ) -> None:
        """With ``replayable = True`` a step runs the layers of `Build` and the core's kernels, and nothing beside them."""
        runner = Runner(opened(lab, twin(record, case).write(tmp_path), case))
        if not runner.model.replayable:
            pytest.skip("the model does not say that it is replayable")
        runner.step({0: IDS})
        model, batch = runner.model, runner.prepare({0: [4]})
        with torch.no_grad():
            hidden = model.embed(batch.input_ids)
            with own_operators() as found:
                hidden, residual = model.forward_layers(hidden, None, batch.positions, 0, len(model.layers))
                model.compute_logits(model.final_norm(hidden, residual))
        assert not found, f"the model is replayable by its own word, and runs {', '.join(sorted(found))}"

    def test_replayed_steps_read_the_step(self, record: ModelRecord, lab: ModelLab, tmp_path: Path) -> None:
        """A decode step that was recorded and is replayed on other tokens gives what the step run from Python gives."""
        if lab.device != "cpu" or not ops.has_linear():
            pytest.skip("steps are recorded on CPUs with avx512_bf16, through compiled kernels")
        files = twin(record, DEFAULT).write(tmp_path)
        model = replace(lab, dtype=torch.bfloat16).open(files)
        if not model.replayable or any(layer.spec.sinks for layer in model.attention_layers):
            pytest.skip("the model does not say that it is replayable, or has sinks")
        runner = Runner(model, decode=KernelDecode)
        replays = DecodeReplays(model, runner.runtimes)
        runner.step({0: IDS, 1: OTHER})
        live = runner.prepare({0: [5], 1: [6]})
        with torch.no_grad():
            for _ in range(2):  # what passes by once is not recorded
                replays.logits(live)
            if not replays.possible:
                pytest.skip("the core's own kernels for this model cannot be recorded here")
            later = runner.prepare({0: [77], 1: [21]})
            expected = runner.run(later)
            overwrite(live, later)
            got = replays.logits(live)
        assert got is not None, "the recorded step was not replayed"
        assert torch.equal(got, expected), "a replayed step differs from the step: something was computed outside it"

    # --- cases

    @classmethod
    def plain(cls, record: ModelRecord, settings: Settings) -> list[Sample]:
        """The default configuration, and one with windows where they are optional."""
        return samples.plain(record)

    @classmethod
    def far(cls, record: ModelRecord, settings: Settings) -> list[Far]:
        """Rope types and distances."""
        return samples.far(record)

    @classmethod
    def tied(cls, record: ModelRecord, settings: Settings) -> list[Sample]:
        """Tied and untied."""
        return samples.tied(record)

    @classmethod
    def settings_(cls, record: ModelRecord, settings: Settings) -> list[Sample]:
        """A changed field each."""
        return [*samples.windowed(record), *samples.settings(record)]

    @classmethod
    def all_settings(cls, record: ModelRecord, settings: Settings) -> list[Sample]:
        """The same, the default first."""
        return [DEFAULT, *cls.settings_(record, settings)]

    @classmethod
    def shared(cls, record: ModelRecord, settings: Settings) -> list[Shared]:
        """Samples, and numbers of ranks."""
        return samples.shared(record)
