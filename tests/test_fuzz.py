"""Whatever stands in a file or on a command line, the answer is a valid plan or one clear line: no traceback, no hang.

Each property runs on a few examples by default, the same ones every time, and marked long on thousands of new ones.
``ValueError`` itself (and its subclass ``ConfigError``) is what says so: one of Python's own kinds, as UnicodeDecodeError,
means that nobody thought of the case.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import json
import math
import re
import shlex
import struct
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotspa_megatron.cli import described_run, report
from hotspa_megatron.cli.main import main
from hotspa_megatron.cli.megatron_args import MegatronCommandLine, read_command_line
from hotspa_megatron.cli.run_script import arguments_of_script
from hotspa_megatron.config import ConfigError, load_config, resolve
from hotspa_megatron.hooks.conversations import ConversationFile, bytes_of, conversations_of
from hotspa_megatron.planning.data_check import check_data
from hotspa_megatron.planning.hardware import load_hardware
from hotspa_megatron.planning.lengths import LengthHistogram, read_index
from hotspa_megatron.planning.step_plan import StepPlanner
from hotspa_megatron.run_folder import folder_inside, read_steps
from hotspa_megatron.strategy import Kind
from tests.test_lengths import write_index
from tests.test_report import logged

_Case = TypeVar("_Case")
_Answer = TypeVar("_Answer")

ROOT: Final = Path(__file__).parents[1]
FEW: Final = 40


def amounts(many: int, few: int = FEW) -> pytest.MarkDecorator:
    """Runs a test with ``few`` examples, and with ``many`` where the long tests run."""
    long = pytest.param(many, id=f"{many:,} examples", marks=[pytest.mark.long, pytest.mark.timeout(7200)])
    return pytest.mark.parametrize("examples", [pytest.param(few, id="few examples"), long])


def fuzz(examples: int, cases: st.SearchStrategy[_Case], check: Callable[[_Case], object]) -> None:
    """Hold ``check`` against so many cases; few are always the same, so that the default suite is."""

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=examples < 1000,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases)
    def property_(case: _Case) -> None:
        check(case)

    property_()


def answer(call: Callable[[], _Answer]) -> _Answer | None:
    """What a reader gives, or None where it refuses in one clear line; anything else fails."""
    try:
        return call()
    except ValueError as error:
        assert type(error) in (ValueError, ConfigError), f"{type(error).__name__}: {error}"
        is_one_line(str(error))
        return None


def both_happened(seen: dict[str, int], examples: int) -> None:
    """A generator that only ever makes rubbish, or only what fits, would prove little."""
    assert min(seen.values()) >= max(1, examples // 100), seen


def is_one_line(said: str) -> None:
    assert 10 < len(said) < 1500 and said.isprintable(), said


# ---------------------------------------------------------------------------------------------------------------- texts

NASTY: Final = (
    *("", " ", "\t", "\n", "\0", "\r", "\x85", "\u2028", "\ufeff", "\ud800", "\U0001f389", "é", "\x1b[31m"),
    *("0", "-1", "1.5", "1e9", "0x10", "010", "4_0", "٣", "true", "yes", "null", "~", "nan", "inf"),
    *("9" * 9, "2147483647", "2147483648", "9" * 12, "9" * 400, "9" * 5000, "1" + "0" * 30),
    *("&a", "*a", "<<: *a", "!!python/object/apply:os.system ['true']", "!<tag:x>", "!%FF", "--- ", "...", "? ", "| "),
    *("[" * 40, "{" * 40, "- " * 40, "]", "}", ": ", "- ", "'", '"', "#", "\\", "%YAML " + "9" * 5000 + ".1\n---\n"),
    *('"\\UFFFFFFFF"', '"\\U7FFFFFFF"', '"\\ud800"', '"\\x', "a" * 300, "/" * 300, "../../etc", "/etc/passwd", "~root"),
    *("wikipedia", "lognormal:mean=9,sigma=999,max=999999999999", "lognormal:mean=0,sigma=0,max=0", "/", ".", ".."),
)
_nasty: Final = st.one_of(st.sampled_from(NASTY), st.text(max_size=12))


@st.composite
def mutated(draw: st.DrawFn, texts: st.SearchStrategy[str], most: int = 4) -> str:
    """A text with up to ``most`` places cut out, doubled, or replaced by something nasty."""
    text = draw(texts)
    for _ in range(draw(st.integers(0, most))):
        start = draw(st.integers(0, len(text)))
        stop = draw(st.integers(start, min(len(text), start + 12)))
        kind = draw(st.sampled_from(("cut", "double", "put")))
        middle = {"cut": "", "double": text[start:stop] * 2, "put": draw(_nasty)}[kind]
        text = text[:start] + middle + text[stop:]
    return text


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return path


# ------------------------------------------------------------------------------------------------- configuration files

_size: Final = st.sampled_from((1, 1, 1, 2, 2, 2, 4, 3, 8, 4096, 2**31 - 1))


@st.composite
def configurations(draw: st.DrawFn) -> str:
    """A configuration, most often one that can be read, of every key that there is."""
    lines = ["strategies:"]
    longest = 0
    for _ in range(draw(st.integers(0, 4))):
        longest += draw(st.sampled_from((1, 64, 500, 512)))
        entry = {"max_length": longest}
        for key in ("tp", "cp", "pp", "vpp", "recompute_layers"):
            if draw(st.integers(0, 5)) == 0:
                entry[key] = draw(_size)
        if draw(st.booleans()):
            entry["tokens_per_microbatch"] = draw(st.sampled_from((2 * longest, 4096, 8192, longest, 1)))
        words = [f"{key}: {value}" for key, value in entry.items()]
        if draw(st.booleans()) or "recompute_layers" in entry:
            words.append(f"recompute: {draw(st.sampled_from(('full', 'full', 'none', 'selective')))}")
        lines.append(f"  - {{{', '.join(words)}}}")
    if len(lines) == 1:
        lines = ["strategies: []"]
    choices = {
        "home": (
            *(
                "{tokens_per_microbatch: 8192}",
                "{}",
                "{tokens_per_microbatch: 1}",
                "[]",
                "{vpp: 2}",
                "{vpp: 1, recompute: none}",
            ),
            "{tp: 2, recompute: full, recompute_layers: 1}",
        ),
        "samples": ("documents", "megatron"),
        "overlong": ("split", "truncate", "drop", "error"),
        "merge": ("auto", "never"),
        "mock_lengths": ("wikipedia", "lognormal:mean=900,sigma=1.5,max=4096", *NASTY[-20:]),
        "switch": (
            "{chunk_mb: 16, prefetch: always}",
            "{max_group_mb: 1}",
            "{max_group_mb: null}",
            "{fold_dtype: bf16}",
        ),
        "check_plans": ("true", "false"),
        "get_batch": ("null", "a.b:c", "os:system", "a b"),
        "trace": ("null", "trace", "a/b", "../x", "/tmp/x", "~", "a/../../b"),
        "allow_untested": ("[]", "[fp8]", "[fp8, megatron]"),
        "verify_every": ("10", "0", "null", "-1", "1.5"),
        "watchdog_s": ("10", "0", "null", "-1", "1.5"),
    }
    for key, values in choices.items():
        if draw(st.integers(0, 15)) == 0:
            lines.append(f"{key}: {draw(st.sampled_from(values))}")
    return "\n".join(draw(st.permutations(lines)) if len(lines[0]) > 11 else lines) + "\n"


SMALL: Final = shlex.split(
    "--num-layers 8 --hidden-size 256 --ffn-hidden-size 1024 --num-attention-heads 8 --seq-length 2048 "
    "--max-position-embeddings 2048 --padded-vocab-size 1024 --swiglu --normalization RMSNorm --disable-bias-linear "
    "--group-query-attention --num-query-groups 4 --position-embedding-type rope --bf16 --global-batch-size 16"
)
HOMES: Final = tuple(
    read_command_line([*SMALL, *shlex.split(flags)], world_size=world)
    for world, flags in (
        (1, ""),
        (8, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"),
        (16, "--tensor-model-parallel-size 4 --context-parallel-size 2 --use-distributed-optimizer"),
        (
            24,
            "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --tensor-model-parallel-size 2",
        ),
    )
)


@amounts(10_000, few=100)
def test_a_configuration_gives_a_valid_plan_or_one_line(tmp_path: Path, examples: int) -> None:
    """Into each of four models and worlds; a plan trains every sequence exactly once."""
    seen = {"refused": 0, "does not fit": 0, "plan": 0}
    lengths = np.random.default_rng(5).integers(1, 2049, 24).tolist()

    def check(case: tuple[str, MegatronCommandLine]) -> None:
        text, line = case
        config = answer(lambda: load_config(write(tmp_path / "hotspa.yaml", text)))
        if config is None:
            seen["refused"] += 1
            return
        if config.trace is not None:
            assert folder_inside(tmp_path, config.trace).resolve().is_relative_to(tmp_path.resolve())
        resolved = answer(lambda: resolve(config, shape=line.shape, home=line.home))
        if resolved is None:
            seen["does not fit"] += 1
            return
        seen["plan"] += 1
        every = (*resolved.strategies, resolved.home)
        limits = [each.max_length for each in every]
        assert (
            limits == sorted(limits) and limits[-1] == line.shape.seq_length and len({*limits[:-1]}) == len(every) - 1
        )
        for each in every:
            assert each.strategy.world_size == line.home.world_size
            assert sorted(layer for stage in each.layers for layer in stage) == list(range(line.shape.num_layers))
            assert (each.kind is Kind.GUEST) != each.strategy.same_layout(line.home)
            assert each.tokens_per_microbatch >= each.alignment.alone(each.max_length)
        step = StepPlanner.from_resolved(resolved).plan(lengths)
        trained = [i for s in step.segments for batches in s.micro_batches for batch in batches for i in batch]
        assert sorted(trained) == list(range(len(lengths)))

    texts = st.one_of(configurations(), mutated(configurations(), most=2))
    fuzz(examples, st.tuples(texts, st.sampled_from(HOMES)), check)
    both_happened(seen, examples)


# ------------------------------------------------------------------------------------------------------- command lines

FLAGS: Final = (
    *("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size", "--num-layers"),
    *("--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--num-query-groups", "--kv-channels"),
    *("--seq-length", "--max-position-embeddings", "--vocab-size", "--padded-vocab-size", "--global-batch-size"),
    *("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers", "--make-vocab-size-divisible-by"),
    *("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank", "--recompute-num-layers"),
    *("--recompute-granularity", "--recompute-method", "--normalization", "--position-embedding-type", "--optimizer"),
    *("--sequence-parallel", "--bf16", "--fp16", "--swiglu", "--untie-embeddings-and-output-weights", "--num-experts"),
    *("--group-query-attention", "--use-distributed-optimizer", "--add-qkv-bias", "--qk-layernorm", "--spec", "--lr"),
    *("--hotspa-config", "--world-size", "--help", "-h", "--num-lay", "--no-such-flag", "--seq_length", "--", "-"),
)
_value: Final = st.one_of(
    st.sampled_from(("1", "2", "4", "6", "8", "64", "128", "4096", "full", "selective", "block", "uniform", "RMSNorm")),
    st.sampled_from(NASTY),
    st.text(max_size=6),
)


@st.composite
def argument_lists(draw: st.DrawFn) -> list[str]:
    """Megatron's arguments: a small model's, with some cut out, doubled, moved, added, or of another value."""
    found = list(SMALL)
    for _ in range(draw(st.integers(0, 5))):
        at = draw(st.integers(0, len(found)))
        kind = draw(st.sampled_from(("cut", "put", "flag", "joined", "value", "double")))
        if kind == "cut":
            del found[at : at + draw(st.integers(1, 2))]
        elif kind == "put":
            found.insert(at, draw(_value))
        elif kind == "flag":
            found[at:at] = [draw(st.sampled_from(FLAGS)), draw(_value)]
        elif kind == "joined":
            found.insert(at, f"{draw(st.sampled_from(FLAGS))}={draw(_value)}")
        elif kind == "value":
            found[at : at + 1] = [draw(_value)]
        else:
            found += found[at : at + 2]
    return found


def said_by(command: Sequence[str]) -> str | None:
    """What ``hotspa`` prints, or None where it ends with exit code 2 and one line on stderr, having printed nothing."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(command)
        except SystemExit as left:  # argparse's way
            code = int(left.code or 0)
    if code == 0:
        return out.getvalue()
    said = err.getvalue()
    assert code == 2 and not out.getvalue() and said.startswith("hotspa") and said.endswith("\n"), (code, said)
    is_one_line(said[:-1])
    return None


