#!/usr/bin/env bash
# What each task of a job runs on its node: a rank, or the node's torchrun. site.sh beside this file starts it; the
# arguments are Python's, such as -m MODULE ARGS.
set -euo pipefail

getent hosts "$MASTER_ADDR" >/dev/null || {
    printf 'slurm: %s: %s, the node of rank 0, does not resolve here: put it into DNS or /etc/hosts of every node\n' \
        "${SLURMD_NODENAME:-$(hostname)}" "$MASTER_ADDR" >&2
    exit 2
}

# Until Megatron listens to the signal it is ignored, not deadly.
trap '' "$EXIT_SIGNAL"
if [[ $LAUNCHER == srun ]]; then
    export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$RANKS_PER_NODE
    exec "$PYTHON" "$@"
fi

"$PYTHON" -m torch.distributed.run --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" \
    --nproc-per-node "$RANKS_PER_NODE" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "$@" &
torchrun=$!
# Where Slurm signals its own tasks alone, that is this shell; the ranks are children of torchrun.
trap 'pkill "-$EXIT_SIGNAL" -P "$torchrun" || true' "$EXIT_SIGNAL"
trap 'kill -TERM "$torchrun" || true' TERM
code=0
while kill -0 "$torchrun" 2>/dev/null; do
    if wait "$torchrun"; then code=0; else code=$?; fi
done
exit "$code"
