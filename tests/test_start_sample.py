"""A checkpoint says which kind of sample its consumed samples are; the other kind is taken up from where the file says."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest

from hotspa_megatron.config import HotSPaConfig, load_config
from hotspa_megatron.hooks.checkpoint import first_sample
from tests.spawn import run_ranks
from tests.test_checkpoint import GUEST, SETUPS, loading, saving, stock
from tests.test_data_faults import _no_process_group, refusal
from tests.test_samples import RESET
from tests.training import SHARDED, Job, Run, arguments, difference, import_megatron, train, workspace

# ------------------------------------------------------------------------------------------------------------ the key


def config(folder: Path, *lines: str) -> HotSPaConfig:
    path = folder / "hotspa.yaml"
    path.write_text("\n".join(("strategies: []", *lines, "")))
    return load_config(path)


def test_the_key_is_a_count_or_null_and_belongs_to_the_digest(tmp_path: Path) -> None:
    values = {"null": None, "0": 0, "1": 1, "5000000000": 5_000_000_000}
    read = [config(tmp_path, f"start_sample: {text}") for text in values]
    assert [each.start_sample for each in read] == list(values.values())
    assert len({each.digest() for each in read}) == 4 and config(tmp_path) == read[0]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("-1", "-1 is less than 0"),
        ("1.5", "not a whole"),
        ("'1'", "is text"),
        (str(2**63), "too large"),
        ("[1]", "a list"),
    ],
)
def test_another_value_is_refused_with_its_line(tmp_path: Path, value: str, problem: str) -> None:
    with pytest.raises(ValueError, match=rf"hotspa\.yaml:3: start_sample: .*{problem}"):
        config(tmp_path, "merge: auto", f"start_sample: {value}")


# --------------------------------------------------------------------------------------------------- kinds of samples


def job(**other: Any) -> Any:
    usual: dict[str, Any] = {
        "load": "folder", "sft": False, "global_batch_size": 16, "override_opt_param_scheduler": False, "no_load_optim": False
    }  # fmt: skip
    return types.SimpleNamespace(**{**usual, **other})


def saved(kind: str | None, consumed: int = 48, **other: Any) -> Any:
    mark = {} if kind is None else {"hotspa_samples": kind}
    return types.SimpleNamespace(**{"global_batch_size": 16, "consumed_train_samples": consumed, **mark, **other})


@pytest.mark.parametrize("counted", [None, "megatron", "documents", "conversations"])
@pytest.mark.parametrize("kind", ["megatron", "documents", "conversations"])
def test_counts_of_another_kind_are_not_gone_on_from(tmp_path: Path, counted: str | None, kind: str) -> None:
    """Without the string a checkpoint counts Megatron's own samples."""
    lines = ("samples: megatron",) if kind == "megatron" else ()
    this = job(sft=kind == "conversations")
    if kind == (counted or "megatron"):
        assert first_sample(this, saved(counted), config(tmp_path, *lines)) is None
        assert first_sample(this, saved(counted), config(tmp_path, *lines, "start_sample: 7")) is None
        return
    assert first_sample(this, saved(counted, consumed=0), config(tmp_path, *lines)) is None
    with pytest.raises(
        ValueError, match=rf"has consumed 48 samples of the kind {counted or 'megatron'}, .* counts {kind}; "
    ):
        first_sample(this, saved(counted), config(tmp_path, *lines))
    for count in (0, 7):
        assert first_sample(this, saved(counted), config(tmp_path, *lines, f"start_sample: {count}")) == count


def test_another_batch_size_takes_the_command_lines_schedule(tmp_path: Path) -> None:
    """Schedules by iterations are kept in samples: the checkpoint's would be in the other kind's."""
    file = config(tmp_path, "start_sample: 7")
    with pytest.raises(
        ValueError, match=r"--global-batch-size 24: .* 16 per iteration; add --override-opt-param-scheduler"
    ):
        first_sample(job(global_batch_size=24), saved(None), file)
    for way_out in ("override_opt_param_scheduler", "no_load_optim"):
        assert first_sample(job(global_batch_size=24, **{way_out: True}), saved(None), file) == 7


# ------------------------------------------------------------------------------------------------------------- in jobs


def counters(folder: Path, iteration: int) -> dict[str, Any]:
    (found,) = run_ranks(
        _read_counters, 1, folder / f"iter_{iteration:07d}", prepare=import_megatron, init_process_group=False
    )
    return dict(found)


