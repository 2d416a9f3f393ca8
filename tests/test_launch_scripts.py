"""Launch scripts as people have them become configuration files with ``hotspa plan --from-script``; what conflicts is named.

Written in our own words, with the flags and habits of Megatron's example for Llama 3, of fine-tuning jobs under Slurm and of
HotSPa's own runs. Where MEGATRON_LM_PATH names a checkout, its example is read as it is.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hotspa_megatron.cli.described_run import changed, recompute_of
from hotspa_megatron.cli.main import main
from hotspa_megatron.cli.megatron_args import read_command_line
from hotspa_megatron.cli.run_script import arguments_of_script
from hotspa_megatron.config import ResolvedConfig, load_config, resolve
from hotspa_megatron.planning.home_flags import FlagChange

LLAMA = """#!/bin/bash
# Llama 3 8B on one node of H100s; arguments: checkpoints, logs, data
export CUDA_DEVICE_MAX_CONNECTIONS=1
SAVE=${1:-"out/ckpt"}
LOGS=${2:-"out/tb"}
DATA=${3:-"MOCK"}
mkdir -p "$(dirname "$SAVE")"
PER_NODE=8
NODES=1
PORT=${MASTER_PORT:-29500}
WORLD=$(($PER_NODE*$NODES))
ENTRY="pretrain_gpt.py"
PRECISION=${PRECISION:-fp8}

LAUNCH=(--nproc_per_node $PER_NODE --nnodes $NODES --master_port $PORT)
MODEL=(
    --use-mcore-models
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
    --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0
    --swiglu --normalization RMSNorm --apply-layernorm-1p   # Transformer Engine's
    --untie-embeddings-and-output-weights --disable-bias-linear
    --attention-dropout 0.0 --hidden-dropout 0.0 --init-method-std 0.0134 --attention-backend fused
)
TRAIN=(
    --micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000
    --lr-decay-samples 1949218748 --lr-warmup-samples 3906252
    --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5
    --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
    --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss
    --manual-gc --empty-unused-memory-level 1 --exit-duration-in-mins 235
)
LOW=()
if [[ "$PRECISION" == "fp8" ]]; then
    LOW+=(
        "--fp8-format hybrid"
        "--fp8-amax-history-len 1024"
        "--fp8-amax-compute-algo max"
        "--fp8-param-gather"
    )
fi
PARALLEL=(
    --tensor-model-parallel-size 1 --context-parallel-size 1
    # --pipeline-model-parallel-size 1
    --sequence-parallel
)
TRAIN+=(--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
SOURCE=()
if [[ "$DATA" == "MOCK" ]] || [[ -z "$DATA" ]]; then
    SOURCE+=("--mock-data" "--tokenizer-type NullTokenizer" "--vocab-size 128256" "--split '99,1,0'")
else
    SOURCE+=("--data-path $DATA" "--tokenizer-type HuggingFaceTokenizer" "--vocab-size 128256")
fi
SOURCE+=(--no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 --data-cache-path "${PWD}/cache")
LOGGING=(
    --log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput
    --profile --profile-step-start 4 --profile-step-end 6 --ckpt-format torch_dist
    --distributed-timeout-minutes 60 --save "$SAVE" --load "$SAVE" --tensorboard-dir "$LOGS"
)
if [ ! -f "$ENTRY" ]; then
    echo "pretrain_gpt.py is not here"
    exit 1
fi
torchrun ${LAUNCH[@]} \\
    "$ENTRY" \\
    ${MODEL[@]} ${TRAIN[@]} ${LOW[@]} ${PARALLEL[@]} \\
    ${SOURCE[@]} ${LOGGING[@]}
"""

FINE_TUNING = """#!/bin/bash
#SBATCH --job-name=tune
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --no-requeue
set -eo pipefail
echo "begun at $(date)"
MEGATRON_DIR=/opt/Megatron-LM
MASTER_ADDR=$(hostname)
MASTER_PORT=25678
PROJECT=tuned
GBS=240
EXTRA_ARGS=""

NETWORK=(
    --num-layers 28
    --hidden-size 3072
    --ffn-hidden-size 8192
    --num-attention-heads 24
    --group-query-attention
    --num-query-groups 8
    --max-position-embeddings 131072
    --position-embedding-type rope
    --use-rope-scaling
    --make-vocab-size-divisible-by 128
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
)
TUNING=(
    --micro-batch-size 2
    --global-batch-size $GBS
    --seq-length 8192
    --train-iters 4000
    --lr 2e-5
    --optimizer adam
    --sft
    --calculate-per-token-loss
    --eval-iters 0
    --eval-interval 500
    --no-check-for-nan-in-loss-and-grad
    --dataloader-type single
    --bf16
    --use-distributed-optimizer
    --use-precision-aware-optimizer
    --main-grads-dtype bf16
    --tensor-model-parallel-size 4
    --sequence-parallel
)
STATE=(--save /scratch/$PROJECT --load /scratch/$PROJECT --save-interval 200 --async-save --ckpt-format torch_dist)
TOKENS=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model /models/tok)
TRAINING_CMD="torchrun --nproc-per-node 4 --nnodes $SLURM_NNODES --rdzv-endpoint $MASTER_ADDR:$MASTER_PORT \\
    $MEGATRON_DIR/pretrain_gpt.py ${NETWORK[@]} ${TUNING[@]} ${STATE[@]} ${TOKENS[@]} $EXTRA_ARGS"
