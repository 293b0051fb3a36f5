"""The batch: one representation of a step that every part reads.

Device tensors live in buffers that the core owns at their maximum size; what is handed out are views of them, so that a
captured graph finds the same addresses again. Host copies end in ``_host``. A `PhaseBatch` is a view of the decode rows or
of the extend and prefill rows of one step.

Shapes: ``T`` tokens, ``R`` rows, ``B`` columns of a block table, ``L`` rows that yield logits.
A padding row of a captured size has seq_len 1, the null block (block 0) and slot -1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

#: Block 0 is never handed out: padding rows read it, so its content is finite and without meaning.
NULL_BLOCK = 0
#: A token whose KV must not be written has this slot.
NULL_SLOT = -1


@dataclass(slots=True)
class GroupBatch:
    """KV metadata of one cache group for the rows of a phase."""

    #: int32 ``[R, B]``: ids of each row's blocks in order of position; entries past the row's length are undefined
    block_table: Tensor
    #: int64 ``[T]``: block id x block_size + offset where each token's KV goes, or -1
    slot_mapping: Tensor


@dataclass(slots=True)
class PhaseBatch:
    """The rows of one phase, as an attention backend reads them."""

    num_rows: int
    num_tokens: int
    #: host upper bound of tokens a row in this step; 1 in the decode phase
    max_query_len: int
    #: host upper bound of `seq_lens`
    max_seq_len: int
    #: int32 ``[R + 1]``, starts at 0 within the phase
    query_start_loc: Tensor
    #: int32 ``[R]``: tokens a row once this step's KV is written, context included
    seq_lens: Tensor
    #: int64 ``[T]``
    positions: Tensor
    groups: tuple[GroupBatch, ...]
    #: int32 ``[R + 1]`` on the host
    query_start_loc_host: npt.NDArray[np.int32]
    #: int32 ``[R]`` on the host: exact, or an upper bound while speculative steps are in flight
    seq_lens_host: npt.NDArray[np.int32]


@dataclass(slots=True)
class Batch:
    """One step."""

    num_rows: int
    num_tokens: int
    #: int64 ``[R]``: each row's slot
    slot_of_row: Tensor
    #: int64 ``[T]``
    input_ids: Tensor
    #: int64 ``[T]``
    positions: Tensor
    #: int64 ``[R]``: index among the step's tokens of each row's last one, where its logits are taken
    logits_indices: Tensor
    #: KV slot of each token, one ``[T]`` tensor a cache group
    slot_mappings: tuple[Tensor, ...]
    #: leading rows, one token each; None if there are none
    decode: PhaseBatch | None
    #: the other rows; None if there are none
    prefill: PhaseBatch | None

    @property
    def num_decode_tokens(self) -> int:
        """Leading tokens that belong to decode rows."""
        return 0 if self.decode is None else self.decode.num_tokens


@dataclass(frozen=True)
class Bucket:
    """A size that a plan's buffers are made for."""

    #: most rows
    rows: int
    #: most tokens a row in a step
    query_len: int
    #: whether the step is captured in a CUDA graph: then buffers are fixed and every shape is the bucket's
    captured: bool = False


def torch_dtype(name: str) -> torch.dtype:
    """``"float32"`` -> ``torch.float32``, ``"float8_e4m3fn"`` -> ``torch.float8_e4m3fn``."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype")
    return dtype
