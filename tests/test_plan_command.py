"""``hotspa plan``, ``simulate`` and ``doctor``: files that the configuration's reader accepts, and one line for bad input."""

from __future__ import annotations

import csv
import errno
import importlib.util
import io
import json
import os
import resource
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hotspa_megatron.cli import charts, described_run, doctor, progress, simulate
from hotspa_megatron.cli import options as options_module
from hotspa_megatron.cli.described_run import check_flags, recompute_of, without
from hotspa_megatron.cli.main import main
from hotspa_megatron.cli.megatron_args import read_command_line
from hotspa_megatron.cli.run_script import arguments_of_script
from hotspa_megatron.config import load_config, resolve
from hotspa_megatron.planning.execution import Execution, Recompute
from hotspa_megatron.planning.home_flags import recompute_flags
from hotspa_megatron.planning.plan_file import home_recompute_of
from hotspa_megatron.planning.plan_file import recompute_of as recompute_of_execution
from hotspa_megatron.strategy import Strategy

MODEL = shlex.split(
    "--num-layers 8 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --seq-length 8192 "
    "--max-position-embeddings 8192 --vocab-size 30592 --swiglu --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --position-embedding-type rope --bf16 --use-distributed-optimizer"
)
BATCH = ["--global-batch-size", "32"]
CLUSTER = ["--hardware", "l40s-pcie", "--world-size", "8", "--lengths", "wikipedia"]
needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)


def plan(*options: str, arguments: list[str] | None = None) -> int:
    return main(["plan", *options, "--", *(MODEL + BATCH if arguments is None else arguments)])


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """What went to stderr, which must be a single line."""
    said = capsys.readouterr().err
    assert said.startswith("hotspa") and said.endswith("\n") and said.count("\n") == 1
    return said


# --------------------------------------------------------------------------------------------------------------- plan


def test_the_file_is_one_that_a_job_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hotspa.yaml"
    assert plan(*CLUSTER, "-o", str(path), "--json") == 0
    said = json.loads(capsys.readouterr().out)
    home = Strategy.parse(said["home"])
    line = read_command_line([*MODEL, *said["megatron_flags"]], world_size=8)
    assert line.home == home
    resolved = resolve(load_config(path), shape=line.shape, home=home, recompute=recompute_of(said["megatron_flags"]))
    assert [each.max_length for each in resolved.strategies] == [g["max_length"] for g in said["groups"][:-1]]
    assert [str(each.strategy) for each in resolved.strategies] == [g["strategy"] for g in said["groups"][:-1]]
    assert resolved.home.tokens_per_microbatch == said["groups"][-1]["tokens_per_microbatch"]
    assert said["gain"] >= 1 and said["seconds"]["total"] <= said["static_seconds"]["total"]
    assert all(group["memory"]["total"] <= group["memory"]["limit"] for group in said["groups"])
    comments = [text for text in path.read_text().splitlines() if text.startswith("#")]
    assert "not measured" in " ".join(comments) and "static" in " ".join(comments)
    assert " ".join(said["megatron_flags"]) in " ".join(comments)


