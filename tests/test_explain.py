"""``hotspa explain``: its numbers, its reading of Megatron's flags, and one line with exit code 2 for bad input."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hotspa_megatron.cli import charts
from hotspa_megatron.cli.main import main
from hotspa_megatron.cli.megatron_args import MegatronCommandLine, read_command_line
from hotspa_megatron.cli.timeline import SpanShown, rows_of
from hotspa_megatron.planning import cost_model
from hotspa_megatron.planning.communicators import GROUP_MB, PAIR_MB, GroupMemory, Groups, count_groups, group_memory
from hotspa_megatron.planning.lengths import LengthHistogram
from hotspa_megatron.planning.step_time import Activity, Span
from hotspa_megatron.strategy import Kind, Strategy
from tests.test_config import BAD, GOOD, write
from tests.test_lengths import write_index

GPT = [
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "8", "--ffn-hidden-size", "96"),
    *("--seq-length", "4096", "--max-position-embeddings", "4096", "--position-embedding-type", "rope"),
    *("--tokenizer-type", "HuggingFaceTokenizer", "--vocab-size", "1000", "--normalization", "RMSNorm"),
    *("--disable-bias-linear", "--swiglu", "--untie-embeddings-and-output-weights", "--bf16"),
    *("--tensor-model-parallel-size", "4", "--sequence-parallel", "--use-distributed-optimizer", "--lr", "1e-4"),
]


def without(*flags: str) -> list[str]:
    return [flag for flag in GPT if flag not in flags]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own launcher must not decide the world."""
    for name in ("WORLD_SIZE", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)


def read(*arguments: str, world_size: int | None = None) -> MegatronCommandLine:
    return read_command_line(arguments, world_size=world_size)


def explained(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, *arguments: str) -> dict[str, Any]:
    assert main(["explain", str(write(tmp_path, text)), "--json", *arguments]) == 0
    described: dict[str, Any] = json.loads(capsys.readouterr().out)
    return described


def test_strategies_and_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "strategies: [{max_length: 512}, {max_length: 1024, tp: 4, cp: 2}, {max_length: 4096, pp: 2, tp: 2}]"
    described = explained(tmp_path, capsys, text, "--world-size", "8", "--", *GPT)
    guest, sibling, pipelined = described["strategies"]
    home = described["home"]
    assert [each["strategy"] for each in (guest, sibling, pipelined, home)] == [
        "tp1-cp1-pp1-dp8",
        "tp4-cp2-pp1-dp1",
        "tp2-cp1-pp2-dp2",
        "tp4-cp1-pp1-dp2",
    ]
    assert [each["kind"] for each in (guest, sibling, pipelined, home)] == ["guest", "sibling", "guest", "home"]
    assert [each["lengths"] for each in (guest, sibling, pipelined, home)] == [
        [1, 512],
        [513, 1024],
        [1025, 4096],
        None,
    ]
    assert pipelined["layers"] == [[0, 2], [2, 4]]

    # Embedding and head of 1024 rows, four layers of QKV, projection, gate, up and down, and their norms.
    ends, layer, layer_norms, last_norm = 1024 * 64, 64 * (3 * 64 + 64 + 3 * 96), 2 * 64, 64
    whole = 2 * ends + 4 * (layer + layer_norms) + last_norm
    assert guest["memory"] == [
        {
            "stage": 0,
            "parameters": whole,
            "parameter_bytes": 2 * whole,
            "gradient_bytes": 4 * whole,
            "optimizer_bytes": 0,
        }
    ]
    quarter = (2 * ends + 4 * layer) // 4 + 4 * layer_norms + last_norm
    assert home["memory"][0]["parameters"] == quarter
    assert home["memory"][0]["optimizer_bytes"] == 12 * quarter // 2
    assert sibling["memory"] == [dict.fromkeys(guest["memory"][0], 0)]
    half = (2 * layer + ends) // 2 + 2 * layer_norms
    assert [stage["parameters"] for stage in pipelined["memory"]] == [half, half + last_norm]
    assert described["world_size"] == 8


