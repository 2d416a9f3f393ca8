#!/usr/bin/env bash
# Builds an image with whatever is there: docker, podman or buildah.
#
#   scripts/build_image.sh gpu|cpu [--tag NAME] [--plan] [FURTHER ARGUMENTS OF THE BUILDER ...]
#
#   scripts/build_image.sh cpu
#   scripts/build_image.sh gpu --build-arg MEGATRON_TAG=core_v0.18.2 --build-arg APEX_REF=25.09
#
#   --plan       print the command and stop
#   BUILDER=...  docker, podman or buildah; default: the first of them that works here
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    printf 'build_image: %s\n' "$*" >&2
    exit 2
}

works() {
    command -v "$1" >/dev/null 2>&1 || return 1
    # docker's command may be there without its daemon; the others have none.
    [[ $1 != docker ]] || timeout 20 docker info >/dev/null 2>&1
}

case ${1:-} in
    gpu) file=docker/Dockerfile tag=hotspa-megatron ;;
    cpu) file=docker/Dockerfile.cpu tag=hotspa-megatron-cpu ;;
    -h | --help)
        sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit
        ;;
    *) fail "'${1:-}': write gpu or cpu; --help tells more" ;;
esac
shift
plan=
more=()
while (($#)); do
    case $1 in
        --tag) tag=${2:?--tag needs a name} && shift ;;
        --plan) plan=yes ;;
        *) more+=("$1") ;;
    esac
    shift
done

builder=${BUILDER:-}
if [[ -z $builder ]]; then
    for candidate in docker podman buildah; do
        works "$candidate" && builder=$candidate && break
    done
    [[ -n $builder ]] || fail "neither docker (with its daemon), podman nor buildah works here: install one of them"
fi
case $builder in
    docker) command=(docker build) ;;
    # The format keeps SHELL and HEALTHCHECK, which the other one has no place for.
    podman) command=(podman build --format docker) ;;
    buildah) command=(buildah build --format docker --layers) ;;
    *) fail "BUILDER=$builder: write docker, podman or buildah" ;;
esac
works "$builder" || fail "BUILDER=$builder does not work here"

command+=("${more[@]}" --tag "$tag" --file "$file" .)
if [[ -n $plan ]]; then
    printf '%q ' "${command[@]}"
    printf '\n'
    exit
fi
printf 'build_image: %s builds %s from %s\n' "$builder" "$tag" "$file"
began=$SECONDS
"${command[@]}"
printf 'build_image: %s is ready after %d s\n' "$tag" $((SECONDS - began))
