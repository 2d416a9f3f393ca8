#!/usr/bin/env bash
# Settings of the site, and what the .sbatch files beside this one share. They source it; it starts nothing.
set -euo pipefail

# ------------------------------------------------------------------------------------------------- settings of the site
# Edit these once, or set them in sbatch's environment. Options of Slurm's own (partition, account, GPUs as your site spells
# them: --gpus-per-node=8 or --gres=gpu:8) go on sbatch's command line or into SBATCH_PARTITION, SBATCH_ACCOUNT, ...

# srun: Slurm starts every rank. torchrun: Slurm starts one torchrun per node.
LAUNCHER=${LAUNCHER:-srun}
# Ranks of a node: its GPUs.
RANKS_PER_NODE=${RANKS_PER_NODE:-${SLURM_NTASKS_PER_NODE:-8}}
# The interpreter that has torch, Megatron and hotspa_megatron, and the training script, on every node.
PYTHON=${PYTHON:-python3}
SCRIPT=${SCRIPT:-${MEGATRON_LM_PATH:-/opt/Megatron-LM}/pretrain_gpt.py}
# Where checkpoints go, on a file system that all nodes share. Saved to, and loaded from once there is one. The tasks of an
# array are trainings of their own.
CHECKPOINTS=${CHECKPOINTS:-$PWD/checkpoints/${SLURM_JOB_NAME:-hotspa}${SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID}}
# Steps between checkpoints, beside those before an end; Megatron's own --save-interval wins.
SAVE_INTERVAL=${SAVE_INTERVAL:-1000}
# What tells ranks to save and end. URG means nothing to processes that do not listen, such as a checkpoint's writers: where
# Slurm tracks processes without cgroups, they get it, too. TERM where preemption sends nothing else (slurm.conf has no
# preempt_send_user_signal); with LAUNCHER=srun then, since torchrun ends its ranks 30 s after TERM.
EXIT_SIGNAL=${EXIT_SIGNAL:-URG}
# Further options of srun, such as --container-image=... --container-mounts=... of pyxis.
read -r -a SRUN_OPTIONS <<<"${SRUN_OPTIONS:-}"
# The network between the nodes, where there are several interfaces: export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# --------------------------------------------------------------------------------------------------- end of the settings

say() { printf 'slurm: %s %s\n' "$(date +%FT%T)" "$*"; }
fail() {
    printf 'slurm: %s\n' "$*" >&2
    exit 2
}

# The head of the script that sources this.
case " $* " in
    *' -h '* | *' --help '*)
        sed -n '2,/^set -euo/{/^set -euo/d;/^#SBATCH/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[1]}"
        exit
        ;;
esac
[[ -n ${SLURM_JOB_ID:-} ]] || fail "no SLURM_JOB_ID: start this with sbatch"
[[ $LAUNCHER == srun || $LAUNCHER == torchrun ]] || fail "LAUNCHER=$LAUNCHER: write srun or torchrun"
[[ $EXIT_SIGNAL == URG || $EXIT_SIGNAL == TERM ]] || fail "EXIT_SIGNAL=$EXIT_SIGNAL: write URG or TERM"
[[ $EXIT_SIGNAL == URG || $LAUNCHER == srun ]] ||
    fail "EXIT_SIGNAL=TERM: torchrun would end its ranks before they have saved; set LAUNCHER=srun"
[[ $RANKS_PER_NODE =~ ^[1-9][0-9]*$ ]] || fail "RANKS_PER_NODE=$RANKS_PER_NODE: write the number of GPUs of a node"
command -v "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON: no such interpreter; write the one that has torch and Megatron"

# The first node in Slurm's order has rank 0, to which all others connect. Ranks of a node, and neighbouring nodes, are
# neighbours: node ranks are static, as a rendezvous would sort nodes by name, node10 before node2.
# MASTER_ADDR, where it is set already, is another name of that node: of its fast network, for instance.
if [[ -z ${MASTER_ADDR:-} ]]; then
    MASTER_ADDR=$(scontrol show hostnames "${SLURM_JOB_NODELIST:-}" | head -n 1) || true
    [[ -n $MASTER_ADDR ]] ||
        fail "SLURM_JOB_NODELIST=${SLURM_JOB_NODELIST:-}: scontrol names no node; set MASTER_ADDR to the first node's address"
fi
# Another one after every restart: connections of the last one may still be closing.
MASTER_PORT=$((20000 + (SLURM_JOB_ID * 7 + ${SLURM_RESTART_COUNT:-0}) % 10000))
export MASTER_ADDR MASTER_PORT LAUNCHER RANKS_PER_NODE PYTHON EXIT_SIGNAL

# Sets start_ranks: the command that starts what follows it, arguments of Python, as every rank of the job.
if [[ $LAUNCHER == srun ]]; then
    cpus=$((SLURM_CPUS_ON_NODE / RANKS_PER_NODE))
    tasks=(--ntasks=$((SLURM_NNODES * RANKS_PER_NODE)) --ntasks-per-node="$RANKS_PER_NODE")
    tasks+=(--cpus-per-task=$((cpus > 0 ? cpus : 1)))
else
    tasks=(--ntasks="$SLURM_NNODES" --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_ON_NODE")
fi
# --gpu-bind=none: every task sees the node's GPUs, of which its rank takes that of its number. Options of sbatch's, such as
# --gpus-per-task, would show it its own alone.
# shellcheck disable=SC2034 # used where this is sourced
start_ranks=(
    srun --kill-on-bad-exit=1 --distribution=block --gpu-bind=none "${tasks[@]}" "${SRUN_OPTIONS[@]}" bash "$HOTSPA_SLURM/task.sh"
)
