#!/usr/bin/env bash
# Makes the virtual environment .venv that tests, demo and examples run in. Does nothing when it is up to date.
#
#   scripts/setup.sh            make or remake .venv where needed
#   scripts/setup.sh --plan     print what .venv would be made from and stop: nothing is written
#
#   PYTHON=...                  the interpreter (default: the first Python 3.11 to 3.13 on PATH, python3 first)
#   HOTSPA_VENV=...             another place than .venv
#   HOTSPA_MEGATRON=...         another megatron-core release than the one that the tests know
#   HOTSPA_LOCKED=1             exactly the releases in requirements/, each file held against its hash; for CI and images
#
# A torch or megatron-core that the interpreter already has, as GPU images do, is used as it is. pip's own settings
# (PIP_INDEX_URL, PIP_CONSTRAINT, ...) are honoured. The plan is kept in the environment and written last: where it is
# missing (interrupted) or differs (new requirements, another Python, a moved checkout), .venv is made anew.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${HOTSPA_VENV:-$root/.venv}
stamp=$venv/hotspa-plan
ours=$venv/made-by-hotspa-setup
log=$venv-setup/setup.log
megatron_release=${HOTSPA_MEGATRON:-0.19.2}
locked=${HOTSPA_LOCKED:-}

fail() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

usage() {
    sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
}

# One tab-separated line about interpreter $1: kind (ok, old, new, ours), base interpreter, its prefix, version, the
# torch and megatron-core that it has ("-": none), and where those lie if $1 is itself a virtual environment.
describe() {
    "$1" - 2>/dev/null <<'PY'
import os, sys
kind = "old" if sys.version_info < (3, 11) else "new" if sys.version_info >= (3, 14) else "ok"
torch = megatron = site = "-"
if kind == "ok":
    import importlib.metadata, sysconfig
    def release(name):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return "-"
    torch, megatron = release("torch"), release("megatron-core")
    if os.path.exists(os.path.join(sys.prefix, "made-by-hotspa-setup")):
        kind = "ours"
    elif sys.prefix != sys.base_prefix and torch != "-":
        site = sysconfig.get_path("purelib")
base = getattr(sys, "_base_executable", None) or sys.executable
prefix = getattr(sys, "base_prefix", sys.prefix)
print("\t".join([kind, base, prefix, ".".join(map(str, sys.version_info[:3])), torch, megatron, site]))
PY
}

# Sets python, prefix, version, has_torch, has_megatron and site from the interpreter to use.
choose_python() {
    local candidates=(python3 python3.12 python3.13 python3.11) candidate line kind wrong=
    [[ -n ${PYTHON:-} ]] && candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        line=$(describe "$candidate") || continue
        IFS=$'\t' read -r kind python prefix version has_torch has_megatron site <<<"$line"
        if [[ $kind == ours ]]; then # .venv is active: what counts is what it was made with
            line=$(describe "$python") || continue
            IFS=$'\t' read -r kind python prefix version has_torch has_megatron site <<<"$line"
        fi
        [[ $kind == ok ]] && return
        wrong="$candidate is Python $version"
    done
    [[ -n $wrong ]] && fail "$wrong, and this needs 3.11, 3.12 or 3.13: set PYTHON=/path/to/python3.12"
    [[ -n ${PYTHON:-} ]] && fail "PYTHON=$PYTHON is no working Python interpreter"
    fail "no python3 on PATH: install Python 3.12, or set PYTHON=/path/to/python3.12"
}

# What setup.cfg asks for, for use and for the tests, without torch and megatron-core, which have steps of their own.
# packaging is megatron-core's own requirement; setuptools installs this package, and older ones need wheel beside them.
requirements() {
    "$python" - "$root/setup.cfg" <<'PY'
import configparser, re, sys
cfg = configparser.ConfigParser()
if not cfg.read(sys.argv[1], encoding="utf-8"):
    sys.exit(f"setup: no file {sys.argv[1]}")
text = cfg["options"]["install_requires"] + cfg["options.extras_require"]["dev"]
names = [line.strip() for line in text.splitlines() if line.strip()]
print(*[n for n in names if re.split(r"[^\w-]", n)[0] not in ("torch", "megatron-core")], "packaging", "setuptools>=70.1")
PY
}

