"""The seams on a GPU: correctness first, then figures; every row is printed and written as it is known.

    python benchmarks/gpu/proof.py --model PATH_OR_NAME [--out DIR]

It checks that on CUDA (1) fp32 tokens through the torch backend equal transformers', (2) bf16 tokens through every backend
equal them but where the reference's two best logits are closer than the dtype's noise, (3) a captured decode
bucket with padding rows equals the eager step, and (4) two steps in flight launch without any device-to-host
synchronisation, so that sampled ids never visit the host before the next launch.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from enginebay import LLM, SamplingParams
from enginebay.errors import EngineBayError
from enginebay.worker.model_runner import ModelRunner
from workloads import get, write_config

TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea,",
    "1, 1, 2, 3, 5, 8, 13,",
    "Water boils at a temperature of",
    "La tour Eiffel se trouve",
    "The three laws of thermodynamics are " * 12,
    "import numpy as np\nx = np.",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
#: all that a step can be asked for besides the prompt's log-probabilities
EVERYTHING = SamplingParams(
    temperature=0.8,
    top_p=0.95,
    top_k=50,
    min_p=0.01,
    seed=1,
    repetition_penalty=1.2,
    presence_penalty=0.5,
    frequency_penalty=0.2,
    logit_bias={5: 1.0},
    bad_words=["the", " and so"],
    allowed_token_ids=range(40_000),
    min_tokens=4,
    logprobs=5,
    max_tokens=48,
)
ROWS: list[dict[str, Any]] = []


def row(out: Path, name: str, **values: Any) -> None:
    ROWS.append({"row": name, **values})
    print(json.dumps(ROWS[-1]), flush=True)
    (out / "proof.json").write_text(json.dumps(ROWS, indent=1))


def engine(model: str, **tree: Any) -> LLM:
    tree.setdefault("device", "cuda")
    tree.setdefault("cache", {"memory_bytes": 4 << 30})
    return LLM(model=model, **tree)


def close(llm: LLM) -> None:
    llm.shutdown()
    gc.collect()
    torch.cuda.empty_cache()


def tokens(llm: LLM, prompts: list[Any], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(r.outputs[0].token_ids) for r in llm.generate(prompts, params)]


def runner_of(llm: LLM) -> ModelRunner:
    return llm._client._core.executor._worker._runner  # type: ignore[attr-defined,no-any-return]


# --- correctness -----------------------------------------------------------------------------------------------------


def reference(model: str, ids: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
    """Greedy fp32 tokens by transformers, and the gap of the two best logits at each step."""
    from transformers import AutoModelForCausalLM

    path = Path(model)
    reference_model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).cuda()
    found, gaps = [], []
    for prompt in ids:
        result = reference_model.generate(
            torch.tensor([prompt], device="cuda"),
            max_new_tokens=GREEDY.max_tokens,
            min_new_tokens=GREEDY.max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        found.append(result.sequences[0, len(prompt) :].tolist())
        best = [step[0].float().topk(2).values for step in result.logits]
        gaps.append([float(b[0] - b[1]) for b in best])
    del reference_model
    gc.collect()
    torch.cuda.empty_cache()
    return found, gaps


def divergences(ours: list[list[int]], theirs: list[list[int]], gaps: list[list[float]]) -> list[float]:
    """The reference's gap at the first difference of each prompt that differs."""
    found = []
    for a, b, gap in zip(ours, theirs, gaps, strict=True):
        first = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        if first is not None:
            found.append(round(gap[first], 4))
    return found


