#!/usr/bin/env bash
# Build the GPU kit: what the benchmarks need on a machine that has PyTorch, nvcc and a GPU but reaches no registry.
#
#   benchmarks/gpu/pack.sh [--out DIR] [--gguf FILE] [--no-prebuild] [--conformance]
#
# Packages come through pip as the user has it configured. The kit is split into DIR/part1, DIR/part2, ... of at most
# PART_MIB each. Everything in between is kept in WORK; run again, only what is missing is fetched or compiled.
# With nvcc on the path FlashInfer's modules are compiled ahead; without, the GPU machine compiles them when first used.
# --conformance also compiles what the core level of its conformance suite takes.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
out=$root/.kit
gguf=
prebuild=yes
modules=()
work=${WORK:-$root/.cache/gpu-kit}
part_mib=${PART_MIB:-60}
# the target
python_version=${PYTHON_VERSION:-3.12}
arch=${ARCH:-9.0a}
# an interpreter with torch (any build), for compiling ahead
python=${PYTHON:-$root/.venv/bin/python}
flashinfer=flashinfer-python==${FLASHINFER_VERSION:-0.7.4}
flash_attention=(flash-attn-4==4.0.0b36 quack-kernels==0.6.5 torch-c-dlpack-ext==0.1.5 nvidia-cutlass-dsl==4.8.1
                 nvidia-cutlass-dsl-libs-{base,core,cu13}==4.8.1)
tvm_ffi=apache-tvm-ffi==0.1.15.post2
head_dims=${HEAD_DIMS:-128 64}

while (($#)); do
  case $1 in
    --out) out=$2; shift 2 ;;
    --gguf) gguf=$2; shift 2 ;;
    --no-prebuild) prebuild=no; shift ;;
    --conformance) modules=(--conformance); shift ;;
    *) echo "pack.sh: unknown argument $1" >&2; exit 2 ;;
  esac
done
mkdir -p "$work/aot"

# --- wheels that a PyTorch image tends to lack ------------------------------------------------------------------------
# fetch DIR REQUIREMENT...: the target's wheels, unless DIR holds these very ones
fetch() {
  local to=$1 platforms=() p
  shift
  [[ -e $to/done && $(cat "$to/done") == "$*" ]] && return
  rm -rf "$to"
  for p in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux1; do
    platforms+=(--platform "${p}_x86_64")
  done
  "$python" -m pip download -q --no-deps --only-binary=:all: --implementation cp --python-version "$python_version" \
    "${platforms[@]}" -d "$to" "$@"
  echo "$*" > "$to/done"
}
fetch "$work/wheels" pydantic==2.14.4 pydantic-core==2.50.5 annotated-types==0.8.0 typing-inspection==0.4.5 \
  typing-extensions==4.16.0 gguf==0.19.0 "$tvm_ffi"

# --- FlashAttention-4, without what only other devices, profilers and other releases of torch need ---------------------
packed=$work/flash_attention.tar.xz
if [[ ! -e $packed || $(cat "$work/flash_attention.packed") != "${flash_attention[*]}" ]]; then
  fetch "$work/flash_attention_wheels" "${flash_attention[@]}"
  rm -rf "$work/flash_attention"
  for wheel in "$work"/flash_attention_wheels/*.whl; do
    "$python" -m zipfile -e "$wheel" "$work/flash_attention"
  done
  (cd "$work/flash_attention" && rm -rf nvidia_cutlass_dsl/dsl_packages/iket nvidia_cutlass_dsl/cu13/{include,lib/stubs} \
    nvidia_cutlass_dsl/cu13/lib/*.a torch_c_dlpack_ext/*.so)
  # Blocks let several threads unpack it.
  tar -C "$work/flash_attention" --sort=name --owner=0 --group=0 --mtime=@0 -cf - . |
    xz -T0 --block-size=64MiB --x86 --lzma2=preset=9 > "$packed.tmp"
  mv "$packed.tmp" "$packed"
  echo "${flash_attention[*]}" > "$work/flash_attention.packed"
fi

# --- FlashInfer: its Python, and the sources that attention is compiled from ------------------------------------------
if [[ ! -d $work/flashinfer/flashinfer ]]; then
  "$python" -m pip download -q --no-deps -d "$work/dist" "$flashinfer"
  "$python" -m zipfile -e "$work"/dist/flashinfer_python-*.whl "$work/flashinfer.tmp"
  # Nearly every Python file stays, since the package imports widely; of the sources, attention's and what they include.
  rm -rf "$work"/flashinfer.tmp/flashinfer/{experimental/b12x,experimental/qwen_3_5_block,moe_ep}
  find "$work/flashinfer.tmp/flashinfer" -path '*/flashinfer/data' -prune -o \
    -type f ! -name '*.py' ! -name '*.json' ! -name 'py.typed' -print0 | xargs -0 rm -f
  find "$work/flashinfer.tmp/flashinfer/data/csrc" -mindepth 1 -maxdepth 1 -type d -print0 | xargs -0 rm -rf
  rm -rf "$work/flashinfer" && mv "$work/flashinfer.tmp" "$work/flashinfer"