srun -lu --environment /envs/ngc.toml bash -c "
  RANK=\\$SLURM_PROCID $TRAINING_CMD
"
"""

HOTSPA = """NUM_LAYERS=32
HIDDEN_SIZE=6656
python3 ./llama_hot.py \\
    --num_layers $NUM_LAYERS --hidden_size $HIDDEN_SIZE --num_attention_heads 64 --global_batch_size 512 \\
    --bucket_sizes 32768 16384 4096 0 --ds_parallel_config a.json,b.json,c.json
"""


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "SLURM_NTASKS", "SLURM_NNODES", "PRECISION", "DATA", "VOCABULARY"):
        monkeypatch.delenv(name, raising=False)


def written(tmp_path: Path, text: str) -> Path:
    script = tmp_path / "run.sh"
    script.write_text(text)
    return script


def planned(
    script: Path, capsys: pytest.CaptureFixture[str], *options: str, world: int = 8, hardware: str = "h100"
) -> tuple[dict[str, Any], ResolvedConfig]:
    """What plan says, and its file as a job with the script's arguments resolves it."""
    path = script.with_name("hotspa.yaml")
    base = ["--hardware", hardware, "--world-size", str(world), "--lengths", "wikipedia", "--from-script", str(script)]
    code = main(["plan", *base, "-o", str(path), "--json", "--force", *options])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    said = json.loads(captured.out)
    change = FlagChange(give=tuple(said["megatron_flags"]), remove=tuple(said["megatron_flags_to_remove"]))
    arguments = changed(arguments_of_script(script), change)
    line = read_command_line(arguments, world_size=world)
    assert str(line.home) == said["home"]
    shape = replace(line.shape, sequence_parallel=True)
    return said, resolve(load_config(path), shape=shape, home=line.home, recompute=recompute_of(arguments))


def refused_flags(said: dict[str, Any]) -> list[str]:
    return [line.split(":")[0] for line in said["conflicts"]]


