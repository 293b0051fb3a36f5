"""What can be wrong with a logits processor: one that discourages recent tokens, broken in one way each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast

import torch
from enginebay.interfaces.sampler import LogitsProcessor, ProcessorContext, SamplerRows
from enginebay.interfaces.scheduler import Int32Array, NewRequest
from enginebay.plugins.local import import_local
from enginebay.plugins.records import LogitsProcessorRecord
from mutant import Mutant, accepts_everything
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import Tensor

NAME = "discourage"
Told = dict[str, Any]


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")

    scale: float = Field(1.0, gt=0, le=2, examples=[1.0, 2.0])


class Words(BaseModel):
    model_config = ConfigDict(extra="forbid")

    strength: float = Field(ge=0, le=20, allow_inf_nan=False, examples=[2.0, 5.5])
    window: int = Field(1000, ge=1, le=10**6, examples=[1000, 3])
    forbid: list[Annotated[int, Field(ge=0)]] = Field([], examples=[[], [1, 3]])


class Right(LogitsProcessor):
    """Lowers the logits of a request's newest tokens, and forbids some."""

    def __init__(self, context: ProcessorContext) -> None:
        super().__init__(context)
        self.told: dict[int, Told | None] = {}
        self.scale = cast(Options, context.options).scale

    def add(self, requests: Sequence[NewRequest]) -> None:
        for request in requests:
            self.enter(request, cast(Told | None, request.params.extra_args.get(NAME)))

    def enter(self, request: NewRequest, told: Told | None) -> None:
        self.told[request.slot] = told

    def applies_to(self, slots: Int32Array) -> bool:
        return any(self.told.get(slot) for slot in slots.tolist())

    def apply(self, logits: Tensor, rows: SamplerRows) -> None:
        for row, slot in enumerate(rows.slots_host.tolist()):
            if told := self.told.get(slot):
                self.change(logits, row, told, self.tokens(rows, row, slot)[-told["window"] :])

    def tokens(self, rows: SamplerRows, row: int, slot: int) -> Tensor:
        return rows.token_ids[slot, : int(rows.num_tokens[row])].long()

    def change(self, logits: Tensor, row: int, told: Told, tokens: Tensor) -> None:
        logits[row] -= told["strength"] * self.scale * self.counts(tokens)
        logits[row, self.forbidden(told)] = -torch.inf

    def counts(self, tokens: Tensor) -> Tensor:
        return torch.bincount(tokens[tokens < self.context.vocab_size], minlength=self.context.vocab_size)

    def forbidden(self, told: Told) -> list[int]:
        return [token for token in told["forbid"] if token < self.context.vocab_size]


RECORD = LogitsProcessorRecord(
    name=NAME,
    summary="discourages recent tokens",
    factory=Right,
    api_version=0,
    devices=("cpu",),
    options=Options,
    request_options=Words,
)
NO_REPEAT = import_local(str(Path(__file__).parents[2] / "examples" / "no_repeat_ngram.py")).module
ON_A_GPU = cast(LogitsProcessorRecord, next(iter(NO_REPEAT.enginebay_logits_processors())))
ORIGINALS = {"cpu": RECORD, "cuda": ON_A_GPU}


# --- records and models ----------------------------------------------------------------------------------------------


def _no_processor(context: ProcessorContext) -> object:
    return functools.partial(Right, context)


class KnowsOneScale(Right):
    def __init__(self, context: ProcessorContext) -> None:
        super().__init__(context)
        if self.scale != 1.0:
            raise ValueError(f"scale {self.scale} is not supported")


class Unexampled(Words):
    strength: float = Field(ge=0, le=20, allow_inf_nan=False)


class WrongExample(Words):
    strength: float = Field(ge=0, le=20, allow_inf_nan=False, examples=[2.0, 21.0])


class TakesAnyWord(Words):
    model_config = ConfigDict(extra="ignore")


