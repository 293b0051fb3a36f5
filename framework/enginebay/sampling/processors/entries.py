"""Ragged entries kept by slot, flattened into index tensors for the rows of a step.

What a request asks of a processor is a list of any length. `SlotEntries` keeps one a slot on the host and joins those of a
step's rows on the device; the joined form is kept as long as the rows stay the same, so a steady step does no work here. It
does not know what the entries mean.

Shapes: ``R`` rows of the step, ``Q`` rows that have entries, ``E`` entries of those rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from enginebay.interfaces.scheduler import Int32Array
from enginebay.kernels.transfer import to_device

#: A column of entries: ``[e]``, or ``[e, k]`` aligned right.
Column = npt.NDArray[Any]

#: Fills the left of two-dimensional columns narrower than the widest; no token has this id.
NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class FlatEntries:
    """The entries of a step's rows."""

    #: int64 ``[Q]``, ascending: rows of the step that have entries
    rows: Tensor
    #: int64 ``[E]``: the entry's row in the step
    row_of_entry: Tensor
    #: int64 ``[E]``: the entry's place in `rows`
    place_of_entry: Tensor
    #: ``[E]`` or ``[E, k]`` each, in the order given to `SlotEntries.put`
    columns: tuple[Tensor, ...]


class SlotEntries:
    """Entries of up to `num_slots` requests."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.device = device
        #: bool ``[S]``: which slots have entries
        self.present = np.zeros(num_slots, dtype=np.bool_)
        self._columns: dict[int, tuple[Column, ...]] = {}
        self._key: tuple[bytes, bytes] | None = None
        self._flat: FlatEntries | None = None

    def put(self, slot: int, columns: tuple[Column, ...] | None) -> None:
        """Set the slot's entries: equally long columns, or None for nothing."""
        self._key = None
        if columns is None or not len(columns[0]):
            self.present[slot] = False
            self._columns.pop(slot, None)
        else:
            self.present[slot] = True
            self._columns[slot] = columns

    def flat(self, slots: Int32Array, wanted: npt.NDArray[np.bool_] | None = None) -> FlatEntries | None:
        """Entries of the rows in `slots` that have any (and are `wanted`, bool ``[R]``); None if no row does."""
        asked = self.present[slots] if wanted is None else self.present[slots] & wanted
        key = (slots.tobytes(), asked.tobytes())
        if key != self._key:
            rows = np.flatnonzero(asked)
            self._flat = self._join(slots, rows) if len(rows) else None
            self._key = key
        return self._flat

    def _join(self, slots: Int32Array, rows: npt.NDArray[np.int64]) -> FlatEntries:
        parts = [self._columns[slot] for slot in slots[rows].tolist()]
        place = np.repeat(np.arange(len(rows)), [len(part[0]) for part in parts])
        return FlatEntries(
            rows=to_device(rows, self.device),
            row_of_entry=to_device(rows[place], self.device),
            place_of_entry=to_device(place, self.device),
            columns=tuple(to_device(_joined(column), self.device) for column in zip(*parts, strict=True)),
        )


def _joined(parts: Sequence[Column]) -> Column:
    if parts[0].ndim == 2:
        widest = max(part.shape[1] for part in parts)
        parts = [np.pad(p, ((0, 0), (widest - p.shape[1], 0)), constant_values=NO_TOKEN) for p in parts]
    return np.ascontiguousarray(np.concatenate(parts))


def token_array(token_ids: Sequence[int] | frozenset[int], vocab_size: int) -> npt.NDArray[np.int64]:
    """The ids that lie within the vocabulary, int64, ascending and each once."""
    return np.array(sorted({token for token in token_ids if token < vocab_size}), dtype=np.int64)
