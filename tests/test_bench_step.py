"""``hotspa bench step``: what it compares is equal, a lost fold is seen, noise is not judged, and one line for bad input."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from hotspa_megatron.cli import bench_step, step_contenders, step_measurement
from hotspa_megatron.cli.main import main
from hotspa_megatron.strategy import Strategy
from tests.training import SCRIPT, run_module

SMALL = ("--ranks", "2", "--layers", "2", "--hidden", "128", "--seq-length", "64", "--max-tokens-per-rank", "32",
         "--lengths", "lognormal:mean=24,sigma=0.8,max=64", "--sequences", "12",
         "--full-sequences", "2", "--rounds", "1", "--json")  # fmt: skip
GUEST = "merge: never\nstrategies: [{max_length: 48, tp: 2}]\nhome: {tokens_per_microbatch: 64}\n"
KEYS = {"ours_s", "static_s", "tp_static_s", "unpacked_s", "ceiling_s", "home_only_s", "stock_s", "ratio_static",
        "ratio_tp_static", "ratio_unpacked", "ceiling_share", "ratio_home_only", "switch_fraction", "collectives",
        "bytes"}  # fmt: skip


def measured(*options: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, what --json printed, and the lines of standard error that are not progress."""
    done = run_module("hotspa_megatron.cli.main", "bench", "step", *SMALL, *options)
    complaints = [line for line in done.stderr.splitlines() if line.startswith("hotspa: ")]
    return done.returncode, json.loads(done.stdout), "\n".join(complaints)


def judged(said: dict[str, Any]) -> int:
    """The exit code where all trained alike: how much times vary is up to the machine, and no test's business."""
    return 3 if said["too_noisy"] else 0


def test_all_train_alike_and_home_only_adds_the_plans_digest_and_the_loss_sum_to_stock() -> None:
    code, said, complaints = measured()
    assert code == judged(said) and not complaints, complaints
    assert set(said) >= KEYS and all(said[key] is not None for key in KEYS)
    assert set(said["contenders"]) == {"cp2", "tp2", "tp2-sp", "unpacked", "ours", "ceiling", "home_only", "stock"}
    assert said["static_s"] == min(said["contenders"][name]["wall_s"] for name in ("cp2", "tp2", "tp2-sp"))
    # Every rank's digest (8 bytes) in one gather; (sum, tokens) of the loss and the valid tokens instead of the tokens.
    extra = {key: (of["count"], of["bytes"]) for key, of in said["home_only_extra"].items() if of["count"] >= 0}
    assert extra == {"all_gather of 2": (1, 16), "all_reduce of 2": (0, 36)}
    # One sequence per micro-batch takes more of everything than packs do.
    assert said["collectives"]["unpacked"]["all_gather of 2"] > said["collectives"]["cp2"]["all_gather of 2"]
    assert said["collectives"]["ceiling"].get("all_to_all of 2", 0) == 0
    assert said["switch_fraction"] == 0  # siblings move nothing


@pytest.mark.long
def test_a_pipeline_trains_alike_too() -> None:
    """From the same weights: those of a layer do not depend on the stage that holds it."""
    code, said, complaints = measured("--only", "cp2,pp2,ours", "--max-tokens-per-rank", "64")
    assert code == judged(said) and not complaints, complaints
    assert set(said["contenders"]) == {"cp2", "pp2", "ours"} and said["bytes"]["pp2"]["send"] > 0
    assert said["left_out"] == []