class BreaksOnAWord(Words):
    @field_validator("window", mode="before")
    @classmethod
    def _in_tokens(cls, window: Any) -> Any:
        return window if window + 0 == window else int(window)  # a TypeError for what cannot be added to


class TakesNaN(Words):
    strength: float = Field(examples=[2.0, 5.5])


# --- what it changes -------------------------------------------------------------------------------------------------


class ReturnsACopy(Right):
    def apply(self, logits: Tensor, rows: SamplerRows) -> None:
        changed = logits.clone()
        super().apply(changed, rows)
        return changed  # type: ignore[return-value]


class ListensToAnother(Right):
    """Looks for the request's words under another name."""

    def add(self, requests: Sequence[NewRequest]) -> None:
        for request in requests:
            self.enter(request, cast(Told | None, request.params.extra_args.get("discourages")))


class AlwaysApplies(Right):
    def applies_to(self, slots: Int32Array) -> bool:
        return len(slots) > 0


class ForbidsForAll(Right):
    """Forbids a column instead of a row's entries."""

    def change(self, logits: Tensor, row: int, told: Told, tokens: Tensor) -> None:
        super().change(logits, row, told, tokens)
        logits[:, self.forbidden(told)] = -torch.inf


class RoundsAll(Right):
    """Scales the whole batch and back, which rounds."""

    def apply(self, logits: Tensor, rows: SamplerRows) -> None:
        logits.mul_(3)
        super().apply(logits, rows)
        logits.div_(3)


class AsksTheFirst(Right):
    def applies_to(self, slots: Int32Array) -> bool:
        return len(slots) > 0 and bool(self.told.get(int(slots[0])))


class WantsARow(Right):
    def applies_to(self, slots: Int32Array) -> bool:
        return bool(self.told.get(int(slots[0]))) or super().applies_to(slots)


class CentresRows(Right):
    """Takes the greatest logit off first: of a row without one, that is NaN."""

    def change(self, logits: Tensor, row: int, told: Told, tokens: Tensor) -> None:
        greatest = logits[row].amax()
        logits[row] -= greatest
        super().change(logits, row, told, tokens)
        logits[row] += greatest


class AllowsAgain(Right):
    """Keeps logits finite, forbidden ones too."""

    def change(self, logits: Tensor, row: int, told: Told, tokens: Tensor) -> None:
        logits[row].clamp_(min=torch.finfo(logits.dtype).min)
        super().change(logits, row, told, tokens)


class ForbidsAnyId(Right):
    def forbidden(self, told: Told) -> list[int]:
        return list(told["forbid"])


class CountsAnyId(Right):
    def counts(self, tokens: Tensor) -> Tensor:
        return torch.bincount(tokens, minlength=self.context.vocab_size)


# --- what it reads and writes ----------------------------------------------------------------------------------------


class ReadsPastTheEnd(Right):
    def tokens(self, rows: SamplerRows, row: int, slot: int) -> Tensor:
        return rows.token_ids[slot, : rows.max_num_tokens].long()


class ReadsTheRowsLine(Right):
    """Takes a row's number for its slot."""

    def tokens(self, rows: SamplerRows, row: int, slot: int) -> Tensor:
        return super().tokens(rows, row, row)


class ClearsTheRest(Right):
    def tokens(self, rows: SamplerRows, row: int, slot: int) -> Tensor:
        found = super().tokens(rows, row, slot)
        rows.token_ids[slot, len(found) :] = 0
        return found


# --- what changes nothing --------------------------------------------------------------------------------------------


class KeepsTheFirstRows(Right):
    """Gathers what rows ask in the first step, and takes the next steps' rows to be the same."""

    def apply(self, logits: Tensor, rows: SamplerRows) -> None:
        kept = self.__dict__.setdefault("kept", [self.told.get(slot) for slot in rows.slots_host.tolist()])
        for row, (slot, told) in enumerate(zip(rows.slots_host.tolist(), kept, strict=False)):
            if told:
                self.change(logits, row, told, self.tokens(rows, row, slot)[-told["window"] :])

    def enter(self, request: NewRequest, told: Told | None) -> None:
        super().enter(request, told)
        self.__dict__.pop("kept", None)