def test_what_memory_rules_out_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of it in JSON; in the table how many as what, and the nearest."""
    hardware, path = tmp_path / "small.yaml", tmp_path / "hotspa.yaml"
    text = (Path(described_run.__file__).parents[1] / "planning" / "hardware" / "l40s-pcie.yaml").read_text()
    hardware.write_text(text.replace("value: 46068", "value: 22000"))
    options = ["--hardware", str(hardware), "--world-size", "8", "--lengths", "wikipedia", "-o", str(path), "--force"]
    assert plan(*options, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    for refused in said["refused"]:
        assert refused["needed"] > refused["limit"] == said["groups"][0]["memory"]["limit"]
        assert "GiB" in refused["reason"] and Strategy.parse(refused["strategy"].split()[0])
    assert plan(*options) == 0
    printed = capsys.readouterr().out
    table = printed[printed.index("Ruled out by memory") :].splitlines()
    for kind in ("home", "guest"):
        needed = {each["strategy"]: each["needed"] for each in said["refused"] if each["kind"] == kind}
        (line,) = (line for line in table if line.startswith(kind))
        nearest = min(needed.values())
        assert line.split()[1] == str(len(needed)) and f" {nearest / 2**30:.1f} " in line
        assert any(strategy in line for strategy, bytes_ in needed.items() if bytes_ == nearest)


def test_it_says_which_batch_keeps_the_tokens_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Documents are shorter than stock Megatron's samples: whoever plans for as many of them plans for another step."""
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("100\n" * 9 + "1100\n")  # 200 on average, where stock's samples have 8,192
    options = ["--hardware", "H100", "--world-size", "8", "--lengths", str(lengths), "--keep-home", "--force"]
    assert plan(*options, "-o", str(tmp_path / "hotspa.yaml"), "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["tokens_per_step"], said["stock_tokens_per_step"]) == (32 * 200, 32 * 8192)
    assert said["global_batch_size_for_stock_tokens"] == 1311  # the least whose 200 each are that many
    assert plan(*options, "-o", str(tmp_path / "hotspa.yaml")) == 0
    assert (
        "A step of 32 documents has 6,400 tokens on average; with --global-batch-size 1311" in capsys.readouterr().out
    )


def test_it_can_keep_home_and_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hotspa.yaml"
    arguments = [*MODEL, *BATCH, "--tensor-model-parallel-size", "4", "--sequence-parallel"]
    assert plan(*CLUSTER, "-o", str(path), "--keep-home", arguments=arguments) == 0
    said = capsys.readouterr().out
    assert "tp4-cp1-pp1-dp2" in said and "Give Megatron" not in said and f"Wrote {path}" in said
    line = read_command_line(arguments, world_size=8)
    resolve(load_config(path), shape=line.shape, home=line.home)


def test_a_home_with_tp_may_have_the_sequence_parallelism_that_tp_1_has_not(tmp_path: Path) -> None:
    """Megatron turns the flag off at tp 1; a small GPU needs tp, and the file must fit what the flag then means."""
    path = tmp_path / "hotspa.yaml"
    hardware = tmp_path / "small.yaml"
    text = (Path(described_run.__file__).parents[1] / "planning" / "hardware" / "l40s-pcie.yaml").read_text()
    hardware.write_text(text.replace("value: 46068", "value: 26000"))
    options = ["--hardware", str(hardware), "--world-size", "8", "--lengths", "wikipedia", "--sequences", "32"]
    arguments = [*MODEL, "--sequence-parallel"]
    assert plan(*options, "-o", str(path), arguments=arguments) == 0
    flags = path.read_text().split("home: ")[1].splitlines()[0].split()
    line = read_command_line([*arguments, *flags], world_size=8)
    assert line.shape.sequence_parallel == (line.home.tp > 1)
    resolve(load_config(path), shape=line.shape, home=line.home)


def failing(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_an_existing_file_is_kept_unless_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "hotspa.yaml"
    path.write_text("mine")
    assert plan(*CLUSTER, "-o", str(path)) == 2
    assert "--force" in one_line(capsys) and path.read_text() == "mine"
    assert plan(*CLUSTER, "-o", str(path), "--force") == 0
    assert "strategies" in path.read_text()
    path.write_text("mine")
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", failing)
        assert plan(*CLUSTER, "-o", str(path), "--force") == 2
    assert "--output" in one_line(capsys) and path.read_text() == "mine"


def test_recomputation_and_virtual_stages_are_written_as_a_job_takes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of memories so short that long sequences need what the short ones do without, some show both."""
    text = (Path(described_run.__file__).parents[1] / "planning" / "hardware" / "l40s-pcie.yaml").read_text()
    arguments = [*MODEL, "--global-batch-size", "128", "--sequence-parallel"]
    seen = set()
    for mebibytes in range(23000, 28000, 500):
        hardware, path = tmp_path / "small.yaml", tmp_path / f"{mebibytes}.yaml"
        hardware.write_text(text.replace("value: 46068", f"value: {mebibytes}"))
        options = ["--hardware", str(hardware), "--world-size", "8", "--lengths", "wikipedia"]
        assert plan(*options, "--max-cp", "1", "--max-tp", "1", "-o", str(path), "--json", arguments=arguments) == 0
        said = json.loads(capsys.readouterr().out)
        line = read_command_line([*arguments, *said["megatron_flags"]], world_size=8)
        assert str(line.home) == said["home"]
        recompute = recompute_of(said["megatron_flags"])
        resolved = resolve(load_config(path), shape=line.shape, home=line.home, recompute=recompute)
        for each, group in zip(resolved.strategies, said["groups"], strict=False):
            assert str(each.strategy) == group["strategy"] and each.recompute is not None
            layers = max(len(stage) for stage in each.layers)
            assert each.recompute.share(layers) == pytest.approx(group["recompute"], abs=0.5 / layers)
        if len({group["recompute"] for group in said["groups"]}) > 1:
            seen.add("recompute")
        seen |= {"vpp" for each in resolved.strategies if each.strategy.vpp > 1}
    assert seen == {"recompute", "vpp"}, "the cases do not show both"


def test_homes_recomputation_is_said_in_megatrons_flags() -> None:
    assert recompute_flags(Recompute(granularity="none")) == ()
    assert recompute_flags(Recompute(granularity="full"))[1::2] == ("full", "uniform", "1")
    assert recompute_flags(Recompute(granularity="full", layers=3))[1::2] == ("full", "block", "3")


ROOMY = ["--hardware", "h100", "--world-size", "8", "--lengths", "wikipedia", "--max-cp", "1"]
FULL = shlex.split("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")


def explain(path: Path, *arguments: str) -> int:
    return main(["explain", str(path), "--world-size", "8", "--", *MODEL, *BATCH, *arguments])


def test_a_file_is_for_the_home_that_plan_has_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the virtual stages or the recomputation of its home, home's budget would not fit: each is refused."""
    hardware, path = tmp_path / "small.yaml", tmp_path / "hotspa.yaml"
    text = (Path(described_run.__file__).parents[1] / "planning" / "hardware" / "l40s-pcie.yaml").read_text()
    hardware.write_text(text.replace("value: 46068", "value: 23000"))
    options = [
        "--hardware",
        str(hardware),
        "--world-size",
        "8",
        "--lengths",
        "wikipedia",
        "--max-cp",
        "1",
        "--max-tp",
        "1",
    ]
    assert plan(*options, "-o", str(path), "--json") == 0
    flags = json.loads(capsys.readouterr().out)["megatron_flags"]
    virtual = {"--num-virtual-stages-per-pipeline-rank": 1}
    recompute = {"--recompute-granularity": 1, "--recompute-method": 1, "--recompute-num-layers": 1}
    assert {*virtual, *recompute} <= {*flags}, "the case does not show both"
    assert explain(path, *flags) == 0
    for left_out, key in ((virtual, "home.vpp"), (recompute, "home.recompute"), ({**virtual, **recompute}, "home.vpp")):
        capsys.readouterr()
        assert explain(path, *without(flags, left_out)) == 2
        said = one_line(capsys)
        assert f"{key}: the file was made for" in said and all(
            f" {flag} " in said.replace(",", " ") for flag in left_out
        )
    capsys.readouterr()
    assert explain(path, *without(flags, recompute), "--recompute-activations") == 2
    assert " --recompute-activations, or have the file made anew" in one_line(capsys)


@pytest.mark.parametrize(
    ("flags", "removed"),
    [
        (FULL, ["--recompute-granularity", "--recompute-method", "--recompute-num-layers"]),
        (
            ["--pipeline-model-parallel-size", "4", "--num-layers-per-virtual-pipeline-stage", "1"],
            ["--num-layers-per-virtual-pipeline-stage"],
        ),
        (
            ["--pipeline-model-parallel-size=4", "--num-virtual-stages-per-pipeline-rank=2", *FULL],
            [
                *("--num-virtual-stages-per-pipeline-rank", "--recompute-granularity"),
                *("--recompute-method", "--recompute-num-layers"),
            ],
        ),
    ],
)
def test_flags_that_the_chosen_home_has_not_are_to_be_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], removed: list[str]
) -> None:
    """On memory to spare nothing is recomputed; with no pipeline there are no virtual stages."""
    path = tmp_path / "hotspa.yaml"
    options = [*ROOMY, "-o", str(path), "--force"]
    assert plan(*options, "--json", arguments=[*MODEL, *BATCH, *flags]) == 0
    said = json.loads(capsys.readouterr().out)
    assert "-pp1-" in said["home"] and said["megatron_flags_to_remove"] == removed
    assert plan(*options, arguments=[*MODEL, *BATCH, *flags]) == 0
    assert f"{' '.join(said['megatron_flags'])}, and remove: {' '.join(removed)} (now" in capsys.readouterr().out
    assert f"have to go: {' '.join(removed)}" in path.read_text()
    # Whoever gives what is to be given, and leaves the others where they are, has another home.
    assert explain(path, *without(flags, dict.fromkeys(removed, 1)), *said["megatron_flags"]) == 0
    assert explain(path, *flags, *said["megatron_flags"]) == 2


