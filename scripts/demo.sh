#!/usr/bin/env bash
# Trains a small GPT on 4 CPU ranks twice, static and by length groups, and compares: losses equal, times, bytes moved.
# Writes demo_out/report.json. Exit code 0: the losses agree; 1: they do not; 2: a run failed. About 3 minutes on 2 cores.
#
#   scripts/demo.sh [--iterations N] [--batch N] [--out DIR] [--config FILE]
#   scripts/demo.sh --break fold      drops gradients on purpose; exits 1
set -euo pipefail
case " $* " in
    *' -h '* | *' --help '*)
        sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit
        ;;
esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

bash "$root/scripts/setup.sh"
python=${HOTSPA_VENV:-$root/.venv}/bin/python

# exec: Ctrl-C and kill reach the demo itself, which ends everything that it started.
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m examples.demo "$@"
