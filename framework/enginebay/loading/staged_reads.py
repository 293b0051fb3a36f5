"""Reading many tensors of a checkpoint, in order: to a GPU through a few staging buffers that threads fill ahead.

Mapped files are read page by page by whoever touches them, and a copy from unpinned memory passes through the driver's own
small buffer: one thread, no overlap. Here threads read pieces into pinned buffers (`os.preadv` works without the
interpreter's lock), and the device copies a piece while the next ones are being read. On CPU the mapping stays: its pages
become the source of the only copy.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from enginebay.errors import WeightsError
from enginebay.loading.source import FileSpan, LocatedSource, RawTensor, WeightSource

#: Threads that read. Two saturate memory on small hosts; network and RAID volumes gain from more requests at once.
THREADS = 4
#: Bytes of a staging buffer, and buffers: what a load takes of pinned host memory. Two a thread let reads go on while the
#: device copies.
BUFFER_BYTES = 8 * 2**20
BUFFERS = 2 * THREADS


def read_all(source: WeightSource, names: Sequence[str], device: torch.device) -> Iterator[RawTensor]:
    """The tensors `names` in that order: on a CUDA `device`, where the source can say where they lie, else on the host.

    Raises
    ------
    WeightsError
        A file is truncated or damaged.
    """
    if device.type != "cuda" or not isinstance(source, LocatedSource):
        return map(source.load, names)
    return staged(names, [source.locate(name) for name in names], device)


@dataclass(slots=True)
class _Buffer:
    """Host memory for a piece, and the event after which the device has copied it away."""

    memory: Tensor
    copied: torch.cuda.Event | None


@dataclass(frozen=True, slots=True)
class _Piece:
    path: Path
    offset: int
    num_bytes: int


def staged(
    names: Sequence[str],
    spans: Sequence[FileSpan],
    device: torch.device,
    *,
    threads: int = THREADS,
    buffers: int = BUFFERS,
    buffer_bytes: int = BUFFER_BYTES,
) -> Iterator[RawTensor]:
    """Tensors on `device`, one at a time; pieces of the ones to come are read ahead.

    A tensor's memory is the caller's from then on. Staging takes ``buffers * buffer_bytes`` of host memory, pinned where
    `device` is CUDA.

    Raises
    ------
    WeightsError
        A file ends before a span does, or cannot be read.
    """
    is_cuda = device.type == "cuda"
    pieces = (
        _Piece(span.path, span.offset + start, min(buffer_bytes, span.num_bytes - start))
        for span in spans
        for start in range(0, span.num_bytes, buffer_bytes)
    )
    with ExitStack() as stack:
        files = {path: _open(path, stack) for path in dict.fromkeys(span.path for span in spans)}
        pool = stack.enter_context(ThreadPoolExecutor(threads, thread_name_prefix="enginebay-weights"))
        # Reads not yet begun are dropped where the caller gives up; those begun end before their files are closed.
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)
        reads: deque[Future[_Buffer]] = deque()

        def read_next(buffer: _Buffer) -> None:
            if (piece := next(pieces, None)) is not None:
                reads.append(pool.submit(_read, files[piece.path], piece, buffer))

        for _ in range(buffers):
            memory = torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=is_cuda)
            read_next(_Buffer(memory, torch.cuda.Event() if is_cuda else None))  # type: ignore[no-untyped-call]

        def assemble(span: FileSpan) -> Tensor:
            data = torch.empty(span.num_bytes, dtype=torch.uint8, device=device)
            for start in range(0, span.num_bytes, buffer_bytes):
                part = data[start : start + buffer_bytes]
                buffer = reads.popleft().result()
                part.copy_(buffer.memory[: len(part)], non_blocking=is_cuda)
                if buffer.copied is not None:
                    buffer.copied.record(torch.cuda.current_stream(device))
                read_next(buffer)
            return data.view(span.dtype).view(span.shape)

        for name, span in zip(names, spans, strict=True):
            # No name for the tensor here: it must be gone when the next one is made.
            yield RawTensor(name, span.shape, assemble(span))


def _open(path: Path, stack: ExitStack) -> int:
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error
    stack.callback(os.close, file)
    return file


def _read(file: int, piece: _Piece, buffer: _Buffer) -> _Buffer:
    """Fill the buffer once the device is done with it."""
    if buffer.copied is not None:
        buffer.copied.synchronize()
    view = buffer.memory.numpy().data
    done = 0
    while done < piece.num_bytes:
        try:
            count = os.preadv(file, [view[done : piece.num_bytes]], piece.offset + done)
        except OSError as error:
            raise WeightsError(f"{piece.path} cannot be read: {error}") from error
        if count == 0:
            raise WeightsError(
                f"{piece.path} is truncated or damaged: it ends at byte {piece.offset + done}; fetch it again"
            )
        done += count
    return buffer