def test_a_kept_recomputation_is_what_the_command_line_says() -> None:
    """Of stages of 2 or 4 layers the share of 2 says no number of layers; another share is none of the command line's."""
    given = Recompute(granularity="full", layers=2)
    kept = Execution(strategy=Strategy(tp=1, cp=1, pp=4, dp=2), recompute=given.share(10 / 4))
    assert home_recompute_of(kept, num_layers=10, given=given) == given
    assert recompute_of_execution(kept, num_layers=10, selective=False) != given
    for share, said in ((0.0, "none"), (1.0, "full")):
        other = Execution(strategy=kept.strategy, recompute=share)
        assert str(home_recompute_of(other, num_layers=10, given=given)) == said
    selective = Recompute(granularity="selective")
    assert home_recompute_of(Execution(strategy=kept.strategy), num_layers=10, given=selective) == selective


def test_recompute_activations_is_selective_recomputation_whatever_else_is_said() -> None:
    assert recompute_of([*FULL, "--recompute-activations"]) == Recompute(granularity="selective")
    assert recompute_of(FULL) == Recompute(granularity="full")


def test_lengths_come_from_a_file_and_from_an_index(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("".join(f"{length}\n" for length in np.arange(1, 4000, 13)))
    base = ["--hardware", "a800-80", "--world-size", "4", "--sequences", "16"]
    assert plan(*base, "--lengths", str(lengths), "-o", str(tmp_path / "a.yaml"), arguments=MODEL) == 0
    # An index of Megatron's: header, dtype code 8 (uint16), sequences and documents.
    documents = np.arange(2, 600, 7, dtype=np.int32)
    pointers = np.concatenate([[0], np.cumsum(documents.astype(np.int64) * 2)[:-1]])
    header = b"MMIDIDX\x00\x00" + np.array([1], "<u8").tobytes() + bytes([8])
    header += np.array([len(documents), len(documents) + 1], "<u8").tobytes()
    body = documents.tobytes() + pointers.tobytes() + np.arange(len(documents) + 1, dtype=np.int64).tobytes()
    (tmp_path / "corpus.idx").write_bytes(header + body)
    assert plan(*base, "--corpus", str(tmp_path / "corpus"), "-o", str(tmp_path / "b.yaml"), arguments=MODEL) == 0


WRONG: list[tuple[list[str], list[str], str]] = [
    (["--hardware", "h900", "--world-size", "8", "--lengths", "wikipedia"], MODEL + BATCH, "'h900' is not known"),
    (["--hardware", "no/such.yaml", "--world-size", "8", "--lengths", "wikipedia"], MODEL + BATCH, "cannot be read"),
    (
        CLUSTER,
        [*MODEL, *BATCH, "--num-layer", "4"],
        "--num-layer: not an argument of Megatron's; did you mean --num-layers?",
    ),
    (CLUSTER, MODEL, "--global-batch-size"),
    (CLUSTER, [], "arguments are missing"),
    (CLUSTER, [*BATCH, "--hidden-size", "64"], "--num-layers"),
    (["--hardware", "a800-80", "--lengths", "wikipedia"], MODEL + BATCH, "--world-size: missing"),
    (["--hardware", "a800-80", "--world-size", "08", "--lengths", "wikipedia"], MODEL + BATCH, "'08'"),
    (["--hardware", "a800-80", "--world-size", "8"], MODEL + BATCH, "--corpus"),
    (["--hardware", "a800-80", "--world-size", "8", "--corpus", "no/such"], MODEL + BATCH, "no/such.idx"),
    (
        ["--hardware", "a800-80", "--world-size", "8", "--lengths", "no/such"],
        MODEL + BATCH,
        "--lengths: 'no/such' names no lengths: there is neither such a file nor an index",
    ),
    (["--hardware", "cpu-gloo", "--world-size", "1", "--lengths", "wikipedia"], MODEL + BATCH, "no strategy holds"),
    ([*CLUSTER, "--sequences", "-3"], MODEL + BATCH, "'-3'"),
    ([*CLUSTER, "--from-script", "run.sh"], MODEL + BATCH, "--from-script"),
]


@pytest.mark.parametrize(("options", "arguments", "says"), WRONG, ids=[says for _, _, says in WRONG])
def test_bad_input_is_one_line_and_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], arguments: list[str], says: str
) -> None:
    path = tmp_path / "hotspa.yaml"
    try:
        code = plan(*options, "-o", str(path), arguments=arguments)
    except SystemExit as stopped:  # argparse
        code = int(stopped.code or 0)
    assert code == 2 and not path.exists()
    assert says in one_line(capsys)


