"""What a job under the flag holds between the hooks, and how a hook speaks to people.

One process trains one job, so there is one session; without the flag there is none, and every hook calls the original.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn

from hotspa_megatron import run_folder
from hotspa_megatron.config import ResolvedConfig
from hotspa_megatron.hooks import auto
from hotspa_megatron.hooks.costs import decide_costs, decide_estimator
from hotspa_megatron.hooks.data import StepLoader
from hotspa_megatron.hooks.forward_backward import StepRunner
from hotspa_megatron.hooks.guard import Guard
from hotspa_megatron.hooks.model import LogicalModel, build_guest, read_home
from hotspa_megatron.hooks.moves import Moves
from hotspa_megatron.hooks.parallel_state import ParallelState, ParallelStates
from hotspa_megatron.hooks.patching import Patches
from hotspa_megatron.hooks.step_report import Estimates, LineFile, StepLog, StepReport
from hotspa_megatron.hooks.trace import Trace
from hotspa_megatron.planning.step_plan import StepPlanner
from hotspa_megatron.planning.topology import Topology
from hotspa_megatron.runtime.group_pool import GroupPool
from hotspa_megatron.runtime.transport import BatchedTransport
from hotspa_megatron.runtime.watchdog import Progress, Watchdog
from hotspa_megatron.strategy import Kind

STEP_LOG_VARIABLE: Final = "HOTSPA_STEP_LOG"
"""Environment variable: the file to which rank 0 writes one JSON object per step."""

patches: Final = Patches()
"""Every replaced name of Megatron's, those replaced while a job runs included."""

_session: Session | None = None


class Session:
    """What one job under the flag holds between the hooks, filled in as Megatron starts up."""

    def __init__(self, args: Any, resolved: ResolvedConfig) -> None:
        self.args = args
        self.resolved = resolved
        self.progress = Progress()
        self._planner: StepPlanner | None = None
        self.pool = GroupPool()
        self.states: ParallelStates | None = None
        self.transport: BatchedTransport | None = None
        self.topology = Topology.flat(args.world_size)
        self.runner: StepRunner | None = None
        self.guard: Guard | None = None
        self.train_dataset: Any = None
        self.loader: StepLoader | None = None
        self.first_sample: int | None = None
        """Where the count of samples was taken up, if the checkpoint counted another kind."""
        self.replaced: set[Path] = set()
        """Checkpoints that a save under way replaces, on rank 0."""
        self.folder = _run_folder(args, resolved.config.trace)
        self.report: StepReport | None = None
        self.trace: Trace | None = None
        self.watchdog: Watchdog | None = None
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    @property
    def launcher_is_gone(self) -> bool:
        """Whether torchrun, which started this rank, has ended before it."""
        return self._launcher is not None and os.getppid() != self._launcher

    def stop_watching(self) -> None:
        """End the watchdog's threads, where they run."""
        if self.watchdog is not None:
            self.watchdog.stop()

    @property
    def planner(self) -> StepPlanner:
        """The planner of steps, from when the model is there."""
        assert self._planner is not None
        return self._planner

    def prepare_runner(self, model: list[Any], build: Callable[[ParallelState], list[Any]]) -> StepRunner:
        """Build the guests beside home's ``model`` and make the runner of steps. Collective."""
        assert self.states is not None and self.transport is not None
        logical = read_home(model, self.resolved.home.strategy)
        self._planner = self._plan_by_costs(logical)
        # Each guest once, in the order of the file, however many length groups it serves.
        layers = {s.strategy: s.stages for s in self.resolved.strategies if s.kind is Kind.GUEST}
        moves_of = functools.partial(
            Moves,
            home=self.resolved.home.strategy,
            logical=logical,
            model=model,
            transport=self.transport,
            topology=self.topology,
            switch=self.resolved.config.switch,
            progress=self.progress,
            log=say,
        )
        runner_of = functools.partial(
            StepRunner, args=self.args, states=self.states, model=model, progress=self.progress
        )
        guests = {guest: build_guest(self.states, guest, logical, layers[guest], build) for guest in layers}
        moves = moves_of(guests=guests)
        self.runner = runner_of(planner=self.planner, moves=moves, check_plans=self.resolved.config.check_plans)
        if self.resolved.config.verify_every is not None:
            in_home = self.planner.in_home()
            self.guard = Guard(
                every=self.resolved.config.verify_every,
                ungraded=why_ungraded(self.args, self.resolved),
                alone=runner_of(planner=in_home, moves=moves_of(guests={}), check_plans=False),
                home=self.resolved.home.strategy,
                logical=logical,
                model=model,
                say=say,
                scaled=bool(self.args.fp16 or self.args.loss_scale),
                folded_in=moves.fold_dtype,
            )
        self.report = self._prepare_report(logical)
        return self.runner

    def _prepare_report(self, logical: LogicalModel) -> StepReport:
        make = decide_estimator(self.args, self.resolved, logical, self.topology, self.planner)
        files = []
        if self.args.rank == 0:
            # Of a resumed job: what it logged before stays.
            paths = [Path(path) for path in filter(None, [os.environ.get(STEP_LOG_VARIABLE)])]
            paths += [] if self.folder is None else [self.folder / run_folder.STEPS]
            files = [LineFile(path, say_here) for path in paths]
        self.trace = None if self.folder is None else Trace(self.folder, say_here)
        # Megatron's line and writers are the last rank's.
        seen = bool(files) or self.args.rank == self.args.world_size - 1
        return StepReport(
            args=self.args, planner=self.planner, estimates=Estimates(make, say_here) if seen else None,
            log=StepLog(files), trace=None if self.trace is None else self.trace.add, say=say,
        )  # fmt: skip

    def _plan_by_costs(self, logical: LogicalModel) -> StepPlanner:
        costs, source = decide_costs(self.args, self.resolved, logical, self.topology)
        merge = self.resolved.config.merge == "auto"
        if self.resolved.strategies:
            what = "length groups are merged where switches do not pay" if merge else "no length group is merged"
            say(f"{what} (merge: {self.resolved.config.merge}); times are those of {source}")
        return StepPlanner.from_resolved(self.resolved, costs, merge=merge)


