"""Times of attention backends through the engine's seam, beside the libraries' own calls for the same work.

Caches are larger than the second-level cache: a graph goes through as many copies as that takes. Bandwidth counts each
key and value read once, arithmetic the causal products alone: 4 x D x H x (keys seen by all queries).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from attention_cases import record_of
from enginebay.conformance.attention.steps import Row, make_backend, make_batch, make_cache, make_layer, make_query
from enginebay.interfaces.attention import AttentionBackend, PlanState
from enginebay.interfaces.batch import Bucket
from enginebay.plugins.records import HND, NHD, KVLayout, Phase
from enginebay.plugins.requirements import AttentionSpec, Hardware, Requirements
from measuring import BEYOND_L2, Budget, Report, alternating, host_microseconds, ratio, synchronize
from torch import Tensor

Attend = Callable[[Tensor], None]


@dataclass(frozen=True)
class Shape:
    """A step: rows alike, GQA 32/8, head size 128 unless said otherwise."""

    name: str
    phase: Phase
    rows: int
    query_len: int
    context: int
    block_size: int = 16
    #: blocks one after the other, as a contiguous cache has them
    sequential: bool = False
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            num_heads=self.heads, num_kv_heads=self.kv_heads, head_dim=self.head_dim, scale=self.head_dim**-0.5
        )

    def cache_bytes(self, itemsize: int) -> int:
        """Bytes of keys and values that the step reads."""
        return 2 * self.kv_heads * self.head_dim * self.rows * self.context * itemsize

    @property
    def flops(self) -> int:
        """Of the causal products: queries are a row's last tokens."""
        last, queries = self.context, self.query_len
        seen = queries * (last - queries) + queries * (queries + 1) // 2
        return 4 * self.head_dim * self.heads * self.rows * seen


def decode(rows: int, context: int, block_size: int = 16) -> Shape:
    return Shape(f"decode {rows} x {context}, block {block_size}", "decode", rows, 1, context, block_size)


#: those with a figure in the project's aims come first
TARGETS = (
    decode(128, 1024),
    decode(1, 8192),
    Shape("prefill 4 x 4096, block 16 random", "prefill", 4, 4096, 4096),
    Shape("prefill 4 x 4096, block 256 sequential", "prefill", 4, 4096, 4096, block_size=256, sequential=True),
    Shape("chunk 8 x 512 of 4096, block 16", "prefill", 8, 512, 4096),
)
SWEEP = (
    *(decode(rows, context) for context in (1024, 8192, 32768) for rows in (1, 8, 32, 64, 256)),
    decode(128, 1024, 128),
    decode(1, 32768, 128),
    Shape("prefill 1 x 512, block 16", "prefill", 1, 512, 512),
    Shape("prefill 16 x 1024, block 16", "prefill", 16, 1024, 1024),
    Shape("chunk 1 x 2048 of 32768, block 16", "prefill", 1, 2048, 32768),
)
SMALL = (
    decode(3, 40),
    Shape("prefill 2 x 40, block 16", "prefill", 2, 40, 40),
    Shape("chunk 2 x 16 of 40, block 32 sequential", "prefill", 2, 16, 40, block_size=32, sequential=True),
)


class Work:
    """A shape's tensors, and the contenders that can do it."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype, layout: KVLayout, beyond: int) -> None:
        self.shape, self.dtype, self.layout = shape, dtype, layout
        generator = torch.Generator(device).manual_seed(3)
        rows = [Row(shape.query_len, shape.context)] * shape.rows
        self.batch, num_blocks = make_batch(
            rows,
            block_size=shape.block_size,
            max_model_len=shape.context,
            device=device,
            seed=5,
            sequential=shape.sequential,
        )
        copies = max(1, min(64, -(-beyond // shape.cache_bytes(dtype.itemsize))))
        self.caches = [
            make_cache(shape.spec, layout, num_blocks, shape.block_size, dtype, generator) for _ in range(copies)
        ]
        self.layer = make_layer(shape.spec, generator)
        self.query = make_query(shape.spec, self.batch.num_tokens, dtype, generator)

    @property
    def calls(self) -> int:
        """Calls that a graph holds: each cache at least once."""
        least = 8 if self.shape.phase == "decode" else 2
        return max(least, len(self.caches))

    def rounds_of(self, attend: Attend) -> Callable[[], None]:
        """A function of `calls` calls, that goes through the caches."""

        def run() -> None:
            for i in range(self.calls):
                attend(self.caches[i % len(self.caches)])

        return run

    def new_output(self) -> Tensor:
        return torch.empty(self.query.shape, dtype=self.dtype, device=self.query.device)


@dataclass(slots=True)
class Contender:
    """A way to do a step: a call a layer, and the host's work before it."""

    attend: Attend
    out: Tensor
    plan: Callable[[], None] | None = None