# Megatron's wheels need Python 3.12. On 3.11 its source package works, which pip has to be told to take; torch 2.13 is
# what the tests know there.
make_plan() {
    torch="torch"
    megatron="megatron-core==$megatron_release"
    if [[ $version == 3.11.* ]]; then
        torch="torch==2.13.0"
        megatron="--ignore-requires-python --no-binary megatron-core $megatron"
    fi
    if [[ $has_torch != - ]]; then
        torch="of the interpreter: $has_torch"
        if [[ $has_megatron != - && -z ${HOTSPA_MEGATRON:-} ]]; then
            megatron="of the interpreter: $has_megatron"
        fi
    fi
    requires=$(requirements)
    plan=$(printf '%s\n' \
        "python $version $prefix" \
        "torch $torch" \
        "megatron $megatron" \
        "inherits $site" \
        "requires $requires" \
        "setup.cfg $(cksum <"$root/setup.cfg")" \
        "checkout $root")
    if [[ -n $locked ]]; then
        [[ -z ${HOTSPA_MEGATRON:-} ]] || fail "HOTSPA_LOCKED and HOTSPA_MEGATRON: only one release is locked; unset one"
        plan+=$(printf '\nlocked %s' "$(cat "$root"/requirements/{locked,torch,build,megatron}.txt | cksum)")
    fi
}

up_to_date() {
    [[ -f $stamp ]] || return 1
    local made
    made=$(<"$stamp")
    # What was made from locked releases serves those, too, who did not ask for them.
    [[ -n $locked ]] || made=${made%%$'\n'locked *}
    [[ $made == "$plan" ]] && "$venv/bin/python" -c '' 2>/dev/null
}

check_tools() {
    "$python" -c 'import venv' 2>/dev/null || fail "$python has no venv module: apt-get install python3-venv"
    if "$python" -c 'import ensurepip' 2>/dev/null; then
        pip=("$venv/bin/python" -m pip)
        venv_flags=()
    elif "$python" -m pip --version >/dev/null 2>&1; then # Debian and Ubuntu without python3-venv, most GPU images
        pip=("$python" -m pip --python "$venv/bin/python")
        venv_flags=(--without-pip)
    else
        fail "$python has neither ensurepip nor pip: apt-get install python3-venv"
    fi
    if [[ $has_torch != - && $site == - ]]; then
        venv_flags+=(--system-site-packages)
    fi
    if [[ -n $locked && $has_torch == - ]]; then
        local tag
        tag=cp$(cut -d. -f1,2 <<<"$version" | tr -d .)
        # Never without a hash: pip would take whatever file it finds.
        if [[ $(uname -m) != x86_64 ]] || ! grep -q "^# checked builds for CPU:.*\b$tag\b" "$root/requirements/torch.txt"; then
            fail "HOTSPA_LOCKED: requirements/torch.txt has no hash of torch for $tag on $(uname -m): scripts/lock.sh adds those of x86_64 where it reaches PyTorch's index; or take another PYTHON, or unset it"
        fi
    fi
    if [[ $megatron == *--no-binary* ]]; then
        local compiler found=
        for compiler in ${CXX:+"${CXX%% *}"} c++ g++ clang++; do
            command -v "$compiler" >/dev/null 2>&1 && found=$compiler && break
        done
        [[ -n $found ]] || fail "no C++ compiler, which megatron-core needs on Python 3.11: apt-get install g++"
        "$python" -c 'import os, sysconfig; os.stat(os.path.join(sysconfig.get_path("include"), "Python.h"))' \
            2>/dev/null || fail "$python has no Python.h, which megatron-core needs on 3.11: apt-get install python3-dev"
    fi
}

step() {
    local label=$1 began=$SECONDS
    shift
    number=$((number + 1))
    printf 'setup: [%d/%d] %s ... ' "$number" "$steps" "$label"
    if ! "$@" >>"$log" 2>&1 </dev/null; then
        printf 'failed\n'
        tail -n 12 "$log" | sed 's/^/    /' >&2
        fail "$label: failed, see $log"
    fi
    printf '%d s\n' $((SECONDS - began))
}

