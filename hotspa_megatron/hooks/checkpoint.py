"""Going on from a checkpoint: whether this job can load it, and which kind of sample its consumed samples are.

Checkpoints are plain Megatron checkpoints of home, written and read by Megatron alone. One string among the arguments that
they keep (``MARK``) says what the job counted as samples; without it they count Megatron's own. Called by
``startup`` before any process group exists (``check``), and by ``checkpoint_hooks`` within Megatron's own loading.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from torch.distributed.checkpoint.api import CheckpointException

from hotspa_megatron.config import HotSPaConfig
from hotspa_megatron.hooks import compat
from hotspa_megatron.strict_yaml import config_error, one_line, shown

MARK: Final = "hotspa_samples"
"""The saved argument that holds a ``SampleKind``."""

SampleKind: TypeAlias = Literal["documents", "conversations", "megatron"]

_SAMPLES: Final[dict[SampleKind, str]] = {
    "documents": "documents", "conversations": "conversations", "megatron": "samples of Megatron's own",
}  # fmt: skip

_FINISHED: Final = "metadata.json"
"""The last file of a checkpoint that is written."""
_OF_TORCH: Final = ("torch_dcp", "fsdp_dtensor")
_REPLACED: Final = ".replaced"
"""How the name of a checkpoint ends that another one is about to replace."""
_RESHARDABLE: Final = "--dist-ckpt-optim-fully-reshardable"


class _Saved(NamedTuple):
    """Of a checkpoint: the arguments of the job that wrote it, and how it keeps a distributed optimizer's state."""

    args: Any
    sharding: str | None


def kind_of(args: Any, config: HotSPaConfig) -> SampleKind:
    """What this job counts as samples."""
    if config.samples == "megatron":
        return "megatron"
    return "conversations" if args.sft else "documents"


def check(args: Any, config: HotSPaConfig, *, say: Callable[[str], None]) -> None:
    """Raise ValueError, one line, where the job could not go on from the checkpoint that it is about to load.

    Needs no process group. ``say`` hears of a save that was interrupted and costs nothing. What only Megatron's own loading can
    tell (other formats, non-persistent checkpoints) passes.
    """
    if args.save is not None:
        _check_room(Path(args.save))
    saved = _saved(args, say)
    if saved is not None:
        first_sample(args, saved.args, config)
        _check_layout(args, saved)


def first_sample(args: Any, saved: Any, config: HotSPaConfig) -> int | None:
    """The consumed samples to start at where a checkpoint's are not of this job's kind; None where they are.

    ``saved``: the arguments that the checkpoint keeps. Raises ValueError where the file does not say.
    """
    consumed = getattr(saved, "consumed_train_samples", 0)
    counted, kind = getattr(saved, MARK, "megatron"), kind_of(args, config)
    if counted == kind or not consumed:
        return None
    if config.start_sample is None:
        raise config_error(
            config.path,
            config.start_sample_line,
            "start_sample",
            f"the checkpoint in {args.load} has consumed {consumed} samples of the kind {counted}, and this job counts "
            f"{kind}; write start_sample: N, how many {_SAMPLES[kind]} count as consumed (iterations done times "
            "--global-batch-size keeps schedules by iterations where they are), or give --finetune to begin anew",
        )
    batch = getattr(saved, "global_batch_size", args.global_batch_size)
    if batch != args.global_batch_size and not (args.override_opt_param_scheduler or args.no_load_optim):
        raise ValueError(
            f"--global-batch-size {args.global_batch_size}: the checkpoint's schedule counts samples of the kind {counted}, "
            f"{batch} per iteration; add --override-opt-param-scheduler, which takes this command line's"
        )
    return config.start_sample


@contextlib.contextmanager
def nothing_consumed(args: Any) -> Iterator[None]:
    """Let a count of 0 stand while Megatron builds its iterators.

    Behind the first iteration it takes 0 for a checkpoint without counts, and makes one up.
    """
    args.consumed_train_samples = 1
    try:
        yield
    finally:
        args.consumed_train_samples = 0


def saved_for_one_layout(args: Any) -> str | None:
    """A line for the job's start where its checkpoints will be of its own layout alone; None where they are not."""
    if args.save is None or args.no_save_optim or not args.use_distributed_optimizer:
        return None
    if args.dist_ckpt_optim_fully_reshardable:
        return None
    return f"checkpoints can be loaded at another dp or cp; for another tp or pp, save with {_RESHARDABLE}"


