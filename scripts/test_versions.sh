#!/usr/bin/env bash
# Runs the tests that touch Megatron against other supported releases of megatron-core, each in an environment of its own.
#
#   scripts/test_versions.sh                  the supported releases that scripts/test.sh does not run
#   scripts/test_versions.sh 0.18.2           these releases
#   scripts/test_versions.sh 0.18.2 -- -k x   what follows -- goes to pytest
#   scripts/test_versions.sh --list           the files of tests that are run; nothing is made or started
#
# An environment is made at .venv-RELEASE on first use and kept. MEGATRON_LM_PATH, where set, names a checkout of
# Megatron-LM whose own pretrain_gpt.py is tried too, in the environment of the same release. The last line says how each
# release ended; exit code 1 where one failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# All files of tests are run but these. First those that know nothing of Megatron, as a test of this script holds.
without_megatron=(cases command config cost_model counters data_command executor hardware launch_scripts lengths load_balance
    memory_model mutants packing profile report reshard_plan resharding_alone sample_order search simulate slurm_ranks spawn
    step_plan supply topology transport watchdog)
# Then those that do, to which one release is as good as another.
any_release=(
    docs         # what the pages say of commands and of our own code
    fuzz         # what is in files and on command lines, which Megatron does not see
    images       # an image has a release of its own
    plan_command # flags as our own commands read them
    scripts      # the demo, of which the training is in the other files
    soak         # all of it is long
    megatron_lm  # where there is a checkout: below
)
# Single tests of the others, which ask for what a release does not have; each by its name, or the start of it.
beyond() {
    # Megatron's planner that runs by itself, and the example's script, are of 0.19; before, a full disk is told in torch's words.
    [[ $1 != 0.1[78].* ]] ||
        printf 'tests/test_%s\n' bench.py::test_megatrons_planner_crosses_the_network bench.py::test_no_rank_receives_more_than \
            bench_step.py::test_all_train_alike faults.py::test_a_full_disk_ends_all_ranks
    # The vocabulary is padded once the tokenizer is there, whose stand-in has no token for padding.
    [[ $1 != 0.17.* ]] ||
        printf 'tests/test_%s\n' gpu.py::test_every_command_line_is_what invariance.py::test_the_gradient_of_a_step
}
suite=()
for file in tests/test_*.py; do
    name=${file#tests/test_}
    [[ " ${without_megatron[*]} ${any_release[*]} " == *" ${name%.py} "* ]] || suite+=("$file")
done
releases=()
while (($#)); do
    case $1 in
        -h | --help)
            sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
            exit
            ;;
        --list)
            printf '%s\n' "${suite[@]}"
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
checkout=''
if [[ -n ${MEGATRON_LM_PATH:-} ]]; then
    info=$MEGATRON_LM_PATH/megatron/core/package_info.py
    [[ ! -r $info ]] || checkout=$(sed -n 's/^\(MAJOR\|MINOR\) = \([0-9]*\).*/\2/p' "$info" | paste -sd .)
    [[ -n $checkout && " ${releases[*]}" == *" $checkout."* ]] ||
        printf "test_versions: MEGATRON_LM_PATH=%s is %s, and none of the releases that are run (%s): its pretrain_gpt.py is not tried\n" \
            "$MEGATRON_LM_PATH" "${checkout:-no checkout of Megatron-LM}" "${releases[*]}"
fi
for release in "${releases[@]}"; do
    HOTSPA_MEGATRON=$release HOTSPA_VENV=$PWD/.venv-$release bash scripts/setup.sh
done

logs=$(mktemp -d) running=() failed=0
# What has ended by itself cannot be ended, and is no failure.
trap 'kill "${running[@]}" 2> /dev/null || true; rm -rf "$logs"' EXIT
# Before anything looks for them.
for release in "${releases[@]}"; do
    : > "$logs/$release"
done
# Side by side: much of such a test is ranks that wait for each other.
for release in "${releases[@]}"; do
    tests=("${suite[@]}")
    for each in $(beyond "$release"); do
        tests+=("--deselect=$each")
    done
    [[ $checkout != "${release%.*}" ]] || tests+=(tests/test_megatron_lm.py)
    ".venv-$release/bin/python" -m pytest -m "not long" "${tests[@]}" "$@" >> "$logs/$release" 2>&1 &
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
