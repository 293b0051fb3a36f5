"""What device there is, and which dtype suits it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from enginebay.errors import ConfigError
from enginebay.plugins.requirements import Hardware


def detect(device: str) -> Hardware:
    """The hardware behind ``device``: ``"auto"`` takes CUDA where there is a GPU.

    Raises
    ------
    ConfigError
        CUDA was asked for and there is none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device: cuda was asked for, but torch sees no GPU; set device: cpu, or install torch for CUDA"
        )
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        from enginebay.worker.memory import host_memory_bytes

        return Hardware(device="cpu", name="CPU", memory_bytes=host_memory_bytes(), features=_cpu_features())
    properties = torch.cuda.get_device_properties(0)
    return Hardware(
        device="cuda",
        name=properties.name,
        capability=torch.cuda.get_device_capability(0),
        memory_bytes=properties.total_memory,
    )


def _cpu_features() -> frozenset[str]:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return frozenset()
    flags = next((line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def choose_dtype(wanted: str, hf_config: Any, hardware: Hardware) -> tuple[str, str]:
    """A compute dtype and the sentence that says why."""
    if wanted != "auto":
        return wanted, ""
    if hardware.device == "cpu":
        if "avx512_bf16" in hardware.features:
            return "bfloat16", "the processor has avx512_bf16"
        return "float32", "the processor has no avx512_bf16"
    stored = str(getattr(hf_config, "dtype", None) or "").removeprefix("torch.")
    if stored in ("float16", "bfloat16"):
        return stored, "the checkpoint's dtype"
    return "bfloat16", "the checkpoint's dtype is wider than a GPU needs"
