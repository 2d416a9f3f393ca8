"""``hotspa verify``: runs a user's own command a few steps under one strategy and under the file's, and compares.

The command is started as it is, with the arguments changed that would save, evaluate or run on. What the ranks note of
their steps is read back from files; nothing of Megatron is imported here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from hotspa_megatron.cli import tables
from hotspa_megatron.cli.described_run import whole, whole_of, without, word_of
from hotspa_megatron.cli.megatron_args import read_command_line
from hotspa_megatron.cli.users_process import POLL_S, Signals, end, start
from hotspa_megatron.config import HotSPaConfig, load_config
from hotspa_megatron.hooks.flags import INTER_DOCUMENT_MASKING, why_stock_crosses_documents
from hotspa_megatron.hooks.rank_log import RANK_LOG_VARIABLE
from hotspa_megatron.strategy import Strategy

if TYPE_CHECKING:
    from argparse import _SubParsersAction

FLAG: Final = "--hotspa-config"
_EPILOG: Final = """\
examples:
  hotspa verify -- torchrun --nproc-per-node 8 -m hotspa_megatron.launch pretrain_gpt.py $GPT_ARGS --hotspa-config FILE
      5 steps each under one strategy and under FILE's, from the same seed or checkpoint
  hotspa verify --logs /shared/verify -- srun ... pretrain_gpt.py ... --hotspa-config FILE
      several nodes: ranks write to a folder that all nodes share

PASS (exit code 0): losses and gradient norms differ by no more than the order of sums explains. FAIL: exit code 1.
Nothing is saved; evaluation, TensorBoard and W&B are off; dropout is 0, as its random numbers depend on the layout.
"""
_OFF: Final = {
    **dict.fromkeys(
        ("--save", "--save-interval", "--save-retain-interval", "--save-params-interval", "--non-persistent-save-interval",
         "--non-persistent-ckpt-type", "--non-persistent-global-ckpt-dir", "--non-persistent-local-ckpt-dir",
         "--tensorboard-dir", "--wandb-project", "--wandb-exp-name", "--wandb-entity", "--wandb-save-dir",
         "--exit-interval", "--exit-duration-in-mins", "--eval-interval", "--log-interval",
         "--hidden-dropout", "--attention-dropout"),
        1,
    ),
    **dict.fromkeys(("--async-save", "--use-persistent-ckpt-worker", "--log-progress", "--profile"), 0),
}  # fmt: skip
"""Arguments that are taken out of the command, with how many values each has."""
_NEVER: Final = "1000000000"
_GROUPS: Final = re.compile(
    r"hotspa: ([\d,]+) process groups of several ranks, ([\d,]+) of them beside home's.*?about ([\d,]+) MiB"
)
_RAISED: Final = re.compile(r"^(?:\[rank\d+\]: ?)?((?:\w+\.)*\w*(?:Error|Exception)\b.*)$", re.MULTILINE)
_NO_ROOM: Final = "make room there, or give another folder (--logs)"
_GRACE_S: Final = 40.0
"""For a run that is ended: longer than torchrun gives its ranks. Of a short --limit it is half."""


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Relative differences that the order of sums alone explains, however small the noise measured."""

    loss: float
    grad_norm: float


_SINGLE, _HALF = Tolerance(loss=1e-5, grad_norm=1e-4), Tolerance(loss=1e-3, grad_norm=1e-2)


@dataclass(frozen=True, kw_only=True)
class UsersCommand:
    """The command to verify, taken apart. ``plain``: without what must be off and without the flag."""

    plain: tuple[str, ...]
    config: HotSPaConfig
    home: Strategy
    tolerance: Tolerance
    first: int
    """Iterations that the checkpoint it loads has behind it."""
    without_stock: str
    """Why stock Megatron's own run of the command would be another training; empty where it is the same."""

    def run(self, config: Path | None, *, steps: int) -> tuple[str, ...]:
        """The command of one run; None: stock Megatron."""
        # An exit interval ends the run without the learning rate's schedule knowing of it.
        more = ["--exit-interval", str(self.first + steps), "--log-interval", "1", "--eval-interval", _NEVER]
        more += ["--hidden-dropout", "0", "--attention-dropout", "0"]
        more += ["--calculate-per-token-loss"] if config is None else [FLAG, str(config)]
        return (*self.plain, *more)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run. Losses and gradient norms by step; ``step_s``: the slowest rank's, the first step left out."""

    name: str
    iterations: tuple[int, ...]
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    step_s: float
    peak_bytes: int
    groups: int | None = None
    groups_added: int | None = None
    groups_mib: int | None = None
    switch_bytes: int = 0
    switch_s: float = 0.0
    segments: tuple[str, ...] = ()

    @property
    def switch_gbps(self) -> float | None:
        """GB/s of all ranks together, as rank 0 waited for it; None without a switch."""
        return self.switch_bytes / self.switch_s / 1e9 if self.switch_bytes and self.switch_s else None


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The largest relative differences of a run from the static one, over its steps."""

    loss: float
    grad_norm: float


class RunFailed(Exception):
    """A run of the user's command did not get through its steps; the message is for the user."""


