"""The sampler with its logits processors: from a step's logits to token ids and their log-probabilities.

Order: the built-in processors, those of plugins that belong to stage "logits", then the greedy rows' argmax; temperature,
stage "scaled", min_p, top_k and top_p, and the draw. A step none of whose rows asks for a processor or log-probabilities is
`sampler.sample` and nothing else. It knows slots; it does not know steps, the cache or the model.

Shapes: ``R`` rows, ``V`` vocabulary that may be drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from enginebay.interfaces.sampler import LogitsProcessor, ProcessorContext, SamplerRows
from enginebay.interfaces.scheduler import BoolArray, Int32Array, NewRequest
from enginebay.kernels.argmax import argmax
from enginebay.kernels.transfer import to_device
from enginebay.plugins.records import SamplerStage
from enginebay.sampling.logprobs import LogprobsMode, Scores, score
from enginebay.sampling.processors.allowed import AllowedTokens
from enginebay.sampling.processors.bad_words import BadWords
from enginebay.sampling.processors.logit_bias import LogitBias
from enginebay.sampling.processors.min_tokens import MinTokens
from enginebay.sampling.processors.penalties import Penalties
from enginebay.sampling.sampler import SamplingRows, draw, filtered, sample, scale

#: In the order that they run.
BUILT_IN: tuple[type[LogitsProcessor], ...] = (AllowedTokens, BadWords, MinTokens, LogitBias, Penalties)

#: The id of a row whose whole vocabulary is forbidden.
NO_TOKEN_LEFT = -1

#: Slots that ask no log-probabilities.
_NONE_ASKED = -2


@dataclass(frozen=True, slots=True)
class StagedProcessor:
    """A processor and when it runs."""

    processor: LogitsProcessor
    stage: SamplerStage = "logits"
    #: greedy rows are left out
    argmax_invariant: bool = False


@dataclass(slots=True)
class RowScores:
    """Log-probabilities of some rows' tokens."""

    #: rows of the step, int64 ``[n]`` on the host
    rows: npt.NDArray[np.int64]
    scores: Scores


@dataclass(slots=True)
class Sampled:
    """What the sampler made of a step."""

    #: int64 ``[R]``; -1 where everything is forbidden, undefined in rows that do not sample
    token_ids: Tensor
    #: None if no row asks
    logprobs: RowScores | None
    #: some id may be -1
    may_lack: bool