class WeakensWithSteps(Right):
    """Counts its own steps."""

    steps = 0

    def apply(self, logits: Tensor, rows: SamplerRows) -> None:
        self.steps += 1
        super().apply(logits, rows)

    def change(self, logits: Tensor, row: int, told: Told, tokens: Tensor) -> None:
        super().change(logits, row, told | {"strength": told["strength"] / self.steps}, tokens)


class RemembersTheSlot(Right):
    """Leaves a slot's words where the next request says nothing."""

    def enter(self, request: NewRequest, told: Told | None) -> None:
        if told:
            super().enter(request, told)


class CountsWhatItWasTold(Right):
    """Counts the tokens that the request entered with."""

    def __init__(self, context: ProcessorContext) -> None:
        super().__init__(context)
        self.entered: dict[int, Tensor] = {}

    def enter(self, request: NewRequest, told: Told | None) -> None:
        super().enter(request, told)
        self.entered[request.slot] = torch.from_numpy(request.token_ids).long()

    def tokens(self, rows: SamplerRows, row: int, slot: int) -> Tensor:
        return self.entered[slot]


class KnowsItAlready(Right):
    """Takes a request that enters again for one that it has noted."""

    def __init__(self, context: ProcessorContext) -> None:
        super().__init__(context)
        self.seen: set[str] = set()

    def enter(self, request: NewRequest, told: Told | None) -> None:
        if request.request_id not in self.seen:
            super().enter(request, told)
        self.seen.add(request.request_id)


class LeavesGreedyAlone(Right):
    """Takes greedy requests for ones that need no processor."""

    def enter(self, request: NewRequest, told: Told | None) -> None:
        super().enter(request, None if request.params.greedy else told)


class SharesItsWords(Right):
    everywhere: dict[int, Told | None] = {}  # noqa: RUF012 - that it is shared is the fault

    def __init__(self, context: ProcessorContext) -> None:
        super().__init__(context)
        self.told = self.everywhere


class AsksTheDevice(LogitsProcessor):
    """Reads the greatest length back from the device."""

    def __init__(self, context: ProcessorContext) -> None:
        super().__init__(context)
        self.right = ON_A_GPU.factory(context)

    def add(self, requests: Sequence[NewRequest]) -> None:
        self.right.add(requests)

    def applies_to(self, slots: Int32Array) -> bool:
        return bool(self.right.applies_to(slots))

    def apply(self, logits: Tensor, rows: SamplerRows) -> None:
        longest = int(rows.num_tokens.max()) if len(rows.slots_host) else 0
        self.right.apply(logits, replace(rows, max_num_tokens=longest))


def speaking(words: type[BaseModel], factory: Callable[[ProcessorContext], Any] = Right) -> LogitsProcessorRecord:
    """The record with another model of what requests say."""
    return replace(RECORD, request_options=words, factory=factory)


