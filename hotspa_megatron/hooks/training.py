"""A step under several strategies, and what is seen of it while it runs and when it does not get on.

Each function here wraps one of Megatron's; ``install`` lists which.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from hotspa_megatron.hooks import get_batch
from hotspa_megatron.hooks.data import Step, StepBatch, StepLoader
from hotspa_megatron.hooks.forward_backward import StepRecord, count_work
from hotspa_megatron.hooks.parallel_state import ParallelStates
from hotspa_megatron.hooks.session import Session, current_report, current_session, patches, refuse, say_here
from hotspa_megatron.hooks.timeline import Mark, Timeline
from hotspa_megatron.runtime.watchdog import Watchdog, connection_beside


def train_under_several_strategies(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def train_step(*positional: Any, **options: Any) -> Any:
        session = current_session()
        if session is None:
            return original(*positional, **options)
        runner, loader, states = session.runner, session.loader, session.states
        assert runner is not None and loader is not None and states is not None
        report = session.report
        assert report is not None
        session.progress.step(session.args.curr_iteration + 1)
        if session.launcher_is_gone:
            # Ranks would train on for as long as none fails, beside the job that is started in their place.
            problem = "torchrun, which started this rank, is gone, and with it what ends all ranks where one fails"
            refuse(RuntimeError(f"{problem}; start the job again"), code=1)
        bound = signature.bind(*positional, **options)
        get_batch.serve(bound.arguments["forward_step_func"], patches, adapter=session.resolved.config.get_batch)
        done: list[tuple[Any, StepRecord, Mark]] = []
        guard, iteration = session.guard, session.args.curr_iteration + 1
        if guard is not None and guard.due(iteration):
            # Outside Megatron's own step, which clears gradients first and may run its pass several times.
            guard.before(bound.arguments["forward_step_func"], _step_of(loader, next(iter(loader))), loader, iteration)
        else:
            guard = None

        def forward_backward(*, forward_step_func: Any, data_iterator: Any, **schedule_options: Any) -> Any:
            timeline, began = Timeline(session.progress), time.perf_counter()
            with timeline.span("plan", "this step"):
                # One iterator per chunk of a pipeline with virtual stages: all say the same.
                iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
                batches = [next(iterator) for iterator in iterators]
                step = _step_of(loader, batches[0])
            planned = time.perf_counter()
            report.begin(step.plan)
            reports, record = runner.run(
                forward_step_func=forward_step_func, step=step, loader=loader, timeline=timeline,
                switched=None if guard is None else guard.switched,
                force_all_reduce=schedule_options.get("force_all_reduce", False),
            )  # fmt: skip
            record.plan_seconds = planned - began
            if guard is not None:
                guard.after(record)
            session.progress.at("optimizer")
            done[:] = [(step, record, Mark())]
            return reports

        bound.arguments["forward_backward_func"] = forward_backward
        started = time.perf_counter()
        result = original(*bound.args, **bound.kwargs)
        if done:
            step, record, finished = done[0]
            record.timeline.took("optimizer", "optimizer", finished)
            seconds = time.perf_counter() - started
            _count_work(step, states)
            report.end(session.args.curr_iteration + 1, step, record, seconds)
        session.progress.at("after the step")
        return result

    return train_step


def _step_of(loader: StepLoader, batch: tuple[int, int]) -> Step:
    try:
        return loader.step(StepBatch(*batch))
    except ValueError as error:  # what a sample is, every rank finds alike
        refuse(error)


def _count_work(step: Any, states: ParallelStates) -> None:
    from megatron.training import training

    update = getattr(training, "update_seqlen_stats_from_cu_seqlens", None)
    if update is not None:  # from 0.18 on
        count_work(step, states, dist.get_rank(), update)


def skip_one_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def dummy_train_step(data_iterator: Any) -> None:
        if current_session() is None:
            original(data_iterator)
            return
        from megatron.core.rerun_state_machine import get_rerun_state_machine

        machine = get_rerun_state_machine()
        while machine.should_run_forward_backward(data_iterator):
            for iterator in data_iterator if isinstance(data_iterator, list) else [data_iterator]:
                next(iterator)

    return dummy_train_step


def log_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def training_log(*positional: Any, **options: Any) -> Any:
        report = current_report()
        if report is None:
            return original(*positional, **options)
        bound = signature.bind(*positional, **options).arguments
        return report.during_log(
            bound["iteration"],
            first=bound.get("is_first_iteration", False),
            log=functools.partial(original, *positional, **options),
        )

    return training_log


def complete_line(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def print_rank_last(message: Any) -> Any:
        report = current_report()
        return original(message if report is None else report.complete(message))

    return print_rank_last


def show_timers(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def show(self: Any, names: Any, *rest: Any, **options: Any) -> Any:
        report = current_report()
        return original(self, names if report is None else report.more_timers(names), *rest, **options)

    return show


def watch_and_end_reports(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def train(*positional: Any, **options: Any) -> Any:
        session = current_session()
        if session is None:
            return original(*positional, **options)
        ended, session.watchdog = False, _watchdog(session)
        try:
            result = original(*positional, **options)
            ended = True
            session.progress.at("after the last step")  # the last evaluation and the last save come now
            return result
        except SystemExit as end:  # Megatron's own way out, on all ranks: --exit-interval and its like
            ended = not end.code
            raise
        finally:
            if session.report is not None:
                session.report.close()
                if session.trace is not None:
                    session.trace.close()
                    if ended:
                        dist.barrier()
                        session.trace.merge()

    return train


def _watchdog(session: Session) -> Watchdog | None:
    """The running watchdog of this rank, if the file wants one."""
    config, args = session.resolved.config, session.args
    if config.watchdog_s is None:
        return None
    # Where the file says nothing, early enough for a short time-out, too.
    half = args.distributed_timeout_minutes * 30
    watchdog = Watchdog(
        session.progress,
        rank=args.rank,
        world_size=args.world_size,
        seconds=config.watchdog_s if config.watchdog_line is not None else min(config.watchdog_s, half),
        connect=connection_beside(dist.distributed_c10d._get_default_store()),
        say=lambda line: say_here(f"watchdog: {line}"),
    )
    watchdog.start()
    return watchdog


def noting(what: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def noted(*positional: Any, **options: Any) -> Any:
        session = current_session()
        if session is not None:
            session.progress.inside(what)
        return original(*positional, **options)

    return noted