@pytest.mark.parametrize("lost", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_lost_fold_shows_in_the_grad_norm(tmp_path: Path, lost: bool) -> None:
    config, script = tmp_path / "guest.yaml", tmp_path / "train.py"
    config.write_text(GUEST)
    break_it = "from examples.demo.without_fold import drop_folds\ndrop_folds()\n" if lost else ""
    script.write_text(f"{break_it}exec(compile(open({str(SCRIPT)!r}).read(), {str(SCRIPT)!r}, 'exec'), globals())\n")
    options = ("--only", "cp2,ours", "--home", "cp2", "--config", str(config), "--script", str(script))
    code, said, complaints = measured(*options)
    assert said["contenders"]["cp2"]["losses"][0] == pytest.approx(said["contenders"]["ours"]["losses"][0], rel=1e-6)
    assert said["switch_fraction"] > 0 and said["bytes"]["ours"]["send"] > 0
    assert code == (1 if lost else judged(said))
    assert ("grad_norms of ours differ from those of cp2 in step 1" in complaints) == lost


def case(**changes: Any) -> step_contenders.Case:
    usual = step_contenders.Case(
        ranks=4, layers=4, hidden=256, ffn=512, heads=8, query_groups=4, vocabulary=1024, seq_length=2048,
        max_tokens_per_rank=512, lengths="wikipedia", overlong="truncate", sequences=32, full_sequences=4,
        home=Strategy.from_world(4, tp=1, cp=4, pp=1), config=None, script=SCRIPT, seed=1,
    )  # fmt: skip
    return dataclasses.replace(usual, **changes)


def static(entered: step_contenders.LineUp) -> list[str]:
    return [each.name for each in entered.contenders if each.static]


def test_contenders_are_the_static_strategies_that_meet_the_limit() -> None:
    entered = step_contenders.line_up(case())
    names = [each.name for each in entered.contenders]
    assert names == ["cp4", "tp4", "tp4-sp", "tp2-cp2", "unpacked", "ours", "ceiling", "home_only", "stock"]
    assert static(step_contenders.line_up(case(max_tokens_per_rank=1658))) == [
        "cp4", "tp4", "tp4-sp", "tp2-cp2", "tp2-cp2-sp", "cp2-dp2", "tp2-dp2", "tp2-dp2-sp", "cp2-pp2", "tp2-pp2", "tp2-pp2-sp",
    ]  # fmt: skip
    assert {"dp4", "pp4", "pp2-dp2"} < set(static(step_contenders.line_up(case(max_tokens_per_rank=2048))))
    ours = next(each.config for each in entered.contenders if each.name == "ours")
    assert ours is not None and "{max_length: 512, tp: 1, cp: 1, tokens_per_microbatch: 512}" in ours
    assert "{max_length: 1024, tp: 1, cp: 2, tokens_per_microbatch: 1024}" in ours and "cp: 4" not in ours


@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 8])
@pytest.mark.parametrize("limit", [256, 512, 1024, 2048])
@pytest.mark.parametrize("layers", [3, 4])
def test_every_static_strategy_takes_part_or_has_a_reason_not_to(ranks: int, limit: int, layers: int) -> None:
    entered = step_contenders.line_up(
        case(ranks=ranks, max_tokens_per_rank=limit, layers=layers, home=Strategy.from_world(ranks, tp=1, cp=1, pp=1))
    )
    everything = set()
    for tp, cp, pp, dp in itertools.product(range(1, ranks + 1), repeat=4):
        if tp * cp * pp * dp == ranks:
            sizes = zip(("tp", "cp", "pp", "dp"), (tp, cp, pp, dp), strict=True)
            name = "-".join(f"{axis}{size}" for axis, size in sizes if size > 1) or "dp1"
            everything |= {(name, tp, cp, pp)} | ({(f"{name}-sp", tp, cp, pp)} if tp > 1 else set())
    chosen, reasons = static(entered), {each.name: each.reason for each in entered.left_out}
    assert sorted([*chosen, *reasons]) == sorted(name for name, *_ in everything)
    assert all(reasons.values())
    # 8 heads of 256 in 4 groups: they divide over 1, 2, 4 and 8; the sequence's 2,048 over twice 1, 2, 4 and 8.
    fits = {
        name: (cp, name.endswith("-sp"))
        for name, tp, cp, pp in everything
        if tp * cp * limit >= 2048 and layers % pp == 0 and 8 % tp == 0 and 8 % cp == 0
    }
    beside_cp = {name for name, (cp, parallel) in fits.items() if parallel and cp > 1}
    few = len(fits) - len(beside_cp) <= 5
    assert set(chosen) == set(fits) - (beside_cp if few else set())
    for each in entered.contenders:
        if each.static:
            assert each.config is not None
            assert f"tokens_per_microbatch: {limit * each.home.tp * each.home.cp}" in each.config


@pytest.mark.parametrize("text", ["tp2-cp2-sp", "tp2-cp2-pp1-dp1-sp"])
def test_one_that_is_named_takes_part(text: str) -> None:
    entered = step_contenders.line_up(case(named=(text,)))
    assert static(entered) == ["cp4", "tp4", "tp4-sp", "tp2-cp2", "tp2-cp2-sp"]
    assert [each.name for each in entered.contenders if each.kept] == ["tp2-cp2-sp"]


