"""Decode steps on CPU, recorded once for each number of rows and replayed: what CUDA graphs are on a GPU.

The batch's buffers keep their addresses, so a replay reads whatever `SlotBatch.apply` wrote before it. Embedding and
sampling stay outside. Parts that compute with anything but our kernels are found while recording, and then every step runs
from Python as before.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from enginebay.interfaces.batch import Batch
from enginebay.interfaces.model import CausalLM
from enginebay.kernels.cpu.recording import Recording
from enginebay.layers.attention import AttentionRuntime
from enginebay.layers.embedding import VocabEmbedding
from enginebay.layers.linear import Linear

logger = logging.getLogger(__name__)

#: Memory that recordings may hold in all. A step that writes more computes for so long that calls do not matter.
_MOST_BYTES: Final = 64 << 20
#: Steps of a number of rows before it is recorded: most numbers pass by once.
_SEEN_BEFORE: Final = 2


@dataclass(slots=True)
class _Replay:
    """One number of rows."""

    recording: Recording
    #: ``[R, d]``: embeddings go in here; the residual stream runs in place
    hidden: Tensor
    #: ``[R, V]``, overwritten by each replay
    logits: Tensor
    addresses: tuple[int, ...]


class DecodeReplays:
    """Recorded decode steps of one model.

    Parameters
    ----------
    model
        On CPU, its attention layers bound.
    runtimes
        One a plan group.
    """

    def __init__(self, model: CausalLM, runtimes: Sequence[AttentionRuntime]) -> None:
        self._model = model
        self._replays: dict[int, _Replay] = {}
        self._seen: dict[int, int] = {}
        #: False once something was met that cannot be replayed
        self.possible = (
            model.replayable
            and all(r.decode.replayable for r in runtimes)
            and all(m.method.replayable for m in model.modules() if isinstance(m, Linear | VocabEmbedding))
        )

    def logits(self, batch: Batch) -> Tensor | None:
        """The step's logits ``[R, V]``; None where the step is to be run from Python. Decode rows only, planned."""
        if not self.possible:
            return None
        replay = self._replays.get(batch.num_rows)
        if replay is None:
            return self._first(batch)
        if replay.addresses != _addresses(batch):
            return None
        replay.hidden.copy_(self._model.embed(batch.input_ids))
        replay.recording.replay()
        return replay.logits

    def _first(self, batch: Batch) -> Tensor | None:
        """Record a number of rows that has been seen before."""
        rows = batch.num_rows
        seen = self._seen[rows] = self._seen.get(rows, 0) + 1
        if seen != _SEEN_BEFORE:
            return None
        replay = self._recorded(batch)
        if foreign := replay.recording.foreign:
            self.possible = False
            logger.info("decode steps run from Python: %s cannot be replayed", ", ".join(sorted(foreign)))
            return replay.logits
        if not self._replays:
            self._check(replay, batch)
        self._keep(rows, replay)
        return replay.logits

    def _recorded(self, batch: Batch) -> _Replay:
        model, recording = self._model, Recording()
        hidden = model.embed(batch.input_ids).clone()
        with recording.record():
            states, residual = model.forward_layers(hidden, None, batch.positions, 0, len(model.layers))
            logits = model.compute_logits(model.final_norm(states, residual))
        return _Replay(recording, hidden, logits, _addresses(batch))

    def _check(self, replay: _Replay, batch: Batch) -> None:
        """The first recording, replayed, must give the bits that it gave while it was recorded."""
        wanted = replay.logits.clone()
        replay.logits.zero_()
        replay.hidden.copy_(self._model.embed(batch.input_ids))
        replay.recording.replay()
        if not torch.equal(replay.logits, wanted):
            self.possible = False
            replay.logits.copy_(wanted)
            logger.warning("decode steps run from Python: a replayed step differs from the recorded one")

    def _keep(self, rows: int, replay: _Replay) -> None:
        size = replay.recording.num_bytes
        if not self.possible or size > _MOST_BYTES:
            return
        while sum(r.recording.num_bytes for r in self._replays.values()) + size > _MOST_BYTES:
            oldest = next(iter(self._replays))
            del self._replays[oldest]
            self._seen[oldest] = 0
        self._replays[rows] = replay


def _addresses(batch: Batch) -> tuple[int, ...]:
    """Where the step's tensors stand that kernels read."""
    assert batch.decode is not None
    return (
        batch.positions.data_ptr(),
        batch.decode.seq_lens.data_ptr(),
        *(group.block_table.data_ptr() for group in batch.decode.groups),
        *(mapping.data_ptr() for mapping in batch.slot_mappings),
    )
