#!/usr/bin/env bash
# On a machine with a GPU: the tests that need one, then the figures of benchmarks/README.md, in ten minutes in all.
# Every part writes to the folder as it goes, so that what is done counts if the time runs out: gpu_check.sh [folder]
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
out=${1:-gpu-check}
end=$((SECONDS + 590))
failed=()
mkdir -p "$out"

part() { # name, most seconds, command: runs it for as long as there is time
  local name=$1 most=$2 left=$((end - SECONDS))
  shift 2
  ((left > 5)) || { echo "== $name: no time left"; failed+=("$name"); return; }
  echo "== $name, at most $((left < most ? left : most)) s"
  timeout "$((left < most ? left : most))" "$@" 2>&1 | tee "$out/$name.txt" || failed+=("$name")
}

"$python" - <<'PY' | tee "$out/machine.txt" || { echo "no GPU that torch can use" >&2; exit 2; }
import importlib.util, sys, torch
if not torch.cuda.is_available():
    sys.exit(1)
triton = importlib.util.find_spec("triton") is not None
print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton" if triton else "NO TRITON")
PY
part tests 240 "$python" -m pytest -q tests/privacy/test_{kernels,chacha,writes}.py \
  tests/contributions/test_{gpu,captured_rules}.py tests/test_captured.py --deselect \
  tests/test_captured.py::test_many_steps_leave_the_memory_as_it_was
for model in vit mlp cnn encoder; do
  part "$model" 90 "$python" -u -m benchmarks.gpu --models "$model" --rounds 1 --epochs 5
done
part ranks 170 "$python" -m pytest -q tests/ranks/test_gpu_ranks.py
part memory 60 "$python" -m pytest -q tests/test_captured.py -k many_steps
if ((${#failed[@]})); then
  printf '== failed, or out of time: %s\n' "${failed[@]}"
  exit 1
fi
echo "== all done, in $out"