def check_tokens(out: Path, model: str) -> None:
    llm = engine(model, dtype="float32", attention={"backend": "torch"})
    ids = [list(llm.tokenize(text)["prompt_token_ids"]) for text in TEXTS]
    ours = tokens(llm, [{"prompt_token_ids": i} for i in ids])
    close(llm)
    theirs, gaps = reference(model, ids)
    row(out, "fp32 torch = transformers", prompts=len(ids), equal=ours == theirs, gaps=divergences(ours, theirs, gaps))
    arrangements: list[tuple[str, dict[str, Any]]] = [
        ("torch eager", {"attention": {"backend": "torch"}}),
        ("torch graph 8", {"attention": {"backend": "torch"}, "graphs": {"decode_sizes": [8]}, "max_model_len": 1024}),
        ("flashinfer eager", {"attention": {"backend": "flashinfer"}}),
        ("flashinfer graph 16", {"attention": {"backend": "flashinfer"}, "graphs": {"decode_sizes": [16]}}),
        ("flashinfer sync", {"attention": {"backend": "flashinfer"}, "scheduler": {"async_scheduling": False}}),
        ("triton eager", {"attention": {"backend": "triton"}}),
        ("triton graph 16", {"attention": {"backend": "triton"}, "graphs": {"decode_sizes": [16]}}),
        ("flash_attention eager", {"attention": {"backend": "flash_attention"}}),
        ("flash_attention graph 16", {"attention": {"backend": "flash_attention"}, "graphs": {"decode_sizes": [16]}}),
        ("mixed", {"attention": {"backend": {"prefill": "flash_attention", "decode": "flashinfer"}}}),
        (
            "mixed graph 16",
            {
                "attention": {"backend": {"prefill": "flash_attention", "decode": "triton"}},
                "graphs": {"decode_sizes": [16]},
            },
        ),
        ("auto", {}),
    ]
    for name, tree in arrangements:
        try:
            llm = engine(model, dtype="bfloat16", **tree)
        except EngineBayError as error:
            row(out, f"bf16 {name}: left out", reason=str(error))
            continue
        got = tokens(llm, [{"prompt_token_ids": i} for i in ids])
        used = [f"{s.bay}={s.chosen.name if s.chosen else None}" for s in llm.info.selections if s.kind == "attention"]
        close(llm)
        row(out, f"bf16 {name}", used=used, gaps_at_first_difference=divergences(got, theirs, gaps))


def check_graph(out: Path, model: str, backend: str, dtype: str) -> None:
    """At every decode step: logits of the padded, captured step against the eager one, on the same batch and cache."""
    llm = engine(model, dtype=dtype, attention={"backend": backend}, graphs={"decode_sizes": [8]}, max_model_len=1024)
    runner = runner_of(llm)
    worst, steps = 0.0, 0
    original = runner.execute

    @torch.inference_mode()
    def compared(output: Any) -> None:
        nonlocal worst, steps
        eager = None
        if runner._graph_size(output) is not None:
            batch = runner.batch.apply(output)
            runner.plan(batch, runner._eager_states)
            eager = runner.forward(batch).float().clone()
        original(output)
        if eager is not None:
            assert runner._pending is not None
            assert runner._pending[1] is not None
            worst = max(worst, float((runner._pending[1].float() - eager).abs().max() / eager.abs().max()))
            steps += 1

    runner.execute = compared  # type: ignore[method-assign]
    tokens(llm, TEXTS[:5])
    close(llm)
    row(
        out,
        f"graph bucket 8, 5 rows + 3 padding, = eager ({backend}, {dtype})",
        steps=steps,
        worst_relative_difference=worst,
    )


def check_prefix_hits(out: Path, model: str, backend: str) -> None:
    """Cold, warm and evicted: float32 tokens are the same, seeded draws and log-probabilities too, graph or not."""
    sizes = [8] if backend == "flashinfer" else []
    dtype = "bfloat16" if backend == "flashinfer" else "float32"
    llm = engine(model, dtype=dtype, attention={"backend": backend}, graphs={"decode_sizes": sizes}, max_model_len=1024)
    shared = list(llm.tokenize(" ".join(TEXTS))["prompt_token_ids"])
    jobs: list[Any] = [{"prompt_token_ids": [*shared[:n], n]} for n in range(20, 60, 5)]
    found = [[o.outputs[0] for o in llm.generate(jobs, GREEDY)] for _ in range(2)]
    drawn = [[o.outputs[0] for o in llm.generate(jobs, EVERYTHING)] for _ in range(2)]
    stats = llm.stats()
    close(llm)
    row(
        out,
        f"prefix cache warm = cold ({backend}, {dtype})",
        greedy_equal=[a.token_ids for a in found[0]] == [a.token_ids for a in found[1]],
        drawn_equal=[a.token_ids for a in drawn[0]] == [a.token_ids for a in drawn[1]],
        logprobs_given=all(len(a.logprobs or ()) == len(a.token_ids) for a in drawn[1]),
        hits=stats.num_prefix_hits,
        free=stats.num_free_blocks == stats.num_blocks,
    )