def test_an_empty_corpus_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("\n\n")
    assert plan("--hardware", "h100", "--world-size", "8", "--lengths", str(lengths)) == 2
    assert "no lengths" in one_line(capsys)


def test_without_matplotlib_a_plot_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        charts.save_lines(str(tmp_path / "x.png"), title="t", series={"a": [1.0]})


@needs_matplotlib
def test_charts_are_drawn_and_a_wrong_path_is_named(tmp_path: Path) -> None:
    charts.save_bars(str(tmp_path / "b.svg"), title="t", labels=["x", "y"], series={"a": [1.0, 2.0], "b": [2.0, 1.0]})
    charts.save_lines(str(tmp_path / "l.png"), title="t", series={"a": [1.0, 2.0]})
    assert (tmp_path / "b.svg").stat().st_size > 1000 and (tmp_path / "l.png").stat().st_size > 1000
    with pytest.raises(ValueError, match=r"--plot: .*no-such"):
        charts.save_lines(str(tmp_path / "no-such" / "x.png"), title="t", series={"a": [1.0]})


# -------------------------------------------------------------------------------------------------------- run scripts


def test_arguments_are_read_off_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROM_OUTSIDE", "7")
    script = tmp_path / "run.sh"
    script.write_text(
        """#!/bin/bash
set -euo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS=8
HIDDEN=${HIDDEN_SIZE:-4096}
NODE=$(hostname)        # never run
MODEL_ARGS=(
    --num-layers 12     # a comment
    --hidden-size $HIDDEN
    "--ffn-hidden-size" 11008
)
OPTIONS="--swiglu --bf16"
MODEL_ARGS+=(--seed ${FROM_OUTSIDE})
torchrun --nproc-per-node $GPUS -m hotspa_megatron.launch pretrain_gpt.py \\
    "${MODEL_ARGS[@]}" \\
    ${OPTIONS} \\
    --lr 1e-4 2>&1 | tee log.txt
"""
    )
    assert arguments_of_script(script) == shlex.split(
        "--num-layers 12 --hidden-size 4096 --ffn-hidden-size 11008 --seed 7 --swiglu --bf16 --lr 1e-4"
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("echo hello", "starts no Python file"),
        ("python pretrain_gpt.py --num-layers $LAYERS", r":1: \$LAYERS is not set"),
        ("N=$(nproc)\npython pretrain_gpt.py --num-layers $N", r":2: \$N is not set"),
        ("python pretrain_gpt.py --num-layers $(nproc)", "comes from a command"),
        ("python pretrain_gpt.py 'unfinished", "no closing quotation"),
        (
            "if [ -f x ]; then\n  N=1\nelse\n  N=2\nfi\npython pretrain_gpt.py --num-layers $N",
            r":6: \$N depends on a condition",
        ),
        ("[ -f x ] && N=1\npython pretrain_gpt.py --num-layers $N", r"\$N depends on a condition"),
        ("for N in 1 2; do\n  M=$N\ndone\npython pretrain_gpt.py --num-layers $M", r"\$M depends on a condition"),
    ],
)
def test_what_cannot_be_read_off_a_script_is_named(tmp_path: Path, text: str, says: str) -> None:
    script = tmp_path / "run.sh"
    script.write_text(text + "\n")
    with pytest.raises(ValueError, match=says):
        arguments_of_script(script)


