"""hotspa verify: the user's own command under one strategy and under the file's; what differs is found, and said."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hotspa_megatron.cli import verify
from hotspa_megatron.cli.described_run import without
from hotspa_megatron.cli.main import main
from hotspa_megatron.cli.verify import Measured, RunFailed, Tolerance, judge, measured, read_users_command
from tests.spawn import REPOSITORY
from tests.test_report import as_nobody
from tests.training import SP, arguments, torchrun, verified

CONFIG = """
strategies:
  - {max_length: 32, tp: 1, tokens_per_microbatch: 96}
  - {max_length: 128, tp: 2, tokens_per_microbatch: 192}
merge: never
"""
FILE = ("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "256",
        "--max-position-embeddings", "256", "--vocab-size", "121", "--tensor-model-parallel-size", "2")  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "hotspa.yaml"
    path.write_text(CONFIG)
    return path


# ----------------------------------------------------------------------------------------------------------- the command


def test_the_command_runs_with_saves_off_and_a_file_of_its_own(config: Path, tmp_path: Path) -> None:
    users = read_users_command(
        ["python3", "-m", "torch.distributed.run", "pretrain_gpt.py", *FILE, "--save", "/data/run", "--save-interval=5",
         "--async-save", "--hotspa-config", str(config), "--lr", "1e-3", "--load", str(tmp_path), "--hidden-dropout", "0.1"]
    )  # fmt: skip
    line = users.run(Path("static.yaml"), steps=5)
    assert line == (
        "python3", "-m", "torch.distributed.run", "pretrain_gpt.py", *FILE, "--lr", "1e-3", "--load", str(tmp_path),
        "--exit-interval", "5", "--log-interval", "1", "--eval-interval", "1000000000",
        "--hidden-dropout", "0", "--attention-dropout", "0", "--hotspa-config", "static.yaml",
    )  # fmt: skip
    assert users.run(None, steps=5)[-1] == "--calculate-per-token-loss" and "--hotspa-config" not in users.run(
        None, steps=5
    )


def test_from_a_checkpoint_the_steps_after_it_are_run(config: Path, tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1003\n")
    command = ["python3", *FILE, "--load", str(tmp_path), f"--hotspa-config={config}"]
    line = read_users_command(command).run(None, steps=5)
    assert line[line.index("--exit-interval") + 1] == "1008"
    line = read_users_command([*command, "--finetune"]).run(None, steps=5)
    assert line[line.index("--exit-interval") + 1] == "5"
    line = read_users_command([*command, "--ckpt-step", "100"]).run(None, steps=5)
    assert line[line.index("--exit-interval") + 1] == "105"
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    assert read_users_command([*command, "--ckpt-step", "100"]).run(None, steps=5) == line
    # Left empty by a rank that was killed while it wrote it.
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("")
    (tmp_path / "iter_0000900").mkdir()
    (tmp_path / "iter_0000900" / "metadata.json").write_text("{}")
    line = read_users_command(command).run(None, steps=5)
    assert line[line.index("--exit-interval") + 1] == "905"


LOCAL = ["--transformer-impl", "local"]


@pytest.mark.parametrize(
    ("samples", "more", "why"),
    [
        ("documents", [], "samples: documents is not what it trains on"),
        ("megatron", [*LOCAL, "--no-create-attention-mask-in-dataloader"], "it attends across documents"),
        ("megatron", [*LOCAL, "--context-parallel-size", "2"], "under context parallelism it attends across documents"),
        ("megatron", [], "with --transformer-impl transformer_engine it attends across documents"),
        ("megatron", LOCAL, None),
        ("megatron", ["--dataloader-inter-document-masking"], None),
    ],
)
def test_stock_megatron_is_run_where_it_trains_the_same(
    samples: str, more: list[str], why: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "hotspa.yaml"
    path.write_text(f"{CONFIG}samples: {samples}\n")
    given = read_users_command(["python3", *FILE, *more, "--hotspa-config", str(path)]).without_stock
    assert why in given if why else given == ""


def test_flags_go_with_their_values() -> None:
    command = ["a", "--save", "x", "--saved", "y", "--save=z", "--async-save", "b"]
    assert without(command, {"--save": 1, "--async-save": 0}) == ["a", "--saved", "y", "b"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ([], "no command; write it after --"),
        (["python3", *FILE], "the command has no --hotspa-config FILE, so there is nothing to compare"),
        (["python3", *FILE, "--hotspa-config"], "--hotspa-config: the file's name is missing"),
        (["python3", *FILE, "--hotspa-config", "auto"], "--hotspa-config auto: what would run is decided at start"),
        (["python3", *FILE, "--hotspa-config", "STATIC"], "strategies is empty: that is the static run itself"),
        (["no-such-torchrun", *FILE, "--hotspa-config", "CONFIG"], "no-such-torchrun: no such program"),
        (["python3", *FILE, "--num-experts", "4", "--hotspa-config", "CONFIG"], "--num-experts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_one_line_and_nothing_is_written(
    command: list[str], said: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    static = tmp_path / "static.yaml"
    static.write_text("strategies: []\n")
    command = [{"STATIC": str(static), "CONFIG": str(config)}.get(word, word) for word in command]
    logs = tmp_path / "logs"
    assert main(["verify", "--logs", str(logs), "--", *command]) == 2
    errors = capsys.readouterr().err
    assert said in errors and errors.count("\n") == 1
    assert not logs.exists()


def test_a_folder_that_is_not_verifys_own_is_never_replaced(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    command = ["python3", *FILE, "--hotspa-config", str(config)]
    for more in ([], ["--force"]):
        assert main(["verify", "--logs", str(kept), *more, "--", *command]) == 2
        assert f"--logs: {kept} is there already" in capsys.readouterr().err
    assert (kept / "file").exists()


# ----------------------------------------------------------------------------------------------------------- the verdict

TOLERANCE = Tolerance(loss=1e-5, grad_norm=1e-4)


def made(name: str, *, loss: float = 1.0, grad_norm: float = 1.0, **more: Any) -> Measured:
    return Measured(
        name=name, iterations=(1, 2), losses=(5.0, 4.0 * loss), grad_norms=(2.0, 3.0 * grad_norm), step_s=1.0,
        peak_bytes=1 << 30, segments=("tp1-cp1-pp1-dp4 (guest)", "tp2-cp1-pp1-dp2 (home)"), **more,
    )  # fmt: skip


def runs(**config: Any) -> dict[str, Measured]:
    return {
        "static": made("static"), "other order": made("other order", loss=1 + 1e-6, grad_norm=1 + 2e-5),
        "config": made("config", **config),
    }  # fmt: skip


def test_what_the_order_of_sums_explains_passes_and_anything_more_fails() -> None:
    assert judge(runs(loss=1 + 9e-6, grad_norm=1 + 9e-5), TOLERANCE).passed
    lost = judge(runs(loss=1 + 2e-5), TOLERANCE)
    assert not lost.passed and lost.why.startswith("config: the loss differs by 2.0e-05, and 1.0e-05 is what")
    assert "the gradient norm differs by 2.0e-04" in judge(runs(grad_norm=1 + 2e-4), TOLERANCE).why
    assert not judge(runs(loss=math.nan), TOLERANCE).passed
    assert not judge({**runs(), "stock": made("stock", loss=1.1)}, TOLERANCE).passed


def test_noise_widens_what_is_allowed_but_excuses_nothing_that_large() -> None:
    noisy = {**runs(loss=1 + 9e-5), "other order": made("other order", loss=1 + 5e-5)}
    assert judge(noisy, TOLERANCE).passed
    loud = judge({**runs(), "other order": made("other order", loss=1.5)}, TOLERANCE)
    assert not loud.passed and "the static run itself differs" in loud.why


def test_other_steps_are_no_comparison() -> None:
    other = {**runs(), "config": dataclasses.replace(made("config"), iterations=(2, 3))}
    assert not judge(other, TOLERANCE).passed


def test_a_run_of_home_alone_says_how_little_it_shows() -> None:
    alone = {**runs(), "config": dataclasses.replace(made("config"), segments=("tp2-cp1-pp1-dp2 (home)",))}
    assert "only one strategy ran in these steps" in judge(alone, TOLERANCE).why


def noted(step: int, *, loss: bool, seconds: float, peak: int) -> dict[str, Any]:
    losses = {"lm loss": 5.0 - step} if loss else {}
    return {"iteration": step, "losses": losses, "grad_norm": 2.0, "step_s": seconds, "peak_bytes": peak}


def test_what_the_ranks_noted_is_put_together() -> None:
    ranks = [
        [noted(1, loss=False, seconds=9.0, peak=5), noted(2, loss=False, seconds=1.0, peak=5)],
        [noted(1, loss=True, seconds=8.0, peak=7), noted(2, loss=True, seconds=3.0, peak=7)],
    ]
    step = {
        "switches": [{"bytes": 500, "seconds": 0.0, "under_way_s": 1e-6}],
        "segments": [{"strategy": "tp1", "kind": "guest"}],
    }
    said = (
        "hotspa: 14 process groups of several ranks, 1,005 of them beside home's, made in 0.3 s; NCCL would take about "
        "2,300 MiB of a rank's memory for what is added (assumed)\n"
    )
    run = measured("config", ranks, [step, step], said, steps=2)
    assert (run.losses, run.grad_norms, run.step_s, run.peak_bytes) == ((4.0, 3.0), (2.0, 2.0), 3.0, 7)
    assert (run.groups, run.groups_added, run.groups_mib) == (14, 1005, 2300)
    assert (run.switch_bytes, run.switch_gbps, run.segments) == (1000, 0.5, ("tp1 (guest)",))
    with pytest.raises(RunFailed, match="2 steps instead of 3"):
        measured("config", ranks, [], said, steps=3)
    with pytest.raises(RunFailed, match="no rank reported a loss"):
        measured("config", ranks[:1], [], said, steps=2)


def test_the_table_shows_differences_beside_the_noise_times_moves_memory_and_groups(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = runs(loss=1 + 2e-5, groups=14, groups_added=5, groups_mib=2300, switch_bytes=3 * 10**9, switch_s=1.5)
    verify._print(found, judge(found, TOLERANCE), tmp_path)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0] == "Steps 1 to 2, compared with static"
    columns = ["run", "loss off by", "gradient norm off by", "step", "switches", "peak memory", "groups"]
    assert re.split(" {2,}", lines[1].strip()) == columns
    table = [re.split(" {2,}", line.strip()) for line in lines[2:5]]
    assert table[0] == ["static", "-", "-", "1.00 s", "-", "1.00 GiB", "-"]
    assert table[1][:4] == ["other order", "1.0e-06", "2.0e-05", "1.00 s"]
    assert table[2] == [
        "config", "2.0e-05", "0.0e+00", "1.00 s", "3.000 GB at 2.00 GB/s", "1.00 GiB", "14 (5 added, 2,300 MiB)",
    ]  # fmt: skip
    assert lines[6].startswith("noise (other order of sums): loss 1.0e-06, gradient norm 2.0e-05; allowed: 1.0e-05")
    assert lines[7].startswith("FAIL: config: the loss differs by 2.0e-05")
    verify._print(runs(), judge(runs(), TOLERANCE), tmp_path)
    assert "PASS: config: the same training as under one strategy" in capsys.readouterr().out


# -------------------------------------------------------------------------------------------------------------- for real


def training(launcher: str, *more: str, cp: int = 2, config: str = CONFIG, without: str = "") -> tuple[str, ...]:
    """A user's command on 4 ranks."""
    line = [each for each in arguments(*more, tp=2, cp=cp, iterations=50) if each != without]
    return torchrun(line, config, launcher=launcher)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_right_step_passes_and_saves_nothing(tmp_path: Path) -> None:
    save = (SP, "--save", str(tmp_path / "saved"), "--save-interval", "1")
    code, found, errors = verified(tmp_path / "logs", *training("hotspa_megatron.launch", *save))
    assert code == 0, (found, errors)
    assert found["passed"] and set(found["runs"]) == {"static", "other order", "config"}
    assert 0 < found["noise"]["loss"] < 1e-5 and found["differences"]["config"]["loss"] < 1e-5
    config = found["runs"]["config"]
    assert config["iterations"] == [1, 2, 3, 4, 5] and len(config["segments"]) == 3
    static = found["runs"]["static"]
    assert config["switch_bytes"] > 0 == static["switch_bytes"] and config["groups_mib"] > 0 == static["groups_mib"]
    assert config["groups"] >= static["groups"] > 0 and config["peak_bytes"] > 1 << 20
    assert not (tmp_path / "saved").exists()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_step_without_the_guests_gradients_fails(tmp_path: Path) -> None:
    """The negative control: losses stay plausible and nothing else tells."""
    code, found, errors = verified(tmp_path / "logs", *training("examples.demo.without_fold", SP))
    assert code == 1, (found, errors)
    assert not found["passed"] and "the gradient norm differs by" in found["why"]
    assert found["differences"]["config"]["grad_norm"] > 100 * found["allowed"]["grad_norm"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_with_megatrons_own_samples_stock_megatron_is_compared_too(tmp_path: Path) -> None:
    more = ("--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss")
    # Stock Megatron has neither context nor sequence parallelism on CPU.
    command = training(
        "hotspa_megatron.launch", *more, cp=1, config=f"{CONFIG}samples: megatron\n",
        without="--no-create-attention-mask-in-dataloader",
    )  # fmt: skip
    code, found, errors = verified(tmp_path / "logs", *command)
    assert code == 0, (found, errors)
    assert set(found["runs"]) == {"static", "other order", "config", "stock"}
    assert found["runs"]["stock"]["groups"] is None and found["differences"]["stock"]["loss"] < 1e-5


def test_the_reason_is_the_first_exception_else_our_own_line_and_never_the_launchers() -> None:
    launcher = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    refused = f"hotspa: no CUDA device is visible\nhotspa: --fp8-format: not supported\n{launcher}"
    assert verify.why_it_ended(refused) == "--fp8-format: not supported"
    raised = "[rank1]: Traceback\n[rank1]:   x\n[rank1]: torch.OutOfMemoryError: CUDA out of memory\n[rank0]: OSError: peer\n"
    assert verify.why_it_ended(refused + raised + launcher) == "torch.OutOfMemoryError: CUDA out of memory"
    assert verify.why_it_ended("nothing") == ""


@pytest.mark.parametrize(
    ("body", "limit", "said"),
    [
        (
            "import sys; print('hotspa: home does not fit'); sys.exit(3)",
            "60",
            "the command ended with code 3: home does not fit",
        ),
        ("import time; time.sleep(600)", "1", "not through its steps when the time was over (--limit)"),
        ("pass", "60", "no rank wrote to"),
    ],
    ids=["fails", "hangs", "is no training"],
)
def test_a_command_that_does_not_train_is_a_failure_with_its_reason(
    body: str, limit: str, said: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", body, *FILE, "--hotspa-config", str(config)]
    with pytest.raises(SystemExit, match="1"):
        main(["verify", "--json", "--limit", limit, "--logs", str(tmp_path / "logs"), "--", *command])
    found = json.loads(capsys.readouterr().out)
    assert not found["passed"] and found["why"].startswith(f"static: {said}")


# ---------------------------------------------------------------------------------------- what ends it, and what it ends


def started(body: str, config: Path) -> list[str]:
    return [sys.executable, "-c", body, *FILE, "--hotspa-config", str(config)]


def launcher_with_a_rank(pids: Path, *, deaf: bool) -> str:
    """A program that starts another in a session of its own, as torchrun its ranks, and never ends it."""
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " if deaf else ""
    rank = (
        f"{ignore}import pathlib, os, time; pathlib.Path({str(pids)!r}).write_text(str(os.getpid())); time.sleep(600)"
    )
    return (
        f"{ignore}import subprocess, sys, time; "
        f"subprocess.Popen([sys.executable, '-c', {rank!r}], start_new_session=True); time.sleep(600)"
    )


def written(pids: Path) -> int:
    """The number of the rank's process, once it is there."""
    until = time.monotonic() + 60
    while not (pids.exists() and (text := pids.read_text())):
        assert time.monotonic() < until
        time.sleep(0.05)
    return int(text)


def runs_still(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_command_that_does_not_end_is_ended_within_the_limit_and_its_ranks_with_it(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    command = started(launcher_with_a_rank(tmp_path / "pid", deaf=True), config)
    with pytest.raises(SystemExit, match="1"):
        main(["verify", "--json", "--limit", "6", "--logs", str(tmp_path / "logs"), "--", *command])
    assert time.monotonic() - began < 7
    assert "when the time was over (--limit)" in json.loads(capsys.readouterr().out)["why"]
    assert not runs_still(written(tmp_path / "pid"))


def test_of_a_long_limit_torchruns_own_grace_is_kept(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, float] = {}

    def run(*_: Any, deadline: float, grace_s: float) -> str:
        seen.update(left=deadline - time.monotonic(), grace=grace_s)
        raise RunFailed("that will do")

    monkeypatch.setattr(verify, "_run", run)
    with pytest.raises(SystemExit):
        main(["verify", "--logs", str(tmp_path / "logs"), "--", *started("pass", config)])
    assert seen["grace"] == 40 and 559 < seen["left"] <= 560


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGTERM, 143, "hotspa: ended by SIGTERM, and the command with it"),
        pytest.param(signal.SIGHUP, 129, "hotspa: ended by SIGHUP, and the command with it", marks=pytest.mark.long),
        (signal.SIGINT, 130, "hotspa: interrupted"),
    ],
    ids=["timeout", "hangup", "Ctrl-C"],
)
def test_what_ends_verify_ends_what_it_has_started(
    number: signal.Signals, code: int, said: str, config: Path, tmp_path: Path
) -> None:
    command = started(launcher_with_a_rank(tmp_path / "pid", deaf=False), config)
    verifying = in_a_process(tmp_path / "logs", *command)
    rank = written(tmp_path / "pid")
    assert runs_still(rank)
    verifying.send_signal(number)
    if number == signal.SIGTERM:  # timeout's comes twice: to its child and to their group
        verifying.send_signal(number)
    output, errors = verifying.communicate(timeout=60)
    stock, static, *last = errors.splitlines()
    assert stock.startswith("  stock") and static == "  static: 5 steps ..."
    assert (verifying.returncode, output, last) == (code, "", [said])
    assert not runs_still(rank)


def in_a_process(logs: Path, *command: str, ignored: Sequence[signal.Signals] = ()) -> subprocess.Popen[str]:
    """``hotspa verify``, under a launcher that has these signals ignored, as nohup has SIGHUP, whatever these tests have."""
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "signal.signal(signal.SIGHUP, signal.SIG_DFL); "
        f"[signal.signal(each, signal.SIG_IGN) for each in {[int(each) for each in ignored]}]; "
        "from hotspa_megatron.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, "verify", "--logs", str(logs), "--", *command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip


@pytest.mark.long
def test_under_nohup_a_hangup_ends_nothing(config: Path, tmp_path: Path) -> None:
    body = f"import pathlib, time; pathlib.Path({str(tmp_path / 'pid')!r}).write_text('1'); time.sleep(2)"
    verifying = in_a_process(tmp_path / "logs", *started(body, config), ignored=[signal.SIGHUP])
    written(tmp_path / "pid")
    verifying.send_signal(signal.SIGHUP)
    output, _ = verifying.communicate(timeout=60)
    assert verifying.returncode == 1 and "no rank wrote to" in output


@pytest.mark.long
def test_ctrl_c_twice_waits_for_nothing(config: Path, tmp_path: Path) -> None:
    verifying = in_a_process(tmp_path / "logs", *started(launcher_with_a_rank(tmp_path / "pid", deaf=True), config))
    rank = written(tmp_path / "pid")
    began = time.monotonic()
    for _ in range(2):
        verifying.send_signal(signal.SIGINT)
        time.sleep(1)
    _, errors = verifying.communicate(timeout=60)
    assert verifying.returncode == 130 and errors.endswith("hotspa: interrupted\n")
    assert time.monotonic() - began < 20 and not runs_still(rank)


# ------------------------------------------------------------------------------------------------------ what it cannot do


def cannot(capsys: pytest.CaptureFixture[str], logs: Path, command: Sequence[str], *more: str) -> str:
    """The one line with which verify refuses, but for the lines that say what it is at."""
    assert main(["verify", "--logs", str(logs), *more, "--", *command]) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if not line.startswith("  ")]
    assert captured.out == "" and len(lines) == 1 and lines[0].startswith("hotspa: ")
    return lines[0]


