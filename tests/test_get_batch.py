"""The contract with the user's forward_step: what is read from it, what is served, what is refused before a job starts."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from hotspa_megatron.hooks import get_batch
from hotspa_megatron.hooks.data import MicroBatch

NAMES = "tokens, labels, loss_mask, attention_mask, position_ids, cu_seqlens, cu_seqlens_padded, max_seqlen"
_numbers = itertools.count()


def module(folder: Path, body: str) -> Any:
    """A user's module with a get_batch of its own and this body."""
    path = folder / f"user_{next(_numbers)}.py"
    head = "def get_batch(data_iterator, vp_stage=None):\n    return 'original', data_iterator\n\n"
    path.write_text(head + textwrap.dedent(body))
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None and specification.loader is not None
    made = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(made)
    return made


PLAIN = f"def forward_step(data_iterator, model):\n    {NAMES} = get_batch(data_iterator)\n    return tokens\n"


def test_the_names_that_forward_step_unpacks_are_the_contract(tmp_path: Path) -> None:
    expected = tuple(NAMES.split(", "))
    user = module(tmp_path, PLAIN)
    assert get_batch.contract_of(user.forward_step) == expected
    assert get_batch.contract_of(functools.partial(user.forward_step, model=None)) == expected
    as_method = module(
        tmp_path,
        f"""
        import functools

        class Trainer:
            def forward_step(self, data_iterator, model):
                {NAMES} = get_batch(data_iterator)
                return tokens

            def __call__(self, data_iterator, model):
                with open("/dev/null"):
                    ({NAMES}) = get_batch(data_iterator, None)

        def logged(function):
            @functools.wraps(function)
            def call(*args, **kwargs):
                return function(*args, **kwargs)
            return call

        decorated = logged(Trainer.forward_step)
        """,
    )
    for step in (as_method.Trainer().forward_step, as_method.Trainer(), as_method.decorated):
        assert get_batch.contract_of(step) == expected
        get_batch.check(step, adapter=None)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("def forward_step(i, m):\n    batch = get_batch(i)\n", "does not unpack names"),
        (
            "def forward_step(i, m):\n    tokens, labels, loss_mask, position_ids = get_batch(i)\n",
            "neither packed_seq_params",
        ),
        (
            "def forward_step(i, m):\n    tokens, labels, cu_seqlens = get_batch(i)\n",
            "missing: loss_mask, position_ids",
        ),
        (f"def forward_step(i, m):\n    {NAMES}, mood = get_batch(i)\n", "unknown: mood"),
        ("def forward_step(i, m):\n    return next(i)\n", "does not call get_batch"),
    ],
)
def test_contracts_that_cannot_be_served_name_the_place_and_the_fix(tmp_path: Path, body: str, problem: str) -> None:
    user = module(tmp_path, body)
    with pytest.raises(ValueError, match=problem) as caught:
        get_batch.check(user.forward_step, adapter=None)
    assert f"{user.__file__}:4: forward_step" in str(caught.value) and "get_batch: pkg.mod:function" in str(
        caught.value
    )


def test_a_step_without_a_get_batch_of_its_own_is_refused_with_another_fix() -> None:
    for adapter in (None, "json:loads"):
        with pytest.raises(ValueError, match="pass a plain function that calls get_batch"):
            get_batch.check(textwrap.dedent, adapter=adapter)  # any function of another module


def test_an_adapter_that_cannot_be_had_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = module(tmp_path, "def forward_step(i, m):\n    return get_batch(i)\n")
    get_batch.check(user.forward_step, adapter="json:loads")
    (tmp_path / "adapter_that_is_no_python.py").write_text("def (:\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("json:nothing", "no_such_module_of_mine:loads", "adapter_that_is_no_python:loads"):
        with pytest.raises(ValueError, match=name):
            get_batch.check(user.forward_step, adapter=name)


class _Batches(get_batch.SegmentIterator):
    """One micro-batch of two sequences, 3 and 2 tokens, padded to 4 and 4."""

    def __init__(self) -> None:
        self.given = 0

    def __next__(self) -> MicroBatch:
        self.given += 1
        ids = torch.arange(8).unsqueeze(0)
        return MicroBatch(ids, ids + 1, torch.ones(1, 8), ids, (0, 4, 8), (0, 3, 5), 4)


def test_only_our_own_iterator_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, **_: self)
    user, patches = module(tmp_path, PLAIN), get_batch.Patches()
    get_batch.serve(user.forward_step, patches, adapter=None)
    get_batch.serve(user.forward_step, patches, adapter=None)
    assert len(patches.replaced) == 1
    assert user.get_batch("evaluation") == ("original", "evaluation")
    served = dict(zip(NAMES.split(", "), user.get_batch(_Batches()), strict=True))
    assert served["attention_mask"] is None
    assert served["cu_seqlens"].tolist() == [[0, 3, 5]] and served["cu_seqlens_padded"].tolist() == [[0, 4, 8]]
    assert served["cu_seqlens"].dtype == torch.int32 and int(served["max_seqlen"]) == 4
    patches.undo_all()
    assert user.get_batch("evaluation") == ("original", "evaluation") and not hasattr(user.get_batch, "serves_hotspa")


def test_boundaries_beyond_32_bits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, **_: self)
    assert get_batch._boundaries((0, 2**31 - 1)).tolist() == [[0, 2**31 - 1]]
    with pytest.raises(ValueError, match="2,147,483,648 tokens"):
        get_batch._boundaries((0, 2**31))
