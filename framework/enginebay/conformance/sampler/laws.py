"""The laws of a logits processor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from enginebay.conformance.sampler.bench import (
    ALPHABET,
    SLOTS,
    VOCAB,
    Bench,
    Seat,
    alone,
    assert_close,
    logits_for,
    same_bits,
    seats,
    slots_of,
    why,
)
from enginebay.conformance.sampler.words import Words, accepted, examples, fields_of, probes, spelt, unexampled
from enginebay.conformance.suite import Conformance, Settings, cases_from
from enginebay.errors import RequestError
from enginebay.plugins.records import Kind, LogitsProcessorRecord
from enginebay.plugins.requirements import Hardware, Requirements

Record = LogitsProcessorRecord


@dataclass(frozen=True)
class Case:
    """What YAML says to the processor, and what the requests that ask say."""

    options: Words
    said: tuple[Words, ...]

    def __str__(self) -> str:
        return f"options: {spelt(self.options)}" if self.options else "no options"


class LogitsProcessorConformance(Conformance):
    """What every logits processor keeps. What requests say comes from the examples of its models."""

    kind: ClassVar[Kind] = "sampler"
    decisive: ClassVar[tuple[str, ...]] = ("an_example_changes_logits", "the_batchs_composition_changes_no_row")

    # --- the record

    @cases_from("told")
    def test_factory_gives_a_processor(self, record: Record, settings: Settings, case: Case) -> None:
        """The factory builds a `LogitsProcessor` with every example of the record's options."""
        Bench(record, settings.device, case.options)

    @cases_from("other_devices")
    def test_what_is_not_declared_is_refused(self, record: Record, case: str) -> None:
        """A device that the record does not declare is refused, by a reason that says which would do."""
        here = Hardware(device=case, capability=(9, 0) if case == "cuda" else None)
        support = record.supports(Requirements(hardware=here, dtype="float32", kv_dtype="float32"))
        assert not support.ok, f"{case} is accepted, though the record does not declare it"
        assert any(reason.wanted == case and reason.allowed for reason in support.reasons), support.reasons

    def test_what_must_be_said_has_examples(self, record: Record, settings: Settings, runs_here: None) -> None:
        """Every word without a default has ``Field(examples=[...])``, and the models accept their own examples."""
        for what, model in (("options", record.options), ("request_options", record.request_options)):
            assert not (lacking := unexampled(model)), f"{what}: {', '.join(lacking)} must be said and has no examples"
            for said in examples(model):
                assert accepted(model, said), f"{what} refuses its own example {spelt(said)}"

    @cases_from("told")
    def test_wrong_words_are_refused(self, record: Record, settings: Settings, case: Case) -> None:
        """An unknown, a missing or a wrong word is that request's `RequestError`, which names it, and nothing else."""
        bench, model, good = Bench(record, settings.device, case.options), record.request_options, dict(case.said[0])
        faults = [("no_such_word", good | {"no_such_word": 1})]
        faults += [(word, said) for word, said in probes(model) if not _accepts(model, said)]
        required = [field.alias or name for name, field in model.model_fields.items() if field.is_required()]
        faults += [(word, {w: v for w, v in good.items() if w != word}) for word in required]
        for word, said in faults:
            error = _refusal(bench, said)
            assert error is not None, (
                f"{spelt(said)} is accepted; forbid unknown words: extra='forbid' in request_options"
            )
            assert isinstance(error, RequestError), f"{spelt(said)} raises {why(error)}, no RequestError"
            assert f"extra_args.{record.name}" in str(error), error
            assert word in str(error), f"{spelt(said)} is refused without the name {word!r}: {error}"

    # --- what it changes

    @cases_from("told")
    def test_logits_are_changed_in_place(self, record: Record, settings: Settings, case: Case) -> None:
        """`apply` returns nothing: what it changes it changes in the tensor that it is given."""
        bench, seated = _seated(record, settings, case, case.said)
        logits = logits_for(len(seated), 1, bench.device)
        with torch.inference_mode():
            given = bench.processor.apply(logits, bench.rows(seated))
        assert given is None, f"apply returned {type(given).__name__}; the engine takes what stands in logits"

    @cases_from("told")
    def test_an_example_changes_logits(self, record: Record, settings: Settings, case: Case) -> None:
        """Requests that say what the examples say get other logits, some of them; else nothing would be tried here."""
        for seed in range(8):
            bench, seated = _seated(record, settings, case, case.said, seed=seed)
            logits = logits_for(len(seated), seed, bench.device)
            if not same_bits(bench.step(seated, logits), logits):
                return
        pytest.fail(f"none of {len(case.said)} examples changed a logit over {ALPHABET} tokens; give examples that do")

    @cases_from("with_words")
    def test_who_says_nothing_costs_nothing(self, record: Record, settings: Settings, case: Case) -> None:
        """`applies_to` is false of requests that say nothing to the processor: steps of such alone are spared it."""
        bench, seated = _seated(record, settings, case, (None,))
        assert not bench.applies(*seated)
        for seat in seated:
            assert not bench.applies(seat)

    @cases_from("with_words")
    def test_neighbours_stay_as_they_are(self, record: Record, settings: Settings, case: Case) -> None:
        """Rows that say nothing keep every bit of their logits, whatever their neighbours say."""
        for seed in range(4):
            bench, seated = _seated(record, settings, case, (*case.said, None), seed=seed)
            logits = logits_for(len(seated), seed, bench.device)
            changed = bench.step(seated, logits, force=True)
            for row, seat in enumerate(seated):
                if seat.said is None:
                    assert same_bits(changed[row], logits[row]), f"row {row} said nothing and was changed"

    @cases_from("told")
    def test_applies_to_speaks_for_its_rows(self, record: Record, settings: Settings, case: Case) -> None:
        """`applies_to` is true of slots exactly if it is of one of them; a row of which it is false is not changed."""
        for seed in range(4):
            bench, seated = _seated(record, settings, case, (*case.said, None), seed=seed)
            logits = logits_for(len(seated), seed, bench.device)
            changed = bench.step(seated, logits, force=True)
            each = [bench.applies(seat) for seat in seated]
            for row, applies in enumerate(each):
                assert applies or same_bits(changed[row], logits[row]), f"row {row} was changed; applies_to denies it"
            for end in range(1, len(seated) + 1):
                assert bench.applies(*seated[:end]) == any(each[:end]), "slots together are answered unlike one by one"
                assert bench.applies(*seated[:end][::-1]) == any(each[:end]), "the order of slots changes the answer"

    @cases_from("told")
    def test_an_empty_step_does_nothing(self, record: Record, settings: Settings, case: Case) -> None:
        """No requests may enter, no slots be asked about and no rows be changed, and nothing is raised."""
        bench, _ = _seated(record, settings, case, case.said)
        bench.enter()
        assert not bench.applies()
        bench.step([], logits_for(0, 0, bench.device), force=True)

    @cases_from("told")
    def test_logits_stay_numbers(self, record: Record, settings: Settings, case: Case) -> None:
        """No logit becomes NaN or +inf: of rows that are all equal, huge, mostly or wholly forbidden."""
        for seed, logits in enumerate(_hard_rows(settings)):
            bench, seated = _seated(record, settings, case, case.said, seed=seed, rows=len(logits))
            changed = bench.step(seated, logits)
            assert not changed.isnan().any(), "a logit became NaN"
            assert not (changed == torch.inf).any(), "a logit became +inf"

    @cases_from("told")
    def test_what_is_forbidden_stays_forbidden(self, record: Record, settings: Settings, case: Case) -> None:
        """A logit that is -inf, by a processor before this one, stays so."""
        for seed, logits in enumerate(_hard_rows(settings)):
            bench, seated = _seated(record, settings, case, case.said, seed=seed, rows=len(logits))
            changed = bench.step(seated, logits)
            assert bool((changed[logits == -torch.inf] == -torch.inf).all()), "a forbidden token is allowed again"

    @cases_from("told")
    def test_what_is_accepted_is_served(self, record: Record, settings: Settings, case: Case) -> None:
        """Whatever the request's model accepts, the processor serves: it raises nothing, and gives no NaN (C38)."""
        for _, said in probes(record.request_options):
            if not _accepts(record.request_options, said):
                continue
            bench = Bench(record, settings.device, case.options)
            seated = seats(4, 5, (said, None))
            logits = logits_for(len(seated), 5, bench.device)
            try:
                changed = bench.enter(*seated).step(seated, logits, force=True)
            except Exception as error:
                pytest.fail(f"{spelt(said)} is accepted, and raises {why(error)}; let request_options refuse it")
            assert not changed.isnan().any(), f"{spelt(said)} is accepted, and makes NaN; let request_options refuse it"

    @cases_from("told")
    def test_ids_beyond_the_vocabulary_do_no_harm(self, record: Record, settings: Settings, case: Case) -> None:
        """A prompt may hold ids that have no logit, those that only pad the model's vocabulary; they raise nothing."""
        bench, seated = _seated(record, settings, case, case.said, padding=True)
        logits = logits_for(len(seated), 2, bench.device)
        try:
            changed = bench.step(seated, logits)
        except Exception as error:
            pytest.fail(f"ids of {VOCAB} and more in a prompt raise {why(error)}")
        assert not changed.isnan().any()

    # --- what it reads and writes

    @cases_from("told")
    def test_only_its_tokens_are_read(self, record: Record, settings: Settings, case: Case) -> None:
        """What stands in a line behind a request's last token, or in lines of other slots, changes nothing."""
        found = []
        for junk in (1, 2, 3):
            bench = Bench(record, settings.device, case.options, junk=junk)
            seated = seats(8, 4, case.said)
            found.append(bench.enter(*seated).step(seated, logits_for(len(seated), 4, bench.device)))
        for other in found[1:]:
            assert_close(other, found[0], "tokens that are not the request's own were read")

    @cases_from("told")
    def test_nothing_but_the_logits_is_written(self, record: Record, settings: Settings, case: Case) -> None:
        """The rows are the core's: slots, lines of tokens and lengths are read only."""
        bench, seated = _seated(record, settings, case, case.said)
        logits = logits_for(len(seated), 3, bench.device)
        rows = bench.rows(seated)
        names = ("slots", "output_index", "token_ids", "num_tokens", "num_prompt_tokens")
        before = {name: getattr(rows, name).clone() for name in names}
        hosts = {name: getattr(rows, name).copy() for name in ("slots_host", "output_index_host")}
        with torch.inference_mode():
            bench.processor.apply(logits, rows)
        for name, held in before.items():
            assert torch.equal(getattr(rows, name), held), f"{name} was changed"
        for name, host in hosts.items():
            assert np.array_equal(getattr(rows, name), host), f"{name} was changed"

    # --- what changes nothing

    @cases_from("told")
    def test_the_batchs_composition_changes_no_row(self, record: Record, settings: Settings, case: Case) -> None:
        """A row alone, in another order, or beside others has one result, step after step."""
        said = (*case.said, None) if record.request_options.model_fields else case.said
        for seed in range(3):
            bench, seated = _seated(record, settings, case, said, seed=seed)
            logits = logits_for(len(seated), seed, bench.device)
            wanted = torch.stack(
                [alone(record, settings.device, case.options, seat, logits[row]) for row, seat in enumerate(seated)]
            )
            order = list(range(len(seated)))
            for chosen in (order, order[::-1], order[2:5], order[1::2], order[:1], order):
                found = bench.step([seated[row] for row in chosen], logits[chosen])
                assert_close(found, wanted[chosen], f"rows {chosen} of the batch differ from each alone")

    @cases_from("told")
    def test_a_slot_starts_anew(self, record: Record, settings: Settings, case: Case) -> None:
        """A request has the result of a new processor, whoever held its slot before, and whatever that one had said."""
        silent = (None,) if record.request_options.model_fields else ()
        for seed, said in enumerate((*case.said, *silent)):
            seated = seats(6, seed, (said,))
            logits = logits_for(len(seated), seed, torch.device(settings.device))
            bench = Bench(record, settings.device, case.options)
            for life, earlier in enumerate((*case.said, *silent)):
                others = seats(6, 77 + life, (earlier,))
                before = [seat.at(new.slot) for seat, new in zip(others, seated, strict=True)]
                bench.enter(*before).step(before, logits)
            found = bench.enter(*seated).step(seated, logits)
            for row, seat in enumerate(seated):
                wanted = alone(record, settings.device, case.options, seat, logits[row])
                assert_close(found[row], wanted, f"a slot's earlier request shows in a later one ({spelt(said)})")

    @cases_from("told")
    def test_newest_tokens_are_read_on_the_device(self, record: Record, settings: Settings, case: Case) -> None:
        """A request whose outputs `add` was not told has the result of one that re-entered with them: they are in the lines."""
        for seed in range(3):
            seated = seats(6, seed, case.said)
            logits = logits_for(len(seated), seed, torch.device(settings.device))
            told = [replace(seat, known=len(seat.output)) for seat in seated]
            found = [
                Bench(record, settings.device, case.options).enter(*them).step(them, logits) for them in (seated, told)
            ]
            assert_close(found[0], found[1], "outputs that the host did not know were overlooked")

    @cases_from("told")
    def test_resumed_equals_uninterrupted(self, record: Record, settings: Settings, case: Case) -> None:
        """A request that was preempted and enters again, in another slot, goes on as if nothing had happened."""
        for seed, said in enumerate(case.said):
            whole = seats(2, seed, (said,), outputs=1)[1]
            text = tuple((7 * n * n + seed + n // 3) % ALPHABET for n in range(14))
            logits = logits_for(len(text) + 1, seed, torch.device(settings.device))
            results = []
            for preempted in (len(text) + 1, 5, 9):
                bench, seat, found = Bench(record, settings.device, case.options), replace(whole, output=()), []
                bench.enter(seat)
                for count in range(len(text) + 1):
                    seat = replace(seat, output=text[:count])
                    if count == preempted:
                        seat = replace(seat, slot=(seat.slot + 3) % SLOTS, known=count)
                        bench.enter(seat)
                    found.append(bench.step([seat], logits[count][None])[0])
                results.append(torch.stack(found))
            for other in results[1:]:
                assert_close(other, results[0], f"a preempted request goes on unlike the uninterrupted ({spelt(said)})")

    @cases_from("told")
    def test_greedy_rows_are_served_alike(self, record: Record, settings: Settings, case: Case) -> None:
        """At stage ``logits``, unless `argmax_invariant` is declared, a greedy request gets what a sampled one gets."""
        if record.argmax_invariant:
            pytest.skip("the record declares argmax_invariant, so greedy rows skip the processor")
        sampled = seats(8, 6, case.said)
        logits = logits_for(len(sampled), 6, torch.device(settings.device))
        found = []
        for temperature in (1.0, 0.0):
            seated = [replace(seat, params={"temperature": temperature}) for seat in sampled]
            found.append(Bench(record, settings.device, case.options).enter(*seated).step(seated, logits))
        assert_close(found[1], found[0], "greedy requests are served otherwise than sampled ones")

    @cases_from("told")
    def test_the_likeliest_stays_the_likeliest(self, record: Record, settings: Settings, case: Case) -> None:
        """With `argmax_invariant` declared, the greatest logit of a row stays its greatest, and allowed."""
        if not record.argmax_invariant:
            pytest.skip("the record does not declare argmax_invariant")
        hard = [rows[(rows > -torch.inf).any(1)] for rows in _hard_rows(settings)]
        rounds = 400 if settings.level == "full" else 60
        for seed, logits in enumerate(
            [*hard, *(logits_for(12, seed, torch.device(settings.device)) for seed in range(rounds))]
        ):
            bench, seated = _seated(record, settings, case, case.said, seed=seed, rows=len(logits))
            scaled = logits - logits.amax(1, keepdim=True) if record.stage == "scaled" else logits
            changed = bench.step(seated, scaled)
            likeliest = scaled.argmax(1, keepdim=True)
            kept = changed.gather(1, likeliest).squeeze(1)
            assert bool((kept == changed.amax(1)).all()), (
                "another token became likelier; declare argmax_invariant=False"
            )
            assert bool((kept > -torch.inf).all()), "the likeliest token was forbidden; declare argmax_invariant=False"

    @cases_from("told")
    def test_two_processors_keep_apart(self, record: Record, settings: Settings, case: Case) -> None:
        """Two engines of one process have processors of their own: what one is told the other does not know."""
        first, seated = _seated(record, settings, case, case.said)
        logits = logits_for(len(seated), 8, first.device)
        wanted = first.step(seated, logits)
        others = [seat.at(seated[0].slot) for seat in seats(2, 9, case.said[::-1])][:1]
        Bench(record, settings.device, case.options).enter(*others, *(s.silent() for s in seated[1:]))
        assert_close(first.step(seated, logits), wanted, "a second processor changed what the first one does")

    # --- on a GPU

    @cases_from("told_on_a_gpu")
    def test_nothing_waits_for_the_device(self, record: Record, settings: Settings, case: Case) -> None:
        """`apply` reads nothing back from the device: the step in flight would have to end first."""
        bench, seated = _seated(record, settings, case, case.said)
        for attempt in range(2):  # the first may compile
            rows = bench.rows(seated)
            logits = logits_for(len(seated), 3, bench.device)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if attempt else "default")
            try:
                with torch.inference_mode():
                    assert bench.processor.applies_to(slots_of(seated)) in (True, False)
                    bench.processor.apply(logits, rows)
            finally:
                torch.cuda.set_sync_debug_mode("default")

    # --- cases

    @classmethod
    def told(cls, record: Record, settings: Settings) -> list[Case]:
        """Each example of the options, with all that requests may say."""
        return [Case(options, tuple(examples(record.request_options))) for options in examples(record.options)]

    @classmethod
    def with_words(cls, record: Record, settings: Settings) -> list[Case]:
        """The same, of a processor that a request can speak to: others may be for all requests."""
        return cls.told(record, settings) if fields_of(record.request_options) else []

    @classmethod
    def told_on_a_gpu(cls, record: Record, settings: Settings) -> list[Case]:
        """The same on CUDA."""
        return cls.told(record, settings) if settings.device == "cuda" else []

    @classmethod
    def other_devices(cls, record: Record, settings: Settings) -> list[str]:
        """Devices that the record does not declare."""
        return sorted({"cpu", "cuda"} - set(record.devices))


def _seated(
    record: Record,
    settings: Settings,
    case: Case,
    said: tuple[Words | None, ...],
    *,
    seed: int = 0,
    rows: int = 12,
    padding: bool = False,
) -> tuple[Bench, list[Seat]]:
    """A processor with requests that say these things in turn."""
    seated = seats(rows, seed, said)
    if padding:
        seated = [replace(seat, prompt=(VOCAB, *seat.prompt, VOCAB + 41)) for seat in seated]
    return Bench(record, settings.device, case.options).enter(*seated), seated


def _hard_rows(settings: Settings) -> Iterator[Tensor]:
    """Logits at the edges of what there is, float32 ``[R, V]``."""
    device, most = torch.device(settings.device), torch.finfo(torch.float32).max
    plain = logits_for(8, 1, device)
    masked = plain.masked_fill(logits_for(8, 2, device) < 2, -torch.inf)
    single = torch.full_like(plain, -torch.inf)
    single[torch.arange(7), torch.arange(7)] = 1.5  # the last row has nothing left
    huge = torch.where(plain > 0, most, -most)
    tied = plain.round()
    yield from (plain, masked, single, huge, huge.masked_fill(masked == -torch.inf, -torch.inf), tied)
    yield torch.zeros_like(plain)
    yield plain * 1e-30


def _refusal(bench: Bench, said: Words) -> Exception | None:
    """What the engine raises for a request that says this."""
    try:
        bench.request(Seat(0, (1,), said=said))
    except Exception as error:
        return error
    return None


def _accepts(model: Any, said: Words) -> bool:
    """Whether a request's model takes it; a model that breaks on it does not."""
    try:
        return accepted(model, said)
    except Exception:
        return False
