"""Starts one training run of the demo and follows it; on the way out, however it comes, no process of it is left.

Uses torchrun as a user would. torchrun puts each rank into a session of its own, so ending its process group does not
reach the ranks: processes of a run are found by a mark in their environment.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import psutil

from examples.demo.corpus import VOCAB_SIZE

RANKS: Final = 4
SEQ_LENGTH: Final = 4096
REPOSITORY: Final = Path(__file__).resolve().parents[2]
_TORCHRUN: Final = re.compile(r"[WE]\d{4} \S+ \d+ torch/distributed/elastic/")
_MARK: Final = "HOTSPA_DEMO_RUN"
_POLL_S: Final = 0.2
_GRACE_S: Final = 5.0


def megatron_arguments(*, corpus: Path, cache: Path, iterations: int, batch: int) -> list[str]:
    """Megatron's own command line, of both runs."""
    return f"""
        --data-path {corpus} --data-cache-path {cache} --split 100,0,0 --num-workers 0 --seed 1234
        --tokenizer-type NullTokenizer --vocab-size {VOCAB_SIZE} --make-vocab-size-divisible-by 16
        --num-layers 4 --hidden-size 64 --ffn-hidden-size 192 --num-attention-heads 4 --group-query-attention
        --num-query-groups 2 --kv-channels 16 --swiglu --disable-bias-linear --normalization RMSNorm
        --position-embedding-type rope --seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH}
        --hidden-dropout 0 --attention-dropout 0
        --tensor-model-parallel-size 2 --context-parallel-size 2 --use-distributed-optimizer
        --calculate-per-token-loss --micro-batch-size 1 --global-batch-size {batch} --train-iters {iterations}
        --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --weight-decay 0.01 --clip-grad 1.0 --adam-eps 1e-6
        --log-interval 1 --eval-interval 1000000 --eval-iters 0
        --transformer-impl local --attention-backend unfused --distributed-backend gloo
        --no-create-attention-mask-in-dataloader --no-gradient-accumulation-fusion --no-persist-layer-norm
        --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
    """.split()


def command_line(arguments: Sequence[str], *, config: Path, broken: str | None) -> list[str]:
    """What starts the ranks of one run; ``broken`` ("fold") starts them through a launcher that breaks the step."""
    launcher = "hotspa_megatron.launch" if broken is None else f"examples.demo.without_{broken}"
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)),
        *("--local-addr", "127.0.0.1"),  # the name of a container or a laptop need not resolve
        *("-m", launcher, "examples/pretrain_small.py"),
        *arguments,
        *("--hotspa-config", str(config)),
    ]


def environment(*, step_log: Path) -> dict[str, str]:
    """The run's environment: on CPU, one thread per rank, steps logged for us."""
    return {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "PYTHONUNBUFFERED": "1",
        "HOTSPA_STEP_LOG": str(step_log),
    }


@contextlib.contextmanager
def started(command: Sequence[str], *, env: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose output goes to ``log``; when the block is left it has ended, and so have all its descendants.

    It gets a session of its own, so that Ctrl-C reaches this process alone, which then ends it in good order.
    """
    mark = uuid.uuid4().hex
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**env, _MARK: mark},
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not stop the cleaning up
            try:
                _end(process, mark)
            finally:
                signal.signal(signal.SIGINT, previous)


def marked_processes(mark: str) -> list[psutil.Process]:
    """Every process that inherited a run's mark, whoever its parent is by now."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """End a run's processes: ask torchrun, which asks its ranks; after a while, kill what is left."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_GRACE_S)
    while left := marked_processes(mark):
        for member in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(left, timeout=_GRACE_S)
    process.wait()


def lines_of(process: subprocess.Popen[bytes], *files: Path, limit_s: float) -> Iterator[tuple[int, str]]:
    """Lines as a running process adds them to its files: (index of the file, line). Ends when the process has.

    Raises RuntimeError when it runs longer than ``limit_s``.
    """
    began = time.monotonic()
    ended = False
    positions = [0] * len(files)
    while not ended:
        ended = process.poll() is not None  # before reading, so that what it wrote last is still read
        for index, path in enumerate(files):
            if not path.exists():
                continue
            with path.open("rb") as stream:
                stream.seek(positions[index])
                added = stream.read()
            whole = added[: added.rfind(b"\n") + 1]
            positions[index] += len(whole)
            for line in whole.decode("utf-8", errors="replace").splitlines():
                yield index, line
        if not ended:
            if time.monotonic() - began > limit_s:
                raise RuntimeError(f"the run took longer than {limit_s:.0f} s")
            time.sleep(_POLL_S)


def last_words(log: str, *, count: int = 25) -> list[str]:
    """The end of what the ranks wrote, without torchrun's own account of their deaths and Megatron's warnings."""
    lines = []
    for line in log.splitlines():
        if _TORCHRUN.match(line):
            break
        if "UserWarning" not in line and line.strip() != "warnings.warn(":
            lines.append(line)
    return lines[-count:]