def _read_counters(rank: int, world_size: int, checkpoint: Path) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    common = dist_checkpointing.load_common_state_dict(str(checkpoint))
    args, scheduler = common["args"], common["opt_param_scheduler"]
    return {
        "kind": getattr(args, "hotspa_samples", None), "consumed": args.consumed_train_samples,
        "schedule": (scheduler["num_steps"], scheduler["lr_decay_steps"]),
    }  # fmt: skip


def documents(start: int | None, *more: str, iterations: int, batch: int = 16) -> Run:
    text = GUEST if start is None else f"{GUEST}\nstart_sample: {start}"
    return train(Job(arguments(SHARDED, *more, iterations=iterations, batch=batch), text, ranks=2))


def test_stocks_checkpoint_is_taken_up_by_documents_once(tmp_path: Path) -> None:
    """With another batch size, as documents are shorter; the count and the schedule are documents from there on."""
    old = stock(SETUPS["sharded"], *saving("stock"), iterations=3)
    assert counters(workspace() / "stock", 3) == {"kind": None, "consumed": 48, "schedule": (48, 640)}

    load, save = loading("stock", 3), ("--save", str(tmp_path), "--save-interval", "1")
    line = refusal(Job(arguments(SHARDED, *load, iterations=5), GUEST, ranks=2, before=_no_process_group))
    assert "start_sample: the checkpoint in" in line and "has consumed 48 samples of the kind megatron" in line

    first = documents(72, *load, *save, iterations=4, batch=24)
    assert first.loaded == old.parameters
    assert [(each.first_sample, each.samples) for each in first.steps] == [(72, 24)]
    assert "hotspa: start_sample: documents are counted from 72 on, by schedules too" in first.output
    # 4 of 40 iterations, in documents: the schedule is where it was.
    assert counters(tmp_path, 4) == {"kind": "documents", "consumed": 96, "schedule": (96, 960)}

    # The file still says so, but now the checkpoint counts documents.
    again = documents(72, "--load", str(tmp_path), "--override-opt-param-scheduler", *save, iterations=5, batch=24)
    assert [(each.first_sample, each.samples) for each in again.steps] == [(96, 24)]
    assert "hotspa: start_sample: has no effect, as the checkpoint counts documents already" in again.output
    assert counters(tmp_path, 5) == {"kind": "documents", "consumed": 120, "schedule": (120, 960)}


def test_the_first_sample_may_be_0() -> None:
    """Which Megatron takes for a checkpoint without counts, and replaces by iterations times batch size."""
    stock(SETUPS["sharded"], *saving("stock"), iterations=3)
    run = documents(0, *loading("stock", 3), iterations=5)
    assert [(each.first_sample, each.samples) for each in run.steps] == [(0, 16), (16, 16)]
    assert [(each.number, each.consumed_samples) for each in run.iterations] == [(4, 16), (5, 32)]


@pytest.mark.parametrize("optimizer", [(SHARDED,), pytest.param((), marks=pytest.mark.long)], ids=["sharded", "plain"])
def test_a_running_job_takes_the_flag_up_and_drops_it_again(tmp_path: Path, optimizer: tuple[str, ...]) -> None:
    """With Megatron's own samples."""

    def part(text: str | None, *more: str) -> Run:
        line = arguments(*optimizer, *RESET, *more, iterations=6)
        line = tuple(each for each in line if each != "--no-create-attention-mask-in-dataloader")
        return train(Job(line, text, ranks=2, hooks=text is not None))

    def at(folder: str, *more: str) -> tuple[str, ...]:
        return (*more, str(tmp_path / folder))

    whole = part(None, *at("stock", "--save-interval", "2", "--save"))
    flag = part(
        f"{GUEST}\nsamples: megatron",
        "--save-interval",
        "2",
        *at("flag", "--save"),
        *at("stock", "--ckpt-step", "2", "--load"),
    )
    dropped = part(None, *at("flag", "--ckpt-step", "4", "--load"))
    assert {segment.kind for step in flag.steps for segment in step.segments} == {"guest", "home"}
    assert counters(tmp_path / "flag", 4) == {"kind": "megatron", "consumed": 64, "schedule": (64, 640)}
    for taken, first in ((flag, 2), (dropped, 4)):
        assert [each.consumed_samples for each in taken.iterations] == [16 * n for n in range(first + 1, 7)]
        losses = difference(taken.losses, whole.losses[first:])
        print(f"losses differ by {losses:.1e}")
        assert losses <= 1e-6
