#!/usr/bin/env bash
# Runs the tests that touch Megatron against other supported releases of megatron-core, each in an environment of its own.
#
#   scripts/test_versions.sh                  the supported releases that scripts/test.sh does not run
#   scripts/test_versions.sh 0.18.2           these releases
#   scripts/test_versions.sh 0.18.2 -- -k x   what follows -- goes to pytest
#
# An environment is made at .venv-RELEASE on first use and kept. MEGATRON_LM_PATH, where set, names a checkout of
# Megatron-LM whose own pretrain_gpt.py is tried too, in the environment of the same release. The last line says how each
# release ended; exit code 1 where one failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

suite=(tests/test_launch.py tests/test_patches.py tests/test_training.py tests/test_steps.py tests/test_checkpoint.py
    tests/test_samples.py tests/test_gradients.py tests/test_switching.py tests/test_get_batch.py tests/test_compat.py
    tests/test_flags.py tests/test_step_report.py tests/test_recompute.py tests/test_conversations.py tests/test_resume.py
    tests/test_start_sample.py tests/test_agreement.py tests/test_guard.py tests/test_nonfinite.py tests/test_merging.py tests/test_auto.py
    tests/test_endings.py tests/test_data_faults.py tests/test_verify.py tests/test_vocabulary.py)
releases=()
while (($#)); do
    case $1 in
        -h | --help)
            sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
            exit
            ;;
        --)
            shift
            break
            ;;
        -*)
            printf 'test_versions: %s: no such option; options for pytest come after --\n' "$1" >&2
            exit 2
            ;;
        *) releases+=("$1") ;;
    esac
    shift
done
((${#releases[@]})) || releases=(0.17.1 0.18.2)

export OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 CUDA_DEVICE_MAX_CONNECTIONS=1
release_of_checkout() {
    local info=${MEGATRON_LM_PATH:-}/megatron/core/package_info.py
    [[ -f $info ]] && sed -n 's/^\(MAJOR\|MINOR\) = \([0-9]*\).*/\2/p' "$info" | paste -sd .
}
for release in "${releases[@]}"; do
    HOTSPA_MEGATRON=$release HOTSPA_VENV=$PWD/.venv-$release bash scripts/setup.sh
done

logs=$(mktemp -d) running=() failed=0
trap 'kill "${running[@]}" 2> /dev/null; rm -rf "$logs"' EXIT
# Side by side: much of such a test is ranks that wait for each other.
for release in "${releases[@]}"; do
    tests=("${suite[@]}")
    [[ $(release_of_checkout) == "${release%.*}" ]] && tests+=(tests/test_megatron_lm.py)
    ".venv-$release/bin/python" -m pytest -m "not long" "${tests[@]}" "$@" > "$logs/$release" 2>&1 &
    running+=("$!")
done
tail -n +1 -f "$logs"/* &
shown=$!
for each in "${running[@]}"; do
    wait "$each" || failed=1
done
sleep 1
running=("$shown")
for release in "${releases[@]}"; do
    printf 'megatron-core %s: %s\n' "$release" "$(tail -n 1 "$logs/$release" | tr -d =)"
done
exit "$failed"