def test_optimizer_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def per_parameter(*flags: str) -> float | None:
        described = explained(tmp_path, capsys, "strategies: []", "--world-size", "8", "--", *flags)
        stage = described["home"]["memory"][0]
        return None if stage["optimizer_bytes"] is None else stage["optimizer_bytes"] / stage["parameters"]

    assert per_parameter(*GPT) == 6
    assert per_parameter(*without("--use-distributed-optimizer")) == 12
    assert per_parameter(*without("--bf16")) == 4
    assert per_parameter(*GPT, "--optimizer", "sgd") is None
    assert per_parameter(*GPT, "--use-precision-aware-optimizer") is None


def test_groups_that_serve_several_axes_count_once() -> None:
    assert count_groups([Strategy(tp=1, cp=1, pp=1, dp=1)]).total == 0
    found = count_groups([Strategy(tp=2, cp=1, pp=1, dp=2)])
    axes = {"tp": 2, "cp": 0, "dp": 2, "pp": 0, "tp-cp": 2, "tp-dp": 1, "tp-pp": 2, "dp-cp": 2, "tp-dp-cp": 1}
    assert found == Groups(per_axes={**axes, "all": 0, "embedding": 0}, total=5, most_on_one_rank=3)
    both = count_groups([Strategy(tp=2, cp=1, pp=1, dp=2), Strategy(tp=1, cp=2, pp=1, dp=2)])
    assert (both.total, both.most_on_one_rank) == (5, 3)
    deep = count_groups([Strategy(tp=1, cp=1, pp=4, dp=1)])
    assert (deep.per_axes["pp"], deep.per_axes["embedding"], deep.total) == (1, 1, 2)


def test_memory_of_groups_counts_what_home_does_not_have() -> None:
    home = Strategy(tp=2, cp=1, pp=1, dp=2)
    assert group_memory(home, []) == GroupMemory(added_groups=0, total_mb=2 * PAIR_MB + GROUP_MB, added_mb=0)
    same = group_memory(home, [(home, Kind.SIBLING)])
    assert same.added_groups == 0
    # cp 2 over tp's pairs and dp 2 over dp's: nothing is new; a guest's moves have a group of all ranks.
    sibling = group_memory(home, [(Strategy(tp=1, cp=2, pp=1, dp=2), Kind.SIBLING)])
    assert sibling.added_groups == 0
    guest = group_memory(home, [(Strategy(tp=1, cp=1, pp=1, dp=4), Kind.GUEST)])
    assert (guest.added_groups, guest.added_mb) == (1, GROUP_MB)
    deep = group_memory(home, [(Strategy(tp=1, cp=1, pp=4, dp=1), Kind.GUEST)])
    assert (deep.added_groups, deep.added_mb) == (2, PAIR_MB + GROUP_MB)


def test_more_memory_for_groups_than_allowed_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, GOOD + "switch:\n  max_group_mb: 100\n")
    line = path.read_text().splitlines().index("  max_group_mb: 100") + 1
    assert main(["explain", str(path), "--world-size", "8", "--", *GPT]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"hotspa: {path}:{line}: switch.max_group_mb: ") and said.count("\n") == 1
    assert "more than 100" in said and "NVIDIA/nccl issue 964" in said
    path.write_text(path.read_text().replace("100", "100000"))
    assert main(["explain", str(path), "--world-size", "8", "--", *GPT]) == 0
    assert "MiB of a rank's memory" in capsys.readouterr().out


