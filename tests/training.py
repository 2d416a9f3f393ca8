"""Trainings for tests: a small corpus, a small GPT, and one call that trains it through megatron.training.pretrain.

The ranks run examples/pretrain_small.py in processes that have Megatron on the CPU stand-in imported; what the training
loop hands to its log is recorded in full precision. Corpora, weights and runs are made once per test process and then
shared: a run is a function of its job. Nothing here checks anything.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hotspa_megatron.hooks.patching import Patches
from hotspa_megatron.planning.sample_order import SampleOrder
from tests.spawn import GRACE_SECONDS, REPOSITORY, run_ranks

RELEASE = tuple(int(part) for part in importlib.metadata.version("megatron-core").split(".")[:2])
SCRIPT = REPOSITORY / ("examples" if RELEASE >= (0, 19) else "tests/older") / "pretrain_small.py"
SEED = 1234
SEQ_LENGTH = 256
VOCAB = 121
"""The last one is the end of document; padded to 128 for every tensor-parallel size up to 4."""


@functools.cache
def workspace() -> Path:
    """A folder of this test process, removed at its end."""
    folder = Path(tempfile.mkdtemp(prefix="hotspa-trainings-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


_VOCAB_SIZE = VOCAB if RELEASE >= (0, 18) else VOCAB - 1
"""0.17 adds the end of document to what --vocab-size says."""

# -------------------------------------------------------------------------------------------------------------- corpora


def skewed_lengths(documents: int = 260, seed: int = 7) -> tuple[int, ...]:
    """Tokens per document: most are short, some reach --seq-length, a few exceed it, one is of 1 token, one of 2."""
    numbers = np.random.default_rng(seed)
    lengths = np.minimum(np.exp(numbers.normal(3.3, 1.0, documents)).astype(int) + 3, SEQ_LENGTH + 1)
    lengths[: documents // 16] = numbers.integers(SEQ_LENGTH // 2, SEQ_LENGTH + 1, documents // 16)
    lengths = numbers.permutation(lengths)
    # Apart from each other, and in the part that --split gives to training.
    lengths[5 : documents // 2 : documents // 10][:5] = (1, 2, SEQ_LENGTH + 2, 2 * SEQ_LENGTH + 1, 3 * SEQ_LENGTH - 40)
    return tuple(int(length) for length in lengths)


@functools.cache
def corpus(lengths: tuple[int, ...] | None = None) -> Path:
    """The prefix of a corpus with documents of these lengths, each with its end of document; None: skewed ones."""
    prefix = Path(tempfile.mkdtemp(prefix="corpus-", dir=workspace())) / "documents"
    lengths = lengths or skewed_lengths()
    run_ranks(_write_corpus, 1, prefix, lengths, prepare=import_megatron, init_process_group=False)
    return prefix


def lengths_for(steps: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Lengths of a corpus, all of it for training, whose first steps hold documents of these lengths in this order."""
    wanted = [length for step in steps for length in step]
    order = SampleOrder([len(wanted)], [1.0], SEED).samples(0, len(wanted))
    placed = {document: length for (_, document), length in zip(order, wanted, strict=True)}
    return tuple(placed[document] for document in range(len(wanted)))


def _write_corpus(rank: int, world_size: int, prefix: Path, lengths: Sequence[int]) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    numbers = np.random.default_rng(len(lengths))
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for length in lengths:
        # Each document keeps to a few neighbouring tokens, so that there is something to learn from its start.
        start = numbers.integers(VOCAB - 1)
        tokens = (start + np.abs(numbers.normal(0, 6, length)).astype(int)) % (VOCAB - 1)
        tokens[-1] = VOCAB - 1
        builder.add_document(torch.from_numpy(tokens.astype(np.uint16)), [length])
    builder.finalize(f"{prefix}.idx")


# ------------------------------------------------------------------------------------------------------------ arguments

GROUPED_QUERIES = ("--group-query-attention", "--num-query-groups", "2")
LLAMA = (*GROUPED_QUERIES, "--swiglu", "--disable-bias-linear", "--normalization", "RMSNorm",
         "--position-embedding-type", "rope", "--untie-embeddings-and-output-weights")  # fmt: skip


ON_CPU = shlex.split("""
    --transformer-impl local --attention-backend unfused --distributed-backend gloo --no-gradient-accumulation-fusion
    --no-persist-layer-norm --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
""")


