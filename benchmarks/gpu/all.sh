#!/usr/bin/env bash
# Everything of this project that wants a GPU: first what is right, then the figures with an aim, then the other shapes.
#
#   benchmarks/gpu/all.sh OUT [right|figures|sweep ...]
#
# Rows go to the terminal and to files in OUT as they are known, so a run that is cut short leaves what it has. A step that
# fails or exceeds its share of time is named, and the rest goes on; the exit status counts them. MODEL (default: KIT_MODEL,
# else the packaged model) is what whole engines run; FLASHINFER_VARIANTS (2) how many of FlashInfer's kernels are checked.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
out=${1:?an output folder}
shift
stages=("$@")
(($#)) || stages=(right figures sweep)
model=${MODEL:-${KIT_MODEL:-smollm2-135m-instruct}}
variants=${FLASHINFER_VARIANTS:-2}
python=${PYTHON:-python3}
gpu=$root/benchmarks/gpu
mkdir -p "$out"
cd "$root"
failed=0

# step SECONDS COMMAND...: run it, say how it went
step() {
  local seconds=$1 started=$SECONDS status
  shift
  timeout "$seconds" "$@" 2>&1 | cut -c1-700
  status=${PIPESTATUS[0]}
  ((status == 0)) || failed=$((failed + 1))
  echo "== status $status, $((SECONDS - started)) s: ${*:1:6}" | tee -a "$out/steps.txt"
}

right() {
  step 160 "$python" $gpu/attention.py --out "$out" --only checks --flashinfer-variants "$variants" --processes 14 --check-seconds 130
  step 100 "$python" $gpu/attention.py --out "$out" --only shared_caches --flashinfer-variants "$variants"
  step 200 "$python" $gpu/proof.py --model "$model" --out "$out" --only check_tokens
  step 90 "$python" -m pytest -q -m gpu tests/worker tests/loading tests/plugins/attention -k "not 8b" -p no:cacheprovider
  step 60 "$python" -m enginebay conformance run attention:triton --device cuda --report json --out "$out"
  step 60 "$python" -m pytest -q -m gpu tests/conformance -p no:cacheprovider
}

figures() {
  step 240 "$python" $gpu/attention.py --out "$out" --only speed --seconds 200
  step 60 "$python" $gpu/fused.py --out "$out" --seconds 50 --tokens 1 4096
}

sweep() {
  step 300 "$python" $gpu/attention.py --out "$out" --only sweep --seconds 260
  step 200 "$python" $gpu/proof.py --model "$model" --out "$out" --only check_graph
  step 200 "$python" $gpu/proof.py --model "$model" --out "$out" --only measure
}

for stage in "${stages[@]}"; do
  case $stage in
    right | figures | sweep) "$stage" ;;
    *) echo "all.sh: unknown stage $stage; there are right, figures and sweep" >&2; exit 2 ;;
  esac
done
exit "$failed"
