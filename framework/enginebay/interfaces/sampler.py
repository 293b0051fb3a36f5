"""The sampler bay: logits processors, which change what may be sampled, one request at a time.

A processor is made once an engine (and rank). It keeps its state by *slot*, is told of requests as they enter the batch,
and changes the logits of a step's rows. It sees no scheduler and no model. One that no row of a step needs costs nothing.

Everything that depends on earlier output must be read from `SamplerRows`, on the device: with two steps in flight the host
does not know the newest tokens, and a preempted request enters again with `add`. So a processor that keeps to this is right
under asynchronous scheduling, preemption and any batch composition (C35).

Shapes: ``R`` rows, ``V`` vocabulary, ``S`` slots, ``L`` max_model_len.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from pydantic import BaseModel
from torch import Tensor

from enginebay.interfaces.scheduler import Int32Array, NewRequest


@dataclass(frozen=True, kw_only=True)
class ProcessorContext:
    """What a logits processor's factory is given."""

    #: columns of the logits, ``V``
    vocab_size: int
    #: slots, ``S``
    max_num_seqs: int
    #: most tokens of a request, ``L``
    max_model_len: int
    device: torch.device
    #: the processor's own options, from ``sampler.options.<name>``
    options: BaseModel


@dataclass(slots=True)
class SamplerRows:
    """The rows of a step that is about to be sampled."""

    #: int32 ``[R]`` on the host
    slots_host: Int32Array
    #: int64 ``[R]``
    slots: Tensor
    #: int64 ``[R]``: index in its request's output of the token to be drawn
    output_index: Tensor
    #: the same on the host: exact
    output_index_host: Int32Array
    #: int32 ``[S, L]``: each slot's prompt and outputs, those that the host does not know yet included
    token_ids: Tensor
    #: int64 ``[R]``: tokens of each row in `token_ids`
    num_tokens: Tensor
    #: int64 ``[R]``: how many of those are the prompt's
    num_prompt_tokens: Tensor
    #: the largest of `num_tokens`, on the host
    max_num_tokens: int


class LogitsProcessor(ABC):
    """Changes the logits of the rows that ask for it."""

    def __init__(self, context: ProcessorContext) -> None:
        self.context = context

    @abstractmethod
    def add(self, requests: Sequence[NewRequest]) -> None:
        """Take note of requests that enter the batch; what was known of their slots before is void."""

    @abstractmethod
    def applies_to(self, slots: Int32Array) -> bool:
        """Whether any of these slots (host) needs `apply`; asked every step, so it must be a look into an array."""

    @abstractmethod
    def apply(self, logits: Tensor, rows: SamplerRows) -> None:
        """Change float32 ``[R, V]`` in place; -inf forbids a token. Rows that did not ask must stay as they are."""