def _saved(args: Any, say: Callable[[str], None]) -> _Saved | None:
    if args.load is None or args.non_persistent_ckpt_type is not None:
        return None
    from megatron.core import dist_checkpointing
    from megatron.training import checkpointing

    tracker = Path(checkpointing.get_checkpoint_tracker_filename(args.load))
    if not getattr(args, "ckpt_step", None):  # which counts, whatever the tracker says
        _check_tracker(tracker)
        if line := _surprise_of(tracker):
            say(line)
    folder = checkpointing.get_load_checkpoint_path_by_args(args)
    _check_whole(Path(folder), tracker, of_torch=args.ckpt_format in _OF_TORCH)
    if args.finetune:
        return None
    try:
        if not dist_checkpointing.check_is_distributed_checkpoint(folder):
            return None
        with _silence():
            common = dist_checkpointing.load_common_state_dict(folder)
    # Whatever the bytes of a damaged file happen to mean; torch's own is not even an Exception.
    except (Exception, CheckpointException) as error:
        problem = one_line(f"{type(error).__name__}: {error}".splitlines()[-1])[:200]
        raise ValueError(
            f"--load: {folder} cannot be read ({problem}); name a whole checkpoint with --ckpt-step"
        ) from error
    if "args" not in common:
        return None
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {}
    return _Saved(common["args"], metadata.get("distrib_optim_sharding_type"))


def seen(args: Any) -> str:
    """What this rank sees behind --load: ranks that see different things would load different ones, or wait for each other."""
    if args.load is None or args.non_persistent_ckpt_type is not None:
        return "none"
    from megatron.training import checkpointing

    tracker = Path(checkpointing.get_checkpoint_tracker_filename(args.load))
    step = getattr(args, "ckpt_step", None)
    try:
        named = tracker.read_text(errors="replace").strip() or last_finished(tracker)
    except OSError as error:
        return f"none ({error.strerror})"
    return f"that of iteration {step or named}"


def _check_room(folder: Path) -> None:
    """ValueError for a --save that cannot be written, which Megatron finds at its first save."""
    there = folder
    # Not Path.exists, which raises where a folder may not be entered.
    while not os.path.exists(there) and there != there.parent:
        there = there.parent
    if not os.path.isdir(there) or not os.access(there, os.W_OK | os.X_OK):
        why = "is no folder" if not os.path.isdir(there) else "cannot be written"
        raise ValueError(f"--save: {folder}: {there} {why}; name a folder that this job may write to")


def _check_tracker(tracker: Path) -> None:
    """ValueError for a tracker that says nothing, as one whose writing was cut short; Megatron would end with exit code 0."""
    try:
        text = tracker.read_text(errors="replace").strip()
    except OSError:  # there is none, and nothing is loaded; or Megatron says why it cannot be read
        return
    if text == "release" or re.fullmatch("[0-9]+", text) or last_finished(tracker) is not None:
        return
    whole = _finished(tracker.parent)
    fix = "remove it to begin anew"
    if whole:
        fix = f"the latest whole checkpoint is that of iteration {max(whole)}: write {max(whole)} into it"
    raise ValueError(f"--load: {tracker} should name an iteration, and holds {shown(text)}; {fix}")


def _surprise_of(tracker: Path) -> str | None:
    """A line where the checkpoint that the tracker stands for is not what its user may expect."""
    number = last_finished(tracker)
    if number is not None:
        return (
            f"{tracker} is empty, as a job leaves it that is killed while it writes it: the last checkpoint that was finished "
            f"counts, that of iteration {number}"
        )
    try:
        text, last = tracker.read_text(errors="replace").strip(), max(_finished(tracker.parent), default=0)
    except OSError:
        return None
    if not text.isdigit() or int(text) >= last:
        return None
    later = f"there are whole checkpoints up to that of iteration {last}, which --ckpt-step {last} would name"
    return f"{tracker} names iteration {int(text)}, and {later}"


def _check_whole(folder: Path, tracker: Path, *, of_torch: bool) -> None:
    """ValueError where the named checkpoint is gone, or its save was interrupted; Megatron finds that many groups later.

    ``of_torch``: whether this job's checkpoints are torch's own, which end otherwise.
    """
    try:
        if not os.path.isfile(tracker):  # nothing is loaded
            return
        names = {entry.name for entry in os.scandir(folder)}
    except FileNotFoundError:
        names = set()
    except OSError:  # Megatron says why it cannot be read
        return
    # The oldest format has a folder per rank.
    if _FINISHED in names or (of_torch and names) or any(name.startswith("mp_rank_0") for name in names):
        return
    whole, aside = max(_finished(tracker.parent), default=None), folder.with_name(f"{folder.name}{_REPLACED}")
    problem = "is not whole: its save was interrupted" if names else "is not there"
    fix = "give another --load" if whole is None else f"--ckpt-step {whole} names the latest that is whole"
    kept = f"; the one that it was to replace is kept in {aside}" if os.path.isdir(aside) else ""
    raise ValueError(f"--load: {folder} {problem}; {fix}{kept}")