_worlds: Final = st.sampled_from(("1", "2", "8", "12", "64", "0", "-1", "9" * 9, "9" * 400, "eight", "", " 8"))


@amounts(10_000)
def test_an_argument_list_is_explained_or_refused_in_one_line(tmp_path: Path, examples: int) -> None:
    path = write(tmp_path / "hotspa.yaml", "strategies:\n  - max_length: 512\n  - {max_length: 1024, tp: 2}\n")
    seen = {"refused": 0, "explained": 0}

    def check(case: tuple[str, list[str]]) -> None:
        world, arguments = case
        said = said_by(["explain", str(path), "--json", "--world-size", world, "--", *arguments])
        seen["refused" if said is None else "explained"] += 1
        if said is not None:
            explained = json.loads(said)
            assert explained["world_size"] == int(world)
            assert all(stage["parameters"] > 0 for stage in explained["home"]["memory"])

    fuzz(examples, st.tuples(_worlds | st.just("8"), argument_lists()), check)
    both_happened(seen, examples)


class _Read(Exception):
    """The command has read all that it was given, and would begin to search."""


@amounts(2_500)
@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_plan_and_simulate_read_it_or_refuse_it_in_one_line(tmp_path: Path, examples: int, command: str) -> None:
    lengths = write(tmp_path / "lengths.txt", "100\n2000\n300\n")
    seen = {"refused": 0, "read": 0}
    words = st.sampled_from(("2", "0", "x", *NASTY))
    rubbish = st.fixed_dictionaries(
        {"--world-size": _worlds},
        optional={
            "--hardware": st.sampled_from(("h100", "h1000", "cpu-gloo", "/nowhere.yaml", "a.yaml", *NASTY)),
            "--lengths": st.just(str(lengths)) | words,
            **dict.fromkeys(("--sequences", "--seed", "--steps", "--max-tp", "--max-cp", "--corpus"), words),
        },
    )
    options = st.just({"--world-size": "8"}) | rubbish

    def check(case: tuple[dict[str, str], list[str]]) -> None:
        chosen, arguments = case
        given_ = {"--hardware": "cpu-gloo", "--lengths": str(lengths), **chosen}
        out = tmp_path / "plan.yaml"
        own = [word for option in given_.items() for word in option] + (["-o", str(out)] if command == "plan" else [])
        with mock.patch.object(described_run, "plan_strategies", side_effect=_Read):
            try:
                assert said_by([command, *own, "--", *arguments]) is None
                seen["refused"] += 1
            except _Read:
                seen["read"] += 1
        assert not out.exists()

    fuzz(examples, st.tuples(options, st.just(SMALL) | argument_lists()), check)
    both_happened(seen, examples)