def check_no_sync(
    out: Path, model: str, backend: str, sizes: list[int], params: SamplingParams = GREEDY, asked: str = "greedy"
) -> None:
    """Launch and sampling of every step under torch's sync guard, which raises on a device-to-host wait."""
    llm = engine(
        model, dtype="bfloat16", attention={"backend": backend}, graphs={"decode_sizes": sizes}, max_model_len=1024
    )
    tokens(llm, TEXTS, params)  # compile and warm up
    llm.reset_prefix_cache()
    runner = runner_of(llm)
    guarded = 0

    def guard(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            nonlocal guarded
            torch.cuda.set_sync_debug_mode("error")
            try:
                guarded += 1
                return function(*args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return run

    runner.execute = guard(runner.execute)  # type: ignore[method-assign]
    runner.sample = guard(runner.sample)  # type: ignore[method-assign]
    depth = llm._client._core._depth  # type: ignore[attr-defined]
    tokens(llm, TEXTS, params)
    close(llm)
    row(out, f"no synchronisation ({backend}, graphs {sizes}, {asked})", steps_in_flight=depth, guarded_calls=guarded)


# --- figures ---------------------------------------------------------------------------------------------------------


def measure(out: Path, name: str, model: str, work: str, **tree: Any) -> None:
    llm = engine(model, dtype="bfloat16", **tree)
    prompts, lengths = get(work)
    params = [SamplingParams(temperature=0.6, ignore_eos=True, detokenize=False, max_tokens=n) for n in lengths]
    jobs: list[Any] = [{"prompt_token_ids": p} for p in prompts]
    seconds = []
    for _ in range(3):
        llm.reset_prefix_cache()  # a run must not find the prompts of the one before
        torch.cuda.synchronize()
        start = time.perf_counter()
        llm.generate(jobs, params)
        seconds.append(time.perf_counter() - start)
    close(llm)
    best = sorted(seconds[1:])[0]
    row(
        out,
        name,
        work=work,
        seconds=[round(s, 3) for s in seconds],
        out_tokens_per_s=round(sum(lengths) / best, 1),
        ms_per_token=round(best / max(lengths) * 1000, 3),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--only", help="run the stages whose function's name holds this")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    import transformers

    row(
        args.out,
        "machine",
        card=torch.cuda.get_device_name(0),
        torch=torch.__version__,
        transformers=transformers.__version__,
        date=time.strftime("%Y-%m-%d"),
    )
    shapes = tempfile.mkdtemp()
    graphs = {"decode_sizes": [1]}
    big = {"memory_bytes": 60 << 30}
    stages: list[tuple[Callable[..., None], tuple[Any, ...], dict[str, Any]]] = [
        (check_tokens, (args.model,), {}),
        (check_graph, (args.model, "torch", "float32"), {}),
        (check_graph, (args.model, "torch", "bfloat16"), {}),
        (check_graph, (args.model, "flashinfer", "bfloat16"), {}),
        (check_no_sync, (args.model, "torch", []), {}),
        (check_no_sync, (args.model, "flashinfer", []), {}),
        (check_no_sync, (args.model, "flashinfer", [8]), {}),
        (check_no_sync, (args.model, "flashinfer", [8]), {"params": EVERYTHING, "asked": "everything"}),
        (check_prefix_hits, (args.model, "torch"), {}),
        (check_prefix_hits, (args.model, "flashinfer"), {}),
    ]
    eager: dict[str, Any] = {}
    captured: dict[str, Any] = {"graphs": graphs, "max_model_len": 1024}
    for backend in ("flashinfer", "torch"):
        for label, tree in (("eager", eager), ("graph 1", captured)):
            stages.append(
                (
                    measure,
                    (f"{backend} {label}", args.model, "bs1_128_256"),
                    {"attention": {"backend": backend}, **tree},
                )
            )
    qwen = write_config("qwen3-0.6b", shapes)
    dummy = {"load_format": "dummy", "attention": {"backend": "flashinfer"}, "cache": big, "max_model_len": 4096}
    stages += [
        (measure, ("qwen3-0.6b graph 1", qwen, "bs1_128_256"), {**dummy, "graphs": graphs}),
        (measure, ("qwen3-0.6b graph 256", qwen, "b256x512x256"), {**dummy, "graphs": {"decode_sizes": [256]}}),
    ]
    failed = 0
    for stage, positional, options in stages:
        if args.only and args.only not in stage.__name__:
            continue
        try:
            stage(args.out, *positional, **options)
        except Exception:
            failed += 1
            row(args.out, f"FAILED {stage.__name__} {positional[:1]}", error=traceback.format_exc()[-1500:])
            gc.collect()
            torch.cuda.empty_cache()
    sys.exit(failed)


if __name__ == "__main__":
    main()