def test_a_step_of_a_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every document is shown in one segment, cut as a job cuts it, and what does not pay is merged."""
    prefix = write_index(tmp_path / "data", [101] * 90 + [2001] * 9 + [9001])
    text = "strategies: [{max_length: 512}, {max_length: 4096, tp: 4, cp: 2}]"
    command = ["--world-size", "8", "--lengths", str(prefix), "--sequences", "64", "--seed", "3"]
    step = explained(tmp_path, capsys, text + "\nmerge: never", *command, "--", *GPT)["step"]
    drawn = LengthHistogram.from_index(prefix).sample(64, seed=3)
    assert step["tokens"] == drawn.sum() and (drawn > 8192).any()
    pieces = [length for each in drawn.tolist() for length in ([4096, 4096, 808] if each == 9000 else [each])]
    assert step["sequences"] == len(pieces)
    guest, sibling = step["segments"]
    assert (guest["kind"], guest["shortest"], guest["longest"]) == ("guest", 100, 100)
    assert (sibling["kind"], sibling["shortest"], sibling["longest"]) == ("sibling", 808, 4096)
    assert guest["sequences"] == pieces.count(100) and len(guest["micro_batches"]) == 8
    for each in (guest, sibling):
        assert each["computed_tokens"] >= each["tokens"] and 0 <= each["imbalance"] < 1
    assert step["padding"] == pytest.approx(
        1 - step["tokens"] / sum(each["computed_tokens"] for each in step["segments"])
    )

    # Over gloo this model's parameters are not moved for a few short documents.
    merged = explained(tmp_path, capsys, text, "--hardware", "cpu-gloo", *command, "--", *GPT)["step"]
    assert [each["kind"] for each in merged["segments"]] != ["guest", "sibling"]
    assert (
        merged["seconds"]
        <= explained(tmp_path, capsys, text + "\nmerge: never", "--hardware", "cpu-gloo", *command, "--", *GPT)["step"][
            "seconds"
        ]
    )

    assert main(["explain", str(write(tmp_path, text)), *command, "--", *GPT]) == 0
    printed = capsys.readouterr().out
    assert f"A step of {prefix}: {len(pieces)} sequences" in printed and "Modelled on a100-80 (--hardware)" in printed


THREE = (
    "strategies: [{max_length: 512}, {max_length: 1024, tp: 4, cp: 2}, {max_length: 2048, pp: 2, tp: 2}]\nmerge: never"
)


def test_every_pair_and_what_it_moves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    described = explained(tmp_path, capsys, THREE, "--world-size", "8", "--hardware", "h100", "--", *GPT)
    assert described["hardware"] == "h100"
    moves = {(each["source"], each["destination"]): each for each in described["moves"]}
    home, guest, deep = "tp4-cp1-pp1-dp2", "tp1-cp1-pp1-dp8", "tp2-cp1-pp2-dp2"
    assert set(moves) == {(home, guest), (deep, guest), (guest, home), (home, deep), (guest, deep), (deep, home)}
    assert {pair for pair, each in moves.items() if each["carries"] == "gradients"} == {(guest, home), (deep, home)}

    # Two bytes each; tp 4 splits embedding, head and the matrices of the layers, of which every rank lacks three quarters.
    ends, layer = 1024 * 64, 64 * (3 * 64 + 64 + 3 * 96)
    out = moves[home, guest]
    assert out["bytes"] == 8 * 2 * 3 * (2 * ends + 4 * layer) // 4
    norms = 4 * 2 * 64 + 64
    assert out["copied_bytes"] + out["bytes"] == 8 * 2 * (2 * ends + 4 * layer + norms)
    assert out["between_nodes_bytes"] == 0 and out["messages"] == 8 * 3
    assert 2 * out["bytes"] // 8 <= out["busiest_rank_bytes"] <= out["bytes"]
    # Whole parameters are everywhere under tp 1, and so are its reduced gradients: nothing is left to send.
    assert moves[guest, deep]["bytes"] == moves[guest, home]["bytes"] == 0 == moves[guest, home]["seconds"]
    # From the guest before, or from home: never more than from home alone.
    assert 0 < moves[deep, guest]["bytes"] <= out["bytes"]
    assert moves[deep, home]["bytes"] > 0 and all(each["seconds"] > 0 for each in moves.values() if each["bytes"])

    slow = explained(tmp_path, capsys, THREE, "--world-size", "8", "--hardware", "l40s-pcie", "--", *GPT)["moves"]
    assert [each["bytes"] for each in slow] == [each["bytes"] for each in described["moves"]]
    assert slow[0]["seconds"] > described["moves"][0]["seconds"]
    # On two nodes what a node lacks crosses once.
    spread = explained(tmp_path, capsys, "strategies: [{max_length: 512, pp: 2}]", "--world-size", "16", "--", *GPT)
    assert sum(each["between_nodes_bytes"] for each in spread["moves"]) > 0

    # Folds in bf16 take half of what main_grad's single precision does; parameters travel as they are.
    halved = explained(
        tmp_path, capsys, THREE + "\nswitch: {fold_dtype: bf16}", "--world-size", "8", "--hardware", "h100", "--", *GPT
    )["moves"]
    for exact, rounded in zip(described["moves"], halved, strict=True):
        assert rounded["bytes"] * (2 if exact["carries"] == "gradients" else 1) == exact["bytes"]

    alone = "strategies: [{max_length: 512, tp: 4}]"
    assert explained(tmp_path, capsys, alone, "--world-size", "8", "--", *GPT)["moves"] == []
    assert main(["explain", str(write(tmp_path, alone)), "--world-size", "8", "--", *GPT]) == 0
    assert "No strategy moves anything" in capsys.readouterr().out


def test_a_step_rank_by_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every rank computes every segment that has work for it, at no time two things, and the last ends the step."""
    of = ["--world-size", "8", "--lengths", "wikipedia", "--sequences", "64"]
    step = explained(tmp_path, capsys, THREE, *of, "--", *GPT)["step"]
    kinds = [each["kind"] for each in step["segments"]]
    assert sorted(kinds) == ["guest", "guest", "home", "sibling"]
    spans = step["timeline"]
    for rank in range(8):
        own = sorted((each["start"], each["end"]) for each in spans if rank in each["ranks"])
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(own)) and own[0][0] == 0.0
        assert own[-1][1] == step["seconds"]
    for number, segment in enumerate(step["segments"]):
        work = [each for each in spans if each["activity"] == "compute" and each["segment"] == number]
        strategy = Strategy.parse(segment["strategy"])
        # A stage of a pipeline computes twice: the first forward passes, and all the rest.
        pieces = 1 if strategy.pp == 1 else 2
        assert sorted(tuple(sorted(each["ranks"])) for each in work) == sorted(strategy.groups("tp-cp") * pieces)
        took = [
            max(each["end"] for each in work if replica & {*each["ranks"]})
            - min(each["start"] for each in work if replica & {*each["ranks"]})
            for replica in map(set, strategy.groups("tp-cp-pp"))
        ]
        assert max(took) == pytest.approx(segment["seconds"])
        around = [each["activity"] for each in spans if each["segment"] == number and each["activity"] != "compute"]
        assert set(around) <= ({"switch", "reduce", "fold"} if segment["kind"] == "guest" else set())
    deep = [each["strategy"] for each in step["segments"]].index("tp2-cp1-pp2-dp2")
    assert [each["segment"] for each in spans if each["activity"] == "fold"] == [deep]  # the other has nothing to send
    assert next(each["segment"] for each in spans if each["activity"] == "switch") == kinds.index("guest")
    assert [each["activity"] for each in spans[-2:]] == ["reduce", "optimizer"]

    assert main(["explain", str(write(tmp_path, THREE)), *of, "--", *GPT]) == 0
    printed = capsys.readouterr().out
    drawn = re.findall(r"^\d(?:-\d)? +([<>=*.0-9]{80}) +([0-9.]+)%$", printed, re.MULTILINE)
    assert drawn and all(re.search("1+.*2+.*3+.*4+", line) for line, _ in drawn)
    shares = [
        sum(each["end"] - each["start"] for each in spans if each["activity"] == "compute" and rank in each["ranks"])
        / step["seconds"]
        for rank in range(8)
    ]
    assert {share for _, share in drawn} == {f"{100 * share:.1f}" for share in shares}


