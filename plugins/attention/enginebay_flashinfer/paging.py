"""The host's arithmetic of a step: lengths and block tables as FlashInfer's compressed rows (CSR).

Row ``r`` owns ``indices[indptr[r] : indptr[r + 1]]``, its blocks in order of position, of which the last holds
``last_page_len[r]`` tokens. Lengths are known on the host, block ids only on the device: `HostPlan` is made of the
former, `gather_blocks` moves the latter without ever waiting for the device. Nothing here knows FlashInfer itself.

Shapes: ``R`` rows, ``B`` block-table columns, ``P`` blocks of all rows together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HostPlan:
    """A step's lengths, int32 on the host: four views of one buffer."""

    #: ``[R + 1]``: where each row's blocks start
    indptr: Tensor
    #: ``[R]``: tokens in each row's last block, 1 to block_size
    last_page_len: Tensor
    #: ``[R]``
    seq_lens: Tensor
    #: ``[R + 1]``: where each row's queries start
    query_indptr: Tensor
    #: P
    num_blocks: int

    @classmethod
    def of(
        cls,
        seq_lens: npt.NDArray[np.int32],
        query_start_loc: npt.NDArray[np.int32],
        block_size: int,
        *,
        pin: bool,
    ) -> HostPlan:
        """Count blocks.

        Parameters
        ----------
        seq_lens
            int32 ``[R]``, each at least 1.
        query_start_loc
            int32 ``[R + 1]``.
        block_size
            Tokens a block.
        pin
            Whether the buffer is pinned: a fresh one each step, which torch keeps back until copies from it have run,
            so that steps in flight need no fence for it.
        """
        rows = len(seq_lens)
        buffer = torch.empty(4 * rows + 2, dtype=torch.int32, pin_memory=pin)
        indptr, query_indptr = buffer[: rows + 1], buffer[rows + 1 : 2 * rows + 2]
        last_page_len, lens = buffer[2 * rows + 2 : 3 * rows + 2], buffer[3 * rows + 2 :]
        tokens, starts = lens.numpy(), indptr.numpy()
        tokens[:] = seq_lens
        query_indptr.numpy()[:] = query_start_loc
        blocks = (tokens + np.int32(block_size - 1)) // np.int32(block_size)
        starts[0] = 0
        np.cumsum(blocks, out=starts[1:])
        last_page_len.numpy()[:] = tokens - (blocks - 1) * np.int32(block_size)
        return cls(indptr, last_page_len, lens, query_indptr, int(starts[rows]))


def gather_blocks(block_table: Tensor, indptr: Tensor, positions: Tensor, out: Tensor) -> None:
    """Write each row's block ids one after the other: ``out[indptr[r] + c] = block_table[r, c]``.

    Parameters
    ----------
    block_table
        int32 ``[R, B]``; entries past a row's blocks are not read.
    indptr
        int32 ``[R + 1]`` on the same device.
    positions
        int32 ``[P]``: 0, 1, 2, …
    out
        int32 ``[P]``, written in full.
    """
    if block_table.shape[0] == 1:
        out.copy_(block_table[0, : out.shape[0]])
        return
    row = torch.searchsorted(indptr[1:], positions, right=True)
    out.copy_(block_table[row, (positions - indptr[row]).long()])
