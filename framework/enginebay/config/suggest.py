"""What to say of a name that does not exist: the near one, the right place of a flat one, or why it is refused.

It knows other engines' flat names and this project's retired environment variables; it validates nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from enginebay.config.tree import Path, SchemaTree, dotted

#: Prefix of every environment variable that configures an engine: ENGINEBAY_<SECTION>__<KEY>.
ENV_PREFIX = "ENGINEBAY_"

#: Variables that are read elsewhere and are no part of the configuration tree.
OTHER_VARIABLES = {
    "ENGINEBAY_DISABLE_PLUGINS": "plugins that are not loaded",
    "ENGINEBAY_CACHE": "folder of downloaded and converted files",
}

_NO_SELECTION = (
    "no environment variable selects a backend, policy, method or plugin file; "
    "set {0} in the YAML file, or with --set {0}=…"
)

#: Variables that one would expect from other engines or that were retired -> what replaced them.
REMOVED_VARIABLES: Mapping[str, str] = {
    "ENGINEBAY_ATTENTION_BACKEND": _NO_SELECTION.format("attention.backend"),
    "ENGINEBAY_EXECUTOR_BACKEND": _NO_SELECTION.format("executor.backend"),
    "ENGINEBAY_SCHEDULER_POLICY": _NO_SELECTION.format("scheduler.policy"),
    "ENGINEBAY_QUANTIZATION": _NO_SELECTION.format("quant.method"),
    "ENGINEBAY_CACHE_DIR": "replaced by ENGINEBAY_CACHE",
}

#: Paths whose value chooses a part or code: they are refused from the environment.
_SELECTORS: tuple[Path, ...] = (
    ("attention", "backend"),
    ("executor", "backend"),
    ("scheduler", "policy"),
    ("sampler", "processors"),
    ("quant",),
    ("plugins",),
)

#: Flat names of other engines -> the path here, with a note where the value changes too.
_FLAT = {
    "tensor_parallel_size": "parallel.tensor",
    "tp_size": "parallel.tensor",
    "pipeline_parallel_size": "parallel.pipeline",
    "pp_size": "parallel.pipeline",
    "quantization": "quant.method",
    "enforce_eager": "graphs.decode_sizes (empty, its default, runs decode steps eagerly)",
    "cudagraph_capture_sizes": "graphs.decode_sizes",
    "cuda_graph_sizes": "graphs.decode_sizes",
    "compilation_config": "graphs.decode_sizes and compile",
    "kv_cache_dtype": "cache.dtype",
    "kv_cache_memory_bytes": "cache.memory_bytes",
    "long_prefill_token_threshold": "scheduler.max_prefill_tokens",
    "logits_processors": "sampler.processors",
    "logprobs_mode": "sampler.logprobs_mode",
    "enable_prefix_caching": "cache.prefix_caching",
    "enable_chunked_prefill": "scheduler.chunked_prefill",
    "num_gpu_blocks_override": "cache.num_blocks",
    "mem_fraction_static": "cache.gpu_memory_utilization",
    "distributed_executor_backend": "executor.backend",
    "scheduling_policy": "scheduler.policy",
    "scheduler_cls": "scheduler.policy",
    "attention_backend": "attention.backend",
    "attention_config": "attention",
    "max_seq_len": "max_model_len",
    "model_path": "model",
}

#: Names of other engines that have no counterpart in this version -> what there is instead.
_REFUSED = {
    "trust_remote_code": "code in a checkpoint is never run; install a model plugin or name its file under plugins",
    "speculative_config": "speculative decoding is not in this version",
    "enable_lora": "adapters are not in this version",
    "lora_modules": "adapters are not in this version",
    "data_parallel_size": "only parallel.tensor and parallel.pipeline are in this version",
    "enable_expert_parallel": "only parallel.tensor and parallel.pipeline are in this version",
    "swap_space": "preempted requests are recomputed, so there is no swap space to size",
    "cpu_offload_gb": "weights stay on the device in this version",
    "kv_transfer_config": "KV connectors are not in this version",
    "hf_overrides": "the checkpoint's own configuration is used; edit its config.json",
    "revision": "name a folder, or a Hugging Face id at its default revision",
    "disable_log_stats": "statistics are not logged",
}


def unknown_key(tree: SchemaTree, path: Path) -> str:
    """The message for a key that `tree` does not have at `path`, with the nearest right one."""
    key, parent = str(path[-1]), path[:-1]
    if key in _REFUSED:
        return f"unknown key; {_REFUSED[key]}"
    siblings = {k: dotted((*parent, k)) for k in tree.keys(parent)}
    elsewhere = {**_by_last_key(tree), **_FLAT}
    if key in elsewhere:
        return f"unknown key; here it is {elsewhere[key]}"
    near = _nearest(key, siblings) or _nearest(key, elsewhere)
    if near:
        return f"unknown key; did you mean {near}?"
    refused = difflib.get_close_matches(key, _REFUSED, 1, 0.8)
    if refused:
        return f"unknown key; if {refused[0]} was meant: {_REFUSED[refused[0]]}"
    return f"unknown key; known keys: {', '.join(siblings)}" if siblings else "unknown key; it takes no keys"


def unknown_variable(name: str, known: Iterable[str], tree: SchemaTree) -> str:
    """The message for an ``ENGINEBAY_*`` variable that means nothing; `known` are those that do."""
    known = list(known)
    if name in REMOVED_VARIABLES:
        return f"not an environment variable of enginebay: {REMOVED_VARIABLES[name]}"
    word = name.removeprefix(ENV_PREFIX).lower()
    if tree.is_section((word,)):
        return f"a section has no variable of its own; set one key: {', '.join(k for k in known if k.startswith(name))}"
    if name.upper() in known:
        return f"unknown environment variable; did you mean {name.upper()}?"
    place = {**_by_last_key(tree), **_FLAT}.get(word)
    if place and variable_of_dotted(place) in known:
        return f"unknown environment variable; here it is {variable_of_dotted(place)}"
    if place:
        return f"unknown environment variable; see {place}, in the YAML file or with --set"
    near = _nearest(word, {k.removeprefix(ENV_PREFIX).lower(): k for k in known})
    hint = f"did you mean {near}?" if near else f"they are named {ENV_PREFIX}<SECTION>__<KEY>"
    return f"unknown environment variable; {hint}"


def selection_refused(path: Path) -> str | None:
    """Why the environment may not set `path`, or None if it may."""
    selects = any(path[: len(selector)] == selector for selector in _SELECTORS) and path[1:2] != ("options",)
    return _NO_SELECTION.format(dotted(path)) if selects else None


def variable_of_dotted(path: str) -> str:
    """``"scheduler.max_num_seqs"`` -> ``"ENGINEBAY_SCHEDULER__MAX_NUM_SEQS"``."""
    return ENV_PREFIX + path.replace(".", "__").upper()


def _by_last_key(tree: SchemaTree) -> dict[str, str]:
    """Last keys of leaves -> their full paths, several joined by "or"."""
    found: dict[str, list[str]] = {}
    for path in tree.leaves():
        found.setdefault(str(path[-1]), []).append(dotted(path))
    return {key: " or ".join(paths) for key, paths in found.items()}


def _nearest(key: str, names: Mapping[str, str]) -> str | None:
    near = difflib.get_close_matches(key, list(names), 1, 0.7)
    return names[near[0]] if near else None
