"""``--hotspa-config auto``: the job plans for itself, once, and writes the file that it and every resumed run then use.

Rank 0 decides for all ranks, from the lengths of the job's own documents, the command line as home, and what is known of
the cluster: a profile that an earlier job left, the description of a known device, or a calibration made now.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from hotspa_megatron.hooks import arguments, compat, cpu
from hotspa_megatron.planning import plan_file, profile_file
from hotspa_megatron.planning.execution import RECOMPUTE_SHARES, VIRTUAL_STAGES
from hotspa_megatron.planning.hardware import UNKNOWN_DEVICE, Hardware, described_device, load_hardware
from hotspa_megatron.planning.lengths import LengthHistogram
from hotspa_megatron.planning.search import plan_strategies

AUTO: Final = "auto"
"""What --hotspa-config says in the place of a file."""
FILE_NAME: Final = "hotspa.auto.yaml"
_MARK: Final = re.compile(r"^# For job ([0-9a-f]{16})\b", re.MULTILINE)
_SEQUENCES: Final = 100_000
"""Sequences that stand for a blend of corpora."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """What a plan depends on besides lengths and cluster. ``mark``: equal for jobs that may share a file."""

    args: Any
    folder: Path

    @classmethod
    def of(cls, args: Any) -> Job:
        """A job's file lies beside its checkpoints, or without --save where the job was started."""
        return cls(args, Path(args.save) if args.save else Path.cwd())

    @property
    def path(self) -> Path:
        return self.folder / FILE_NAME

    @property
    def mark(self) -> str:
        home, recompute = arguments.home_of(self.args), arguments.recompute_of(self.args)
        said = repr((arguments.shape_of(self.args), str(home), str(recompute)))
        return hashlib.sha256(said.encode()).hexdigest()[:16]


def check(args: Any) -> None:
    """ValueError where lengths are not known before the job has begun."""
    if args.sft:
        raise ValueError(
            "--hotspa-config auto: the lengths of conversations are known only once they are tokenised; count them with "
            "hotspa data lengths, and write a file with hotspa plan"
        )
    if args.mock_data:
        raise ValueError(
            "--hotspa-config auto: mock data has no lengths of its own; give --data-path, or a file with mock_lengths"
        )


def decide(args: Any, *, say: Say) -> Path:
    """The file of this job on this rank, written where there was none. Collective; needs joined ranks that agree.

    Raises ValueError, on all ranks alike, where nothing can be planned.
    """
    job, rank = Job.of(args), dist.get_rank()
    text = _from_first(lambda: _kept(job, say) if rank == 0 else None)
    if text is None:
        hardware = _hardware(args, say)
        text = _from_first(lambda: _plan(job, hardware, say) if rank == 0 else None)
    if _read(job.path) == text:
        return job.path
    # Another file system than rank 0's.
    folder = tempfile.mkdtemp(prefix="hotspa-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder) / FILE_NAME
    path.write_text(text, encoding="utf-8")
    return path


def cached_profile() -> Path | None:
    """Where the profile of this job's cluster is, if there is one; None where no place is known. Needs joined ranks."""
    return profile_file.cached_path(
        device=_device_name(), ranks_per_node=_ranks_per_node(), world_size=dist.get_world_size(), versions=_versions()
    )


def _kept(job: Job, say: Say) -> str | None:
    """The text that an earlier run of this job has left; None where there is none or it was another job's."""
    text = _read(job.path)
    if text is None:
        return None
    found = _MARK.search(text)
    if found is None or found[1] != job.mark:
        say(f"{job.path} is of a job with another model, parallel sizes or recomputation: planning anew")
        return None
    say(f"--hotspa-config auto: using {job.path} of an earlier run; remove it to plan anew")
    return text


def _plan(job: Job, hardware: Hardware, say: Say) -> str:
    args = job.args
    home, shape = arguments.home_of(args), arguments.shape_of(args)
    lengths, source = _lengths(args)
    given = arguments.recompute_of(args)
    # Home's is the command line's, which cannot change any more; the other strategies may have less, or more.
    share = given.share(shape.num_layers / (home.pp * home.vpp))
    planned = plan_strategies(
        lengths,
        shape=shape,
        hardware=hardware,
        world_size=args.world_size,
        sequences_per_step=args.global_batch_size,
        home=home,
        home_recompute=share,
        recompute=sorted({*RECOMPUTE_SHARES, share}),
        vpp=VIRTUAL_STAGES if compat.interleaves() else (1,),
        optimizer_bytes=arguments.optimizer_bytes_of(args, shape),
    )
    text = plan_file.as_yaml(
        planned,
        num_layers=shape.num_layers,
        given=given,
        head=(
            f"For job {job.mark}: made by --hotspa-config auto on {date.today()}; a resumed run uses it again.",
            f"{args.world_size} ranks of {hardware.name}, {source}, {args.global_batch_size} sequences per step.",
        ),
    )
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
        draft = job.path.with_suffix(".draft")
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, job.path)
    except OSError as error:
        raise ValueError(f"--hotspa-config auto: {job.path}: {error.strerror}") from None
    say(
        f"--hotspa-config auto: planned {planned.gain:.2f} times the best static strategy's speed (modelled, on "
        f"{hardware.name}); wrote {job.path}"
    )
    return text