def test_stages_of_a_pipeline_wait_for_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One micro-batch through four stages: each computes a quarter of the time, one after the other, forward and back."""
    line = [*GPT, "--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "4"]
    line.remove("--sequence-parallel")
    of = ["--world-size", "4", "--lengths", "lognormal:mean=900,sigma=0.1,max=1000", "--sequences", "1"]
    step = explained(tmp_path, capsys, "strategies: []", *of, "--", *line)["step"]
    work = [each for each in step["timeline"] if each["activity"] == "compute"]
    whole = step["segments"][0]["seconds"]
    for stage in range(4):
        (forward, backward) = [each for each in work if each["ranks"] == [stage]]
        one = whole / 4
        assert [forward["start"], forward["end"]] == pytest.approx([stage * one / 3, (stage + 1) * one / 3])
        end = whole - stage * one * 2 / 3
        assert [backward["start"], backward["end"]] == pytest.approx([end - one * 2 / 3, end])
    span = Span(Activity.COMPUTE, 0, 0, 1.0, 13.0, fill=3.0)
    assert all(sum(end - start for start, end in span.of_stage(stage, 4)) == pytest.approx(9.0) for stage in range(4))


def test_a_character_shows_what_takes_most_of_it() -> None:
    def span(activity: Activity, start: float, end: float, segment: int | None = None) -> SpanShown:
        return SpanShown(activity=activity, segment=segment, ranks=(0, 1), start=start, end=end)

    spans = [span(Activity.COMPUTE, 0.0, 2.6, 0), span(Activity.FOLD, 2.6, 2.8, 0), span(Activity.OPTIMIZER, 3.4, 4.0)]
    (row,) = rows_of(spans, 2)
    assert (row.label, row.drawn(4.0, 4), row.drawn(4.0, 20)) == ("0-1", "111*", 13 * "1" + ">...***")
    assert row.busy() == 2.6
    # A rank that does other things, or the same at other times, has a line of its own.
    alone = SpanShown(activity=Activity.SWITCH, segment=1, ranks=(1,), start=2.8, end=2.9)
    assert [each.label for each in rows_of([*spans, alone], 3)] == ["0", "1", "2"]


def test_a_step_is_plotted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawing = tmp_path / "step.png"
    of = ["--world-size", "8", "--lengths", "wikipedia", "--sequences", "16", "--plot"]
    assert main(["explain", str(write(tmp_path, THREE)), *of, str(drawing), "--", *GPT]) == 0
    assert drawing.read_bytes().startswith(b"\x89PNG") and capsys.readouterr().out
    assert main(["explain", str(write(tmp_path, THREE)), *of, str(tmp_path / "no" / "step.png"), "--", *GPT]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("hotspa: --plot: ") and said.err.count("\n") == 1 and not said.out


def test_the_flag_of_this_package_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    described = explained(tmp_path, capsys, GOOD, "--world-size", "8", "--", *GPT, "--hotspa-config", "hotspa.yaml")
    assert described["world_size"] == 8


def test_a_step_plans_no_move_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are shown, and no others."""
    planned: list[object] = []
    plan = cost_model.plan_reshard

    def counted(*arguments: Any, **options: Any) -> Any:
        planned.append(arguments)
        return plan(*arguments, **options)

    monkeypatch.setattr(cost_model, "plan_reshard", counted)
    counts = []
    for more in ([], ["--lengths", "wikipedia", "--sequences", "16"]):
        assert main(["explain", str(write(tmp_path, THREE)), "--world-size", "8", *more, "--", *GPT]) == 0
        counts.append(len(planned))
        planned.clear()
    assert counts == [6, 6]