def test_plain_conditions_of_a_script_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EXTRA", raising=False)
    script = tmp_path / "run.sh"
    script.write_text(
        """DTYPE=${1:-"fp8"}
MEGATRON=/opt/megatron
SCRIPT="$MEGATRON/pretrain_gpt.py"
if [ ! -f "$SCRIPT" ]; then
    echo "no pretrain_gpt.py"
    exit 1
fi
ARGS=(--num-layers 2)
if [[ "$DTYPE" == "bf16" ]]; then
    ARGS+=(--bf16)
elif [[ "$DTYPE" == "fp16" ]] || [[ "$DTYPE" == "fp8" ]]; then
    ARGS+=("--fp8-format hybrid")
    if [ "$DTYPE" != fp8 ]; then
        ARGS+=(--seed 1)
    fi
else
    ARGS+=(--seed 2)
fi
if [[ -z "$EXTRA" ]]; then ARGS+=(--bf16); else ARGS+=(--seed 4); fi
[ -n "$DTYPE" ] && ARGS+=(--swiglu)
[ -z "$DTYPE" ] && ARGS+=(--seed 3)
HEAD=$(scontrol show hostnames | head -1)
COMMAND="torchrun --rdzv-endpoint $HEAD:29500 $SCRIPT ${ARGS[@]}"
srun --label bash -c "$COMMAND --lr 1e-4"
"""
    )
    expected = "--num-layers 2 --fp8-format hybrid --bf16 --swiglu --lr 1e-4"
    assert arguments_of_script(script) == shlex.split(expected)