WORDS, EXAMPLES = "wrong_words_are_refused", "what_must_be_said_has_examples"
NEIGHBOURS, SERVED, COMPOSITION = (
    "neighbours_stay_as_they_are",
    "what_is_accepted_is_served",
    "the_batchs_composition_changes_no_row",
)
MUTANTS = [
    Mutant(
        "no_processor",
        "the factory returns a function",
        "factory_gives_a_processor",
        replace(RECORD, factory=_no_processor),
    ),
    Mutant(
        "accepts_everything",
        "its record answers yes to every demand",
        "what_is_not_declared_is_refused",
        accepts_everything(RECORD),
    ),
    Mutant("unexampled", "a word that must be said has no example", EXAMPLES, speaking(Unexampled)),
    Mutant("wrong_example", "an example is refused by its own model", EXAMPLES, speaking(WrongExample)),
    Mutant("takes_any_word", "a misspelt word is accepted and ignored", WORDS, speaking(TakesAnyWord)),
    Mutant("breaks_on_a_word", "a wrong word is a TypeError", WORDS, speaking(BreaksOnAWord)),
    Mutant("takes_nan", "NaN is accepted, and reaches the logits", SERVED, speaking(TakesNaN)),
    Mutant(
        "claims_invariance",
        "it declares that the likeliest token stays the likeliest",
        "the_likeliest_stays_the_likeliest",
        replace(RECORD, argmax_invariant=True),
    ),
    *(
        Mutant(name, fault, law, replace(RECORD, factory=broken))
        for name, fault, law, broken in (
            ("knows_one_scale", "an option's other example is refused", "factory_gives_a_processor", KnowsOneScale),
            ("returns_a_copy", "the changed logits are returned", "logits_are_changed_in_place", ReturnsACopy),
            (
                "listens_to_another",
                "the request's words are looked for under another name",
                "an_example_changes_logits",
                ListensToAnother,
            ),
            (
                "always_applies",
                "steps that ask nothing are not spared",
                "who_says_nothing_costs_nothing",
                AlwaysApplies,
            ),
            ("forbids_for_all", "a token is forbidden in all rows", NEIGHBOURS, ForbidsForAll),
            ("rounds_all", "all rows are scaled and back", NEIGHBOURS, RoundsAll),
            ("asks_the_first", "the first slot answers for all", "applies_to_speaks_for_its_rows", AsksTheFirst),
            ("wants_a_row", "a step without rows is an IndexError", "an_empty_step_does_nothing", WantsARow),
            ("centres_rows", "a row that has nothing left becomes NaN", "logits_stay_numbers", CentresRows),
            ("allows_again", "forbidden tokens become finite", "what_is_forbidden_stays_forbidden", AllowsAgain),
            ("forbids_any_id", "an accepted id outside the vocabulary is an IndexError", SERVED, ForbidsAnyId),
            (
                "counts_any_id",
                "an id of the prompt outside the vocabulary breaks a step",
                "ids_beyond_the_vocabulary_do_no_harm",
                CountsAnyId,
            ),
            ("reads_past_the_end", "what lies past the last token counts", "only_its_tokens_are_read", ReadsPastTheEnd),
            (
                "reads_the_rows_line",
                "a row's number is taken for its slot",
                "only_its_tokens_are_read",
                ReadsTheRowsLine,
            ),
            (
                "clears_the_rest",
                "the line is cleared past the last token",
                "nothing_but_the_logits_is_written",
                ClearsTheRest,
            ),
            ("keeps_the_first_rows", "the next steps' rows are taken for the first's", COMPOSITION, KeepsTheFirstRows),
            ("weakens_with_steps", "its own steps are counted", COMPOSITION, WeakensWithSteps),
            ("remembers_the_slot", "a slot keeps its last request's words", "a_slot_starts_anew", RemembersTheSlot),
            (
                "counts_what_it_was_told",
                "outputs since the request entered are overlooked",
                "newest_tokens_are_read_on_the_device",
                CountsWhatItWasTold,
            ),
            (
                "knows_it_already",
                "a request that enters again is taken for noted",
                "resumed_equals_uninterrupted",
                KnowsItAlready,
            ),
            ("leaves_greedy_alone", "greedy requests are left out", "greedy_rows_are_served_alike", LeavesGreedyAlone),
            ("shares_its_words", "all processors share one state", "two_processors_keep_apart", SharesItsWords),
        )
    ),
    Mutant(
        "asks_the_device",
        "a length is read back from the device",
        "nothing_waits_for_the_device",
        replace(ON_A_GPU, factory=AsksTheDevice),
        device="cuda",
    ),
]