@amounts(100, few=3)
def test_what_is_read_is_planned_or_refused_in_one_line(tmp_path: Path, examples: int) -> None:
    """The search itself, on small worlds: what it writes is a file that the configuration's reader takes."""
    lengths = write(tmp_path / "lengths.txt", "100\n2000\n300\n")
    out = tmp_path / "plan.yaml"
    seen = {"refused": 0, "planned": 0}

    def check(case: tuple[str, list[str]]) -> None:
        world, arguments = case
        own = ["--hardware", "cpu-gloo", "--lengths", str(lengths), "--world-size", world, "-o", str(out), "--force"]
        said = said_by(["plan", *own, "--json", "--", *arguments])
        seen["refused" if said is None else "planned"] += 1
        if said is not None:
            assert answer(lambda: load_config(out)) is not None and json.loads(said)["gain"] >= 1

    fuzz(examples, st.tuples(st.sampled_from(("1", "2", "8")), argument_lists()), check)
    assert seen["planned"], seen


SCRIPT: Final = """\
#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
TP=${TP:-2}
if [ "$TP" = "2" ]; then PP=1; else
  PP=2
fi
MODEL=(--num-layers 8 --hidden-size "256" \\
  --num-attention-heads 8)
MODEL+=(--seq-length 2048)
[[ $PP == 1 ]] && MORE="--bf16"
torchrun --nproc-per-node 8 pretrain_gpt.py ${MODEL[@]} $MORE --tensor-model-parallel-size $TP | tee log
"""