def through_seam(name: str, work: Work) -> Contender:
    """A backend as the worker uses it: in decode with the state of a captured size."""
    shape, batch, layer = work.shape, work.batch, work.layer
    backend: AttentionBackend = make_backend(
        record_of(name), shape.phase, batch, layer, work.caches[0], work.dtype, work.layout, shape.context
    )
    captured = shape.phase == "decode" and work.query.is_cuda
    state: PlanState = backend.make_state(Bucket(shape.rows, shape.query_len, captured=captured))
    out = work.new_output()

    def attend(cache: Tensor) -> None:
        backend.attend(layer, work.query, cache, batch, state, out)

    def plan() -> None:
        backend.plan(batch, state)

    plan()
    return Contender(attend, out, plan)


def bare_flashinfer(work: Work) -> Contender:
    """FlashInfer's wrappers as its manual uses them."""
    import flashinfer

    shape, batch = work.shape, work.batch
    blocks = -(-shape.context // shape.block_size)
    indptr = torch.arange(shape.rows + 1, dtype=torch.int32) * blocks
    indices = batch.groups[0].block_table[:, :blocks].flatten().contiguous()
    last = torch.full((shape.rows,), shape.context - (blocks - 1) * shape.block_size, dtype=torch.int32)
    device = work.query.device
    workspace = torch.zeros(128 << 20, dtype=torch.uint8, device=device)
    layout = "HND" if work.layout is HND else "NHD"
    sizes = (shape.heads, shape.kv_heads, shape.head_dim, shape.block_size)
    kinds = {"q_data_type": work.dtype, "kv_data_type": work.dtype, "sm_scale": shape.spec.scale}
    if shape.phase == "decode":
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            layout,
            use_cuda_graph=True,
            use_tensor_cores=True,
            backend="fa2",
            paged_kv_indptr_buffer=indptr.to(device),
            paged_kv_indices_buffer=indices.clone(),
            paged_kv_last_page_len_buffer=last.to(device),
        )
        arguments: tuple[Any, ...] = (indptr, indices, last, *sizes)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, layout, backend="auto")
        kinds["causal"] = True
        arguments = (torch.from_numpy(batch.query_start_loc_host), indptr, indices, last, *sizes)
    out = work.new_output()

    def plan() -> None:
        wrapper.plan(*arguments, **kinds)

    def attend(cache: Tensor) -> None:
        wrapper.run(work.query, cache.transpose(2, 3) if work.layout is HND else cache, out=out)

    plan()
    return Contender(attend, out, plan)