def test_a_program_that_cannot_be_started_is_named_and_nothing_stays(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train"
    script.write_text("exit 0\n")  # a shell would run it; the system does not
    script.chmod(0o755)
    said = cannot(capsys, tmp_path / "a" / "b", [str(script), *FILE, "--hotspa-config", str(config)])
    assert said.startswith(f"hotspa: {script}: Exec format error; give the command as you would start it")
    assert sorted(tmp_path.iterdir()) == [config, script]


def test_a_full_disk_is_one_line_and_nothing_stays(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for most, begin in ((0, "the file"), (300, "what is printed")):
        # Files of more bytes cannot be written, as on a disk that is full.
        monkeypatch.setattr(verify, "_contents", lambda users, document: {"static": {"a": "b"}})
        command = [sys.executable, "-c", "pass", *FILE, "--lr-decay-style", "x" * 300, "--hotspa-config", str(config)]
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
        try:
            said = cannot(capsys, tmp_path / "logs", command)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert (
            said == f"hotspa: {tmp_path / 'logs'}: File too large; make room there, or give another folder (--logs)"
        ), begin
        assert list(tmp_path.iterdir()) == [config]


def test_folders_that_are_closed_are_one_line(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["python3", *FILE, "--hotspa-config", str(config)]
    known = verify.load_config(config)
    monkeypatch.setattr(verify, "load_config", lambda path: known)
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    with as_nobody():
        said = cannot(capsys, closed / "logs", command)
        assert said == f"hotspa: --logs: {closed / 'logs'}: Permission denied; give a folder that can be written to"
        said = cannot(capsys, closed / "logs", [*command, "--load", str(closed)])
    tracker = closed / "latest_checkpointed_iteration.txt"
    assert said == f"hotspa: --load: {tracker}: Permission denied; give a checkpoint that can be read"
    said = cannot(capsys, tmp_path / ("x" * 300), command)
    assert said.endswith("File name too long; give a folder that can be written to")


def test_an_old_folder_that_cannot_be_removed_is_one_line(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", "static.out")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "static.yaml").touch()
    said = cannot(capsys, tmp_path / "logs", started("pass", config), "--force")
    assert said.startswith("hotspa: --logs: static.out: Permission denied; give")


@pytest.mark.parametrize("text", ["\xff\xfe", "9" * 5000, "²", "release"])
def test_a_tracker_of_no_number_begins_at_0(text: str, config: Path, tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(text.encode("latin-1"))
    line = read_users_command(["python3", *FILE, "--load", str(tmp_path), f"--hotspa-config={config}"]).run(
        None, steps=5
    )
    assert line[line.index("--exit-interval") + 1] == "5"


@pytest.mark.parametrize("broken", ['{"iteration": 1, "los', "\udcff"], ids=["a full disk's", "no text"])
def test_what_a_rank_could_not_write_to_its_end_is_a_failure_that_names_the_file(
    broken: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = (
        "import os, pathlib; "
        f"(pathlib.Path(os.environ['HOTSPA_RANK_LOG']) / 'rank-00000.jsonl').write_bytes({os.fsencode(broken)!r})"
    )
    with pytest.raises(SystemExit, match="1"):
        main(["verify", "--json", "--logs", str(tmp_path / "logs"), "--", *started(body, config)])
    why = json.loads(capsys.readouterr().out)["why"]
    assert why == f"static: {tmp_path}/logs/static/rank-00000.jsonl: not written to its end; is there room for it?"


def test_the_flag_is_the_hooks_own() -> None:
    from hotspa_megatron.hooks import flags

    assert verify.FLAG == flags.FLAG
