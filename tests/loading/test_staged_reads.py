"""Reads through staging buffers give what plain reads give, hold no more than they say, and leave nothing open."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from enginebay.errors import WeightsError
from enginebay.loading import staged_reads
from enginebay.loading.safetensors_source import SafetensorsSource
from enginebay.loading.source import RawTensor
from enginebay.loading.staged_reads import read_all, staged
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.float8_e4m3fn]
SHAPES = [(), (1,), (0, 3), (7,), (5, 3), (2, 3, 11), (129,)]


def checkpoint(folder: Path, kinds: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> SafetensorsSource:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"t{i}": torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8).to(dtype)
        for i, (shape, dtype) in enumerate(kinds)
    }
    save_file(tensors, folder / "model.safetensors")
    return SafetensorsSource(folder)


def read(source: SafetensorsSource, names: Sequence[str], **sizes: int) -> Iterator[RawTensor]:
    return staged(names, [source.locate(name) for name in names], CPU, **sizes)


def same(a: RawTensor, b: RawTensor) -> bool:
    as_bytes = [raw.data.contiguous().view(-1).view(torch.uint8) for raw in (a, b)]
    return (a.name, a.shape, a.data.dtype, a.encoding) == (b.name, b.shape, b.data.dtype, None) and torch.equal(
        *as_bytes
    )


@settings(max_examples=60)
@given(
    kinds=st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES)), min_size=1, max_size=12),
    order=st.randoms(use_true_random=False),
    threads=st.integers(1, 3),
    buffers=st.integers(1, 5),
    buffer_bytes=st.sampled_from([1, 2, 7, 64, 10_000]),
)
def test_any_order_and_any_staging_give_the_tensors(
    kinds: Any, order: Any, threads: int, buffers: int, buffer_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = checkpoint(Path(folder), kinds)
        names = source.names()
        order.shuffle(names)
        names = names[: order.randint(0, len(names))] + names[:1]  # some left out, one read twice
        found = list(read(source, names, threads=threads, buffers=buffers, buffer_bytes=buffer_bytes))
        assert [raw.name for raw in found] == names
        assert all(same(raw, source.load(raw.name)) for raw in found)
        source.close()


@pytest.fixture
def large(tmp_path: Path) -> Iterator[SafetensorsSource]:
    source = checkpoint(tmp_path, [((1000,), torch.int8)] * 4)
    yield source
    source.close()


def test_no_more_is_read_ahead_than_the_buffers_hold(large: SafetensorsSource, monkeypatch: pytest.MonkeyPatch) -> None:
    read_bytes: list[int] = []
    plain = os.preadv

    def counted(file: int, views: Any, offset: int) -> int:
        read_bytes.append(plain(file, views, offset))
        return read_bytes[-1]

    monkeypatch.setattr(os, "preadv", counted)
    tensors = read(large, large.names(), threads=2, buffers=3, buffer_bytes=100)
    for taken in range(1, 5):
        next(tensors)
        assert 1000 * taken <= sum(read_bytes) <= min(4000, 1000 * taken + 3 * 100)
        assert max(read_bytes) <= 100
    assert sum(read_bytes) == 4000


def test_short_reads_are_continued(large: SafetensorsSource, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, views, offset: plain(file, [views[0][:37]], offset))
    assert all(same(raw, large.load(raw.name)) for raw in read(large, large.names(), buffer_bytes=256))


def staging_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("enginebay-weights")]


def open_files(path: Path) -> int:
    return sum(os.path.realpath(f"/proc/self/fd/{fd}") == str(path) for fd in os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("taken", [1, 4])
def test_who_stops_early_leaves_no_thread_and_no_file(large: SafetensorsSource, tmp_path: Path, taken: int) -> None:
    path = (tmp_path / "model.safetensors").resolve()
    before = open_files(path)
    tensors = read(large, large.names(), threads=2, buffers=4, buffer_bytes=100)
    for _ in range(taken):
        next(tensors)
    assert staging_threads()
    assert open_files(path) == before + 1
    del tensors
    assert staging_threads() == []
    assert open_files(path) == before


def test_a_file_that_was_cut_after_it_was_opened_is_named_c51(tmp_path: Path) -> None:
    source = checkpoint(tmp_path, [((1000,), torch.int8)] * 4)
    names = source.names()
    spans = [source.locate(name) for name in names]
    source.close()
    os.truncate(tmp_path / "model.safetensors", spans[2].offset + 250)
    tensors = staged(names, spans, CPU, buffer_bytes=100)
    assert [next(tensors).name, next(tensors).name] == names[:2]
    pattern = rf"model\.safetensors is truncated or damaged: it ends at byte {spans[2].offset + 250}"
    with pytest.raises(WeightsError, match=pattern):
        next(tensors)
    assert staging_threads() == []


def test_a_file_that_is_gone_is_named_c51(tmp_path: Path) -> None:
    source = checkpoint(tmp_path, [((4,), torch.int8)])
    span = source.locate("t0")
    source.close()
    span.path.unlink()
    with pytest.raises(WeightsError, match=r"model\.safetensors cannot be read"):
        next(staged(["t0"], [span], CPU))


def test_a_read_that_fails_is_a_weights_error(large: SafetensorsSource, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(WeightsError, match=r"model\.safetensors cannot be read: .*Input/output error"):
        next(read(large, large.names()))


class Event:
    """Stands for a CUDA event: notes which buffer it guards and when it was waited for."""

    made = 0
    calls: list[tuple[str, int]]

    def __init__(self) -> None:
        self.index = Event.made
        Event.made += 1

    def record(self, stream: Any) -> None:
        self.calls.append(("record", self.index))

    def synchronize(self) -> None:
        self.calls.append(("wait", self.index))


def test_a_buffer_is_written_again_only_after_its_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that only pretends to be CUDA: `meta` takes the copies."""
    monkeypatch.setattr(Event, "calls", [], raising=False)
    monkeypatch.setattr(Event, "made", 0)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    plain: Any = torch.empty

    def empty(*size: int, device: Any = CPU, pin_memory: bool | None = None, **kwargs: Any) -> Any:
        assert pin_memory in (None, True)  # staging is pinned
        return plain(*size, device="meta" if pin_memory is None else CPU, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    source = checkpoint(tmp_path, [((1000,), torch.int8)] * 4)
    spans = [source.locate(name) for name in source.names()]
    for _ in staged(source.names(), spans, torch.device("cuda"), threads=1, buffers=3, buffer_bytes=100):
        pass
    source.close()
    assert Event.made == 3
    for index in range(3):
        calls = [call for call, of in Event.calls if of == index]
        # the first wait is for an event that was never recorded, which returns at once
        assert calls == ["wait", "record"] * (14 if index == 0 else 13)  # 40 pieces in turn


class Plain:
    """A source that only loads."""

    def load(self, name: str) -> RawTensor:
        return RawTensor(name, (1,), torch.ones(1))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_who_does_not_say_where_tensors_lie_is_asked_for_them(device: str) -> None:
    source: Any = Plain()
    assert [raw.name for raw in read_all(source, ["b", "a"], torch.device(device))] == ["b", "a"]


def test_on_cpu_the_mapped_file_is_the_source(large: SafetensorsSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_reads, "staged", None)
    assert all(same(raw, large.load(raw.name)) for raw in read_all(large, large.names(), CPU))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("buffers", "buffer_bytes"), [(2, 4096), (8, 1 << 20)])
def test_gpu_tensors_arrive_whole(tmp_path: Path, buffers: int, buffer_bytes: int) -> None:
    torch.manual_seed(0)
    tensors = {f"t{i}": torch.randn(257, 1001 + i, dtype=torch.bfloat16) for i in range(12)}
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    names = source.names()
    device = torch.device("cuda", 0)
    spans = [source.locate(name) for name in names]
    found = {raw.name: raw.data for raw in staged(names, spans, device, buffers=buffers, buffer_bytes=buffer_bytes)}
    assert [raw.data.device for raw in read_all(source, names[:1], device)] == [device]
    source.close()
    assert list(found) == names
    for name, data in found.items():
        assert data.device == device
        assert torch.equal(data.cpu(), tensors[name])
