#!/usr/bin/env bash
# Puts the line into a Megatron-LM checkout's pretrain_gpt.py that makes it understand --hotspa-config without the launcher.
#
#   scripts/apply_patches.sh CHECKOUT             apply; does nothing where it is applied already
#   scripts/apply_patches.sh CHECKOUT --check     say whether it is applied or could be; write nothing
#   scripts/apply_patches.sh CHECKOUT --reverse   take it out again
#
# Example: scripts/apply_patches.sh ~/Megatron-LM
# The patch is that of the release in the checkout's megatron/core/package_info.py (patches/core_vX.Y.Z). Exit code 0:
# done, or nothing to do; 1: it cannot be done, as where the script is not the one that the patch knows; 2: bad usage.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
    sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
}

fail() {
    printf 'apply_patches: %s\n' "$2" >&2
    exit "$1"
}

checkout='' mode=apply
for argument in "$@"; do
    case $argument in
        -h | --help)
            usage
            exit
            ;;
        --check) mode=check ;;
        --reverse) mode=reverse ;;
        -*) fail 2 "$argument: no such option; give --check, --reverse or none" ;;
        *)
            [[ -z $checkout ]] || fail 2 "$argument: one checkout at a time; $checkout was given"
            checkout=$argument
            ;;
    esac
done
[[ -n $checkout ]] || fail 2 "no checkout given; usage: scripts/apply_patches.sh CHECKOUT [--check|--reverse]"
info=$checkout/megatron/core/package_info.py
for file in "$checkout/pretrain_gpt.py" "$info"; do
    [[ -f $file ]] || fail 2 "$file: no such file; give the folder of a Megatron-LM checkout"
    [[ -r $file ]] || fail 1 "$file: cannot be read; make the checkout readable, or run this as its owner"
done

part() {
    sed -n "s/^$1 = \([0-9][0-9]*\).*/\1/p" "$info" | head -n 1
}
release=$(part MAJOR).$(part MINOR)
[[ $release == *?.?* ]] || fail 1 "$info: names no MAJOR and MINOR release"
found=("$root"/patches/core_v"$release".*/pretrain_gpt.patch)
patch=${found[-1]}
[[ -f $patch ]] || fail 1 "$checkout is release $release, for which there is no patch: $(cd "$root/patches" && echo core_v*)"
tag=$(basename "$(dirname "$patch")")

command -v git >/dev/null || fail 1 "no git on PATH, which applies $patch: install it, or edit $checkout/pretrain_gpt.py by hand"

# Not the repository that may hold the checkout: paths are the checkout's own. What git has to say goes into said.
try() {
    said=$(cd "$checkout" && GIT_CEILING_DIRECTORIES=$(dirname "$PWD") LC_ALL=C git apply -p1 "$@" "$patch" 2>&1)
}

# Puts the patch in, or takes it out with --reverse, where a trial has said that it fits.
change() {
    try "$@" && return
    said=${said##*$'\n'}
    fail 1 "$checkout/pretrain_gpt.py: not changed, ${said#error: }; make the checkout writable, or run this as its owner"
}

applied=no
try --reverse --check && applied=yes
if [[ $applied == no ]] && ! try --check; then
    fail 1 "$checkout/pretrain_gpt.py is not that of $tag; add the line of $patch before its first import of Megatron"
fi
case $mode-$applied in
    check-yes) echo "$tag: applied" ;;
    check-no) echo "$tag: not applied; it can be" ;;
    apply-yes) echo "$tag: applied before" ;;
    apply-no) change && echo "$tag: applied" ;;
    reverse-yes) change --reverse && echo "$tag: taken out" ;;
    reverse-no) echo "$tag: not applied" ;;
esac
