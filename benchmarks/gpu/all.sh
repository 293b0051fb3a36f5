#!/usr/bin/env bash
# Everything of this project that wants a GPU: first what is right, then the figures with an aim, then the other shapes.
#
#   benchmarks/gpu/all.sh OUT [right|suites|figures|sweep ...]
#
# Rows go to the terminal and to files in OUT as they are known, so a run that is cut short leaves what it has. A step that
# fails or exceeds its share of time is named in OUT/steps.txt, and the rest goes on; the exit status counts them. MODEL
# (default: KIT_MODEL, else the packaged model) is what whole engines run; FLASHINFER_VARIANTS (2) how many of FlashInfer's
# kernels are checked.
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
: > "$out/steps.txt"
cd "$root"

# step SECONDS COMMAND...: run it, say how it went
step() {
  local seconds=$1 started=$SECONDS status
  shift
  timeout "$seconds" "$@" 2>&1 | cut -c1-700
  status=${PIPESTATUS[0]}
  echo "== status $status, $((SECONDS - started)) s: ${*:1:9}" | tee -a "$out/steps.txt"
}

right() {
  step 160 "$python" $gpu/attention.py --out "$out" --only checks --flashinfer-variants "$variants" --processes 14 --check-seconds 130
  step 100 "$python" $gpu/attention.py --out "$out" --only shared_caches --flashinfer-variants "$variants"
  step 200 "$python" $gpu/proof.py --model "$model" --out "$out" --only check_tokens
  suites
}

# Every test that wants a GPU. Those that measure its memory have it to themselves; the others, and the conformance suite on
# each part that computes, run side by side, since none is timed.
suites() {
  local part
  step 120 "$python" -m pytest -q -m gpu tests/worker tests/loading -p no:cacheprovider
  export OMP_NUM_THREADS=2
  for part in attention:{torch,triton,flashinfer,flash_attention} executor:uniproc quant:gguf \
    model:{LlamaForCausalLM,Qwen2ForCausalLM,Qwen3ForCausalLM,MistralForCausalLM,Gemma3ForCausalLM}; do
    step 400 "$python" -m enginebay conformance run "$part" --device cuda --report json --out "$out" &> "$out/suite-$part.txt" &
  done
  for part in no_repeat_ngram top_n_sigma; do
    step 400 "$python" -m enginebay conformance run sampler:$part --local examples/$part.py --device cuda --report json \
      --out "$out" &> "$out/suite-sampler:$part.txt" &
  done
  for part in attention sampler; do
    step 400 "$python" -m pytest -q -m gpu tests/conformance -k "$part" -p no:cacheprovider &> "$out/mutants-$part.txt" &
  done
  step 400 "$python" -m pytest -q -m gpu tests/plugins/attention -k "not 8b" -p no:cacheprovider &> "$out/tests-attention.txt" &
  wait
  unset OMP_NUM_THREADS
  tail -n 6 "$out"/suite-*.txt "$out"/mutants-*.txt "$out"/tests-*.txt
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
    right | suites | figures | sweep) "$stage" ;;
    *) echo "all.sh: unknown stage $stage; there are right, its last part suites, figures and sweep" >&2; exit 2 ;;
  esac
done
exit "$(grep -vc "^== status 0," "$out/steps.txt")"
