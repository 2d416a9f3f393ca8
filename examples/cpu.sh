#!/usr/bin/env bash
# Three steps of a small GPT on 2 CPU ranks with the flag, on Megatron's mock data; about half a minute after set-up.
# Shows every flag that training on CPU needs. Further arguments go to Megatron.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh
on_cpu=(
    --transformer-impl local --attention-backend unfused --distributed-backend gloo --no-persist-layer-norm
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion
    --no-bias-dropout-fusion --no-rope-fusion --no-create-attention-mask-in-dataloader
)
# Both ranks are here: neither needs this machine's name to resolve.
export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
exec "${HOTSPA_VENV:-.venv}/bin/python" -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 2 \
    -m hotspa_megatron.launch examples/pretrain_small.py "${on_cpu[@]}" \
    --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --num-layers 2 --hidden-size 64 --num-attention-heads 4 \
    --position-embedding-type rope --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 \
    --global-batch-size 8 --train-iters 3 --lr 1e-3 --eval-interval 100 --eval-iters 0 --log-interval 1 \
    --tensor-model-parallel-size 2 --hotspa-config examples/cpu.yaml "$@"