class Sampler:
    """Samples steps of one rank.

    Parameters
    ----------
    context
        Of the built-in processors; its `vocab_size` is ``V``, its options are not used.
    plugins
        Further processors, in the order that they run.
    logprobs_mode
        What log-probabilities are of.
    """

    def __init__(
        self,
        context: ProcessorContext,
        plugins: Sequence[StagedProcessor] = (),
        logprobs_mode: LogprobsMode = "raw_logprobs",
    ) -> None:
        built_in = tuple(StagedProcessor(make(context)) for make in BUILT_IN)
        everything = (*built_in, *plugins)
        self._all = tuple(staged.processor for staged in everything)
        self._logits = tuple(staged for staged in everything if staged.stage == "logits")
        self._scaled = tuple(staged for staged in everything if staged.stage == "scaled")
        self._as_logits = logprobs_mode in ("raw_logits", "processed_logits")
        self._processed = logprobs_mode in ("processed_logprobs", "processed_logits")
        self._greedy = np.ones(context.max_num_seqs, dtype=np.bool_)
        # Whether a slot needs a built-in processor or log-probabilities: one look tells a step that asks nothing.
        self._asks = np.zeros(context.max_num_seqs, dtype=np.bool_)
        self._built_in = tuple(staged.processor for staged in built_in)
        self._has_plugins = bool(plugins)
        self._num_logprobs = np.full(context.max_num_seqs, _NONE_ASKED, dtype=np.int32)

    def add(self, requests: Sequence[NewRequest]) -> None:
        """Take note of requests that enter the batch."""
        for request in requests:
            wanted = request.params.logprobs
            self._greedy[request.slot] = request.params.greedy
            self._num_logprobs[request.slot] = _NONE_ASKED if wanted is None else wanted
        for processor in self._all:
            processor.add(requests)
        for request in requests:
            slot = np.array([request.slot], dtype=np.int32)
            self._asks[request.slot] = request.params.logprobs is not None or any(
                processor.applies_to(slot) for processor in self._built_in
            )

    def sample(
        self, logits: Tensor, rows: SamplingRows, slots: Int32Array, samples: BoolArray, view: Callable[[], SamplerRows]
    ) -> Sampled:
        """Draw a token a row.

        Parameters
        ----------
        logits
            ``[R, V]``, any floating dtype; not modified.
        rows
            Parameters of the same rows.
        slots
            The rows' slots.
        samples
            Which rows need a token; processors see no others.
        view
            Makes the rows as processors see them; called only if one applies.
        """
        if not self._has_plugins and not self._asks[slots].any():
            return Sampled(sample(logits, rows), None, False)
        drawn = samples & ~self._greedy[slots]
        first = self._applying(self._logits, slots, samples, drawn)
        second = self._applying(self._scaled, slots, samples, drawn)
        asked = np.flatnonzero(samples & (self._num_logprobs[slots] != _NONE_ASKED))
        if not first and not second and not (self._processed and len(asked)):
            token_ids, remaining, may_lack = sample(logits, rows), logits, False
        else:
            may_lack = True
            step = _StepRows(slots, logits.device, view)
            token_ids, remaining = self._sample_processed(logits, rows, step, first, second)
        if not len(asked):
            return Sampled(token_ids, None, may_lack)
        source = remaining if self._processed else logits
        return Sampled(token_ids, self._score(source, token_ids, slots, asked), may_lack)

    def _applying(
        self, processors: tuple[StagedProcessor, ...], slots: Int32Array, samples: BoolArray, drawn: BoolArray
    ) -> list[tuple[LogitsProcessor, BoolArray]]:
        """The processors that some row needs, and the rows that each sees."""
        sampling = slots if samples.all() else slots[samples]
        found = []
        for staged in processors:
            mask, seen = (drawn, slots[drawn]) if staged.argmax_invariant else (samples, sampling)
            if len(seen) and staged.processor.applies_to(seen):
                found.append((staged.processor, mask))
        return found

    def _sample_processed(
        self,
        logits: Tensor,
        rows: SamplingRows,
        step: _StepRows,
        first: list[tuple[LogitsProcessor, BoolArray]],
        second: list[tuple[LogitsProcessor, BoolArray]],
    ) -> tuple[Tensor, Tensor]:
        """Token ids, and the logits that remain: of greedy rows after stage "logits", of the others after the filters."""
        logits = logits.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        for processor, mask in first:
            step.apply(processor, logits, mask)
        greedy = argmax(logits)
        forbidden = logits.gather(1, greedy.unsqueeze(1)).squeeze(1) == -torch.inf
        if rows.all_greedy:
            return torch.where(forbidden, NO_TOKEN_LEFT, greedy), logits
        scaled, highest = scale(logits, rows, greedy)
        for processor, mask in second:
            step.apply(processor, scaled, mask)
        if second:
            # Greedy rows took their token before this stage.
            emptied = (scaled == -torch.inf).all(dim=1) & (rows.temperature != 0.0)
            forbidden = forbidden | emptied
        scaled = filtered(scaled, rows)
        token_ids = torch.where(forbidden, NO_TOKEN_LEFT, draw(scaled, rows, greedy))
        if not self._processed:
            return token_ids, logits
        # A tiny temperature makes `highest` infinite, so what is forbidden must not be summed with it.
        restored = scaled + highest if self._as_logits else scaled
        restored = restored.masked_fill(scaled == -torch.inf, -torch.inf)
        return token_ids, torch.where((rows.temperature == 0.0).unsqueeze(1), logits, restored)

    def _score(self, logits: Tensor, token_ids: Tensor, slots: Int32Array, asked: npt.NDArray[np.int64]) -> RowScores:
        wanted = self._num_logprobs[slots[asked]]
        num_top = -1 if (wanted < 0).any() else int(wanted.max())
        if len(asked) < len(slots):
            index = to_device(asked, logits.device)
            logits, token_ids = logits[index], token_ids[index]
        return RowScores(asked, score(logits, token_ids, num_top, as_logits=self._as_logits))


class _StepRows:
    """The rows of a step as processors see them: all, or some."""

    def __init__(self, slots: Int32Array, device: torch.device, view: Callable[[], SamplerRows]) -> None:
        self._slots = slots
        self._device = device
        self._view = view
        self._made: dict[bytes, tuple[Tensor | None, SamplerRows]] = {}

    def apply(self, processor: LogitsProcessor, logits: Tensor, mask: BoolArray) -> None:
        """Let `processor` change the rows in `mask`, bool ``[R]``, of `logits`."""
        index, rows = self._rows(mask)
        if index is None:
            processor.apply(logits, rows)
        else:
            part = logits[index]
            processor.apply(part, rows)
            logits[index] = part

    def _rows(self, mask: BoolArray) -> tuple[Tensor | None, SamplerRows]:
        """Index of the rows in `mask`, int64, and they themselves; None for all."""
        key = mask.tobytes()
        if key not in self._made:
            self._made[key] = (None, self._view()) if mask.all() else self._some(mask)
        return self._made[key]

    def _some(self, mask: BoolArray) -> tuple[Tensor, SamplerRows]:
        rows = self._view()
        index = to_device(np.flatnonzero(mask), self._device)
        some = SamplerRows(
            slots_host=rows.slots_host[mask],
            slots=rows.slots[index],
            output_index=rows.output_index[index],
            output_index_host=rows.output_index_host[mask],
            token_ids=rows.token_ids,
            num_tokens=rows.num_tokens[index],
            num_prompt_tokens=rows.num_prompt_tokens[index],
            max_num_tokens=rows.max_num_tokens,
        )
        return index, some
