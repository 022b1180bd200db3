#!/usr/bin/env bash
# Runs the numeric tests as other CPUs compute them: older instruction sets, more threads.
# portable.sh all: every test under every setting; portable.sh few: what every change must pass,
# each file under one of two settings, and without the tests that must fail on broken versions.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
which=${1:-all}
shift $(($# > 0))
tests=(tests/contributions tests/ranks tests/methods tests/moments tests/posteriors tests/attacks tests/extending
  tests/sources
  tests/test_audit.py tests/test_scattering.py tests/test_audit_methods.py tests/test_privacy_bugs.py
  tests/test_captured.py tests/test_likelihoods.py tests/test_count_predictive.py tests/privacy/test_{bayesian,chacha,gate,langevin,noise,sampling,team}.py)
oldest="ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41"
avx2="ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX2 ONEDNN_MAX_CPU_ISA=AVX2"
case $which in
  few) parts=2; less=(-k "not fails_on_the_broken_version"); settings=("OMP_NUM_THREADS=1 $oldest" "OMP_NUM_THREADS=2 $avx2") ;;
  all)
    parts=1; less=(); settings=()
    for one in $oldest $avx2 "$oldest" "$avx2"; do settings+=("OMP_NUM_THREADS=1 $one"); done
    for threads in 1 2 4; do settings+=("OMP_NUM_THREADS=$threads"); done
    ;;
  *) echo "$which: give 'all' or 'few'" >&2; exit 2 ;;
esac
best=$("$python" -c 'import torch; print(torch.backends.cpu.get_cpu_capability())')
mapfile -t files < <(find "${tests[@]}" -name 'test_*.py' | sort)
failed=() part=0
for setting in "${settings[@]}"; do
  own=()
  for ((i = part++ % parts; i < ${#files[@]}; i += parts)); do own+=("${files[i]}"); done
  if [[ $setting == *ATEN_CPU_CAPABILITY=avx2* && $best != AVX2 && $best != AVX512 ]]; then
    echo "== left out, since this CPU is $best: $setting"
    continue
  fi
  echo "== $setting"
  # Threads that wait passively do not take the cores from each other.
  env OMP_WAIT_POLICY=passive $setting "$python" -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not once" "${less[@]}" "${own[@]}" "$@" || failed+=("$setting")
done
if ((${#failed[@]})); then
  printf '== failed: %s\n' "${failed[@]}"
  exit 1
fi
echo "== passed under all settings above"
