"""What is asked and said when Megatron loads and saves: which kind of sample is counted, and why a file cannot be used.

Each function here wraps one of Megatron's; ``install`` lists which. Decisions are those of ``checkpoint``.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from hotspa_megatron.hooks import checkpoint, endings
from hotspa_megatron.hooks.flags import FLAG
from hotspa_megatron.hooks.session import Session, current_session, refuse, say


def read_an_empty_tracker(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron ends with exit code 0 over a tracker that a killed rank left empty, as if the job were done."""

    @functools.wraps(original)
    def read_metadata(tracker_filename: Any, *rest: Any, **options: Any) -> Any:
        args = _under_the_flag()
        number = None
        if args is not None and Path(tracker_filename).is_file() and not Path(tracker_filename).read_text().strip():
            # One that was named on the command line counts, whatever the tracker would have said.
            number = getattr(args, "ckpt_step", None) or checkpoint.last_finished(Path(tracker_filename))
        if number is None:
            return original(tracker_filename, *rest, **options)
        with tempfile.TemporaryDirectory() as folder:
            # Read by Megatron, which compares ranks here; the folder itself is left as it is.
            meant = Path(folder) / "tracker"
            meant.write_text(str(number))
            return original(str(meant), *rest, **options)

    return read_metadata


def _under_the_flag() -> Any:
    """Megatron's arguments where the flag is set, else None; with --use-checkpoint-args it asks before it has them."""
    from megatron.training.global_vars import get_args

    try:
        args = get_args()
    except AssertionError:
        return argparse.Namespace() if any(word.split("=", 1)[0] == FLAG for word in sys.argv) else None
    return args if getattr(args, "hotspa_config", None) is not None else None


def count_samples_of_this_job(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron asks this of a checkpoint's arguments before it takes the consumed samples from them."""

    @functools.wraps(original)
    def check_checkpoint_args(saved: Any, *rest: Any, **options: Any) -> Any:
        result = original(saved, *rest, **options)
        session = current_session()
        if session is None:
            return result
        config = session.resolved.config
        try:
            session.first_sample = checkpoint.first_sample(session.args, saved, config)
        except ValueError as error:  # in a checkpoint that could not be looked at before
            refuse(error)
        kind = checkpoint.kind_of(session.args, config)
        if session.first_sample is not None:
            say(f"start_sample: {kind} are counted from {session.first_sample} on, by schedules too")
            saved.consumed_train_samples, saved.skipped_train_samples = session.first_sample, 0
        elif config.start_sample is not None:
            say(f"start_sample: has no effect, as the checkpoint counts {kind} already")
        return result

    return check_checkpoint_args


def move_schedule_with_the_count(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_checkpoint(*positional: Any, **options: Any) -> Any:
        result = original(*positional, **options)
        session = current_session()
        first = None if session is None else session.first_sample
        scheduler = signature.bind(*positional, **options).arguments["opt_param_scheduler"]
        if first is not None and scheduler is not None and scheduler.num_steps:  # 0 where it was not loaded
            scheduler.num_steps = first
            scheduler.step(0)
        return result

    return load_checkpoint


def replace_only_what_is_saved(original: Callable[..., Any]) -> Callable[..., Any]:
    """A save that is interrupted must leave the checkpoint of before; and says why where it cannot be finished."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_checkpoint(iteration: int, *positional: Any, **options: Any) -> Any:
        session = current_session()
        if session is None:
            return original(iteration, *positional, **options)
        session.progress.at("save", f"of iteration {iteration}")
        given = signature.bind(iteration, *positional, **options).arguments
        try:
            if not given.get("non_persistent_ckpt"):
                if dist.get_rank() == 0:
                    _make_room(session, iteration, release=bool(given.get("release")))
                dist.barrier()  # nobody writes before
            result = original(iteration, *positional, **options)
        except BaseException as error:  # torch's own for checkpoints is no Exception
            _refuse_unsaved(session, f"the checkpoint of iteration {iteration}", error)
        _drop_replaced(session)
        session.progress.at("after the save")
        return result

    return save_checkpoint


def _make_room(session: Session, iteration: int, *, release: bool) -> None:
    from megatron.training import checkpointing

    args = session.args
    checkpoint.fill(
        Path(checkpointing.get_checkpoint_tracker_filename(args.save)), chosen=getattr(args, "ckpt_step", None)
    )
    folder = checkpointing.get_checkpoint_name(args.save, iteration, release, return_base_dir=True)
    if aside := checkpoint.set_aside(Path(folder)):
        session.replaced.add(aside)


def _drop_replaced(session: Session) -> None:
    session.replaced = {aside for aside in session.replaced if not checkpoint.drop_replaced(aside)}


def say_why_not_finished(original: Callable[..., Any]) -> Callable[..., Any]:
    """Of an asynchronous save: what its writers met is raised here, steps later."""

    @functools.wraps(original)
    def maybe_finalize_async_save(*positional: Any, **options: Any) -> Any:
        session = current_session()
        try:
            result = original(*positional, **options)
        except BaseException as error:
            if session is None:
                raise
            _refuse_unsaved(session, "a checkpoint that was being written meanwhile", error)
        if session is not None:
            _drop_replaced(session)
        return result

    return maybe_finalize_async_save


def _refuse_unsaved(session: Session, what: str, error: BaseException) -> NoReturn:
    """End with one line where files are the cause; raise every other error as it is."""
    cause = endings.cause_in_files(error, reading=False)
    if cause is None:
        raise error
    refuse(OSError(f"{what} cannot be saved: {cause}; {endings.state_of(session.args.save)}"), code=1)


def say_why_not_loaded(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_checkpoint(*positional: Any, **options: Any) -> Any:
        try:
            return original(*positional, **options)
        except BaseException as error:
            session = current_session()
            cause = endings.cause_in_files(error, reading=True)
            if session is None or cause is None:
                raise
            problem = f"the checkpoint in {session.args.load} cannot be loaded: {cause}"
            refuse(OSError(f"{problem}; restore it, or name an earlier one with --ckpt-step"), code=1)

    return load_checkpoint
