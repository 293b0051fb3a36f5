"""Fixtures that build a model beside its transformers twin and run it over a paged cache, with a plain backend."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from enginebay.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer, PlanState
from enginebay.interfaces.batch import Batch, Bucket, GroupBatch, PhaseBatch
from enginebay.interfaces.model import CausalLM, ModelContext
from enginebay.layers.attention import AttentionRuntime
from enginebay.layers.build import ModelBuilder
from enginebay.loading.load_model import load_weights
from enginebay.loading.source import RawTensor
from enginebay.plugins.records import NHD, NoOptions
from torch import Tensor

BLOCK = 4
Factory = Callable[[ModelContext], CausalLM]


@dataclass
class MemorySource:
    """A checkpoint in memory."""

    tensors: dict[str, Tensor]

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def load(self, name: str) -> RawTensor:
        return RawTensor(name, self.shape(name), self.tensors[name])

    def close(self) -> None:
        pass


class PlainBackend(AttentionBackend):
    """One row, one head at a time, straight from the definition."""

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        cache: Tensor,
        batch: PhaseBatch,
        state: PlanState,
        out: Tensor,
        lse: Tensor | None = None,
    ) -> None:
        spec, table = layer.spec, batch.groups[self.context.group].block_table
        starts, lens = batch.query_start_loc_host, batch.seq_lens_host
        for row in range(batch.num_rows):
            seq, first, last = int(lens[row]), int(starts[row]), int(starts[row + 1])
            blocks = table[row, : -(-seq // BLOCK)].long()
            keys, values = (cache[blocks, i].flatten(0, 1)[:seq] for i in (0, 1))
            distance = torch.arange(seq - (last - first), seq)[:, None] - torch.arange(seq)
            hidden = (distance < 0) | (distance >= (spec.window or seq))
            for head in range(spec.num_heads):
                kv = head * spec.num_kv_heads // spec.num_heads
                scores = query[first:last, head] @ keys[:, kv].T * spec.scale
                if spec.soft_cap is not None:
                    scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
                out[first:last, head] = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values[:, kv]


class ThreadComm:
    """Collectives between threads that stand for ranks."""

    def __init__(self, rank: int, parts: list[Tensor | None], barrier: threading.Barrier) -> None:
        self._rank, self._parts, self._barrier = rank, parts, barrier

    def _all(self, tensor: Tensor) -> list[Tensor]:
        self._parts[self._rank] = tensor.clone()
        self._barrier.wait()
        parts = [part for part in self._parts if part is not None]
        self._barrier.wait()
        return parts

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._all(tensor)).sum(0)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.cat(self._all(tensor), -1)


@dataclass
class Runner:
    """A model bound to a cache, for rows that start empty."""

    model: CausalLM
    num_rows: int = 2
    max_len: int = 64
    computed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.computed = [0] * self.num_rows
        columns = self.max_len // BLOCK
        # rows' blocks interleave, so that nothing works by accident of order
        self.table = 1 + torch.arange(columns)[None] * self.num_rows + torch.arange(self.num_rows)[:, None]
        groups: dict[Any, AttentionRuntime] = {}
        for layer in self.model.attention_layers:
            runtime = groups.get(layer.spec)
            if runtime is None:
                decode = PlainBackend(self._context(layer.spec, len(groups), "decode"))
                prefill = PlainBackend(self._context(layer.spec, len(groups), "prefill"))
                runtime = groups[layer.spec] = AttentionRuntime(len(groups), decode, prefill)
            shape = (1 + columns * self.num_rows, 2, BLOCK, layer.spec.num_kv_heads, layer.spec.head_dim)
            layer.bind(runtime, torch.zeros(shape))
        self.runtimes = list(groups.values())

    def _context(self, spec: Any, group: int, phase: Any) -> AttentionContext:
        return AttentionContext(
            spec=spec,
            group=group,
            phase=phase,
            dtype=torch.float32,
            kv_dtype=torch.float32,
            device=torch.device("cpu"),
            block_size=BLOCK,
            layout=NHD,
            max_num_rows=8,
            max_num_tokens=64,
            max_model_len=self.max_len,
            options=NoOptions(),
        )

    @torch.no_grad()
    def step(self, tokens: dict[int, list[int]], offset: int = 0) -> Tensor:
        """Logits ``[T, V]`` of each row's next tokens, single-token rows first; `offset` shifts rotary positions."""
        rows = sorted(tokens, key=lambda row: len(tokens[row]) > 1)
        num_decode = sum(len(tokens[row]) == 1 for row in rows)
        ids = torch.tensor([token for row in rows for token in tokens[row]])
        places = torch.cat([torch.arange(len(tokens[row])) + self.computed[row] for row in rows])
        of_row = torch.tensor([row for row in rows for _ in tokens[row]])
        slots = self.table[of_row, places // BLOCK] * BLOCK + places % BLOCK
        for row in rows:
            self.computed[row] += len(tokens[row])
        decode = self._phase(rows[:num_decode], tokens, slots[:num_decode], places[:num_decode])
        prefill = self._phase(rows[num_decode:], tokens, slots[num_decode:], places[num_decode:])
        batch = Batch(
            num_rows=len(rows),
            num_tokens=len(ids),
            slot_of_row=torch.tensor(rows),
            input_ids=ids,
            positions=places + offset,
            logits_indices=torch.arange(len(ids)),
            slot_mappings=tuple(slots for _ in self.runtimes),
            decode=decode,
            prefill=prefill,
        )
        state = PlanState(Bucket(len(rows), self.max_len))
        for runtime in self.runtimes:
            runtime.batch, runtime.decode_state, runtime.prefill_state = batch, state, state
        return self.model.compute_logits(self.model(batch.input_ids, batch.positions))

    def _phase(self, rows: list[int], tokens: dict[int, list[int]], slots: Tensor, places: Tensor) -> PhaseBatch | None:
        if not rows:
            return None
        counts = [len(tokens[row]) for row in rows]
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        lens = np.array([self.computed[row] for row in rows], np.int32)
        group = GroupBatch(self.table[rows].int(), slots)
        return PhaseBatch(
            num_rows=len(rows),
            num_tokens=int(starts[-1]),
            max_query_len=max(counts),
            max_seq_len=int(lens.max()),
            query_start_loc=torch.from_numpy(starts),
            seq_lens=torch.from_numpy(lens),
            positions=places,
            groups=tuple(group for _ in self.runtimes),
            query_start_loc_host=starts,
            seq_lens_host=lens,
        )


@dataclass(frozen=True)
class ModelLab:
    """Builds twins and compares them."""

    factory: Factory

    def twin(self, hf: Any, config: Any, max_model_len: int = 64) -> Runner:
        """Our model with the weights of transformers' `hf`."""
        return self.runner(config, self.saved(hf), max_model_len=max_model_len)

    def runner(self, config: Any, tensors: dict[str, Tensor], max_model_len: int = 64) -> Runner:
        """Our model with the tensors of a checkpoint."""
        return Runner(self.load(config, tensors, max_model_len=max_model_len))

    def saved(self, hf: Any) -> dict[str, Tensor]:
        """What `save_pretrained` writes: tied matrices once."""
        tensors = {name: tensor.detach().clone() for name, tensor in hf.state_dict().items()}
        if hf.config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        return tensors

    def load(self, config: Any, tensors: dict[str, Tensor], max_model_len: int = 64, **place: Any) -> CausalLM:
        build = ModelBuilder(dtype=torch.float32, device="cpu", max_model_len=max_model_len, **place)
        model = self.factory(ModelContext(config=config, build=build))
        load_weights(model, MemorySource(tensors))
        return model

    @torch.no_grad()
    def reference(self, hf: Any, ids: list[int], offset: int = 0) -> Tensor:
        positions = torch.arange(offset, offset + len(ids))[None]
        logits: Tensor = hf(torch.tensor([ids]), position_ids=positions).logits[0]
        return logits

    def ranks(self, config: Any, tensors: dict[str, Tensor], world: int, tokens: dict[int, list[int]]) -> list[Tensor]:
        """Logits of each of `world` ranks, run as threads."""
        parts: list[Tensor | None] = [None] * world
        barrier = threading.Barrier(world, timeout=30)
        out: list[Tensor | None] = [None] * world
        errors: list[BaseException] = []

        def run(rank: int) -> None:
            try:
                comm = ThreadComm(rank, parts, barrier)
                out[rank] = Runner(self.load(config, tensors, rank=rank, world=world, comm=comm)).step(tokens)
            except BaseException as error:
                errors.append(error)
                barrier.abort()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [logits for logits in out if logits is not None]

    # --- laws that every family keeps

    def check_logits(self, hf: Any, config: Any, ids: list[int], offset: int, max_model_len: int = 8300) -> None:
        """Logits equal transformers' from position `offset` on."""
        ours = self.twin(hf, config, max_model_len=max_model_len).step({0: ids}, offset)
        torch.testing.assert_close(ours, self.reference(hf, ids, offset), rtol=1e-4, atol=1e-4)

    def check_greedy(self, hf: Any, config: Any, ids: list[int], *, beside: bool) -> None:
        """The prompt in two chunks, then one token a step, once `beside` another row's prefill: transformers' tokens."""
        runner = self.twin(hf, config)
        runner.step({1: ids[:4]})
        logits, tokens = runner.step({1: ids[4:]}), list(ids)
        for step in range(12):
            tokens.append(int(logits[0 if beside and step == 1 else -1].argmax()))
            logits = runner.step({1: tokens[-1:]} | ({0: ids[::-1]} if beside and step == 0 else {}))
        want = hf.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0)
        assert tokens == want[0].tolist()

    def check_ranks(self, hf: Any, config: Any, ids: list[int], world: int) -> None:
        """Each of `world` ranks has the whole model's logits."""
        ranks = self.ranks(config, self.saved(hf), world, {0: ids})
        assert len(ranks) == world
        for logits in ranks:
            torch.testing.assert_close(logits, self.reference(hf, ids), rtol=1e-4, atol=1e-4)

    def check_pipeline_cut(self, hf: Any, config: Any, ids: list[int], cut: int) -> None:
        """Layers before and from `cut` on, one after the other, give the whole model's logits."""
        runner = self.twin(hf, config)
        runner.step({0: ids})  # sets the batch; the cut below rewrites the same slots
        model, batch = runner.model, runner.runtimes[0].batch
        assert batch is not None
        with torch.no_grad():
            hidden, residual = model.forward_layers(model.embed(batch.input_ids), None, batch.positions, 0, cut)
            hidden, residual = model.forward_layers(hidden, residual, batch.positions, cut, len(model.layers))
            got = model.compute_logits(model.final_norm(hidden, residual))
        torch.testing.assert_close(got, self.reference(hf, ids), rtol=1e-4, atol=1e-4)


@pytest.fixture
def model_lab() -> Callable[[Factory], ModelLab]:
    """`ModelLab` of a model factory."""
    return ModelLab