def arguments(
    *more: str,
    tp: int = 1,
    cp: int = 1,
    pp: int = 1,
    iterations: int = 20,
    batch: int | str = 16,
    model: Sequence[str] = LLAMA,
    documents: Path | None = None,
    kernels: Sequence[str] = ON_CPU,
) -> tuple[str, ...]:
    """Megatron's command line for home at these sizes, then ``more``.

    ``batch`` is a global batch size or a schedule of them; None as ``documents`` is the skewed corpus. ``kernels``: what the
    layers are made of, and with what ranks talk.
    """
    documents = documents or corpus()
    batches = ("--global-batch-size" if isinstance(batch, int) else "--step-batch-size-schedule", str(batch))
    sizes = f"""
        --data-path {documents} --data-cache-path {documents}-cache --split 90,10,0 --num-workers 0 --seed {SEED}
        --tokenizer-type NullTokenizer --vocab-size {_VOCAB_SIZE} --make-vocab-size-divisible-by 32
        --num-layers 4 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --kv-channels 8
        --seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH} --hidden-dropout 0 --attention-dropout 0
        --tensor-model-parallel-size {tp} --context-parallel-size {cp} --pipeline-model-parallel-size {pp}
        --micro-batch-size 1 --train-iters {iterations} --calculate-per-token-loss
        --lr 1e-3 --min-lr 1e-4 --lr-decay-iters 40 --lr-decay-style cosine --weight-decay 0.01 --clip-grad 1.0
        --adam-eps 1e-6 --log-interval 1 --eval-interval 1000000 --eval-iters 0 --no-create-attention-mask-in-dataloader
    """
    return (*sizes.split(), *kernels, *batches, *model, *more)


def on_mock_data(line: Sequence[str]) -> tuple[str, ...]:
    """A command line with Megatron's mock data in the place of a corpus."""
    at = line.index("--data-path")
    return (*line[:at], "--mock-data", *line[at + 2 :])


@functools.cache
def common_weights() -> Path:
    """A checkpoint of weights alone, from which runs of any layout can start."""
    folder = workspace() / "weights"
    save = ("--save", str(folder), "--save-interval", "1", "--no-save-optim", "--no-save-rng")
    train(Job(arguments(*save, iterations=1), config=None))
    return folder


def from_common_weights() -> tuple[str, ...]:
    """Start at iteration 0 with the common weights."""
    return ("--load", str(common_weights()), "--finetune", "--no-load-optim", "--no-load-rng")


# ---------------------------------------------------------------------------------------------------------------- runs


@dataclasses.dataclass(frozen=True)
class Job:
    """One training. ``config``: the --hotspa-config file's text, None for a run without the flag; ``hooks``: installed
    or not; ``before``: called on every rank after that, before the script runs (a module-level function)."""

    arguments: tuple[str, ...]
    config: str | None
    _: dataclasses.KW_ONLY
    ranks: int = 4
    hooks: bool = True
    before: Callable[[], None] | None = None


@dataclasses.dataclass(frozen=True)
class Iteration:
    """What the training loop gave to its log after an iteration."""

    number: int
    loss: float
    grad_norm: float
    consumed_samples: int
    loss_scale: float


@dataclasses.dataclass(frozen=True)
class SegmentSeen:
    """A segment of a step; ``micro_batches``: how many each replica ran."""

    strategy: str
    kind: str
    micro_batches: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class StepSeen:
    """A forward-backward pass as the hooks ran it; ``tokens``: input positions of all its sequences, which are given as
    (source, document, start, length)."""

    first_sample: int
    samples: int
    tokens: int
    sequences: tuple[tuple[int, int, int, int], ...]
    segments: tuple[SegmentSeen, ...]


@dataclasses.dataclass
class Run:
    """A finished training. ``loaded`` and ``parameters``: a hash of each parameter's bits by name, for every rank,
    before the first and after the last iteration; ``output``: what rank 0 printed."""

    iterations: list[Iteration] = dataclasses.field(default_factory=list)
    evaluations: list[float] = dataclasses.field(default_factory=list)
    steps: list[StepSeen] = dataclasses.field(default_factory=list)
    loaded: list[dict[str, str]] = dataclasses.field(default_factory=list)
    parameters: list[dict[str, str]] = dataclasses.field(default_factory=list)
    output: str = ""

    @property
    def losses(self) -> list[float]:
        return [each.loss for each in self.iterations]

    @property
    def grad_norms(self) -> list[float]:
        return [each.grad_norm for each in self.iterations]

    @property
    def scales(self) -> list[float]:
        """The loss scale after each iteration."""
        return [each.loss_scale for each in self.iterations]