@amounts(1_000)
def test_a_job_script_is_read_or_refused_in_one_line(tmp_path: Path, examples: int) -> None:
    path = tmp_path / "run.sh"
    pieces = st.sampled_from(("${", "}", "$(", "`", "((", ")", "if", "fi", "[[ ", "&&", "for x in", "\\\n", "#", "$X"))

    def check(text: str) -> None:
        found = answer(lambda: arguments_of_script(write(path, text)))
        assert found is None or all(isinstance(each, str) for each in found)

    texts = mutated(st.just(SCRIPT), most=6)
    fuzz(examples, st.one_of(texts, st.builds(lambda text, piece: text.replace(" ", piece, 1), texts, pieces)), check)


# --------------------------------------------------------------------------------------------------------------- data


@st.composite
def mutated_bytes(draw: st.DrawFn, whole: bytes) -> bytes:
    """A file with up to four places cut out, doubled or overwritten, numbers at the limits of their types among it."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        size = draw(st.sampled_from((1, 4, 8)))
        kind = draw(st.sampled_from(("cut", "double", "end", "byte", "number", "put")))
        if kind == "cut":
            del data[at : at + size]
        elif kind == "double":
            data[at:at] = data[at : at + size]
        elif kind == "end":
            del data[at:]
        elif kind == "byte":
            data[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
        elif kind == "number":
            number = draw(st.sampled_from((0, 1, -1, 2**31 - 1, -(2**31), 2**62, 2**63 - 1, -(2**63))))
            packed = struct.pack("<q", number)[:4] if size == 4 else struct.pack("<q", number)
            data[at : at + len(packed)] = packed
        else:
            data[at:at] = draw(st.binary(max_size=16))
    return bytes(data)


@amounts(1_000, few=100)
def test_an_index_is_whole_or_refused_in_one_line(tmp_path: Path, examples: int) -> None:
    """What passes the check can be read: every sequence lies within the data file."""
    prefix = write_index(tmp_path / "corpus", [5, 9, 2, 700, 0, 1])
    index, data = (prefix.with_suffix(suffix) for suffix in (".idx", ".bin"))
    whole, text = index.read_bytes(), data.read_bytes()
    seen = {"refused": 0, "whole": 0}

    def check(case: tuple[bytes, bytes]) -> None:
        for path, changed in zip((index, data), case, strict=True):
            path.write_bytes(changed)
        found = answer(lambda: read_index(prefix))
        summary = None if found is None else answer(lambda: check_data(found))
        seen["refused" if summary is None else "whole"] += 1
        if found is not None and summary is not None:
            ends = found.pointers.astype(object) + found.lengths.astype(object) * found.token_dtype.itemsize
            assert all(0 <= end <= len(case[1]) for end in ends) and summary.num_bytes == len(case[1])
            histogram = answer(lambda: LengthHistogram.from_index(prefix))
            assert histogram is None or histogram.sequences + summary.without_target == summary.sequences

    cases = st.one_of(
        st.tuples(mutated_bytes(whole), st.just(text)),
        st.tuples(st.just(whole), mutated_bytes(text)),
        st.tuples(mutated_bytes(whole), mutated_bytes(text)),
    )
    fuzz(examples, cases, check)
    both_happened(seen, examples)


@amounts(1_000)
def test_a_list_of_lengths_is_counted_or_refused_in_one_line(tmp_path: Path, examples: int) -> None:
    path = tmp_path / "lengths.txt"

    def check(data: bytes) -> None:
        path.write_bytes(data)
        found = answer(lambda: LengthHistogram.from_text(path))
        assert found is None or (found.tokens >= found.sequences >= 1 and found.lengths[0] >= 1)

    numbers = st.sampled_from((b"1", b"0", b"-1", b"9" * 18, b"9" * 19, b"9" * 5000, b"1 2", b"", b"\xff", b"1.0"))
    lines = st.lists(numbers, max_size=30).map(b"\n".join)
    fuzz(examples, st.one_of(mutated_bytes(b"100\n2000\n\n31\n"), lines), check)


LINE: Final = {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hé?"}]}


@amounts(1_000, few=100)
def test_lines_of_conversations_are_read_or_refused_in_one_line(tmp_path: Path, examples: int) -> None:
    path = tmp_path / "lines.jsonl"
    whole = "\n".join([json.dumps(LINE), "", json.dumps(LINE, ensure_ascii=False)]).encode()
    seen = {"refused": 0, "read": 0}

    def check(data: bytes) -> None:
        path.write_bytes(data)
        file = answer(lambda: ConversationFile(path))
        for sample in range(0 if file is None else len(file)):
            assert file is not None
            messages = answer(functools.partial(file.__getitem__, sample))
            seen["refused" if messages is None else "read"] += 1
            for conversation in [] if messages is None else conversations_of(messages):
                pair = answer(functools.partial(bytes_of, conversation, end=260, count_prompts=False))
                assert pair is None or len(pair[0]) == len(pair[1]) >= 2 * len(conversation)

    json_values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    )
    message = st.fixed_dictionaries(
        {"role": st.sampled_from(("user", "tool", "?", "")) | json_values, "content": json_values}
    )
    lines = st.lists(message | json_values, max_size=3).map(lambda each: json.dumps({"messages": each}).encode())
    cruel = st.sampled_from(
        (b"[" * 100_000, b'{"a":' * 100_000, b"9" * 10_000, b"\xff", b"1e999", b'"\\ud800"', b"NaN")
    )
    surrogate = st.just(b'{"messages": [{"role": "user", "content": "\\ud800"}]}')
    fuzz(examples, st.one_of(mutated_bytes(whole), lines, cruel, surrogate), check)
    both_happened(seen, examples)


NUMBERS: Final = (
    *(
        "1e999",
        "-1e999",
        "NaN",
        "1e308",
        "1e-320",
        "-1",
        "0",
        "0.9999999999999999",
        "9" * 18,
        "9" * 19,
        "9" * 400,
        "9" * 5000,
    ),
    *("true", "null", "[]", "{}", '"7"', '"x"', "[" * 5000),
)


@st.composite
def with_other_numbers(draw: st.DrawFn, text: str) -> str:
    """A text with up to three of its numbers replaced by others, or by what is none."""
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(list(re.finditer(r"(?<![\w.])[\d.]+(?![\w.])", text))))
        text = text[: place.start()] + draw(st.sampled_from(NUMBERS)) + text[place.end() :]
    return text


@amounts(1_000)
def test_a_log_of_steps_is_a_page_or_refused_in_one_line(tmp_path: Path, examples: int) -> None:
    figures = pytest.importorskip("matplotlib.figure", reason="needs matplotlib")
    path = tmp_path / "steps.jsonl"
    whole = "".join(json.dumps(logged(iteration)) + "\n" for iteration in (1, 2, 3))
    seen = {"refused": 0, "read": 0}

    def check(data: bytes) -> None:
        path.write_bytes(data)
        steps = answer(lambda: read_steps(path))
        seen["refused" if steps is None else "read"] += 1
        if steps is not None:
            assert report.build_page(steps, name="run").endswith("</html>\n")

    def write_nothing(figure: object, file: io.StringIO, **_: object) -> None:
        file.write("<svg></svg>")

    texts = st.one_of(with_other_numbers(whole), mutated(st.just(whole))).map(
        lambda text: text.encode("utf-8", "replace")
    )
    # Putting the lines of its charts to paper takes a second, so of few examples they are only drawn.
    quick = mock.patch.object(figures.Figure, "savefig", write_nothing) if examples < 1000 else contextlib.nullcontext()
    with quick:
        fuzz(examples, st.one_of(texts, mutated_bytes(whole.encode())), check)
    both_happened(seen, examples)


@amounts(1_000)
def test_a_profile_is_read_or_refused_in_one_line(tmp_path: Path, examples: int) -> None:
    """What is read gives finite times: nothing that is divided by is zero."""
    path = tmp_path / "node.yaml"
    folder = ROOT / "hotspa_megatron" / "planning" / "hardware"
    texts = [each.read_text() for each in sorted(folder.glob("*.yaml"))]
    seen = {"refused": 0, "read": 0}

    def check(text: str) -> None:
        hardware = answer(lambda: load_hardware(write(path, text)))
        seen["refused" if hardware is None else "read"] += 1
        if hardware is None:
            return
        rates = [hardware.gemm_flops(size) for size in (1, 1024, 10**6)]
        rates += [hardware.attention_flops(head) for head in (64, 80)]
        rates += [hardware.copy_gigabytes_per_s, hardware.intra_gigabytes_per_s, hardware.card_gigabytes_per_s]
        assert all(0 < rate < math.inf for rate in rates)
        assert all(0 <= hardware.layer_overhead_s(tp) < math.inf for tp in (1, 3, 64))
        assert hardware.usable_bytes > 0 and hardware.topology(24).world_size == 24

    fuzz(examples, mutated(st.sampled_from(texts), most=2), check)
    both_happened(seen, examples)


# -------------------------------------------------------------------------------------------------------------- limits


@contextlib.contextmanager
def little_memory(most: int) -> Iterator[None]:
    """Fails where Python's allocators come to hold more than so many bytes."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < most, f"{peak:,} bytes"