def test_the_static_strategy_that_a_planned_file_names_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    path = tmp_path / "hotspa.yaml"
    model = "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --vocab-size 1000 --seq-length 2048"
    batch = ["--max-position-embeddings", "2048", "--global-batch-size", "32"]
    cluster = ["--hardware", "cpu-gloo", "--world-size", "4", "--lengths", "wikipedia", "--json"]
    assert main(["plan", *cluster, "-o", str(path), "--", *model.split(), *batch]) == 0
    said = Strategy.parse(json.loads(capsys.readouterr().out)["static"].split()[0])
    entered = step_contenders.line_up(case(config=path, max_tokens_per_rank=2048))
    (kept,) = (each for each in entered.contenders if each.kept)
    assert kept.home == said and entered.planned == kept.name

    def planned(strategy: str) -> step_contenders.LineUp:
        path.write_text(f"# strategy with the same packing ({strategy} recompute 0.5, 1.2 s).\nstrategies: []\n")
        return step_contenders.line_up(case(config=path))

    assert planned("tp2-cp2-pp1-dp1").planned == "tp2-cp2"
    assert planned("tp1-cp1-pp1-dp4").planned is None
    for elsewhere in ("tp1-cp4-pp1-dp2", "tp1-cp2-pp2-dp1-vpp2"):
        entered = planned(elsewhere)
        assert entered.planned is None and elsewhere in {each.name for each in entered.left_out}


def test_a_first_step_drops_the_slow_ones_of_many_with_a_reason() -> None:
    many = step_contenders.line_up(case(max_tokens_per_rank=1658, named=("tp2-pp2",))).contenders
    first = {each.name: 10.0 for each in many} | {"cp2-dp2": 9.0, "ceiling": 5.0, "stock": 99.0}
    assert step_contenders.slow_ones(many, first) == []
    # Above 1.3 times 9 s; tp2-pp2 is named, and stock is no static strategy.
    first |= {"cp4": 11.8, "tp4": 20.0, "tp2-dp2-sp": 14.0, "tp2-pp2": 40.0, "cp2-pp2": 11.6}
    out = step_contenders.slow_ones(many, first)
    assert [each.name for each in out] == ["cp4", "tp4", "tp2-dp2-sp"]
    assert out[0].first_step_s == 11.8 and "11.80 s, more than 1.3 times cp2-dp2's 9.00 s" in out[0].reason
    # The fastest with tp and without cp stays, since ours is compared with it.
    first |= {each.name: 50.0 for each in many if each.home.tp > 1} | {"tp4": 49.0}
    assert [each.name for each in step_contenders.slow_ones(many, first)] == [
        "cp4", "tp4-sp", "tp2-cp2", "tp2-cp2-sp", "tp2-dp2", "tp2-dp2-sp", "tp2-pp2-sp",
    ]  # fmt: skip
    # Of few, none is dropped.
    assert step_contenders.slow_ones([each for each in many if each.name in ("cp4", "tp4-sp", "cp2-dp2")], first) == []


