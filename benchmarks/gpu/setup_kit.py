"""Unpack parts of the GPU kit on a machine without a registry, and say what came of it.

    python3 benchmarks/gpu/setup_kit.py .kit/part1
    . ~/enginebay-kit/env.sh

Run it with the parts at hand, from any folder; the others may follow later, in any order. Packages go to ``packages`` in
the kit's folder, a model to ``models``; what was cut into chunks waits in ``chunks`` until the last has come. enginebay
itself runs from this tree: its source roots are put on PYTHONPATH and its entry points, read from pyproject.toml, into a
metadata folder, so nothing has to be built. A machine that can reach a registry needs none of this:
``pip install 'enginebay[flashinfer,flash-attn]'``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def unpack(part: Path, kit: Path) -> None:
    """Install what a part holds whole, and keep its chunks."""
    if wheels := sorted((part / "wheels").glob("*.whl")):
        install(wheels, kit / "packages" / "wheels")
    for archive in part.glob("*.tar.xz"):
        install([archive], kit / "packages" / archive.name.removesuffix(".tar.xz"))
    if (part / "arch").exists():
        shutil.copy(part / "arch", kit / "arch")
    if (part / "chunks").exists():
        shutil.copytree(part / "chunks", kit / "chunks", dirs_exist_ok=True)


def install(files: list[Path], to: Path, digest: str = "") -> None:
    """Unpack wheels or archives into a folder of their own, unless it was made of the same content."""
    marker = to / ".made_of"
    if not digest:
        content = hashlib.sha256()
        for path in files:
            content.update(path.read_bytes())
        digest = content.hexdigest()
    if marker.exists() and marker.read_text() == digest:
        return
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    for path in files:
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as wheel:
                wheel.extractall(to)
        elif shutil.which("xz"):  # several threads
            tar = ["tar", "--no-same-owner", "-C", str(to), "-xJf", str(path)]
            subprocess.run(tar, check=True, env={**os.environ, "XZ_DEFAULTS": "-T0"})
        else:
            with tarfile.open(path) as archive:
                archive.extractall(to, filter="data")
    marker.write_text(digest)


def join(kit: Path) -> None:
    """Put together every file whose chunks are all there: an archive is installed, anything else is a model."""
    for manifest in sorted((kit / "chunks").glob("*.manifest")):
        name = manifest.stem
        digest, count = manifest.read_text().split()
        chunks = sorted((kit / "chunks").glob(f"{name}.[0-9][0-9][0-9]"))
        is_archive = name.endswith(".tar.xz")
        installed = kit / "packages" / name.removesuffix(".tar.xz")
        marker = installed / ".made_of" if is_archive else kit / "models" / f"{name}.sha256"
        if not (marker.exists() and marker.read_text() == digest):
            if len(chunks) < int(count):
                print(f"{name}: {len(chunks)} of {count} chunks so far")
                continue
            whole = kit / "models" / name
            whole.parent.mkdir(exist_ok=True)
            if concatenate(chunks, whole) != digest:
                whole.unlink()
                raise SystemExit(
                    f"{name}: its chunks do not add up to its checksum; copy all parts of one packing again"
                )
            if is_archive:
                install([whole], installed, digest)
                whole.unlink()
            else:
                marker.write_text(digest)
        for chunk in chunks:
            chunk.unlink()


def concatenate(chunks: list[Path], to: Path) -> str:
    """Write the chunks one after the other; the checksum of the result."""
    digest = hashlib.sha256()
    with to.open("wb") as out:
        for chunk in chunks:
            data = chunk.read_bytes()
            digest.update(data)
            out.write(data)
    return digest.hexdigest()


def source_roots() -> list[Path]:
    """The folders that hold enginebay's importable packages, as the build lists them."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return [ROOT / s for s in config["tool"]["hatch"]["build"]["targets"]["wheel"]["sources"]]


