"""The compiled CPU kernels: built by the machine's own C++ compiler at first use, cached, and loaded through ctypes.

Plain C functions over addresses: no torch headers, so a build takes seconds, serves every torch version, and shares the
OpenMP team that torch has loaded. Without a compiler the torch twins stand, and a warning says so.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from enginebay.models.catalogue import cache_dir

logger = logging.getLogger(__name__)

SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.cpp", "linear.cpp", "prefill.cpp"))
FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
    "-shared",
    "-fPIC",
)

#: arguments and result of the functions that are not called through `ops.Kernel`, whose one argument is an address
SIGNATURES: dict[str, tuple[tuple[type, ...], type | None]] = {
    "eb_linear_supported": ((), ctypes.c_int),
    "eb_replay": ((ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64), None),
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The loaded kernels, built if need be; None where this machine cannot build them."""
    compiler = _compiler()
    if sys.platform != "linux" or compiler is None:
        named = os.environ.get("CXX")
        logger.warning(
            "no C++ compiler%s: CPU kernels run as their slower torch twins; %s to build them",
            f" (CXX={named} is not found)" if named else "",
            "correct or unset CXX" if named else "install g++",
        )
        return None
    try:
        found = _loaded(compiler)
    except (OSError, subprocess.CalledProcessError) as error:
        said = error.stderr.decode(errors="replace")[-500:] if isinstance(error, subprocess.CalledProcessError) else ""
        logger.warning(
            "the CPU kernels could not be built with %s in %s, so their slower torch twins run: %s",
            " ".join(compiler),
            cache_dir() / "kernels",
            said or error,
        )
        return None
    for name, (arguments, result) in SIGNATURES.items():
        function = getattr(found, name)
        function.argtypes, function.restype = arguments, result
    return found


def _compiler() -> tuple[str, ...] | None:
    """The compiler and its first arguments: what CXX says and nothing else where it is set, else c++ or g++."""
    if words := shlex.split(os.environ.get("CXX", "")):
        found = shutil.which(words[0])
        return (found, *words[1:]) if found else None
    found = shutil.which("c++") or shutil.which("g++")
    return (found,) if found else None


def _loaded(compiler: tuple[str, ...]) -> ctypes.CDLL:
    """The kernels, loaded; a damaged file in the cache is built anew, once."""
    target = _built(compiler)
    try:
        return ctypes.CDLL(str(target))
    except OSError:
        target.unlink()
        return ctypes.CDLL(str(_built(compiler)))


def _built(compiler: tuple[str, ...]) -> Path:
    """The shared object for this source, compiler and processor; written atomically, so processes may race."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=True).stdout
    key = hashlib.sha256(
        b"\0".join((*(s.read_bytes() for s in SOURCES), " ".join(FLAGS).encode(), version, _processor()))
    ).hexdigest()
    target = cache_dir() / "kernels" / f"cpu-{key[:16]}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as work:
            built = Path(work) / target.name
            subprocess.run([*compiler, *FLAGS, *map(str, SOURCES), "-o", str(built)], capture_output=True, check=True)
            built.replace(target)
    return target


def _processor() -> bytes:
    """What ``-march=native`` depends on: a cache shared by unlike machines must not mix their code."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor().encode()
    return b"".join(line for line in cpuinfo.read_bytes().split(b"\n") if line.startswith((b"flags", b"model name")))[
        :4096
    ]
