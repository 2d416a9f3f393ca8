#!/usr/bin/env bash
# Sets up .venv, checks style and types, runs the tests. The last line is pytest's summary.
#
#   scripts/test.sh                        all but the tests marked long
#   scripts/test.sh --all                  those too, and then scripts/test_versions.sh: other releases of Megatron
#   scripts/test.sh tests/test_x.py -k y   further arguments go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

marks=(-m "not long") others=no
case ${1:-} in
    -h | --help)
        sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit
        ;;
    --all)
        marks=() others=yes
        shift
        ;;
esac

bash scripts/setup.sh
python=${HOTSPA_VENV:-.venv}/bin/python

# One thread per rank, as the ranks of a test share the cores; the other two are what Megatron needs on CPU.
export OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 CUDA_DEVICE_MAX_CONNECTIONS=1

"$python" -m ruff check .
"$python" -m mypy
if [[ $others == no ]]; then
    exec "$python" -m pytest "${marks[@]}" "$@"
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$python" -m pytest "$@" | tee "$log"
# Without what chose tests of this run: other releases have their own.
bash scripts/test_versions.sh
tail -n 1 "$log"