def test_a_file_far_too_large_is_refused_after_its_first_bytes(tmp_path: Path) -> None:
    """A sparse file of 1 GB, one line without end: neither read whole nor held in memory."""
    huge = tmp_path / "huge.yaml"
    with huge.open("wb") as file:
        file.truncate(1_000_000_000)
    refusals: list[tuple[Callable[[], object], int, str]] = [
        (lambda: load_config(huge), 8, "is larger than 1048576 bytes"),
        (lambda: load_hardware(huge), 8, "is larger than 1048576 bytes"),
        (lambda: LengthHistogram.from_text(huge), 8, "huge.yaml:1: .* is not a length"),
        (lambda: arguments_of_script(huge), 8, "is larger than 1048576 bytes"),
        (lambda: read_steps(huge), 8, "huge.yaml:1: the line has more than 1048576 bytes"),
        (lambda: ConversationFile(huge), 200, "huge.yaml:1: the line has more than 67108864 bytes"),
    ]
    for read, megabytes, message in refusals:
        with little_memory(megabytes * 1_000_000), pytest.raises(ValueError, match=message) as caught:
            read()
        is_one_line(str(caught.value))
    with pytest.raises(AssertionError, match="bytes"), little_memory(8_000_000), huge.open("rb") as file:
        file.read(16_000_000)  # what the limit would say of a reader without one