def test_a_drawing_of_hundreds_of_ranks_can_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figure_module = pytest.importorskip("matplotlib.figure")
    saved: list[Any] = []
    save = figure_module.Figure.savefig
    monkeypatch.setattr(figure_module.Figure, "savefig", lambda self, path: (saved.append(self), save(self, path)))
    drawing = tmp_path / "step.png"
    for ranks, labelled in ((8, 8), (32, 32), (300, 30)):
        rows = {str(rank): [("1 tp1", 0.0, 1.0 + rank)] for rank in range(ranks)}
        charts.save_spans(str(drawing), title=r"$\nonsense{ and $HOME", rows=rows)
        (axes,) = saved[-1].axes
        labels = [label.get_text() for label in axes.get_yticklabels()]
        assert len(labels) == labelled and labels[0] == "rank 0"
        assert axes.get_title() == r"$\nonsense{ and $HOME"
        assert len(axes.collections) == ranks
        heights = [label.get_window_extent() for label in axes.get_yticklabels()]
        assert all(above.y0 >= below.y1 for above, below in itertools.pairwise(heights)), "labels touch each other"


def test_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(write(tmp_path, GOOD)), "--world-size", "8", "--", *GPT]) == 0
    said = capsys.readouterr()
    lines = [line.split() for line in said.out.splitlines()]
    assert ["513-2048", "tp2-cp2-pp1-dp2", "guest", "flags", "2,048", "2", "x", "4"] in lines
    assert ["2049-4096", "tp4-cp1-pp1-dp2", "home", "flags", "8,192", "2", "x", "4"] in lines
    assert "19 distinct in all, at most 7 on one rank." in said.out
    assert "\x1b" not in said.out and not said.err