fi

# --- modules compiled ahead -------------------------------------------------------------------------------------------
if [[ $prebuild == yes ]] && command -v nvcc > /dev/null; then
  if [[ ! -e $work/build/done ]]; then
    # what importing FlashInfer takes beside torch, for this interpreter; curand's headers, which the toolkit may lack
    "$python" -m pip install -q --no-deps --target "$work/build" "$tvm_ffi" ninja nvidia-ml-py einops tabulate \
      "nvidia-curand<11"
    mkdir -p "$work/build/lib"
    # linking wants the driver's library by name; it is looked up for real only on the GPU machine
    cc -shared -fPIC -Wl,-soname,libcuda.so.1 -x c /dev/null -o "$work/build/lib/libcuda.so"
    touch "$work/build/done"
  fi
  [[ -z ${CUDA_HOME:-} && -x /usr/local/cuda/bin/nvcc ]] && export CUDA_HOME=/usr/local/cuda
  curand=$(dirname "$(find "$work/build" -name curand_kernel.h | head -1)")
  env FLASHINFER_CUDA_ARCH_LIST="$arch" FLASHINFER_WORKSPACE_BASE="$work" \
    FLASHINFER_EXTRA_CUDAFLAGS="-I$curand" FLASHINFER_EXTRA_LDFLAGS="-L$work/build/lib" \
    PATH="$work/build/bin:$PATH" PYTHONPATH="$work/flashinfer:$work/build" \
    "$python" "$root/benchmarks/gpu/prebuild.py" --out "$work/aot" --head-dims $head_dims "${modules[@]}"
fi

# --- parts ------------------------------------------------------------------------------------------------------------
rm -rf "$out"
mkdir -p "$out/part1/wheels" "$work/flashinfer/flashinfer/data/aot"
cp "$work"/wheels/*.whl "$out/part1/wheels/"
cp -r "$work/aot/." "$work/flashinfer/flashinfer/data/aot/"
tar -C "$work/flashinfer" --sort=name --owner=0 --group=0 --mtime=@0 -cf - . | xz -6 -T0 > "$out/part1/flashinfer.tar.xz"
echo "$arch" > "$out/part1/arch"

# spread FILE: chunks of it fill what is left of each part; its manifest (checksum, number of chunks) lies beside each
spread() {
  local file=$1 name size offset=0 number=1 count=0 room part
  name=$(basename "$file") size=$(stat -c %s "$file")
  while ((offset < size)); do
    part=$out/part$number/chunks
    mkdir -p "$part"
    room=$((part_mib * 1024 * 1024 - $(du -sb "$out/part$number" | cut -f1) - 4096))
    if ((room > 0)); then
      tail -c +$((offset + 1)) "$file" | head -c "$room" > "$part/$(printf '%s.%03d' "$name" "$number")" || true
      offset=$((offset + room)) count=$((count + 1))
    fi
    number=$((number + 1))
  done
  for part in "$out"/part*/chunks; do
    if compgen -G "$part/$name.[0-9]*" > /dev/null; then
      echo "$(sha256sum < "$file" | cut -d' ' -f1) $count" > "$part/$name.manifest"
    fi
  done
}
spread "$packed"
[[ -z $gguf ]] || spread "$gguf"
du -sh --apparent-size "$out"/part*
