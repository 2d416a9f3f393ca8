"""Ranks that were given different things are told so on all of them, by name, before anything is exchanged."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from hotspa_megatron.hooks import agreement
from hotspa_megatron.hooks.agreement import VARIABLES, compare, difference
from hotspa_megatron.hooks.patching import Patches
from hotspa_megatron.hooks.samples import data_weights
from tests.spawn import run_ranks
from tests.test_profile import shorten
from tests.training import Job, arguments, corpus, flag, import_megatron, skewed_lengths, train, workspace

GIVEN = {"--seed": "1234", "data file 1 (.idx)": "10 bytes", "the version of torch": "2.13.0"}


def test_ranks_item_and_both_values_are_named() -> None:
    everyone = {rank: dict(GIVEN) for rank in range(8)}
    assert difference(everyone) is None
    everyone[5]["--seed"] = "7"
    assert difference(everyone) == "ranks were not given the same: --seed is '7' on rank 5, '1234' on rank 0"
    everyone[0]["the variable NVTE_FLASH_ATTN"] = "0"
    everyone[5]["the version of torch"] = everyone[6]["the version of torch"] = "2.9.0"
    message = difference(everyone)
    assert message is not None
    assert "the version of torch is '2.9.0' on ranks 5, 6, '2.13.0' on rank 0" in message
    assert "the variable NVTE_FLASH_ATTN is '0' on rank 0, 'not set' on rank 1" in message
    # The others count, not rank 0.
    everyone = {rank: GIVEN | {"--seed": str(min(rank, 1))} for rank in range(3)}
    assert difference(everyone) == "ranks were not given the same: --seed is '0' on rank 0, '1' on rank 1"
    many = {0: {str(index): "a" for index in range(9)}, 1: {str(index): "b" for index in range(9)}}
    assert str(difference(many)).endswith("; and 6 more")


def test_all_ranks_hear_of_a_difference_whichever_rank_has_it() -> None:
    for heard in run_ranks(_compare_in_turns, 4):
        assert heard == [None, *(f"'7' on rank {rank}, '1234' on rank {int(rank == 0)}" for rank in range(4)), None]


def _compare_in_turns(rank: int, world: int) -> list[str | None]:
    heard: list[str | None] = []
    for other in (None, *range(world), None):
        try:
            compare(GIVEN | ({"--seed": "7"} if rank == other else {}))
            heard.append(None)
        except ValueError as error:
            heard.append(str(error).partition("--seed is ")[2])
    return heard


def test_a_rank_without_the_flag_is_named_before_the_others_give_up() -> None:
    """It goes on to make groups, and waits there for ranks that wait for its word."""
    *heard, silent = run_ranks(_compare_without_one, 4, init_process_group=False)
    assert silent is None
    assert all(
        each.startswith("rank 3 said nothing of what they were given; were they started without") for each in heard
    )


def _compare_without_one(rank: int, world: int) -> str | None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=8))
    if rank == world - 1:
        time.sleep(6)
        return None
    with pytest.raises(ValueError) as caught:
        compare(GIVEN)
    return str(caught.value)


def test_weights_in_a_file_that_the_command_line_names_are_compared(tmp_path: Path) -> None:
    (found,) = run_ranks(_weights_in, 1, tmp_path / "blend", prepare=import_megatron, init_process_group=False)
    assert found == [[[0.3, 0.7]], [[0.5, 0.5]], [[0.3, 0.7]]]


def _weights_in(rank: int, world: int, file: Path) -> list[Any]:
    names = ("data_path", "train_data_path", "valid_data_path", "test_data_path", "per_split_data_args_path")
    args = SimpleNamespace(**dict.fromkeys(names), data_args_path=str(file), multiple_validation_sets=False)
    found = []
    for text in ("0.3 /a/x 0.7 /a/y", "0.5 /a/x 0.5 /a/y", "0.3 /b/x 0.7 /b/y"):
        file.write_text(text)
        found.append(data_weights(args))
    return found


def test_two_checkouts_of_one_version_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "somebodys"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    marks = []
    for text in ("x = 1\n", "x = 10\n", "x = 1\n"):
        (package / "code.py").write_text(text)
        marks.append(agreement._sizes_in("somebodys"))
    assert marks[0] == marks[2] != marks[1] and agreement._sizes_in("nobodys") == "not there"


def test_what_is_compared_of_a_file_of_the_environment_and_of_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(range(256)) * 400
    marks = []
    for index, content in enumerate((data, data, data[:-1], data[:-1] + b"x", b"x" + data[1:], b"")):
        (tmp_path / str(index)).write_bytes(content)
        marks.append(agreement._known_by(tmp_path / str(index)))
    assert marks[0] == marks[1] and len(set(marks)) == 5
    names = ("NVTE_FLASH_ATTN", "NCCL_ALGO", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "HOME")
    chosen = [name for name in names if agreement._matters(name)]
    assert chosen == ["NVTE_FLASH_ATTN", "NCCL_ALGO"] and "CUDA_DEVICE_MAX_CONNECTIONS" in VARIABLES
    assert agreement._without_paths(["0.3", "/a/b", "0.7", "/c/d"]) == ["0.3", "(a path)", "0.7", "(a path)"]
    # Whether a path is given at all, and switches whose names end as those of paths do.
    values = (None, "", "out", True, False, ["out", "1e-3"])
    assert [agreement._without_paths(value, is_path=True) for value in values] == [
        None, "(a path)", "(a path)", True, False, ["(a path)", "1e-3"],
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------- in a real job

Change = Callable[[Any], None]


def _given_to_rank_1(change: Change) -> None:
    """Have ``change`` done to what rank 1 was given, after it has read its command line and before it joins the others."""
    from megatron.training import get_args, initialize

    def changed(original: Callable[..., Any]) -> Callable[..., Any]:
        def initialize_distributed(*positional: Any, **options: Any) -> Any:
            if os.environ["RANK"] == "1":
                change(get_args())
            try:
                return original(*positional, **options)
            finally:
                # Nothing was made of what they disagreed on.
                assert len(dist.distributed_c10d._world.pg_map) == 1

        return initialize_distributed

    Patches().wrap(initialize, "_initialize_distributed", changed)


def _another_seed(args: Any) -> None:
    args.seed = 7


def _another_size(args: Any) -> None:
    """Megatron itself would hang over this: ranks make other groups."""
    for name in ("tensor_model_parallel_size", "tensor_parallel_num_weight_shards", "expert_tensor_parallel_size",
                 "expert_tensor_parallel_num_weight_shards"):  # fmt: skip
        if getattr(args, name, None):
            setattr(args, name, 1)


def _an_asynchronous_save(args: Any) -> None:
    """Such a rank would wait at the first save for others that have saved already."""
    args.async_save = True


def _nothing_to_save_to(args: Any) -> None:
    args.save = None


def _another_version(args: Any) -> None:
    import torch

    torch.__version__ = "1.0"


def _another_algorithm(args: Any) -> None:
    os.environ["NCCL_ALGO"] = "Ring"


def _another_checkpoint(args: Any) -> None:
    """Such a rank would load, and wait for others that begin anew."""
    args.load = str(workspace() / "elsewhere")
    os.makedirs(Path(args.load) / "iter_0000005" / "mp_rank_00", exist_ok=True)
    (Path(args.load) / "latest_checkpointed_iteration.txt").write_text("5")


def _other_documents(documents: Path, args: Any) -> None:
    args.data_path = [str(documents)]


def _another_file(text: str, args: Any) -> None:
    args.hotspa_config = flag(text)[1]


def _a_file(args: Any) -> None:
    args.hotspa_config = flag(CONFIG)[1]


CONFIG = "strategies: [{max_length: 64, tp: 1}]"
MORE = "strategies: [{max_length: 32, tp: 1}, {max_length: 64, tp: 2}]"
DIFFERENCES: dict[str, tuple[Callable[[], Change], str]] = {
    "file": (
        lambda: functools.partial(_another_file, MORE),
        "strategies of the --hotspa-config file is '[[32, 1, 1, 1, None, None, 'None'], [64, 2",
    ),
    "size": (lambda: _another_size, "--tensor-model-parallel-size is '1' on rank 1, '2' on rank 0"),
    "seed": (lambda: _another_seed, "--seed is '7' on rank 1, '1234' on rank 0"),
    "async save": (lambda: _an_asynchronous_save, "--async-save is 'True' on rank 1, '"),
    "save": (lambda: _nothing_to_save_to, "--save is 'None' on rank 1, '(a path)' on rank 0"),
    "checkpoint": (
        lambda: _another_checkpoint,
        "the checkpoint behind --load is 'that of iteration 5' on rank 1, 'none (No such file or directory)' on rank 0",
    ),
    "version": (lambda: _another_version, "the version of torch is '1.0' on rank 1, '"),
    "environment": (lambda: _another_algorithm, "the variable NCCL_ALGO is 'Ring' on rank 1, 'not set' on rank 0"),
    "data": (
        lambda: functools.partial(_other_documents, corpus(skewed_lengths(seed=8))),
        "data file 1 (.idx) is '",
    ),
}


def _and_says_so_in_time(change: Change) -> None:
    _given_to_rank_1(change)
    shorten()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_a_file, "--hotspa-config is 'a file' on rank 1, 'auto' on rank 0"),
        pytest.param(
            _another_size, "--tensor-model-parallel-size is '1' on rank 1, '2' on rank 0", marks=pytest.mark.long
        ),
    ],
    ids=["file", "size"],
)
def test_ranks_that_plan_for_themselves_are_compared_before_they_plan(
    change: Change, message: str, tmp_path: Path
) -> None:
    line = arguments("--save", str(tmp_path), "--save-interval", "9", "--hotspa-config", "auto", tp=2, iterations=1)
    with pytest.raises(AssertionError) as caught:
        train(Job(line, None, ranks=2, before=functools.partial(_and_says_so_in_time, change)), grace=20)
    told = str(caught.value).replace('"', "'")
    for prefix in ("hotspa: ", "hotspa: rank 1: "):
        assert f"{prefix}ranks were not given the same: {message}" in told
    assert told.count("SystemExit: 2") == 2 and "measuring" not in told and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "what",
    [name if name in ("file", "size") else pytest.param(name, marks=pytest.mark.long) for name in DIFFERENCES],
)
def test_a_job_whose_ranks_differ_ends_with_one_line_each(what: str, tmp_path: Path) -> None:
    make, message = DIFFERENCES[what]
    save = ("--save", str(tmp_path), "--save-interval", "100", "--load", str(tmp_path))
    line = arguments(*save, tp=2, iterations=1)
    with pytest.raises(AssertionError) as caught:
        # Rank 0 speaks first, the others when no launcher has ended them.
        train(Job(line, CONFIG, ranks=2, before=functools.partial(_given_to_rank_1, make())), grace=20)
    told = str(caught.value).replace('"', "'")
    for prefix in ("hotspa: ", "hotspa: rank 1: "):
        assert f"{prefix}ranks were not given the same: {message}" in told
    assert told.count("SystemExit: 2") == 2