class NotStarted(Exception):
    """A run could not be begun, and nothing of it ran; the message is for the user."""


def add_command(commands: _SubParsersAction[Any]) -> None:
    """Add ``verify`` to the ``hotspa`` command."""
    parser = commands.add_parser(
        "verify",
        help="run your own command a few steps and compare with one strategy",
        description="Run a training command a few steps under one strategy and under the file's, and compare them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="hotspa verify [--steps N] [--json] -- COMMAND ... --hotspa-config FILE",
    )
    parser.add_argument("--steps", default="5", metavar="N", help="steps of each run (5)")
    parser.add_argument(
        "--limit", default="600", metavar="SECONDS", help="time that all runs and their ending may take (600)"
    )
    parser.add_argument("--logs", default="hotspa-verify", metavar="DIR",
                        help="new folder for what runs print and note, seen by all nodes (hotspa-verify)")  # fmt: skip
    parser.add_argument("--force", action="store_true", help="replace DIR")
    parser.add_argument("--json", action="store_true", help="print JSON; seconds, bytes")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, command: Sequence[str]) -> None:
    """Run, compare and print; SystemExit with 1 for FAIL. ``ValueError`` for bad input, with nothing written or run."""
    steps, limit = whole("--steps", arguments.steps), whole("--limit", arguments.limit)
    users = read_users_command(command)
    grace_s = min(_GRACE_S, limit / 2)
    deadline = time.monotonic() + limit - grace_s
    logs, made = _new_folder(arguments.logs, replace=arguments.force)
    runs: dict[str, Measured] = {}
    problem = None
    with Signals() as signals:
        try:
            for name, config in _configurations(users, logs).items():
                print(f"  {name}: {steps} steps ...", file=sys.stderr, flush=True)
                said = _run(name, users.run(config, steps=steps), logs, signals, deadline=deadline, grace_s=grace_s)
                runs[name] = _measured(name, said, logs, steps=steps)
        except RunFailed as error:
            problem = str(error)
        except NotStarted as error:
            if not runs:
                _remove(made)
                raise ValueError(str(error)) from None
            problem = str(error)
    verdict = judge(runs, users.tolerance) if problem is None else Verdict(passed=False, why=problem)
    if arguments.json:
        print(json.dumps(_described(runs, verdict, logs), indent=2))
    else:
        _print(runs, verdict, logs)
    if not verdict.passed:
        raise SystemExit(1)


def _new_folder(given: str, *, replace: bool) -> tuple[Path, list[Path]]:
    """The folder for what runs print, and what was made for it, inner ones first; ``ValueError`` where there is none to have."""
    logs = Path(os.path.realpath(given))
    try:
        if logs.exists():
            if not replace or not (logs / "static.yaml").exists():
                raise ValueError(
                    f"--logs: {logs} is there already; give another name, or --force for one of verify's own"
                )
            shutil.rmtree(logs)
        made = [folder for folder in (logs, *logs.parents) if not folder.exists()]
        logs.mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"--logs: {_said_of(error, logs)}; give a folder that can be written to") from None
    return logs, made


def _remove(made: Sequence[Path]) -> None:
    shutil.rmtree(made[0], ignore_errors=True)
    with contextlib.suppress(OSError):  # somebody else has put something there meanwhile
        for folder in made[1:]:
            folder.rmdir()


def _said_of(error: OSError, place: Path) -> str:
    """Where something went wrong, and what."""
    return f"{error.filename or place}: {error.strerror or error}"


# ---------------------------------------------------------------------------------------------------------- the command