def flag(config: str | None) -> tuple[str, ...]:
    """The flag with a file of this text; nothing for None.

    On models this small no switch pays: a text that does not say otherwise has every length group run as it is listed.
    """
    if config is None:
        return ()
    if "merge:" not in config:
        config = f"{config.rstrip()}\nmerge: never\n"
    path = workspace() / f"{hashlib.sha256(config.encode()).hexdigest()[:12]}.yaml"
    path.write_text(config)
    return ("--hotspa-config", str(path))


@functools.cache
def train(job: Job, *, grace: float = GRACE_SECONDS, timeout: float = 240) -> Run:
    """Run a job, once per test process; ``grace`` and ``timeout``: as ``run_ranks`` has them."""
    argv = [str(SCRIPT), *job.arguments, *flag(job.config)]
    ranks: list[Run] = run_ranks(
        train_on_this_rank, job.ranks, job, argv, timeout=timeout, prepare=import_megatron, init_process_group=False,
        grace=grace,
    )  # fmt: skip
    # Losses are known on the last pipeline stage, which the last rank is on in every layout.
    result = dataclasses.replace(ranks[-1], output=ranks[0].output)
    result.loaded = [each for rank in ranks for each in rank.loaded]
    result.parameters = [each for rank in ranks for each in rank.parameters]
    return result


def import_megatron() -> None:
    """What a server of ranks has imported: the stand-in, and Megatron on it."""
    from hotspa_megatron.hooks import cpu

    # Its ranks are on CPU, on a machine with GPUs too. Nothing has asked for devices in this process yet.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    cpu.install()
    with cpu.quiet_imports():
        import megatron.training.training  # noqa: F401


def train_on_this_rank(rank: int, world_size: int, job: Job, argv: list[str]) -> Run:
    """Body of one rank: ``argv`` is the script's command line."""
    from hotspa_megatron.hooks import install

    # A number that overflows or turns into NaN in numpy, in any thread: data and plans are whole numbers of 64 bits.
    warnings.filterwarnings("error", ".*encountered in", RuntimeWarning)
    if job.hooks:
        install.install()
    if job.before is not None:
        job.before()
    run, recording = Run(), Patches()
    _record(run, recording)
    # Without a file: processes that a checkpoint spawns would import it again, and without the stand-in.
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv = argv
    exec(compile(SCRIPT.read_text(), str(SCRIPT), "exec"), vars(main))
    recording.undo_all()
    sys.stdout.flush()
    run.output = Path("/proc/self/fd/1").read_text(errors="replace")
    return run


def log_steps(log: Path) -> None:
    """Have rank 0 write the step log of this job to a file; for ``Job.before``."""
    from hotspa_megatron.hooks.session import STEP_LOG_VARIABLE

    os.environ[STEP_LOG_VARIABLE] = str(log)


def _record(run: Run, patches: Patches) -> None:
    """Have this process's training loop note in ``run`` what it does, until ``patches`` are undone."""
    from megatron.training import get_args, training

    from hotspa_megatron.hooks.forward_backward import StepRunner

    log, evaluate, train_, step_ = training.training_log, training.evaluate, training.train, StepRunner.run

    def training_log(losses: dict[str, Any], *rest: Any, **options: Any) -> Any:
        iteration, scale, grad_norm = rest[2], rest[3], rest[6]
        loss = float(losses["lm loss"]) if losses else float("nan")
        norm = float("nan" if grad_norm is None else grad_norm)  # of a skipped step there is none
        run.iterations.append(Iteration(iteration, loss, norm, get_args().consumed_train_samples, float(scale)))
        return log(losses, *rest, **options)

    def evaluate_and_note(*args: Any, **options: Any) -> Any:
        result = evaluate(*args, **options)
        run.evaluations += [float(loss) for loss in (result[0] or {}).values()]
        return result

    def train(forward_step: Any, model: list[Any], *rest: Any, **options: Any) -> Any:
        run.loaded.append(_bits_of(model))
        result = train_(forward_step, model, *rest, **options)
        run.parameters.append(_bits_of(model))
        return result

    def run_step(runner: Any, *, step: Any, **options: Any) -> Any:
        segments = [
            SegmentSeen(str(each.strategy), str(each.kind), tuple(len(batches) for batches in each.micro_batches))
            for each in step.plan.segments
        ]
        sequences = tuple((each.source, each.document, each.start, each.length) for each in step.sequences)
        run.steps.append(
            StepSeen(step.batch.first_sample, step.batch.samples, sum(step.plan.lengths), sequences, tuple(segments))
        )
        return step_(runner, step=step, **options)

    patches.set(training, "training_log", training_log)
    patches.set(training, "evaluate", evaluate_and_note)
    patches.set(training, "train", train)
    patches.set(StepRunner, "run", run_step)


