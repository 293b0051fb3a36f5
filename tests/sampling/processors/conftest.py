"""Runs one processor over rows given in lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from enginebay.interfaces.sampler import LogitsProcessor, ProcessorContext, SamplerRows
from enginebay.interfaces.scheduler import NewRequest
from enginebay.plugins.records import NoOptions
from enginebay.sampling.params import SamplingParams
from torch import Tensor

SLOTS, LENGTH = 9, 24


@pytest.fixture(scope="session")
def run() -> Callable[..., Tensor]:
    """``run(make, logits, seats)``: the logits ``[R, V]`` after a fresh processor.

    A seat is a dict: ``prompt``, ``output``, and the arguments of `SamplingParams`, ``stops`` and ``words`` of the request.
    """

    def run_processor(make: type[LogitsProcessor], logits: Tensor, seats: list[dict[str, Any]]) -> Tensor:
        device = torch.device("cpu")
        processor = make(
            ProcessorContext(
                vocab_size=logits.shape[1],
                max_num_seqs=SLOTS,
                max_model_len=LENGTH,
                device=device,
                options=NoOptions(),
            )
        )
        # Slots in an order of their own, and lines that hold what an earlier request left there.
        slots = np.array([(5 * row + 3) % SLOTS for row in range(len(seats))], dtype=np.int32)
        token_ids = torch.arange((SLOTS + 1) * LENGTH, dtype=torch.int32).reshape(-1, LENGTH) % logits.shape[1]
        requests = []
        for slot, seat in zip(slots.tolist(), seats, strict=True):
            rest = {k: v for k, v in seat.items() if k not in ("prompt", "output", "stops", "words")}
            tokens = [*seat["prompt"], *seat["output"]]
            token_ids[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
            requests.append(
                NewRequest(
                    f"r{slot}",
                    slot,
                    np.array(tokens, dtype=np.int32),
                    len(seat["prompt"]),
                    0,
                    SamplingParams(**rest),
                    0,
                    frozenset(seat.get("stops", ())),
                    tuple(seat.get("words", ())),
                )
            )
        # Every slot was another's before, who asked for everything.
        before = SamplingParams(
            logit_bias={0: 9.0}, allowed_token_ids=[0], repetition_penalty=3.0, min_tokens=9, max_tokens=9
        )
        processor.add(
            [
                NewRequest("old", slot, np.array([1], np.int32), 1, 0, before, 0, frozenset([0]), ((0,),))
                for slot in range(SLOTS)
            ]
        )
        processor.add(requests)
        outputs = np.array([len(seat["output"]) for seat in seats], dtype=np.int32)
        prompts = np.array([len(seat["prompt"]) for seat in seats], dtype=np.int32)
        rows = SamplerRows(
            slots_host=slots,
            slots=torch.from_numpy(slots.astype(np.int64)),
            output_index=torch.from_numpy(outputs.astype(np.int64)),
            output_index_host=outputs,
            token_ids=token_ids,
            num_tokens=torch.from_numpy((prompts + outputs).astype(np.int64)),
            num_prompt_tokens=torch.from_numpy(prompts.astype(np.int64)),
            max_num_tokens=int((prompts + outputs).max()),
        )
        changed = logits.clone()
        if processor.applies_to(slots):
            processor.apply(changed, rows)
            again = logits.clone()
            processor.apply(again, rows)  # now from what it keeps while the rows stay the same
            assert torch.equal(changed, again)
        return changed

    return run_processor