def write_metadata(folder: Path) -> None:
    """A ``dist-info`` by which the tree's plugins are found; an older one is replaced."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    shutil.rmtree(folder, ignore_errors=True)
    info = folder / f"enginebay-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        f"Summary: {project['description']}\n"
    )
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines))
    (info / "RECORD").write_text("")


def write_env(kit: Path) -> Path:
    """The script that a shell reads before it runs the benchmarks."""
    libraries = kit / "lib"
    libraries.mkdir(parents=True, exist_ok=True)
    packages = [Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib"))]
    # Compiling links against these by their plain names, which a runtime-only install lacks.
    link(libraries / "libcuda.so", find_library("libcuda.so.1", packages))
    link(libraries / "libcudart.so", find_library("libcudart.so.13", packages))
    curand = next((h.parent for p in packages for h in (p / "nvidia").glob("**/curand_kernel.h")), None)
    ours = [kit / "metadata", *sorted((kit / "packages").glob("*"))]
    # Wheels of CUTLASS's Python put this folder on the path by a .pth file, which is read in site-packages only.
    ours += (kit / "packages").glob("*/nvidia_cutlass_dsl/dsl_packages")
    path = os.pathsep.join(map(str, [*source_roots(), *ours]))
    lines = [
        f'export PYTHONPATH="{path}${{PYTHONPATH:+:$PYTHONPATH}}"',
        f'export LIBRARY_PATH="{libraries}${{LIBRARY_PATH:+:$LIBRARY_PATH}}"',
        f'export FLASHINFER_WORKSPACE_BASE="{kit}"',
        "export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1",
    ]
    if (kit / "arch").exists():
        lines.append(f'export FLASHINFER_CUDA_ARCH_LIST="{(kit / "arch").read_text().strip()}"')
    if curand is not None:
        lines.append(f'export FLASHINFER_EXTRA_CUDAFLAGS="-I{curand}"')
    lines += [f'export KIT_MODEL="{model}"' for model in sorted((kit / "models").glob("*.gguf"))[:1]]
    env = kit / "env.sh"
    env.write_text("\n".join(lines) + "\n")
    return env


def find_library(name: str, packages: list[Path]) -> Path | None:
    """A shared library by its versioned name, from the linker's cache or from CUDA's wheels."""
    listed = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    for line in listed.splitlines():
        if line.split(" ")[0].strip() == name and " => " in line:
            return Path(line.rpartition(" => ")[2])
    return next((p for folder in packages for p in (folder / "nvidia").glob(f"**/{name}")), None)


def link(at: Path, target: Path | None) -> None:
    """A symbolic link, or none where there is nothing to point at."""
    at.unlink(missing_ok=True)
    if target is not None:
        at.symlink_to(target)


CHECK = """
import importlib.metadata as m, importlib.util, sys, torch
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
print("python", sys.version.split()[0], "| torch", torch.__version__, "| CUDA", torch.version.cuda, "|", gpu)
names = "triton transformers pydantic pydantic-core gguf pluggy pytest hypothesis apache-tvm-ffi flashinfer-python"
for name in [*names.split(), "flash-attn-4", "nvidia-cutlass-dsl", "einops", "cuda-bindings", "enginebay"]:
    try:
        print(f"  {name} {m.version(name)}")
    except m.PackageNotFoundError:
        print(f"  {name} is not here")
import enginebay
if found := importlib.util.find_spec("flashinfer"):
    from pathlib import Path
    built = list((Path(found.origin).parent / "data" / "aot").glob("*/*.so"))
    print("  compiled ahead:", len(built), "FlashInfer modules")
for group in ("attention", "executor", "model", "quant", "scheduler"):
    points = m.entry_points(group=f"enginebay.{group}")
    print(f"  enginebay.{group}:", ", ".join(sorted(p.name for p in points)))
    for point in points:
        try:
            point.load()
        except ImportError as error:
            print(f"    {point.name} cannot be loaded: {error}")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", type=Path)
    parser.add_argument("--to", type=Path, default=Path.home() / "enginebay-kit", help="default: ~/enginebay-kit")
    args = parser.parse_args()
    kit: Path = args.to.resolve()
    kit.mkdir(parents=True, exist_ok=True)
    for part in args.parts:
        if not part.is_dir():
            parser.error(f"{part} is not a folder of the kit; make one with benchmarks/gpu/pack.sh")
        unpack(part, kit)
    join(kit)
    write_metadata(kit / "metadata")
    env = write_env(kit)
    for model in sorted((kit / "models").glob("*.gguf")):
        print(f"model {model} ({model.stat().st_size:,} bytes)")
    shell = f'. "{env}" && exec "{sys.executable}" -c "$0"'
    subprocess.run(["bash", "-c", shell, CHECK], check=True)
    print(f"ready: . {env}")


if __name__ == "__main__":
    main()