make_environment() {
    rm -rf "$venv"
    mkdir -p "$venv"
    : >"$ours" # before anything else: an interrupted run must find that it may delete this folder
    "$python" -m venv "${venv_flags[@]}" "$venv"
    if [[ $site != - ]]; then
        printf '%s\n' "$site" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
    fi
}

check_environment() {
    "$venv/bin/python" - <<'PY'
import importlib.util, torch, numpy, yaml, hotspa_megatron
assert importlib.util.find_spec("megatron.core"), "megatron.core is not there"
assert importlib.util.find_spec("megatron.training"), "this megatron-core has no megatron.training: 0.17 or newer has"
PY
}

case ${1:-} in
    -h | --help) usage && exit ;;
    "" | --plan) ;;
    *) fail "unknown argument '$1'; scripts/setup.sh --help tells what there is" ;;
esac

choose_python
make_plan
if [[ ${1:-} == --plan ]]; then
    printf '%s\n' "$plan"
    exit
fi
if up_to_date; then
    printf 'setup: %s is up to date\n' "$venv"
    exit
fi

command -v flock >/dev/null 2>&1 || fail "no flock: apt-get install util-linux"
mkdir -p "$venv-setup"
exec 9>"$venv-setup/lock"
if ! flock -n 9; then
    printf 'setup: waiting for another setup of %s\n' "$venv"
    flock 9
    if up_to_date; then
        printf 'setup: %s is up to date\n' "$venv"
        exit
    fi
fi
if [[ -d $venv && ! -e $ours ]]; then
    fail "$venv is there and was not made by this script: move it away, or set HOTSPA_VENV to another place"
fi

check_tools
: >"$log"
number=0
steps=6
[[ -z $locked || $megatron != *--no-binary* ]] || steps=7
printf 'setup: making %s (a few minutes; log: %s)\n' "$venv" "$log"
step "environment with Python $version" make_environment
checked=(install --no-deps --require-hashes)
if [[ $torch == of* ]]; then
    step "torch $torch" true
elif [[ -z $locked ]]; then
    step "$torch" "${pip[@]}" install "$torch"
else
    step "torch of requirements/torch.txt" "${pip[@]}" "${checked[@]}" --requirement "$root/requirements/torch.txt"
fi
if [[ -n $locked ]]; then
    step "requirements/locked.txt" "${pip[@]}" "${checked[@]}" --requirement "$root/requirements/locked.txt"
else
    read -r -a words <<<"$requires"
    step "what setup.cfg asks for" "${pip[@]}" install "${words[@]}"
fi
if [[ $megatron == of* ]]; then
    step "megatron-core $megatron" true
elif [[ -n $locked ]]; then
    read -r -a words <<<"$megatron"
    unset 'words[-1]'
    if [[ $megatron == *--no-binary* ]]; then
        # pip's own environment for a build would fetch what no list names.
        step "requirements/build.txt" "${pip[@]}" "${checked[@]}" --requirement "$root/requirements/build.txt"
        words+=(--no-build-isolation)
    fi
    step "requirements/megatron.txt" \
        "${pip[@]}" "${checked[@]}" "${words[@]}" --requirement "$root/requirements/megatron.txt"
else
    read -r -a words <<<"$megatron"
    step "${words[-1]}" "${pip[@]}" install --no-deps "${words[@]}"
fi
step "hotspa_megatron, editable" "${pip[@]}" install --no-deps --no-build-isolation --editable "$root"
step "check" check_environment
printf '%s\n' "$plan" >"$stamp.new"
mv "$stamp.new" "$stamp"
printf 'setup: ready: %s\n' "$venv"
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 &&
    ! "$venv/bin/python" -c 'import transformer_engine' 2>/dev/null; then
    printf "setup: there is a GPU and no Transformer Engine; to have it: %s install --no-build-isolation '%s'\n" \
        "$venv/bin/python -m pip" 'transformer-engine[pytorch]'
fi