def llama_is_planned(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said, resolved = planned(script, capsys)
    assert refused_flags(said) == ["--fp8-format", "--fp8-param-gather"]
    shape = resolved.shape
    assert (shape.num_layers, shape.hidden_size, shape.num_query_groups, shape.seq_length) == (32, 4096, 8, 8192)
    assert shape.padded_vocab_size == 128256 and not shape.tied_embeddings and shape.gradient_bytes == 2
    assert said["sequences_per_step"] == 128 and said["gain"] >= 1


def test_llama_3_with_fp8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama_is_planned(written(tmp_path, LLAMA), capsys)


def test_llama_3_in_bf16_conflicts_with_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRECISION", "bf16")
    script = written(tmp_path, LLAMA)
    assert "--fp8-format" not in arguments_of_script(script)
    assert planned(script, capsys)[0]["conflicts"] == []
    # In the table that people read, too.
    monkeypatch.delenv("PRECISION")
    base = ["--hardware", "h100", "--world-size", "8", "--lengths", "wikipedia", "--from-script", str(script)]
    assert main(["plan", *base, "-o", str(tmp_path / "x.yaml")]) == 0
    assert "would not start: --fp8-format: never ran" in " ".join(capsys.readouterr().out.split())


def test_explain_names_what_the_file_does_not_allow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = arguments_of_script(written(tmp_path, LLAMA))
    for text, expected in (
        ("", ["--fp8-format", "--fp8-param-gather"]),
        ("allow_untested: [fp8]\n", ["--fp8-param-gather"]),
    ):
        path = tmp_path / "hotspa.yaml"
        path.write_text(f"strategies: []\n{text}")
        assert main(["explain", str(path), "--world-size", "8", "--json", "--", *arguments]) == 0
        assert refused_flags(json.loads(capsys.readouterr().out)) == expected


@pytest.mark.skipif(
    not (Path(os.environ.get("MEGATRON_LM_PATH", "")) / "examples/llama/train_llama3_8b_h100_fp8.sh").is_file(),
    reason="needs a checkout of Megatron-LM in MEGATRON_LM_PATH",
)
def test_megatrons_own_example_for_llama_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(os.environ["MEGATRON_LM_PATH"]) / "examples/llama/train_llama3_8b_h100_fp8.sh"
    llama_is_planned(written(tmp_path, example.read_text()), capsys)


def test_fine_tuning_under_slurm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = written(tmp_path, FINE_TUNING)
    base = ["--hardware", "h100", "--world-size", "16", "--lengths", "wikipedia", "--from-script", str(script)]
    assert main(["plan", *base, "-o", str(tmp_path / "x.yaml")]) == 2
    assert "--vocab-size: missing" in capsys.readouterr().err and not (tmp_path / "x.yaml").exists()
    script.write_text(FINE_TUNING.replace('EXTRA_ARGS=""', 'EXTRA_ARGS="--vocab-size 128256"'))
    said, resolved = planned(script, capsys, "--max-tp", "16", world=16)
    assert refused_flags(said) == ["--use-precision-aware-optimizer", "--micro-batch-size"]
    assert said["sequences_per_step"] == 240 and resolved.shape.tied_embeddings
    # 24 heads and 8 groups of queries: tp 16 is not one that the model can take.
    assert all(24 % each.strategy.tp == 0 for each in (*resolved.strategies, resolved.home))


# --------------------------------------------------------------------------------------------------------- HotSPa's own

MODEL_64_HEADS = """python pretrain_gpt.py --num-layers 60 --hidden-size 6656 --ffn-hidden-size 17920 --num-attention-heads 64 \\
    --seq-length 32768 --max-position-embeddings 32768 --vocab-size 30592 --swiglu --disable-bias-linear --bf16 \\
    --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights --sequence-parallel \\
    --use-distributed-optimizer --micro-batch-size 1 --global-batch-size 512
"""


def test_hotspas_own_script_is_not_megatrons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--hardware", "a800-80", "--world-size", "8", "--lengths", "wikipedia"]
    assert main(["plan", *base, "--from-script", str(written(tmp_path, HOTSPA)), "-o", str(tmp_path / "x.yaml")]) == 2
    error = capsys.readouterr().err
    assert "--num_layers: not an argument of Megatron's; did you mean --num-layers?" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("world", "triples", "home", "groups"),
    [
        (8, "1,4,2 8,1,1 2,2,2", "tp4-cp1-pp2-dp1", {4096: "tp1-cp1-pp1-dp8", 16384: "tp2-cp1-pp2-dp2"}),
        (32, "1,16,2 4,2,4 2,8,2", "tp16-cp1-pp2-dp1", {4096: "tp2-cp1-pp4-dp4", 16384: "tp8-cp1-pp2-dp2"}),
    ],
)
def test_hotspas_tables_become_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], world: int, triples: str, home: str, groups: dict[int, str]
) -> None:
    script = written(tmp_path, MODEL_64_HEADS)
    table = ("--table", "32768 16384 4096 0", triples)
    said, resolved = planned(script, capsys, *table, world=world, hardware="a800-80")
    assert said["home"] == home and str(resolved.home.strategy) == home and resolved.home.max_length == 32768
    assert {each.max_length: str(each.strategy) for each in resolved.strategies} == groups
    assert {each["max_length"]: each["strategy"] for each in said["groups"]} == groups