def _lengths(args: Any) -> tuple[LengthHistogram, str]:
    """The lengths that the job trains on, and where they are from."""
    from megatron.training.utils import get_blend_and_blend_per_split

    blend, per_split = get_blend_and_blend_per_split(args)
    train = blend if blend is not None else (per_split or [None])[0]
    if train is None:
        raise ValueError("--hotspa-config auto: there is no --data-path whose lengths could be counted")
    paths, weights = train
    each = [LengthHistogram.from_index(path).limited(args.seq_length, "split") for path in paths]
    source = f"the documents of {', '.join(map(str, paths))}"
    if len(each) == 1:
        return each[0], source
    # Weights are shares of tokens; sequences are drawn by shares of sequences.
    shares = np.array([1.0] * len(each) if weights is None else weights) / [one.mean for one in each]
    counts = np.maximum(1, np.rint(shares / shares.sum() * _SEQUENCES)).astype(int)
    drawn = [one.sample(int(count), seed=0) for one, count in zip(each, counts, strict=True)]
    return LengthHistogram.of(np.concatenate(drawn)), source


# -------------------------------------------------------------------------------------------------------------- cluster


def _hardware(args: Any, say: Say) -> Hardware:
    """What is known of this cluster; measured now, on all ranks, where that is nothing. Collective."""
    path, name = _from_first(lambda: (cached_profile(), described_device(None if cpu.needed() else _device_name())))
    text = _from_first(lambda: None if path is None else _read(path))
    known_device = not cpu.needed() and (name != UNKNOWN_DEVICE or "A100" in _device_name())
    if text is None and not known_device:
        say(f"--hotspa-config auto: nothing is known of {_device_name()}: measuring it, once, for up to 3 minutes")
        text = _calibrated(path, say)
    if text is None:
        say(
            f"--hotspa-config auto: no profile of this cluster; using the description of {name}. hotspa profile measures it"
        )
        return load_hardware(name).with_nodes_of(_ranks_per_node())
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / (path.name if path is not None else "measured.yaml")
        copy.write_text(text, encoding="utf-8")
        try:
            return load_hardware(copy)
        except ValueError as error:
            raise ValueError(f"{str(error).replace(str(copy), str(path))}; or remove it: it is made anew") from None


def _calibrated(path: Path | None, say: Say) -> str:
    """Measure on all ranks and keep the result at ``path`` on rank 0's machine, where that can be. Collective."""
    from hotspa_megatron.runtime.calibration import calibrate

    device = torch.device("cpu") if cpu.needed() else torch.device("cuda", torch.cuda.current_device())
    done = calibrate(device, ranks_per_node=_ranks_per_node(), say=lambda what: say(f"measuring {what}"))
    text = profile_file.as_yaml(
        done.values,
        done.assumed,
        title=f"{_device_name()}: {dist.get_world_size()} ranks, measured by a job with --hotspa-config auto",
        measured=f"measured {date.today()} at a job's start: {_versions()}",
        notes=done.notes,
    )

    def keep() -> str:
        kept = f"kept in {path} for other jobs"
        try:
            if path is None:
                raise ValueError("this user has no home folder")
            profile_file.write(path, text)
        except ValueError as error:
            kept = f"not kept for other jobs ({error}); {profile_file.CACHE_VARIABLE} names another folder"
        say(f"measured in {done.seconds:.0f} s; {kept}")
        return text

    return str(_from_first(keep))


def _device_name() -> str:
    return f"{platform.machine()} CPU {platform.node()}" if cpu.needed() else str(torch.cuda.get_device_name())


def _ranks_per_node() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or dist.get_world_size()


def _versions() -> str:
    return f"{dist.get_world_size()} ranks on {_device_name()}, {dist.get_backend()}, torch {torch.__version__}"


# ---------------------------------------------------------------------------------------------------------------- ranks


def join(args: Any) -> None:
    """Join the ranks as Megatron would a moment later; it then finds them joined."""
    if dist.is_initialized():
        return
    if not cpu.needed():
        torch.cuda.set_device(args.local_rank)
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    dist.init_process_group(args.distributed_backend, world_size=args.world_size, rank=args.rank, timeout=timeout)


def _from_first(make: Callable[[], Any]) -> Any:
    """What rank 0 makes, on all ranks; a ValueError of it is raised on all. Collective."""
    result: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            result[0] = make()
        except ValueError as error:
            result[1] = str(error)
    dist.broadcast_object_list(result, src=0)
    if result[1] is not None:
        raise ValueError(result[1])
    return result[0]


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