def _bits_of(model: Sequence[Any]) -> dict[str, str]:
    return {
        f"{index}.{name}": hashlib.sha256(parameter.detach().contiguous().view(torch.uint8).numpy()).hexdigest()
        for index, chunk in enumerate(model)
        for name, parameter in chunk.named_parameters()
    }


# ------------------------------------------------------------------------------------------------- as users start them


def run_module(*command: str, folder: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
    """``python -m`` in a process of its own, with ``folder`` as its working directory."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    environment = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, env={**os.environ, **environment},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def ranks_here(ranks: int) -> tuple[str, ...]:
    """What follows python -m to start ranks on this machine, whose name need not resolve."""
    return ("torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks))


def under_torchrun(
    logs: Path, script: Path, *argv: str, ranks: int = 2, folder: Path = REPOSITORY, launcher: bool = True
) -> tuple[int, list[str], list[str]]:
    """Run a script, through the launcher or alone: torchrun's exit code, and every rank's standard output and error."""
    redirected = ("--redirects", "3", "--log-dir", str(logs))
    launched = (*(("-m", "hotspa_megatron.launch") if launcher else ()), str(script), *argv)
    ended = run_module(*ranks_here(ranks), *redirected, *launched, folder=folder)
    output, errors = (
        [path.read_text(errors="replace") for path in sorted(logs.rglob(f"*/{name}"))]
        for name in ("stdout.log", "stderr.log")
    )
    assert len(output) == len(errors) == ranks, ended.stderr
    return ended.returncode, output, errors


def torchrun(
    line: Sequence[str], config: str, *, ranks: int = 4, launcher: str = "hotspa_megatron.launch"
) -> tuple[str, ...]:
    """The command by which a user trains with these arguments and a file of this text."""
    return (sys.executable, "-m", *ranks_here(ranks), "-m", launcher, str(SCRIPT), *line, *flag(config))


def verified(logs: Path, *command: str, limit: int = 230) -> tuple[int, dict[str, Any], str]:
    """``hotspa verify`` of a command: exit code, what --json printed, and standard error."""
    options = ("--json", "--limit", str(limit), "--logs", str(logs))
    done = run_module("hotspa_megatron.cli.main", "verify", *options, "--", *command)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def printed_losses(output: str) -> list[float]:
    """The losses in the log lines of the last rank, to the digits that Megatron prints."""
    return [float(loss) for loss in re.findall(r"lm loss: (\S+)", output)]


# --------------------------------------------------------------------------------------- what several test modules train

STATIC = "strategies: []"
SHARDED = "--use-distributed-optimizer"
SP = "--sequence-parallel"


class Home(NamedTuple):
    """Home's sizes and what else its command line says."""

    tp: int
    cp: int
    pp: int
    flags: tuple[str, ...]

    def run(
        self,
        config: str | None,
        *more: str,
        iterations: int = 20,
        batch: int | str = 16,
        steps: Sequence[Sequence[int]] | None = None,
        **options: Any,
    ) -> Run:
        """A run from the common weights; ``steps``: the lengths of each step's documents, else the skewed corpus."""
        everything = ("--split", "100,0,0") if steps else ()
        documents = corpus(lengths_for(steps)) if steps else None
        line = arguments(
            *self.flags, *from_common_weights(), *everything, *more, tp=self.tp, cp=self.cp, pp=self.pp,
            iterations=len(steps) if steps else iterations, batch=len(steps[0]) if steps else batch, documents=documents,
        )  # fmt: skip
        return train(Job(line, config, **options))


TP2_CP2 = Home(2, 2, 1, (SP, SHARDED))
TP2_PP2 = Home(2, 1, 2, ())
DP4 = Home(1, 1, 1, (SHARDED,))

GUEST_AND_SIBLING = """
strategies:
  - {max_length: 32, tp: 1, tokens_per_microbatch: 96}
  - {max_length: 128, tp: 2, tokens_per_microbatch: 192}
"""
TWO_GUESTS = """
strategies:
  - {max_length: 32, tp: 1, tokens_per_microbatch: 96}
  - {max_length: 128, tp: 4}
"""
PIPELINED_GUEST = """
strategies:
  - {max_length: 64, tp: 2, pp: 2, tokens_per_microbatch: 128}
"""


def difference(values: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference; runs of different lengths are compared as far as both go."""
    pairs = list(zip(values, reference, strict=False))
    assert pairs and [math.isnan(value) for value, _ in pairs] == [math.isnan(other) for _, other in pairs]
    return max(abs(value - other) / max(abs(other), 1e-6) for value, other in pairs if not math.isnan(other))