def test_a_plan_from_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        f"ARGS=({' '.join(MODEL + BATCH)})\ntorchrun pretrain_gpt.py ${{ARGS[@]}} --hotspa-config x.yaml\n"
    )
    assert main(["plan", *CLUSTER, "--from-script", str(script), "-o", str(tmp_path / "h.yaml")]) == 0
    assert main(["plan", *CLUSTER, "--from-script", str(tmp_path / "none.sh"), "-o", str(tmp_path / "i.yaml")]) == 2
    assert "none.sh" in one_line(capsys)


def test_flags_of_megatrons_are_known_and_others_are_not() -> None:
    check_flags([*MODEL, *BATCH, "--lr=1e-4", "-1", "value"])
    with pytest.raises(ValueError, match="remove it here if your own script adds it"):
        check_flags(["--zzzzzzzzzzzzzz"])


@pytest.mark.long
def test_the_list_of_flags_is_megatrons() -> None:
    code = (
        "import argparse\n"
        "from hotspa_megatron.hooks import cpu\n"
        "cpu.install()\n"
        "from megatron.training import arguments\n"
        "from hotspa_megatron.cli.described_run import check_flags\n"
        "parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))\n"
        "flags = [name for action in parser._actions for name in action.option_strings]\n"
        "check_flags([flag for flag in flags if flag != '--help'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ----------------------------------------------------------------------------------------------------------- simulate


def test_a_run_is_simulated_to_a_table_json_and_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "steps.csv"
    options = [*CLUSTER, "--steps", "2", "--csv", str(path)]
    assert main(["simulate", *options, "--json", "--", *MODEL, *BATCH]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [step["step"] for step in said["steps"]] == [1, 2]
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["hotspa_s"]) for row in rows] == [step["hotspa_s"] for step in said["steps"]]
    assert main(["simulate", *options, "--", *MODEL, *BATCH]) == 0
    printed = capsys.readouterr().out
    assert "modelled" in printed
    table = [line for line in printed[printed.index("beside other systems") :].splitlines() if "x  " in line]
    names = ["static", "home, unpacked", "ours", "hybrid CP", "dynamic CP", "ceiling"]
    fields = ["static_s", "home_unpacked_s", "hotspa_s", "hybrid_cp_s", "dynamic_cp_s", "ceiling_s"]
    assert set(said["means"]) == set(fields)
    for line, name, field in zip(table, names, fields, strict=True):
        mean, ours = said["means"][field], said["means"]["hotspa_s"]
        assert line.startswith(name) and line.removeprefix(name).split()[:2] == [f"{mean:.3f}", f"{mean / ours:.2f}x"]
    assert said["means"]["hotspa_s"] == pytest.approx(sum(step["hotspa_s"] for step in said["steps"]) / 2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--seed", "-3"], "--seed: -3 is not a seed"),
        (["--csv", "nowhere/steps.csv"], "--csv: nowhere/steps.csv: No such file or directory"),
        (["--csv", ""], "--csv: '' names no file"),
        (["--csv", "."], "--csv: .: Is a directory"),
        (["--plot", "nowhere/steps.png"], "--plot: nowhere/steps.png: No such file or directory"),
        (["--plot", "steps.xyz"], "--plot: steps.xyz: its ending is not supported; write one of ."),
    ],
)
@pytest.mark.parametrize("suite", [False, True])
def test_what_cannot_be_used_or_written_is_said_before_the_work(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    says: str,
    suite: bool,
) -> None:
    if "--plot" in options:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    for module, name in ((described_run, "plan_strategies"), (simulate, "run_suite")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("the work had begun"))
    own = ["--suite", "a800", *options] if suite else [*CLUSTER, *options, "--", *MODEL, *BATCH]
    assert main(["simulate", *own]) == 2
    assert says in one_line(capsys)
    assert list(tmp_path.iterdir()) == []


