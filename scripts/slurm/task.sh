#!/usr/bin/env bash
# What each task of a job runs on its node: a rank, or the node's torchrun. site.sh beside this file starts it; the
# arguments are Python's, such as -m MODULE ARGS.
set -euo pipefail

getent hosts "$MASTER_ADDR" >/dev/null || {
    printf 'slurm: %s: %s, the node of rank 0, does not resolve here: put it into DNS or /etc/hosts of every node\n' \
        "${SLURMD_NODENAME:-$(hostname)}" "$MASTER_ADDR" >&2
    exit 2
}

# Megatron takes the device of its local rank, so every rank has to see all devices of its node. Slurm names those that it gives.
if [[ ${CUDA_VISIBLE_DEVICES:-} =~ ^([0-9]|GPU-|MIG-) ]]; then
    IFS=, read -r -a devices <<<"$CUDA_VISIBLE_DEVICES"
    ((${#devices[@]} >= RANKS_PER_NODE)) || {
        printf 'slurm: %s: CUDA_VISIBLE_DEVICES=%s, and the node has %d ranks, each of which has to see the devices of all: %s\n' \
            "${SLURMD_NODENAME:-$(hostname)}" "$CUDA_VISIBLE_DEVICES" "$RANKS_PER_NODE" \
            "give sbatch --gpus-per-node=$RANKS_PER_NODE, not --gpus-per-task or --gpu-bind; or set RANKS_PER_NODE" >&2
        exit 2
    }
fi

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
while kill -0 "$torchrun" 2>/dev/null; do # a signal, too, ends a wait
    wait "$torchrun" || true
done
# Once more: where torchrun ends while a trap runs, that wait has only told of the signal.
wait "$torchrun"