def test_a_disturbed_first_step_is_taken_again_before_its_contender_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so is that of one that is slow only beside what a second step showed."""
    running = [each for each in step_contenders.line_up(case(max_tokens_per_rank=1658)).contenders if each.static]
    first = {each.name: 10.0 for each in running} | {"cp4": 20.0, "tp2-pp2": 12.0}
    of = {name: step_measurement.Taken(first_s=seconds, first_disturbed=True) for name, seconds in first.items()}
    second = {"cp4": 9.0, "tp2-pp2": 12.0}
    tried: list[str] = []

    def turn(job: Any, taken: step_measurement.Taken, jobs: Any, *, counts: bool) -> None:
        assert not counts
        tried.append(job.name)
        taken.first_s, taken.first_disturbed = second[job.name], False

    class Started:
        def __init__(self, name: str) -> None:
            self.name, self.told = name, []  # type: ignore[var-annotated]

        def send(self, what: str) -> None:
            self.told.append(what)

    monkeypatch.setattr(step_measurement, "_turn", turn)
    started = {name: Started(name) for name in first}
    left_out = step_measurement._drop_slow(running, started, of, None, lambda text: None)  # type: ignore[arg-type]
    assert tried == ["cp4", "tp2-pp2"]  # 12.0 is slow beside 9.0, and was not beside 10.0
    assert [each.name for each in left_out] == ["tp2-pp2"] and started["tp2-pp2"].told == ["stop"]
    assert "cp4" in {each.name for each in running} and "tp2-pp2" not in {each.name for each in running}


def taken(*wall_s: float, loss: float = 5.0) -> step_measurement.Taken:
    return step_measurement.Taken(
        wall_s=list(wall_s), cpu_s=list(wall_s), moving_s=[0.0] * len(wall_s), losses=[loss], grad_norms=[1.0]
    )


def test_ratios_are_of_medians_and_noise_is_not_judged() -> None:
    everyone = step_contenders.line_up(case())
    names = ("cp4", "tp4", "tp4-sp", "ours", "ceiling")
    entered = dataclasses.replace(
        everyone,
        contenders=tuple(each for each in everyone.contenders if each.name in names),
        left_out=(step_contenders.LeftOut(name="tp4-sp", reason="slow", first_step_s=9.0),),
    )
    of = {
        "cp4": taken(1.2, 1.3, 1.4),
        "tp4": taken(2.0, 2.0, 2.0),
        "ours": taken(1.0, 1.0, 1.1),
        "ceiling": taken(0.8, 0.8),
    }
    of["tp4-sp"] = taken()  # dropped after its first step
    said = bench_step.summary(case(), entered, of)
    assert (said["static"], said["tp_static"]) == ("cp4", "tp4")
    assert (said["ratio_static"], said["ratio_tp_static"]) == (1.3, 2.0)
    assert said["ceiling_share"] == pytest.approx(0.6)
    assert said["too_noisy"] == [] and said["different"] == []
    assert said["left_out"] == [{"name": "tp4-sp", "reason": "slow", "first_step_s": 9.0}]
    assert "tp4-sp" not in said["contenders"]
    of["cp4"] = taken(1.0, 1.3, 1.4)
    assert bench_step.summary(case(), entered, of)["too_noisy"] == ["cp4"]
    of["ceiling"] = taken(0.8)  # which may have been its slowest
    assert bench_step.summary(case(), entered, of)["too_noisy"] == ["ceiling", "cp4"]
    of["tp4-sp"] = taken(loss=float("nan"))  # its one step counts here
    assert "losses of tp4-sp differ" in bench_step.summary(case(), entered, of)["different"][0]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--ranks", "2"], "--max-tokens-per-rank: 512 tokens on each of 2 ranks cannot hold a sequence of 2048"),
        (["--ranks", "0"], "--ranks: '0' is not a whole number of at least 1"),
        ([], "--ranks: missing"),
        (["--ranks", "4", "--config", "x.yaml"], "--home: missing"),
        (
            ["--ranks", "4", "--only", "cp4,ours", "--contender", "tp2-cp2-sp"],
            "--only: lacks tp2-cp2-sp, which --contender",
        ),
        (["--ranks", "4", "--only", "cp4,cp8"], "--only: 'cp8' is none of static, cp4,"),
        (["--ranks", "4", "--contender", "cp8"], "--contender: 'cp8' is no strategy over 4 ranks; give one of cp4,"),
        (
            ["--ranks", "4", "--contender", "tp2-cp1-pp1-dp2"],
            "--contender: tp2-cp1-pp1-dp2: 1,024 tokens per micro-batch are fewer than the longest sequence's 2,048",
        ),
        (["--ranks", "4", "--script", "none.py"], "--script: none.py: no such file"),
        (["--ranks", "4", "--", "--bf16"], "bench step takes no arguments of Megatron's"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: list[str], problem: str
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert main(["bench", "step", *options]) == 2
    said = capsys.readouterr().err
    assert problem in said and said.count("\n") == 1


@pytest.mark.long
def test_under_torchrun_all_ranks_find_the_same_data() -> None:
    case = (
        "--only",
        "cp2,ours",
        "--rounds",
        "1",
        "--sequences",
        "8",
        "--seq-length",
        "1024",
        "--layers",
        "2",
        "--json",
    )
    done = run_module(
        "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "hotspa_megatron.cli.main", "bench", "step", *case,
    )  # fmt: skip
    assert done.returncode in (0, 3), done.stderr  # 3: too noisy to be judged
    result = json.loads(done.stdout)
    assert result["case"]["ranks"] == 2 and not result["different"]
    assert all(len(each["losses"]) >= 2 for each in result["contenders"].values())


def test_the_examples_script_is_of_one_release(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.18.2")
    assert main(["bench", "step", "--ranks", "4"]) == 2
    said = capsys.readouterr().err
    assert "is written for megatron-core 0.19, and here is 0.18; give the pretrain_gpt.py of that release" in said
    assert said.count("\n") == 1