def test_a_lever_is_a_suites(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--without", "interleaving", *CLUSTER, "--", *MODEL, *BATCH]) == 2
    assert "--without: is for a suite; add --suite" in one_line(capsys)


def test_a_file_that_is_there_is_kept_until_there_is_something_to_write(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text("kept")
    assert options_module.writable(str(path), flag="--csv") == path and path.read_text() == "kept"
    assert options_module.writable(str(tmp_path / "new.csv"), flag="--csv") and list(tmp_path.iterdir()) == [path]
    assert options_module.writable("/dev/null", flag="--csv") == Path("/dev/null")
    link, target = tmp_path / "link.csv", tmp_path / "later.csv"
    link.symlink_to(target)
    options_module.writable(str(link), flag="--csv")
    assert link.is_symlink() and not target.exists()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_for_terminals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    stderr = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    with progress.waiting("thinking"):
        pass
    assert list(progress.counted(iter("ab"), what="letters", total=2)) == ["a", "b"]
    assert ("thinking" in stderr.getvalue() and "letters" in stderr.getvalue()) == terminal
    assert bool(stderr.getvalue()) == terminal and capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--suite", "b200"], "'b200' is not known"),
        (["--suite", "a800", "--hardware", "h100"], "remove --hardware"),
        (["--suite", "a800", "--jobs", "none"], "'none'"),
        ([], "--hardware: missing"),
        (["--hardware", "h100"], "--corpus: missing"),
    ],
)
def test_bad_input_of_simulate(capsys: pytest.CaptureFixture[str], options: list[str], says: str) -> None:
    assert main(["simulate", *options]) == 2
    assert says in one_line(capsys)


def test_what_cannot_be_drawn_or_named_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, plot, said in (
        ("hotspa.yaml", tmp_path / "nowhere" / "x.png", "--plot: "),
        (f"{'a' * 300}.yaml", tmp_path / "x.png", "--output: "),
    ):
        command = ["plan", *CLUSTER, "--plot", str(plot)]
        assert main([*command, "-o", str(tmp_path / name), "--", *MODEL, *BATCH]) == 2
        errors = capsys.readouterr().err
        assert said in errors and errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------------------- doctor


def findings(
    environment: Mapping[str, str] | None = None, arguments: tuple[str, ...] = ()
) -> dict[str, doctor.Finding]:
    found = list(doctor.examine(arguments, environment or {}))
    assert all(finding.fix for finding in found if finding.state == "problem")
    return {finding.what: finding for finding in found}