def test_the_file_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(write(tmp_path, GOOD))]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["1-512", "1", "1", "1", "default", "default", "2,048"] in lines
    assert ["513-2048", "2", "2", "1", "default", "default", "default"] in lines
    assert explained(tmp_path, capsys, GOOD)["strategies"][0]["tokens_per_microbatch"] == 2048


def test_markup_in_a_path_is_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "[bold]"
    folder.mkdir()
    assert main(["explain", str(write(folder, "- 1"))]) == 2
    assert "[bold]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "given", "world"),
    [
        ({}, [], 4),
        ({"WORLD_SIZE": "8"}, [], 8),
        ({"SLURM_NTASKS": "16"}, [], 16),
        ({"WORLD_SIZE": "8", "SLURM_NTASKS": "16"}, [], 8),
        ({"WORLD_SIZE": "", "SLURM_NTASKS": "16"}, [], 16),
        ({"WORLD_SIZE": "8"}, ["--world-size", "32"], 32),
    ],
)
def test_where_the_world_size_comes_from(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    given: list[str],
    world: int,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert explained(tmp_path, capsys, "strategies: []", *given, "--", *GPT)["world_size"] == world


@pytest.mark.parametrize("name", BAD)
def test_bad_files_exit_with_2_and_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    text, line, key, _ = BAD[name]
    path = write(tmp_path, text)
    assert main(["explain", str(path)]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"hotspa: {path}:{line}: {key}")
    assert said.err.count("\n") == 1 and not said.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "hotspa: the following arguments are required: COMMAND; see hotspa --help"),
        (["explain"], "hotspa explain: the following arguments are required: CONFIG; see hotspa explain --help"),
        (["explian", "FILE"], "invalid choice: 'explian'"),
        (["explain", "FILE", "--wrld-size", "4"], "unrecognized arguments: --wrld-size 4"),
        (["explain", "FILE", "--world-size", "4"], "--world-size: has no meaning without Megatron's arguments"),
        (["explain", "FILE", "--world-size", "0", "--", *GPT], "--world-size: '0' is not a whole number of at least 1"),
        (
            ["explain", "FILE", "--world-size", "1e3", "--", *GPT],
            "--world-size: '1e3' is not a whole number of at least 1",
        ),
        (
            ["explain", "FILE", "--world-size", "6", "--", *GPT],
            "a world of 6 ranks does not divide into replicas of tp 4",
        ),
        (["explain", "FILE", "--", *GPT, "--seq-length", "1024"], ":7: strategies[1].max_length: 2048 is longer than"),
        (
            ["explain", "FILE", "--", "--num-layers", "4"],
            "--hidden-size, --num-attention-heads, --seq-length, --max-pos",
        ),
        (["explain", "FILE", "--", *GPT, "--num-layers", "four"], "--num-layers: 'four' is not a whole number"),
        (["explain", "FILE", "--", *GPT, "--normalization", "X"], "--normalization: invalid choice: 'X'"),
        (
            ["explain", "FILE", "--", *GPT, "--num-experts=8"],
            "--num-experts: experts are not available in this version",
        ),
        (["explain", "FILE", "--", *GPT, "--fp16"], "--bf16: given together with --fp16"),
        (["explain", "FILE", "--", *GPT, "--max-position-embeddings", "9"], "9 is less than --seq-length 4096"),
        (["explain", "FILE", "--", *GPT, "--hidden-size", "63"], "63 does not divide over 8 attention heads"),
        (["explain", "FILE", "--", *GPT[:16], "--num-layers"], "--num-layers: expected one argument"),
        (["explain", "FILE", "--lengths", "wikipedia"], "--lengths: a step cannot be planned without Megatron's"),
        (
            ["explain", "FILE", "--lengths", "wikipedia", "--", *GPT],
            "--sequences: missing, and the command line has no",
        ),
        (["explain", "FILE", "--lengths", "nowhere", "--sequences", "8", "--", *GPT], "'nowhere' names no lengths"),
        (
            ["explain", "FILE", "--lengths", "wikipedia", "--sequences", "0", "--", *GPT],
            "--sequences: '0' is not a whole",
        ),
        (
            ["explain", "FILE", "--lengths", "wikipedia", "--sequences", "8", "--seed", "-1", "--", *GPT],
            "--seed: -1 is not",
        ),
        (
            ["explain", "FILE", "--lengths", "wikipedia", "--sequences", "8", "--hardware", "b1", "--", *GPT],
            "--hardware: 'b1' is not known",
        ),
        (
            ["explain", "FILE", "--plot", "step.png"],
            "--plot: it draws a step, and there is none to draw; add --lengths",
        ),
        (["explain", "FILE", "--hardware", "B1"], "--hardware: 'B1' is not known"),
        (
            ["explain", "FILE", "--lengths", "wikipedia", "--sequences", "8", "--plot", "", "--", *GPT],
            "--plot: '' names no file",
        ),
        (
            ["explain", "FILE", "--", *GPT, "--tensor-model-paralel-size", "4"],
            "--tensor-model-paralel-size: not an argument of Megatron's; did you mean --tensor-model-parallel-size?",
        ),
        (["explain", "FILE", "--jso"], "unrecognized arguments: --jso"),
        (["data", "check", "FILE", "--jso"], "unrecognized arguments: --jso"),
        (["doctor", "--jso"], "unrecognized arguments: --jso"),
    ],
)
def test_bad_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    path = str(write(tmp_path, GOOD))
    code: object
    try:
        code = main([path if argument == "FILE" else argument for argument in arguments])
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr()
    assert code == 2
    assert message in said.err
    assert said.err.count("\n") == 1 and not said.out


