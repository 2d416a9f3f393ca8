#!/usr/bin/env bash
# Checks on one GPU, in at most 8 minutes, what the test-suite can only check on CPU.
#
#   scripts/gpu_check.sh            all steps; the first failing one ends it with its exit code
#   scripts/gpu_check.sh --help     this text
#
# Steps: 1 kernels that pack, unpack and add, beside the bandwidth of a plain copy; 2 a move at world size 1 over NCCL;
# 3 moves and folds of four ranks that share the GPU; 4 prefetch on a side stream beside a matrix product; 5 `hotspa
# profile` of one rank, and whether plans can read it; 6 the tests marked gpu, trainings last: what this machine lacks for
# one is said where it is skipped, and the tests that the time did not reach are named at the end (exit code 124). Without
# a CUDA device it says so and ends with 0: nothing was checked.
# PYTHON: the interpreter, one that has torch for CUDA (default: .venv's); trainings need Megatron, too.
# LIMIT: seconds for all steps (430); what runs then is interrupted, and has 45 more to end.
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

deadline=$((SECONDS + ${LIMIT:-430}))
# step NAME CMD...: runs CMD within what is left of the time.
step() {
    local left=$((deadline - SECONDS))
    printf '\n== %s (%s s left)\n' "$1" "$left"
    shift
    if ((left <= 0)); then
        printf 'gpu_check: no time left\n' >&2
        exit 124
    fi
    # Interrupted as from a keyboard: a training that a test has started is ended with it.
    timeout --signal=INT --kill-after=45 "$left" "$@"
}

step 'moves and folds' "$python" scripts/gpu_check.py
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# What a profile lacks must not keep the tests from their run.
profiled=0
{
    step 'profile of one rank' "$python" -m hotspa_megatron.cli.main profile --ranks 1 --output "$folder/profile.yaml" &&
        step 'the profile, read as plans read it' "$python" -c \
            'import sys; from hotspa_megatron.planning.hardware import load_hardware; load_hardware(sys.argv[1])' \
            "$folder/profile.yaml"
} || profiled=$?

# Named, as pytest would sort them: the quick ones first.
tests=(tests/test_transport.py)
if "$python" -c 'import importlib.metadata; importlib.metadata.version("megatron-core")' 2>/dev/null; then
    mapfile -t -O 1 tests < <(grep -l 'mark\.gpu' tests/test_*.py | grep -vxF "${tests[0]}")
else
    printf '\ngpu_check: %s has no megatron-core: no trainings\n' "$python"
fi
marked=("$python" -m pytest -m gpu -p no:cacheprovider "${tests[@]}")
mapfile -t wanted < <("${marked[@]}" -q --collect-only | grep ::)
log=$folder/tests.log
code=0
step 'tests marked gpu' "${marked[@]}" -v | tee "$log" || code=$?
if ((code == 124 || code == 137)); then
    printf '\n'
    for test in "${wanted[@]}"; do
        grep -qF -e "$test PASSED" -e "$test SKIPPED" -e "$test FAILED" -e "$test ERROR" "$log" ||
            printf 'gpu_check: not reached: %s\n' "$test"
    done
fi
((code == 0)) || exit "$code"
((profiled == 0)) || { printf '\ngpu_check: the profile failed\n' >&2 && exit "$profiled"; }
printf '\ngpu_check: all steps passed\n'