def read_users_command(command: Sequence[str]) -> UsersCommand:
    """Take a command apart; ``ValueError`` where there is nothing to verify in it."""
    if not command:
        raise ValueError(
            "no command; write it after --: hotspa verify -- torchrun ... pretrain_gpt.py ARGS --hotspa-config FILE"
        )
    files = values_of(command, FLAG)
    if not files:
        raise ValueError(f"the command has no {FLAG} FILE, so there is nothing to compare; add it")
    if not files[-1]:
        raise ValueError(f"{FLAG}: the file's name is missing; write it after the flag")
    if files[-1] == "auto":
        raise ValueError(f"{FLAG} auto: what would run is decided at start; write a file with hotspa plan and name it")
    config = load_config(files[-1])
    if not config.strategies:
        raise ValueError(f"{config.path}: strategies is empty: that is the static run itself; list a strategy")
    if shutil.which(command[0]) is None:
        raise ValueError(f"{command[0]}: no such program; give the command as you would start it")
    line = read_command_line(command, world_size=None)
    half = "--bf16" in command or "--fp16" in command or config.switch.fold_dtype == "bf16"
    return UsersCommand(
        plain=tuple(without(command, {**_OFF, FLAG: 1})),
        config=config,
        home=line.home,
        tolerance=_HALF if half else _SINGLE,
        first=_iterations_behind(command),
        without_stock=_why_without_stock(command, config, line.home),
    )


def _why_without_stock(command: Sequence[str], config: HotSPaConfig, home: Strategy) -> str:
    if config.samples != "megatron":
        return f"samples: {config.samples} is not what it trains on"
    why = why_stock_crosses_documents(
        mask_in_dataloader="--no-create-attention-mask-in-dataloader" not in command,
        ends_in_dataloader=INTER_DOCUMENT_MASKING in command,
        transformer_impl=word_of(command, "--transformer-impl") or "transformer_engine",
        cp=home.cp,
    )
    return why or ""


def values_of(command: Sequence[str], flag: str) -> list[str]:
    """What is given for a flag, each time; an empty string where the value is missing."""
    found = []
    for index, word in enumerate(command):
        name, given, value = word.partition("=")
        if name == flag:
            found.append(value if given else next(iter(command[index + 1 : index + 2]), ""))
    return found