PIPELINES = "strategies: [{max_length: 512}, {max_length: 1024, pp: 4}]"


@pytest.mark.parametrize(
    ("layers", "home", "message"),
    [
        ("30", (), "strategies[1].pp: 30 layers do not divide over pp 4 stages; legal pp: 1, 2, 3, 5, 6, 10, 15, 30"),
        ("12", ("--pipeline-model-parallel-size", "8"),
         "command line: --pipeline-model-parallel-size: 12 layers do not divide over pp 8 stages; legal pp: 1, 2, 3, 4, 6, 12"),
        ("20", ("--decoder-last-pipeline-num-layers", "1"), "have no meaning at pp 1; remove them"),
        # Home's split is uneven; a guest's is not, and a sibling's is home's.
        ("14", ("--pipeline-model-parallel-size", "2", "--decoder-first-pipeline-num-layers", "2"),
         "strategies[1].pp: 14 layers do not divide over pp 4 stages; legal pp: 1, 2, 7, 14"),
        ("14", ("--pipeline-model-parallel-size", "4", "--decoder-first-pipeline-num-layers", "3"),
         "legal --decoder-first-pipeline-num-layers: 2, 5, 8, 11"),
        ("14", ("--pipeline-model-parallel-size", "4", "--decoder-last-pipeline-num-layers", "2"), ""),
    ],
)  # fmt: skip
def test_stages_of_every_strategy_are_checked_with_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layers: str, home: tuple[str, ...], message: str
) -> None:
    line = [*GPT, "--tensor-model-parallel-size", "1", "--num-layers", layers, *home]
    path = write(tmp_path, PIPELINES)
    assert main(["explain", str(path), "--world-size", "8", "--", *line]) == (2 if message else 0)
    said = capsys.readouterr()
    assert message in said.err and said.err.count("\n") == bool(message)


def test_vocabulary_that_only_the_tokenizer_knows() -> None:
    given = without("--vocab-size", "1000")
    with pytest.raises(ValueError, match=r"--vocab-size: missing.*HuggingFaceTokenizer.*or --padded-vocab-size"):
        read(*given)
    assert read(*given, "--padded-vocab-size", "1040").shape.padded_vocab_size == 1040
    assert read(*given, "--vocab-size", "1025").shape.padded_vocab_size == 1536
    assert read(*GPT, "--make-vocab-size-divisible-by", "2").shape.padded_vocab_size == 1000


