"""A logits processor and the batch that it works in: seats, their lines of tokens on the device, and steps over them.

Requests come through the engine's own check, so that a processor is told what it is told there. Shapes: ``R`` rows, ``V``
vocabulary, ``S`` slots, ``L`` tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from enginebay.conformance.sampler.words import Words
from enginebay.engine.request_checks import RequestChecks
from enginebay.interfaces.sampler import LogitsProcessor, ProcessorContext, SamplerRows
from enginebay.interfaces.scheduler import Int32Array, NewRequest
from enginebay.plugins.records import LogitsProcessorRecord
from enginebay.sampling.params import SamplingParams

VOCAB, SLOTS, LENGTH = 199, 16, 96
#: tokens of texts are few, so that they recur
ALPHABET = 7


@dataclass(frozen=True)
class Seat:
    """A request in the batch."""

    slot: int
    prompt: tuple[int, ...]
    #: ``request_id``
    name: str = "request"
    output: tuple[int, ...] = ()
    #: what it says to the processor; None: nothing
    said: Words | None = None
    #: outputs that were known when it entered: those before a preemption
    known: int = 0
    #: further arguments of its `SamplingParams`
    params: Words = field(default_factory=dict)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and output."""
        return self.prompt + self.output

    def at(self, slot: int) -> Seat:
        """The same request in another slot."""
        return replace(self, slot=slot)

    def silent(self) -> Seat:
        """The same request, which says nothing."""
        return replace(self, said=None)


def seats(count: int, seed: int, said: Sequence[Words | None], *, outputs: int = 30) -> list[Seat]:
    """Requests of ragged lengths in random slots, which say the given things in turn."""
    draw = random.Random(seed)
    slots = draw.sample(range(SLOTS), count)

    def text(least: int, most: int) -> tuple[int, ...]:
        return tuple(draw.randrange(ALPHABET) for _ in range(draw.randint(least, most)))

    return [
        Seat(slot, text(1, 40), f"{seed}-{row}", text(0, outputs) if row else (), said[row % len(said)])
        for row, slot in enumerate(slots)
    ]


def logits_for(rows: int, seed: int, device: torch.device) -> Tensor:
    """Float32 ``[R, V]``, normal, with a deviation of 3."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, VOCAB, generator=generator) * 3).to(device)


class Bench:
    """A processor by its record's factory, and its batch."""

    def __init__(
        self, record: LogitsProcessorRecord, device: str, options: Words | None = None, *, junk: int = 0
    ) -> None:
        self.record = record
        self.device = torch.device(device)
        made = record.factory(
            ProcessorContext(
                vocab_size=VOCAB,
                max_num_seqs=SLOTS,
                max_model_len=LENGTH,
                device=self.device,
                options=record.options.model_validate(dict(options or {})),
            )
        )
        assert isinstance(made, LogitsProcessor), f"the factory returned {made!r}, no LogitsProcessor"
        self.processor = made
        self._checks = RequestChecks(vocab_size=VOCAB, has_tokenizer=False, processors={record.name: record})
        generator = torch.Generator().manual_seed(junk)
        #: what earlier requests left there
        self.lines = torch.randint(0, ALPHABET, (SLOTS, LENGTH), generator=generator, dtype=torch.int32).to(self.device)

    def request(self, seat: Seat) -> NewRequest:
        """The request as it enters. Raises what the engine's check raises."""
        said = {} if seat.said is None else {self.record.name: dict(seat.said)}
        params = SamplingParams(**{"detokenize": False, "max_tokens": 64, **seat.params, "extra_args": said})
        params = self._checks.check(params, frozenset(), 64)
        tokens = np.array(seat.prompt + seat.output[: seat.known], dtype=np.int32)
        return NewRequest(seat.name, seat.slot, tokens, len(seat.prompt), 0, params, seed=seat.slot)

    @torch.inference_mode()
    def enter(self, *entering: Seat) -> Bench:
        """Let requests enter the batch."""
        self.processor.add([self.request(seat) for seat in entering])
        return self

    def rows(self, seated: Sequence[Seat]) -> SamplerRows:
        """A step of these seats, whose tokens are written into their lines."""
        for seat in seated:
            self.lines[seat.slot, : len(seat.tokens)] = torch.tensor(seat.tokens, dtype=torch.int32)
        slots = slots_of(seated)
        outputs = np.array([len(seat.output) for seat in seated], dtype=np.int32)
        prompts = np.array([len(seat.prompt) for seat in seated], dtype=np.int32)

        def sent(array: Int32Array) -> Tensor:
            return torch.from_numpy(array.astype(np.int64)).to(self.device)

        return SamplerRows(
            slots_host=slots,
            slots=sent(slots),
            output_index=sent(outputs),
            output_index_host=outputs,
            token_ids=self.lines,
            num_tokens=sent(prompts + outputs),
            num_prompt_tokens=sent(prompts),
            max_num_tokens=int((prompts + outputs).max(initial=0)),
        )

    def applies(self, *seated: Seat) -> bool:
        """What the processor says of these rows."""
        return bool(self.processor.applies_to(slots_of(seated)))

    @torch.inference_mode()
    def step(self, seated: Sequence[Seat], logits: Tensor, *, force: bool = False) -> Tensor:
        """The logits after the processor, where it says that it applies, or always; `logits` stay as they are."""
        changed = logits.clone()
        rows = self.rows(seated)
        if force or self.applies(*seated):
            self.processor.apply(changed, rows)
        return changed


def slots_of(seated: Sequence[Seat]) -> Int32Array:
    """Int32 ``[R]``."""
    return np.array([seat.slot for seat in seated], dtype=np.int32)


def alone(record: LogitsProcessorRecord, device: str, options: Words, seat: Seat, logits: Tensor) -> Tensor:
    """What a processor that knows no other request makes of a seat's logits, ``[V]``."""
    return Bench(record, device, options).enter(seat).step([seat], logits[None])[0]


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are equal, NaN included."""
    return torch.equal(left.view(torch.int32), right.view(torch.int32))


def assert_close(left: Tensor, right: Tensor, fault: str) -> None:
    """Fail unless the same tokens are forbidden and the others' logits are equal but for rounding."""
    assert torch.equal(left == -torch.inf, right == -torch.inf), f"{fault}: other tokens are forbidden"
    kept = left != -torch.inf
    off = (left - right)[kept].abs() / (1e-4 * right[kept].abs() + 1e-4)
    assert bool((off <= 1).all()), f"{fault}: logits differ by up to {float((left - right)[kept].abs().max()):.3g}"


def why(error: Exception) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {error}"
