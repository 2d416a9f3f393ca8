#!/usr/bin/env bash
# Writes requirements/*.txt anew: the newest releases of what setup.cfg asks for, each with the hashes of its files.
#
#   scripts/lock.sh       needs uv (pip install uv) and a package index; look at the difference before you commit it
#
#   locked.txt     what setup.cfg asks for, for use and for the tests, and what torch needs, without torch itself
#   torch.txt      torch's builds for CPU that PyTorch's own index or PIP_FIND_LINKS has; hashes of the same release that
#                  the file had before stay, as no one machine may reach all places
#   megatron.txt   megatron-core: the release that the tests know
#   build.txt      what Python 3.11 builds megatron-core with, beside what locked.txt has
#   release.txt    what CONTRIBUTING.md's release steps use
#
# scripts/setup.sh installs all but the last, and nothing else, where HOTSPA_LOCKED is set.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case ${1:-} in
    "") ;;
    -h | --help)
        sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit
        ;;
    *)
        printf "lock: unknown argument '%s'; scripts/lock.sh --help tells what there is\n" "$1" >&2
        exit 2
        ;;
esac
command -v uv >/dev/null 2>&1 || { printf 'lock: no uv: pip install uv\n' >&2 && exit 2; }

compile() { # PYTHON ARGUMENTS
    uv pip compile --quiet --generate-hashes --no-header --no-annotate --python-version "$@"
}
torch=2.13.0
cpu_index=https://download.pytorch.org/whl/cpu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

release_of() {
    sed -n "s/^megatron_release=.*:-\([0-9.]*\)}.*/\1/p" scripts/setup.sh
}

{
    bash scripts/setup.sh --plan | sed -n 's/^requires //p' | tr ' ' '\n'
    printf '%s\n' filelock fsspec jinja2 networkx 'sympy>=1.13.3' 'typing-extensions>=4.10'
} >"$folder/locked.in"
# The oldest Python that is supported; --universal adds what newer ones take instead.
compile 3.11 --universal "$folder/locked.in" >"$folder/locked.txt"
printf '%s\n' pybind11 >"$folder/build.in"
compile 3.11 --universal "$folder/build.in" >"$folder/build.txt"
printf '%s\n' bandit build pip-audit >"$folder/release.in"
compile 3.11 --universal "$folder/release.in" >"$folder/release.txt"
printf 'megatron-core==%s\n' "$(release_of)" >"$folder/megatron.in"
# Its wheels need Python 3.12; 3.11 takes the source package, whose hash is among these.
compile 3.12 --no-deps "$folder/megatron.in" >"$folder/megatron.txt"

# torch: one release, files from several places. PyPI's own are not among them: pip would take those, for GPUs, first.
printf 'torch==%s+cpu\n' "$torch" >"$folder/torch-cpu.in"
: >"$folder/hashes.txt"
known=
for version in 3.11 3.12 3.13; do
    if compile "$version" --no-deps --default-index "$cpu_index" "$folder/torch-cpu.in" >"$folder/found.txt" 2>/dev/null; then
        cat "$folder/found.txt" >>"$folder/hashes.txt"
        known+=" cp${version/./}"
    fi
done
for file in "${PIP_FIND_LINKS:-/nowhere}/torch-$torch+cpu"-cp*.whl; do
    if [[ -f $file ]]; then
        known+=" $(cut -d- -f3 <<<"${file##*/}")"
        printf 'sha256:%s\n' "$(sha256sum <"$file" | cut -d' ' -f1)" >>"$folder/hashes.txt"
    fi
done
before=requirements/torch.txt
[[ -f $before ]] && grep -q "^torch==$torch+cpu " "$before" || before=/dev/null
known+=" $(sed -n 's/^# checked builds for CPU: //p' "$before")"
{
    printf '# checked builds for CPU: %s\n' "$(tr ' ' '\n' <<<"$known" | sed '/^$/d' | sort -u | paste -sd ' ')"
    printf 'torch==%s+cpu' "$torch"
    cat "$before" "$folder/hashes.txt" | grep -o 'sha256:[0-9a-f]*' | sort -u | sed 's/^/ \\\n    --hash=/' | sed -z 's/\n \\/ \\/g'
} >"$folder/torch.txt"

for name in locked torch megatron build release; do
    { printf '# Written by scripts/lock.sh.\n' && cat "$folder/$name.txt"; } >"requirements/$name.txt"
done
printf 'lock: wrote requirements/{locked,torch,megatron,build,release}.txt\n'