def set_aside(folder: Path) -> Path | None:
    """Before a save into ``folder``: rename a whole checkpoint there; the path of one that is kept aside, if there is any.

    Megatron writes over it file by file: a save that is interrupted would leave a mix, which still counts as whole.
    """
    aside = folder.with_name(f"{folder.name}{_REPLACED}")
    if os.path.isfile(folder / _FINISHED):
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
    return aside if os.path.isdir(aside) else None


def drop_replaced(aside: Path) -> bool:
    """Remove what was set aside, beside the training, once the checkpoint in its place is whole. Whether it is."""
    if not os.path.isfile(aside.with_name(aside.name.removesuffix(_REPLACED)) / _FINISHED):
        return False
    threading.Thread(target=shutil.rmtree, args=(aside,), kwargs={"ignore_errors": True}, daemon=True).start()
    return True


def fill(tracker: Path, *, chosen: int | None) -> None:
    """Write into an empty tracker what it stands for, before Megatron reads the number in it as the one saved before.

    ``chosen``: the iteration of --ckpt-step, where a folder's history does not say.
    """
    if tracker.is_file() and not tracker.read_text(errors="replace").strip():
        number = last_finished(tracker) or chosen
        if number is not None:
            tracker.write_text(str(number))


def last_finished(tracker: Path) -> int | None:
    """The iteration that an empty tracker stands for; None where it is not empty, or where that cannot be told.

    A save ends with the checkpoint's own metadata.json, and then the tracker is written: killed between opening and writing
    it, a rank leaves it empty, and the checkpoint that was finished last is the one that it was to name. Where that is not
    also the one of the latest iteration, the folder has a history of its own, and nothing is guessed.
    """
    try:
        if tracker.read_text(errors="replace").strip():
            return None
        finished = _finished(tracker.parent)
        last = max(finished, key=lambda number: (finished[number].stat().st_mtime_ns, number), default=None)
    except OSError:
        return None
    return last if finished and last == max(finished) else None


def _finished(folder: Path) -> dict[int, Path]:
    """The metadata files of whole checkpoints, by iteration."""
    found = {path.parent.name.removeprefix("iter_"): path for path in folder.glob(f"iter_*/{_FINISHED}")}
    return {int(number): path for number, path in found.items() if number.isdigit()}


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """What torch says while it reads without a process group is of no use, and of a damaged file our own line is enough."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _check_layout(args: Any, saved: _Saved) -> None:
    """ValueError where Megatron would fail to load the optimizer's state, many groups later and naming another flag."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if args.no_load_optim or getattr(saved.args, "no_save_optim", False):
        return
    way_out = "or leave the state behind with --no-load-optim"
    if args.use_distributed_optimizer and not getattr(saved.args, "use_distributed_optimizer", True):
        raise ValueError(
            f"--load {args.load}: its optimizer state was saved without --use-distributed-optimizer and is not the distributed "
            f"optimizer's; remove the flag, {way_out}"
        )
    if saved.sharding is None or saved.sharding in DistributedOptimizer.checkpoint_fully_reshardable_formats:
        return
    was, now = _layout(saved.args), _layout(args)
    if not args.use_distributed_optimizer:
        raise ValueError(
            f"--load {args.load}: its optimizer state is the distributed optimizer's; add --use-distributed-optimizer, {way_out}"
        )
    if was != now:
        raise ValueError(
            f"--load {args.load}: its optimizer state was saved at {was} without {_RESHARDABLE} and cannot be loaded at "
            f"{now}; run at {was} with {_RESHARDABLE} until the next save, {way_out}"
        )


def _layout(args: Any) -> str:
    """What decides which parameters a rank's flat buffers hold."""
    said = f"tp{args.tensor_model_parallel_size} pp{args.pipeline_model_parallel_size}"
    if virtual := getattr(args, "virtual_pipeline_model_parallel_size", None):
        said += f" vpp{virtual}"
    for name in compat.UNEVEN_PIPELINE_ARGUMENTS:
        if value := getattr(args, name, None):
            said += f" --{name.replace('_', '-')} {value}"
    return said