def bare_flash_attention(work: Work) -> Contender:
    """flash-attn-4's function of ragged queries and a paged cache, as it stands."""
    from flash_attn.cute import flash_attn_varlen_func

    shape, batch = work.shape, work.batch
    blocks = -(-shape.context // shape.block_size)
    table = batch.groups[0].block_table[:, :blocks].contiguous()

    def attend(cache: Tensor) -> None:
        result = flash_attn_varlen_func(
            work.query,
            cache[:, 0],
            cache[:, 1],
            cu_seqlens_q=batch.query_start_loc,
            seqused_k=batch.seq_lens,
            max_seqlen_q=shape.query_len,
            page_table=table,
            softmax_scale=shape.spec.scale,
            causal=True,
        )
        contender.out = result[0] if isinstance(result, tuple) else result

    contender = Contender(attend, work.new_output())
    return contender


BARE: dict[str, Callable[[Work], Contender]] = {"flashinfer": bare_flashinfer, "flash_attention": bare_flash_attention}


def refusal(name: str, shape: Shape, hardware: Hardware, dtype: torch.dtype, *, graphs: bool) -> str:
    """Why the backend's record does not take the shape; empty if it does."""
    word = str(dtype).removeprefix("torch.")
    support = record_of(name).supports(
        Requirements(
            hardware=hardware,
            dtype=word,
            kv_dtype=word,
            attention=(shape.spec,),
            phases=(shape.phase,),
            block_size=shape.block_size,
            graphs=graphs and shape.phase == "decode",
        )
    )
    return "; ".join(map(str, support.reasons))


def compare_speed(
    report: Report,
    shape: Shape,
    backends: list[str],
    *,
    hardware: Hardware,
    device: torch.device,
    dtype: torch.dtype,
    layout: KVLayout = NHD,
    rounds: int = 30,
    beyond: int = BEYOND_L2,
) -> None:
    """One row a contender: time a call, GB/s or TFLOP/s, ratio to the bare library, host time of plan. All must agree."""
    work = Work(shape, device, dtype, layout, beyond)
    contenders: dict[str, Contender] = {}
    made: list[tuple[str, Callable[[], Contender]]] = []
    for name in backends:
        if reasons := refusal(name, shape, hardware, dtype, graphs=device.type == "cuda"):
            report.row(f"{shape.name}: {name}", refused=reasons)
        else:
            made.append((name, lambda name=name: through_seam(name, work)))  # type: ignore[misc]
        if name in BARE and device.type == "cuda":
            made.append((f"bare {name}", lambda name=name: BARE[name](work)))  # type: ignore[misc]
    outputs: dict[str, Tensor] = {}
    for name, make in made:
        try:
            contender = make()
            contender.attend(work.caches[0])
            synchronize()
            outputs[name] = contender.out.float()
            contenders[name] = contender
        except Exception:
            report.failure(f"{shape.name}: {name}", traceback.format_exc())
    if not contenders:
        return
    runs = {name: work.rounds_of(contender.attend) for name, contender in contenders.items()}
    # Prefill states are never captured; its kernels run long enough to hide their launches.
    times = alternating(runs, calls=work.calls, rounds=rounds, graphs=shape.phase == "decode")
    first = next(iter(outputs))
    for name, contender in contenders.items():
        report.row(f"{shape.name}: {name}", **_figures(work, times, name), **_plan(contender), copies=len(work.caches))
        # rounding to bfloat16 alone makes some thousandths
        difference = float((outputs[name] - outputs[first]).norm() / outputs[first].norm())
        if not difference < 0.02:
            report.failure(f"{shape.name}: {name}", f"its result is {difference:.3g}, relatively, from that of {first}")


def _figures(work: Work, times: dict[str, list[float]], name: str) -> dict[str, Any]:
    shape, us = work.shape, median(times[name])
    found: dict[str, Any] = {"us": round(us, 2), "spread": round((max(times[name]) - min(times[name])) / us, 3)}
    if shape.phase == "decode":
        found["gb_per_s"] = round(shape.cache_bytes(work.dtype.itemsize) / us / 1e3, 1)
    else:
        found["tflop_per_s"] = round(shape.flops / us / 1e6, 1)
    if f"bare {name}" in times:
        found["of_bare"] = ratio(times, name, f"bare {name}")
    return found


def _plan(contender: Contender) -> dict[str, Any]:
    return {} if contender.plan is None else {"plan_host_us": round(host_microseconds(contender.plan), 1)}


def run_shapes(report: Report, shapes: tuple[Shape, ...], backends: list[str], budget: Budget, **how: Any) -> None:
    """Every shape in turn, until time is up."""
    for shape in shapes:
        if budget.spent:
            report.row(f"{shape.name}: not run", reason="time is up")
            continue
        # gathered copies of the cache: slow, and for the long ones more memory than there is
        able = [b for b in backends if b != "torch" or shape in TARGETS or shape in SMALL]
        try:
            compare_speed(report, shape, able, **how)
        except Exception:
            report.failure(shape.name, traceback.format_exc())
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