def test_doctor_looks_at_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    said = {finding["what"] for finding in json.loads(capsys.readouterr().out)}
    assert {"Python", "torch", "numpy", "transformer-engine", "/dev/shm", "open files", "network interfaces"} <= said
    assert main(["doctor"]) == 0
    assert "/dev/shm" in capsys.readouterr().out


def test_doctor_takes_a_package_that_does_not_load_for_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (
        ("flash_attn", "raise OSError('libcudart.so.12: cannot open')"),
        ("apex", "import no_such_thing"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = findings()
    assert "does not load: OSError: libcudart.so.12" in found["flash-attn"].found
    assert "needs no_such_thing" in found["apex"].found


def test_doctor_names_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    assert findings({"NCCL_SOCKET_IFNAME": "nosuch0"})["NCCL_SOCKET_IFNAME"].state == "problem"
    assert findings({"NCCL_SOCKET_IFNAME": "^docker"})["NCCL_SOCKET_IFNAME"].state == "ok"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 512))
    few = findings()["open files"]
    assert few.state == "problem" and "ulimit -n 512" in few.fix


@pytest.mark.parametrize(("mebibytes", "state"), [(32, "problem"), (64, "problem"), (8192, "ok")])
def test_doctor_knows_a_containers_shared_memory(monkeypatch: pytest.MonkeyPatch, mebibytes: int, state: str) -> None:
    usage = SimpleNamespace(total=mebibytes << 20)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage)
    found = findings()["/dev/shm"]
    assert found.state == state and ("--shm-size" in found.fix) == (state == "problem")


def test_doctor_looks_at_megatrons_flags() -> None:
    good = findings(arguments=(*MODEL, "--hotspa-config", "auto"))
    assert good["Megatron's flags"].state == "ok" and "--hotspa-config" not in good
    assert "--use-distributed-optimizer" not in good
    refused = findings(arguments=(*MODEL, "--num-experts", "8"))
    assert "--num-experts" in refused["Megatron's flags"].found and refused["Megatron's flags"].state == "problem"
    parallel = (*MODEL, "--sequence-parallel")
    assert findings({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, parallel)["CUDA_DEVICE_MAX_CONNECTIONS"].state == "problem"


def test_doctor_names_flags_that_a_job_would_refuse() -> None:
    def problems(*more: str) -> list[str]:
        found = doctor.examine([*MODEL, *BATCH, *more], {})
        return [each.found for each in found if each.what == "Megatron's flags" and each.state == "problem"]

    assert problems() == []
    (said,) = problems("--micro-batch-size", "2")
    assert said.startswith("--micro-batch-size: must be 1")
    (said,) = problems("--fp8-format", "hybrid")
    assert said.startswith("--fp8")


def test_doctor_reads_the_file_that_the_flags_name(tmp_path: Path) -> None:
    path = tmp_path / "hotspa.yaml"
    more = ["--hotspa-config", str(path)]
    missing = findings(arguments=(*MODEL, *more))["--hotspa-config"]
    assert missing.state == "problem" and "cannot be read" in missing.found
    path.write_text("strategies: []\nsamples: megatron\n")
    cut = ("--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss")
    said = findings(arguments=(*MODEL, *more, *cut[:2]))["samples: megatron"]
    assert said.state == "problem" and said.found == "without --eod-mask-loss"
    complete = findings(arguments=(*MODEL, *more, *cut))
    assert "samples: megatron" not in complete and "--reset-position-ids" not in complete
    path.write_text("strategies: []\nallow_untested: [fp8]\n")
    allowed = list(doctor.examine([*MODEL, *BATCH, *more, "--fp8-format", "hybrid", *cut], {}))
    assert {each.what for each in allowed if each.state == "problem"} == {
        each.what for each in doctor.examine([*MODEL, *BATCH], {}) if each.state == "problem"
    }
    assert "--reset-position-ids" in {each.what for each in allowed}  # of documents it is not needed


@pytest.mark.parametrize("command", ["plan", "simulate", "doctor"])
def test_help_has_examples(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0 and "examples:" in capsys.readouterr().out
