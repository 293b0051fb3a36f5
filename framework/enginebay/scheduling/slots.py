"""The slot table: the scheduler's counters of every seated request, one array a field.

A steady step touches these arrays and no `Request`. The table keeps the numbers; it decides nothing.

Shapes: ``S`` slots.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from enginebay.interfaces.scheduler import Request

#: nobody holds the slot
FREE: Final = 0
#: its request runs
ACTIVE: Final = 1
#: its request was preempted; steps in flight still name the slot, and their tokens count
PREEMPTED: Final = 2
#: its request ended; steps in flight still name the slot, and their tokens are dropped
FINISHED: Final = 3

#: Stop ids a slot that are compared for all slots at once; requests with more are looked up one by one.
STOP_WIDTH: Final = 8
_INT32_MAX: Final = 2**31 - 1


class SlotTable:
    """Counters of the requests in slots ``0 .. num_slots - 1``.

    ::

        0            num_prompt   num_prefill         num_tokens
        |--- prompt ---|- resumed --|- known | in flight -|
        |----------- num_computed (in flight included) -|
    """

    def __init__(self, num_slots: int) -> None:
        def counter() -> np.ndarray[tuple[int], np.dtype[np.int32]]:
            return np.zeros(num_slots, dtype=np.int32)

        #: request of each slot that is not free
        self.requests: dict[int, Request] = {}
        #: int8 ``[S]``: FREE, ACTIVE, PREEMPTED or FINISHED
        self.state = np.zeros(num_slots, dtype=np.int8)
        #: tokens of the prompt
        self.num_prompt = counter()
        #: tokens known when the request took the slot: the prompt, and the outputs from before a preemption
        self.num_prefill = counter()
        #: prompt, known outputs, and one placeholder for each sampling row in flight
        self.num_tokens = counter()
        #: tokens computed, steps in flight included
        self.num_computed = counter()
        #: tokens that will ever be computed: the last output's KV is not needed
        self.num_computable = counter()
        #: outputs known on the host, and the most allowed
        self.num_outputs = counter()
        self.max_outputs = counter()
        #: steps in flight that name the slot
        self.in_flight = counter()
        #: int32 ``[S, STOP_WIDTH]``, padded with -1; all -1 where `look_up_stops`
        self.stop_ids = np.full((num_slots, STOP_WIDTH), -1, dtype=np.int32)
        #: bool ``[S]``: slots whose stop ids do not fit `stop_ids`, by number or by value
        self.look_up_stops = np.zeros(num_slots, dtype=np.bool_)
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Slots that `seat` could give."""
        return len(self._free)

    def seat(self, request: Request, num_computed: int) -> int:
        """Give `request` a slot, its first `num_computed` tokens being in the cache."""
        slot = self._free.pop()
        self.requests[slot] = request
        self.state[slot] = ACTIVE
        self.num_prompt[slot] = request.num_prompt_tokens
        self.num_prefill[slot] = self.num_tokens[slot] = request.num_tokens
        self.num_computed[slot] = num_computed
        self.num_computable[slot] = request.num_prompt_tokens + request.max_output_tokens - 1
        self.num_outputs[slot] = len(request.output_token_ids)
        self.max_outputs[slot] = request.max_output_tokens
        self.stop_ids[slot] = -1
        stops = request.stop_token_ids
        self.look_up_stops[slot] = look_up = len(stops) > STOP_WIDTH or max(stops, default=0) > _INT32_MAX
        if not look_up:
            self.stop_ids[slot, : len(stops)] = list(stops)
        request.slot = slot
        return slot

    def vacate(self, slot: int) -> Request:
        """Take the slot back, which no step in flight names, and return the request that had it."""
        self.state[slot] = FREE
        self._free.append(slot)
        return self.requests.pop(slot)