def _iterations_behind(command: Sequence[str]) -> int:
    """Where the command's checkpoint leaves off, as Megatron and a job of ours read it."""
    from hotspa_megatron.hooks.checkpoint import last_finished

    load = values_of(command, "--load")
    tracker = Path(load[-1]) / "latest_checkpointed_iteration.txt" if load else None
    if tracker is None or "--finetune" in command:
        return 0
    if chosen := whole_of(command, "--ckpt-step"):
        return chosen
    try:
        text = tracker.read_text(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except OSError as error:
        raise ValueError(f"--load: {_said_of(error, tracker)}; give a checkpoint that can be read") from None
    # "release" begins at 0.
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else last_finished(tracker) or 0


def _configurations(users: UsersCommand, logs: Path) -> dict[str, Path | None]:
    """What is run, in order: the file by the run's name, None for stock Megatron. ``NotStarted`` without room for them."""
    made: dict[str, Path | None] = {}
    try:
        document = yaml.safe_load(users.config.path.read_text(encoding="utf-8"))
        for name, content in _contents(users, document).items():
            path = logs / f"{name.replace(' ', '-')}.yaml"
            path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
            made[name] = path
    except OSError as error:
        raise NotStarted(f"{_said_of(error, logs)}; {_NO_ROOM}") from None
    if users.without_stock:
        print(f"  stock Megatron is not run: {users.without_stock}", file=sys.stderr)
    else:
        made["stock"] = None
    return made


def _contents(users: UsersCommand, document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The file of each run, from the user's own."""
    document.pop("trace", None)
    # Home's own sizes for the shorter sequences, as a group of their own: only the order of sums differs from the static run.
    order: dict[str, Any] = {"max_length": users.config.strategies[0].max_length}
    order |= {axis: getattr(users.home, axis) for axis in ("tp", "cp", "pp", "vpp")}
    if users.config.home_tokens_per_microbatch is not None:
        order["tokens_per_microbatch"] = users.config.home_tokens_per_microbatch
    return {
        "static": {**document, "strategies": []},
        "other order": {**document, "strategies": [order], "merge": "never"},
        "config": document,
    }


# -------------------------------------------------------------------------------------------------------------- the runs


def _files(name: str, logs: Path) -> tuple[Path, Path, Path]:
    """Of a run: the folder of what its ranks note, what it prints, and its steps."""
    key = name.replace(" ", "-")
    return logs / key, logs / f"{key}.out", logs / f"{key}.jsonl"


def _run(name: str, command: Sequence[str], logs: Path, signals: Signals, *, deadline: float, grace_s: float) -> str:
    """Run the command to its end; what it printed. ``NotStarted``; ``RunFailed`` where it did not get through."""
    from hotspa_megatron.hooks.session import STEP_LOG_VARIABLE

    folder, output, step_log = _files(name, logs)
    environment = {**os.environ, RANK_LOG_VARIABLE: str(folder), STEP_LOG_VARIABLE: str(step_log)}
    signals.answer()
    try:
        folder.mkdir()
        process = start(command, environment, output)
    except OSError as error:
        if error.filename == command[0]:
            fix = "give the command as you would start it (a script without a first line as #!/bin/bash: bash SCRIPT)"
        else:
            fix = _NO_ROOM
        raise NotStarted(f"{_said_of(error, logs)}; {fix}") from None
    try:
        while process.poll() is None and time.monotonic() < deadline and not signals.seen:
            time.sleep(POLL_S)
        in_time = process.returncode is not None
    finally:
        if process.poll() is None:
            end(process, signals, grace_s=grace_s)
    signals.answer()
    try:
        said = output.read_text(errors="replace")
    except OSError as error:
        raise RunFailed(f"{name}: {_said_of(error, output)}; see to that folder (--logs)") from None
    if not in_time:
        raise RunFailed(f"{name}: not through its steps when the time was over (--limit); see {output}")
    if process.returncode:
        reason = why_it_ended(said)
        ended = f"{name}: the command ended with code {process.returncode}"
        raise RunFailed(f"{ended}{': ' + reason if reason else ''}; see {output}")
    return said


def _measured(name: str, said: str, logs: Path, *, steps: int) -> Measured:
    """What the ranks of a run noted; ``RunFailed`` where that is not there."""
    folder, output, step_log = _files(name, logs)
    ranks = [_lines(name, path) for path in sorted(folder.glob("rank-*.jsonl"))]
    if not ranks:
        raise RunFailed(
            f"{name}: no rank wrote to {folder}: ranks have to be started through hotspa_megatron.launch or "
            f"hotspa_megatron.install(), and see this folder (--logs) and this environment; see {output}"
        )
    return measured(name, ranks, _lines(name, step_log) if step_log.exists() else [], said, steps=steps)


def why_it_ended(said: str) -> str:
    """The line of a failed command's output that most likely says why: an exception's, else the last of our own."""
    raised = [found[1] for found in _RAISED.finditer(said) if not found[1].startswith("torch.distributed.elastic")]
    own = [line.removeprefix("hotspa: ") for line in said.splitlines() if line.startswith("hotspa: ")]
    return (raised[:1] or own[-1:] or [""])[0]


def _lines(name: str, path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise RunFailed(f"{name}: {_said_of(error, path)}; see to that folder (--logs)") from None
    except ValueError:
        raise RunFailed(f"{name}: {path}: not written to its end; is there room for it?") from None


def measured(
    name: str,
    ranks: Sequence[Sequence[Mapping[str, Any]]],
    step_log: Sequence[Mapping[str, Any]],
    said: str,
    *,
    steps: int,
) -> Measured:
    """Put together what the ranks of one run noted and printed; ``RunFailed`` where steps are missing."""
    iterations = tuple(entry["iteration"] for entry in ranks[0])
    if len(iterations) < steps or any(len(rank) != len(iterations) for rank in ranks):
        raise RunFailed(f"{name}: {len(iterations)} steps instead of {steps}; is --train-iters too small?")
    last_stage = next((rank for rank in ranks if rank[0]["losses"]), None)
    if last_stage is None or any(entry["grad_norm"] is None for entry in ranks[0]):
        raise RunFailed(f"{name}: no rank reported a loss and a gradient norm")
    slowest = [max(rank[step]["step_s"] for rank in ranks) for step in range(len(iterations))]
    groups = _GROUPS.search(said)
    counted = [int(number.replace(",", "")) for number in groups.groups()] if groups else [None] * 3
    switches = [switch for entry in step_log for switch in entry["switches"]]
    return Measured(
        name=name,
        iterations=iterations,
        losses=tuple(next(iter(entry["losses"].values())) for entry in last_stage),
        grad_norms=tuple(float(entry["grad_norm"]) for entry in ranks[0]),
        step_s=statistics.median(slowest[1:] or slowest),
        peak_bytes=max(entry["peak_bytes"] for rank in ranks for entry in rank),
        groups=counted[0],
        groups_added=counted[1],
        groups_mib=counted[2],
        switch_bytes=sum(switch["bytes"] for switch in switches),
        # Under way, not what was left to wait for: what a prefetch hides is no speed of the network.
        switch_s=sum(switch["under_way_s"] for switch in switches),
        segments=tuple(
            sorted({f"{part['strategy']} ({part['kind']})" for entry in step_log for part in entry["segments"]})
        ),
    )


# ----------------------------------------------------------------------------------------------------------- the verdict


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether the runs are the same training; ``why`` is one line. ``differences`` are from the static run, by run."""

    passed: bool
    why: str
    noise: Difference | None = None
    allowed: Difference | None = None
    differences: Mapping[str, Difference] | None = None


def judge(runs: Mapping[str, Measured], tolerance: Tolerance) -> Verdict:
    """Compare the runs with the static one, beside what another order of sums does to it."""
    static = runs["static"]
    differences = {name: difference(each, static) for name, each in runs.items() if name != "static"}
    noise = differences["other order"]
    allowed = Difference(
        loss=max(2 * noise.loss, tolerance.loss), grad_norm=max(2 * noise.grad_norm, tolerance.grad_norm)
    )
    # Noise of any size would excuse anything.
    loud = noise.loss > 100 * tolerance.loss or noise.grad_norm > 100 * tolerance.grad_norm
    compared = {name: each for name, each in differences.items() if name != "other order"}
    wrong = [
        f"{name}: {what} differs by {value:.1e}, and {limit:.1e} is what the order of sums explains"
        for name, each in compared.items()
        for what, value, limit in (
            ("the loss", each.loss, allowed.loss), ("the gradient norm", each.grad_norm, allowed.grad_norm)
        )
        if not value <= limit
    ]  # fmt: skip
    why = f"{' and '.join(compared)}: the same training as under one strategy"
    if loud:
        wrong.insert(0, "the static run itself differs under another order of sums by more than precision explains")
    if len(runs["config"].segments) < 2:
        why += "; only one strategy ran in these steps, so little is shown (merge: never runs all of them)"
    return Verdict(passed=not wrong, why="; ".join(wrong) or why, noise=noise, allowed=allowed, differences=differences)


def difference(run: Measured, reference: Measured) -> Difference:
    """How far apart two runs are; infinite where they are not of the same steps or a value is not finite."""
    if run.iterations != reference.iterations:
        return Difference(loss=math.inf, grad_norm=math.inf)

    def largest(values: Sequence[float], others: Sequence[float]) -> float:
        pairs = list(zip(values, others, strict=True))
        if not all(math.isfinite(number) for pair in pairs for number in pair):
            return math.inf
        return max(abs(value - other) / max(abs(other), 1e-12) for value, other in pairs)

    return Difference(
        loss=largest(run.losses, reference.losses), grad_norm=largest(run.grad_norms, reference.grad_norms)
    )


# ------------------------------------------------------------------------------------------------------------ for people


def _described(runs: Mapping[str, Measured], verdict: Verdict, logs: Path) -> dict[str, Any]:
    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [finite(each) for each in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    described: dict[str, Any] = finite(
        {
            "passed": verdict.passed,
            "why": verdict.why,
            "noise": None if verdict.noise is None else asdict(verdict.noise),
            "allowed": None if verdict.allowed is None else asdict(verdict.allowed),
            "differences": {name: asdict(each) for name, each in (verdict.differences or {}).items()},
            "runs": {name: {**asdict(each), "switch_gbps": each.switch_gbps} for name, each in runs.items()},
            "logs": str(logs),
        }
    )
    return described


def _print(runs: Mapping[str, Measured], verdict: Verdict, logs: Path) -> None:
    console = tables.console()
    shown = tables.table(
        "run", "loss off by", "gradient norm off by", "step", "switches", "peak memory", "groups", left=("run",)
    )
    for name, each in runs.items():
        off = (verdict.differences or {}).get(name)
        tables.row(
            shown,
            name,
            "-" if off is None else f"{off.loss:.1e}",
            "-" if off is None else f"{off.grad_norm:.1e}",
            f"{each.step_s:.2f} s",
            "-" if each.switch_gbps is None else f"{each.switch_bytes / 1e9:.3f} GB at {each.switch_gbps:.2f} GB/s",
            f"{each.peak_bytes / 2**30:.2f} GiB",
            "-" if each.groups is None else f"{each.groups} ({each.groups_added} added, {each.groups_mib:,} MiB)",
        )
    if runs:
        first = next(iter(runs.values()))
        tables.print_table(
            console, f"Steps {first.iterations[0]} to {first.iterations[-1]}, compared with static", shown
        )
    if "config" in runs:
        tables.say(console, f"ran under: {', '.join(runs['config'].segments)}")
    if verdict.noise is not None and verdict.allowed is not None:
        tables.say(
            console,
            f"noise (other order of sums): loss {verdict.noise.loss:.1e}, gradient norm {verdict.noise.grad_norm:.1e}; "
            f"allowed: {verdict.allowed.loss:.1e} and {verdict.allowed.grad_norm:.1e}",
        )
    tables.say(console, f"{'PASS' if verdict.passed else 'FAIL'}: {verdict.why}")
    tables.say(console, f"what the runs printed: {logs}/*.out")