BOMB: Final = "a: &a [x, x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [*{chr(97 + n)}, *{chr(97 + n)}]\n" for n in range(24)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("strategies: " + "[" * 10_000, "nested more than 16 deep"),
        ("strategies: " + "{a: " * 10_000, "nested more than 16 deep"),
        ("- " * 10_000, "nested more than 16 deep"),
        ("\n".join("  " * depth + "a:" for depth in range(1_000)), "nested more than 16 deep"),
        (BOMB, "anchors and aliases are not read"),
        ("strategies: !!python/object/apply:os.system ['true']", "the tag .* is not read"),
        ("strategies: []\nswitch: {chunk_mb: " + "9" * 100_000 + "}", "is too large; write at most 2147483647"),
        ("strategies: []\n" + "9" * 900 + ": 1", "unknown key '9{60}"),
        ("strategies: []\n? " + "a" * 900 + "\n: b", "unknown key 'a{60}"),
        ("strategies: [{" + "tp" * 400 + ": 1}]", "unknown key 'tptp"),
        ("strategies: !<" + "t" * 5000 + "> 1", "the tag 't{60}.* is not read"),
        ("strategies: !" + "h" * 5000 + "!x 1", "not valid YAML"),
        ('strategies: "\\UFFFFFFFF"', "not valid YAML"),
        ("%YAML " + "9" * 5000 + ".1\n--- {strategies: []}", "not valid YAML"),
    ],
    ids=[
        "lists",
        "maps",
        "dashes",
        "indents",
        "aliases",
        "tag",
        "integer",
        "key",
        "explicit key",
        "inner key",
        "long tag",
        "handle",
        "character",
        "version",
    ],
)
def test_what_is_built_to_break_a_yaml_reader_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "hotspa.yaml", text)
    with little_memory(32_000_000), pytest.raises(ConfigError, match=message) as caught:
        load_config(path)
    is_one_line(str(caught.value))
    assert answer(lambda: load_hardware(path)) is None  # the same reader


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        (["--world-size", "999999999"], [], "999999999 ranks are more .* at most 262144"),
        (["--world-size", "8"], ["--num-layers", "999999999999"], "--num-layers: 999999999999 .* at most 10000"),
        (["--world-size", "8"], ["--num-query-groups", "999999999999"], "no strategy holds"),
        (["--world-size", "8", "--sequences", "999999999"], [], "--sequences: .999999999. .* at most 1048576"),
        (
            ["--world-size", "8"],
            ["--global-batch-size", "999999999"],
            "--global-batch-size: .999999999. .* at most 1048576",
        ),
    ],
)
def test_sizes_that_no_run_has_are_refused_before_anything_is_counted(
    tmp_path: Path, options: list[str], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.yaml"
    own = ["--hardware", "h100", "--lengths", "wikipedia", "-o", str(out), *options]
    assert main(["plan", *own, "--", *SMALL, *arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and re.search(message, said), said
    assert not out.exists()


# ----------------------------------------------------------------------------------------------------------- no pickle

FORBIDDEN_MODULES: Final = ("pickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "torch.package")
FORBIDDEN_NAMES: Final = frozenset({
    *("torch.load", "torch.jit.load", "torch.hub.load", "torch.export.load", "torch.distributed.checkpoint.load"),
    *("numpy.load", "numpy.lib.format.read_array", "pandas.read_pickle"),
    *(f"yaml.{name}" for name in ("load", "load_all", "unsafe_load", "unsafe_load_all", "full_load", "full_load_all")),
    *(f"yaml.{name}" for name in ("Loader", "UnsafeLoader", "FullLoader", "CLoader", "CUnsafeLoader", "CFullLoader")),
    *(f"megatron.core.dist_checkpointing.{name}" for name in ("load", "load_common_state_dict", "load_tensors_metadata")),
    *("eval", "exec", "os.system", "os.popen"),
})  # fmt: skip
ALLOWED: Final = {
    ("hotspa_megatron/launch.py", "exec"),
    ("hotspa_megatron/hooks/endings.py", "pickle"),
    ("hotspa_megatron/hooks/checkpoint.py", "megatron.core.dist_checkpointing.load_common_state_dict"),
}
"""The launcher runs the user's own script, as python would. An unreadable checkpoint is told by pickle's own exception. What a
checkpoint says of itself is read as Megatron reads it a moment later, out of the folder that --load names for both."""


def unsafe(source: str) -> list[str]:
    """Modules and functions that run what a file holds, as a source names them, under whatever name it imports them."""
    tree = ast.parse(source)
    found: list[str] = []
    known: dict[str, str] = {}
    """What a name of the source stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [each.name for each in node.names]
            known |= {each.asname or each.name.split(".")[0]: each.name if each.asname else each.name.split(".")[0]
                      for each in node.names}  # fmt: skip
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
            modules = [node.module, *names.values()]
            known |= names
            found += [name for name in names.values() if name in FORBIDDEN_NAMES]
        else:
            continue
        found += [
            each for each in modules if any(each == bad or each.startswith(f"{bad}.") for bad in FORBIDDEN_MODULES)
        ]

    def name_of(node: ast.expr) -> str:
        first, _, rest = ast.unparse(node).partition(".")
        return f"{known.get(first, first)}.{rest}" if rest else known.get(first, first)

    safe: set[ast.expr] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = name_of(node.func)
            options = {each.arg: ast.unparse(each.value) for each in node.keywords}
            if name == "numpy.load" and options.get("allow_pickle") == "False":
                safe.add(node.func)
            if "shell" in options and name.startswith("subprocess"):
                found.append(f"{name}(shell=True)")
        # Not calls alone: a function may be handed on.
        if isinstance(node, (ast.Attribute, ast.Name)) and node not in safe and name_of(node) in FORBIDDEN_NAMES:
            found.append(name_of(node))
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load(path)",
        "from torch import load",
        "from torch import load as read\nread(path)",
        "import torch as t\nt.load(path)",
        "import torch.distributed.checkpoint as dcp\ndcp.load(state)",
        "from torch.distributed import checkpoint\ncheckpoint.load(state)",
        "import functools, torch\nread = functools.partial(torch.load, weights_only=True)",
        "from megatron.core.dist_checkpointing import load_common_state_dict",
        "from megatron.core import dist_checkpointing\ndist_checkpointing.load_common_state_dict(folder)",
        "import numpy as np\nnp.load(path)",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "from numpy import load",
        "import yaml\nyaml.load(text, Loader)",
        "from yaml import load",
        "from yaml import Loader",
        "import yaml\nclass Mine(yaml.UnsafeLoader): pass",
        "eval(text)",
        "map(eval, texts)",
        "import subprocess\nsubprocess.run(text, shell=True)",
        "from subprocess import run\nrun(text, shell=True)",
    ],
)
def test_the_search_below_finds_what_it_looks_for(source: str) -> None:
    assert unsafe(source)


def test_the_search_below_passes_over_what_is_safe() -> None:
    assert not unsafe(
        "import numpy as np, yaml, torch, json\nnp.load(path, allow_pickle=False)\nyaml.safe_load(text)\nmodel.eval()\n"
        "class Mine(yaml.SafeLoader): pass\njson.load(file)\nfrom json import load\nload(file)"
    )


def test_no_pickle_is_loaded_and_no_text_is_run() -> None:
    """Nothing in the package loads a pickle, YAML with constructors, or text as code; checkpoints stay Megatron's."""
    found = set()
    files = [
        *(ROOT / "hotspa_megatron").rglob("*.py"),
        *(ROOT / "examples").rglob("*.py"),
        *(ROOT / "scripts").rglob("*.py"),
    ]
    for path in files:
        place = path.relative_to(ROOT).as_posix()
        found |= {(place, each) for each in unsafe(path.read_text())}
    assert len(files) > 50 and found == ALLOWED