def why_ungraded(args: Any, resolved: ResolvedConfig) -> str | None:
    """Why a step's gradient is not compared with that of home alone; None where it is."""
    if not resolved.strategies:
        return "home is the only strategy"
    if args.hidden_dropout or args.attention_dropout:
        return "dropout draws other numbers under other strategies"
    if getattr(args, "fp8", None) or getattr(args, "fp4", None):
        return "the scales of fp8 and fp4 follow from every pass, so that one more would change the training"
    return None


def begin(session: Session) -> None:
    """From now on this process trains that job."""
    global _session
    _session = session


def current_session() -> Session | None:
    """The running job's session; None without the flag."""
    return _session


def current_report() -> StepReport | None:
    """What is shown of the running job's steps; None without the flag and before there is a model."""
    return None if _session is None else _session.report


def end() -> None:
    """Forget the job, and restore every name of Megatron's that was replaced."""
    global _session
    _session = None
    patches.undo_all()


def say(line: str) -> None:
    from megatron.training.utils import print_rank_0

    print_rank_0(f"hotspa: {line}")


def say_here(line: str) -> None:
    """On the rank that knows it."""
    rank = os.environ.get("RANK", "0")
    sys.stderr.write(f"hotspa: {'' if rank == '0' else f'rank {rank}: '}{line}\n")


def refuse(error: Exception, *, code: int = 2) -> NoReturn:
    """End this rank with one line and an exit code, over what every rank finds as this one does.

    Rank 0 speaks for all. Another rank speaks only if rank 0 had nothing to say: the launcher ends it before otherwise.
    """
    rank = int(os.environ.get("RANK", "0"))
    if rank:
        time.sleep(3)
    sys.stderr.write(f"hotspa: {f'rank {rank}: ' if rank else ''}{error}\n")
    sys.stderr.flush()
    raise SystemExit(code) from error


def _run_folder(args: Any, trace: str | None) -> Path | None:
    """Where the file's ``trace`` lies: below --save, else below where the job was started. ValueError where it cannot."""
    if trace is None:
        return None
    folder = run_folder.folder_inside(auto.Job.of(args).folder, trace)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"trace: {folder} cannot be made ({error.strerror}); name another folder") from None
    return folder
