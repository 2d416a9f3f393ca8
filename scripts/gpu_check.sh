#!/usr/bin/env bash
# Checks on one GPU, in at most 8 minutes, what the test-suite can only check on CPU.
#
#   scripts/gpu_check.sh            all steps; the first failing one ends it with its exit code
#   scripts/gpu_check.sh --help     this text
#
# Steps: 1 kernels that pack, unpack and add, beside the bandwidth of a plain copy; 2 a move at world size 1 over NCCL;
# 3 moves and folds of four ranks that share the GPU; 4 prefetch on a side stream beside a matrix product; 5 the tests
# marked gpu. Without a CUDA device it says so and ends with 0: nothing was checked.
# PYTHON: the interpreter, one that has torch for CUDA (default: .venv's).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case ${1:-} in
    -h | --help)
        sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit
        ;;
    '') ;;
    *)
        printf 'gpu_check: %s: no such option; see --help\n' "$1" >&2
        exit 2
        ;;
esac

python=${PYTHON:-${HOTSPA_VENV:-.venv}/bin/python}
if ! "$python" -c 'import torch' 2>/dev/null; then
    printf 'gpu_check: %s has no torch; run scripts/setup.sh, or name an interpreter in PYTHON\n' "$python" >&2
    exit 2
fi
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    printf 'gpu_check: no CUDA device is visible: nothing was checked\n'
    exit 0
fi

deadline=$((SECONDS + 470))
# step NAME CMD...: runs CMD within what is left of the time.
step() {
    local left=$((deadline - SECONDS))
    printf '\n== %s (%s s left)\n' "$1" "$left"
    shift
    if ((left <= 0)); then
        printf 'gpu_check: no time left\n' >&2
        exit 124
    fi
    timeout --kill-after=5 "$left" "$@"
}

step 'moves and folds' "$python" scripts/gpu_check.py
# Here: step 'profile' hotspa profile ..., once it is wanted in this run.
step 'tests marked gpu' "$python" -m pytest -q -m gpu -p no:cacheprovider tests/test_transport.py
printf '\ngpu_check: all steps passed\n'