@pytest.mark.parametrize(("release", "padded"), [("0.17.1", 1536), ("0.18.2", 1024), ("0.19.2", 1024), ("1.0.0", 1024)])
def test_null_tokenizer_of_old_releases_adds_one(monkeypatch: pytest.MonkeyPatch, release: str, padded: int) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: release)
    line = read(*GPT, "--tokenizer-type", "NullTokenizer", "--vocab-size", "1024")
    assert line.shape.padded_vocab_size == padded


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hotspa_megatron.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **variables})


def test_the_command(tmp_path: Path) -> None:
    good = run("explain", str(write(tmp_path, GOOD)), "--world-size", "8", "--", *GPT)
    assert (good.returncode, good.stderr) == (0, "")
    assert "Memory of the fullest rank" in good.stdout
    path = write(tmp_path, "strategies:\n  - {max_length: 8, tp: 010}\n")
    bad = run("explain", str(path))
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr == (
        f"hotspa: {path}:2: strategies[0].tp: '010' has a leading zero, which some read as octal; write it without\n"
    )


def test_help_shows_an_example() -> None:
    shown = run("explain", "--help")
    assert shown.returncode == 0
    assert "hotspa explain hotspa.yaml --world-size 16 -- $GPT_ARGS" in shown.stdout


@pytest.mark.parametrize("flag", ["", "--json"])
def test_a_reader_that_leaves_early_sees_no_traceback(tmp_path: Path, flag: str) -> None:
    path = write(tmp_path, GOOD)
    command = f"{sys.executable} -m hotspa_megatron.cli.main explain {path} {flag} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("1\n", "")


COMMAND_LINES = {
    "llama": GPT,
    "defaults": GPT[: GPT.index("--position-embedding-type")],
    "groups": [*GPT, "--group-query-attention", "--num-query-groups", "2", "--qk-layernorm", "--kv-channels", "16"],
    "groups without their flag": [*GPT, "--num-query-groups", "2", "--add-qkv-bias"],
    "fp16": [*without("--bf16"), "--fp16"],
    "fp16 with fp32 gradients": [*without("--bf16", "--swiglu"), "--fp16", "--accumulate-allreduce-grads-in-fp32"],
    "bf16 gradients": [*GPT, "--grad-reduce-in-bf16"],
    "swiglu default": without("--ffn-hidden-size", "96"),
    "pipeline": [*GPT, "--pipeline-model-parallel-size", "2", "--decoder-first-pipeline-num-layers", "1"],
    "virtual stages": [*GPT, "--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"],
    "layers of virtual stages": [
        *GPT,
        "--pipeline-model-parallel-size",
        "2",
        "--num-layers-per-virtual-pipeline-stage",
        "1",
    ],
    "one virtual stage": [*GPT, "--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "2"],
    "no tensor parallelism": [*GPT, "--tensor-model-parallel-size", "1"],
}
MEGATRON_READS = """
import contextlib, io, json, logging, sys
from hotspa_megatron.hooks import cpu
cpu.install()
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training.arguments import parse_args, validate_args
from hotspa_megatron.hooks.arguments import home_of, shape_of
for line in json.loads(sys.argv[1]):
    sys.argv[1:] = line
    with contextlib.redirect_stdout(io.StringIO()):
        args = parse_args()
        validate_args(args)
        build_tokenizer(args)
    print(repr((shape_of(args), home_of(args))))
"""


def test_flags_mean_what_megatron_says_they_mean() -> None:
    """Every command line above, read by Megatron's own parser and validation."""
    pytest.importorskip("torch")
    also = [
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", "1000", "--micro-batch-size", "1", "--train-iters", "1"),
        *("--transformer-impl", "local", "--attention-backend", "unfused"),
    ]
    lines = [[*line, *also] for line in COMMAND_LINES.values()]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEGATRON_READS, json.dumps(lines)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "WORLD_SIZE": "8"},
    )
    assert done.returncode == 0, done.stderr
    theirs = [line for line in done.stdout.splitlines() if line.startswith("(ModelShape")]
    ours = [read(*line, world_size=8) for line in lines]
    assert theirs == [repr((each.shape, each.home)) for each in ours]
    assert len(set(theirs)) > len(lines) // 2, "the command lines must differ, or nothing is compared"