@pytest.mark.parametrize(
    ("sizes", "triples", "says"),
    [
        ("32768 16384 4096", "1,4,2 8,1,1 2,2,2", "do not descend to 0"),
        ("32768 4096 16384 0", "1,4,2 8,1,1 2,2,2", "do not descend to 0"),
        ("32768 16384 4096 1024 0", "1,4,2 8,1,1 2,2,2", "3 strategies take 4 sizes, but there are 5"),
        ("32768 16384 4096 0", "1,4,2 7,1,1 2,2,2", "7,1,1 fills 7 ranks, the world has 8"),
        ("32768 16384 4096 0", "1,4,2 8,1 2,2,2", "'8,1' is not dp,tp,pp"),
        ("32768 16k 4096 0", "1,4,2 8,1,1 2,2,2", "'16k' is not a whole number"),
        ("16384 4096 0", "1,4,2 8,1,1", "give Megatron --seq-length 16384"),
        ("32768 4096 0", "1,4,2 1,8,1", ""),
        ("32768 4096 0", "1,1,8 8,1,1", "60 layers do not divide"),
    ],
)
def test_tables_that_make_no_sense_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sizes: str, triples: str, says: str
) -> None:
    path = tmp_path / "x.yaml"
    base = ["--hardware", "a800-80", "--world-size", "8", "--lengths", "wikipedia"]
    script = str(written(tmp_path, MODEL_64_HEADS))
    code = main(["plan", *base, "--from-script", script, "--table", sizes, triples, "-o", str(path)])
    error = capsys.readouterr().err
    assert (code, path.exists()) == ((2, False) if says else (0, True)), error
    assert says in error and error.count("\n") == (1 if says else 0)


@pytest.mark.parametrize(
    "lines",
    [
        "case $1 in\n70b) TP=8 ;;\nesac",
        "[ $N -gt 1 ] || TP=8",
        "(( N )) && TP=8",
        "if [ $N -gt 1 ]; then TP=8\nfi",
        "if [ $N -gt 1 ]\nthen TP=8\nfi",
        "export PP=8 TP=4",
        "for TP in 1 2; do\n:\ndone",
        "read TP",
        "unset TP",
        "declare PP=1 TP=8",
        "let TP=8",
    ],
)
def test_a_value_that_may_have_changed_is_not_taken_for_the_old_one(lines: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    start = "torchrun pretrain_gpt.py --tensor-model-parallel-size $TP\n"
    script.write_text(f"TP=1\n{lines}\n{start}")
    with pytest.raises(ValueError, match=r"\$TP depends on a condition that is not evaluated"):
        arguments_of_script(script)
    script.write_text(f"{lines}\nTP=1\n{start}")
    assert arguments_of_script(script) == ["--tensor-model-parallel-size", "1"]


def test_a_line_that_ends_with_an_operator_goes_on(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text('TP=1\n[ "$TP" = 1 ] &&\n    TP=2\ntorchrun pretrain_gpt.py --tensor-model-parallel-size $TP\n')
    assert arguments_of_script(script) == ["--tensor-model-parallel-size", "2"]
