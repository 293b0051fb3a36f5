"""Unpack parts of the GPU kit on a machine without a registry, and say what came of it.

    python3 benchmarks/gpu/setup_kit.py .kit/part1
    . ~/enginebay-kit/env.sh

Run it with the parts at hand, from any folder; the others may follow later, in any order. Packages go to ``site`` in
the kit's folder, a model whose chunks are all there to ``models``. enginebay itself runs from this tree: its source
roots are put on PYTHONPATH and its entry points, read from pyproject.toml, into a metadata folder, so nothing has to be
built. A machine that can reach a registry needs none of this: ``pip install 'enginebay[flashinfer]'``.
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
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def unpack(part: Path, kit: Path) -> None:
    """Install what a part holds, once."""
    site = kit / "site"
    wheels = sorted((part / "wheels").glob("*.whl"))
    archive = part / "flashinfer.tar.xz"
    digest = hashlib.sha256()
    for path in [*wheels, *([archive] if archive.exists() else [])]:
        digest.update(path.read_bytes())
    marker = kit / "installed" / digest.hexdigest()
    if (wheels or archive.exists()) and not marker.exists():
        shutil.rmtree(site, ignore_errors=True)
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-index",
            "--no-deps",
            "--no-compile",
            "--no-cache-dir",
        ]
        subprocess.run([*pip, "--target", str(site), *map(str, wheels)], check=True)
        if archive.exists():
            with tarfile.open(archive) as tar:
                tar.extractall(site, filter="data")
        if (part / "arch").exists():
            shutil.copy(part / "arch", kit / "arch")
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    models = kit / "models"
    models.mkdir(exist_ok=True)
    for path in sorted((part / "model").glob("*")):
        if not (models / path.stem).exists():  # the whole file, from an earlier run
            shutil.copy(path, models)


def join_models(models: Path) -> list[Path]:
    """Put together every model whose chunks add up to its checksum."""
    for sums in sorted(models.glob("*.sha256")):
        wanted, name = sums.read_text().split()
        target = models / name
        chunks = sorted(models.glob(f"{name}.[0-9][0-9][0-9]"))
        if target.exists() or not chunks:
            continue
        digest = hashlib.sha256()
        with target.open("wb") as out:
            for chunk in chunks:
                data = chunk.read_bytes()
                digest.update(data)
                out.write(data)
        if digest.hexdigest() == wanted:
            for chunk in chunks:
                chunk.unlink()
        else:
            target.unlink()
            print(f"{name}: {len(chunks)} chunk(s) so far, not the whole file yet")
    return sorted(models / s.stem for s in models.glob("*.sha256") if (models / s.stem).exists())


def source_roots() -> list[Path]:
    """The folders that hold enginebay's importable packages, as the build lists them."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return [ROOT / s for s in config["tool"]["hatch"]["build"]["targets"]["wheel"]["sources"]]


def write_metadata(site: Path) -> None:
    """A ``dist-info`` by which the tree's plugins are found; an older one is replaced."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for old in site.glob("enginebay-*.dist-info"):
        shutil.rmtree(old)
    info = site / f"enginebay-{project['version']}.dist-info"
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


def write_env(kit: Path, models: list[Path]) -> Path:
    """The script that a shell reads before it runs the benchmarks."""
    libraries = kit / "lib"
    libraries.mkdir(parents=True, exist_ok=True)
    packages = [Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib"))]
    # Compiling links against these by their plain names, which a runtime-only install lacks.
    link(libraries / "libcuda.so", find_library("libcuda.so.1", packages))
    link(libraries / "libcudart.so", find_library("libcudart.so.13", packages))
    curand = next((h.parent for p in packages for h in (p / "nvidia").glob("**/curand_kernel.h")), None)
    path = os.pathsep.join(map(str, [*source_roots(), kit / "site"]))
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
    if models:
        lines.append(f'export KIT_MODEL="{models[0]}"')
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
import importlib.metadata as m, sys, torch
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
print("python", sys.version.split()[0], "| torch", torch.__version__, "| CUDA", torch.version.cuda, "|", gpu)
names = "triton transformers pydantic pydantic-core gguf apache-tvm-ffi flashinfer-python enginebay"
for name in names.split():
    print(f"  {name} {m.version(name)}")
import enginebay, gguf, flashinfer
from flashinfer.jit import env
built = sorted(p.stem for p in env.FLASHINFER_AOT_DIR.glob("*/*.so"))
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
    models = join_models(kit / "models")
    write_metadata(kit / "site")
    env = write_env(kit, models)
    for model in models:
        print(f"model {model} ({model.stat().st_size:,} bytes, checksum right)")
    shell = f'. "{env}" && exec "{sys.executable}" -c "$0"'
    subprocess.run(["bash", "-c", shell, CHECK], check=True)
    print(f"ready: . {env}")


if __name__ == "__main__":
    main()
