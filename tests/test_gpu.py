"""What only GPUs run: Transformer Engine's layers and packed attention, fused kernels, NCCL, fp8.

The tests marked gpu are written to the documentation of Megatron and Transformer Engine, and were not run by the authors.
Each starts ``hotspa verify`` of a training through the launcher, from the tests' own corpus and model. What of them needs no
GPU is held here on CPU: their command lines and files, and what a sibling changes in Transformer Engine's modules.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import shlex
import sys
import types
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hotspa_megatron.cli.described_run import check_flags
from hotspa_megatron.cli.verify import read_users_command
from hotspa_megatron.hooks.patching import Patches
from hotspa_megatron.strategy import Strategy
from tests.job import example_script, home_on_the_fake_backend
from tests.spawn import run_ranks
from tests.training import RELEASE, SHARDED, SP, arguments, flag, import_megatron, torchrun, verified, workspace

# ------------------------------------------------------------------------------------------------------------ trainings

# Heads as flash attention and cuDNN have them, and sizes that products in fp8 take.
_SIZES = "--hidden-size 128 --ffn-hidden-size 256 --kv-channels 64 --num-layers 2"
_COMMON = f"{_SIZES} --distributed-backend nccl --bf16 --accumulate-allreduce-grads-in-fp32"
_UNFUSED = "--no-gradient-accumulation-fusion"
LOCAL = shlex.split(f"""
    {_COMMON} --transformer-impl local --attention-backend unfused --no-persist-layer-norm --no-masked-softmax-fusion
    --no-rope-fusion
""")
TRANSFORMER_ENGINE = shlex.split(f"{_COMMON} --transformer-impl transformer_engine")

SIBLINGS = """
strategies:
  - {max_length: 32, tp: 1, tokens_per_microbatch: 96, recompute: full}
  - {max_length: 128, tp: 1, tokens_per_microbatch: 192}
"""
ONE_SIBLING = "strategies: [{max_length: 64, cp: 1, tokens_per_microbatch: 128}]"
SIBLING_WITH_CP = "strategies: [{max_length: 64, cp: 2, tokens_per_microbatch: 128}]"
GUEST = "strategies: [{max_length: 64, tp: 1, tokens_per_microbatch: 128}]"

_NEEDS = {
    "transformer_engine": "pip install transformer-engine[pytorch]",
    "flash_attn": "pip install flash-attn",
    "fused_weight_gradient_mlp_cuda": "Apex from source with APEX_CUDA_EXT=1",
}
"""What a training loads, and where it is from."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A training and the (strategy, kind)s that have to run in it; ``modules``: what it cannot do without."""

    segments: frozenset[tuple[str, str]]
    config: str = SIBLINGS
    ranks: int = 1
    tp: int = 1
    cp: int = 1
    kernels: Sequence[str] = tuple(TRANSFORMER_ENGINE)
    more: tuple[str, ...] = ()
    modules: tuple[str, ...] = ("transformer_engine",)
    capability: tuple[int, int] = (8, 0)
    """The oldest device, by compute capability: bf16 is from 8.0 on, fp8 from 8.9."""
    allowed: tuple[float, float] = (1e-3, 1e-2)
    """What rounding explains, in losses and gradient norms, relative."""

    def line(self, documents: Path | None = None) -> tuple[str, ...]:
        return arguments(*self.more, tp=self.tp, cp=self.cp, iterations=50, documents=documents, kernels=self.kernels)


def _of(*segments: str) -> frozenset[tuple[str, str]]:
    return frozenset((strategy, kind) for strategy, kind in (each.split() for each in segments))


ALONE = _of("tp1-cp1-pp1-dp1 sibling", "tp1-cp1-pp1-dp1 home")
CP_AT_HOME = _of("tp1-cp1-pp1-dp2 sibling", "tp1-cp2-pp1-dp1 home")
CP_IN_A_SIBLING = _of("tp1-cp2-pp1-dp1 sibling", "tp1-cp1-pp1-dp2 home")
TP_AT_HOME = _of("tp1-cp1-pp1-dp2 guest", "tp2-cp1-pp1-dp1 home")
OVERLAP = (SP, SHARDED, "--overlap-grad-reduce", "--overlap-param-gather")
FP8 = ("--fp8-format", "hybrid", "--fp8-recipe", "tensorwise")

CASES = {
    "local": Case(segments=ALONE, kernels=LOCAL, more=(_UNFUSED,), modules=()),
    "te": Case(segments=ALONE, more=(_UNFUSED,)),
    "te, flash": Case(
        segments=ALONE, more=(_UNFUSED, "--attention-backend", "flash"), modules=("transformer_engine", "flash_attn")
    ),
    "te, cudnn": Case(segments=ALONE, more=(_UNFUSED, "--attention-backend", "fused")),
    "local, fused": Case(segments=ALONE, kernels=LOCAL, modules=("fused_weight_gradient_mlp_cuda",)),
    "te, fused": Case(
        segments=ALONE,
        more=("--cross-entropy-loss-fusion",),
        modules=("transformer_engine", "fused_weight_gradient_mlp_cuda"),
    ),
    # Scales of every tensor as it is; those of the default recipe follow from all passes before, of whatever strategy.
    "te, fp8": Case(
        segments=ALONE,
        config=f"{SIBLINGS}allow_untested: [fp8]\n",
        more=(_UNFUSED, *FP8),
        capability=(8, 9),
        allowed=(2e-2, 2e-1),
    ),
    "local, sibling": Case(
        segments=CP_AT_HOME, config=ONE_SIBLING, ranks=2, cp=2, kernels=LOCAL, more=(_UNFUSED, SHARDED), modules=()
    ),
    "te, sibling": Case(segments=CP_AT_HOME, config=ONE_SIBLING, ranks=2, cp=2, more=(_UNFUSED, SHARDED)),
    "te, sibling with cp": Case(segments=CP_IN_A_SIBLING, config=SIBLING_WITH_CP, ranks=2, more=(_UNFUSED,)),
    "local, guest": Case(
        segments=TP_AT_HOME, config=GUEST, ranks=2, tp=2, kernels=LOCAL, more=(_UNFUSED, *OVERLAP), modules=()
    ),
    "te, guest": Case(segments=TP_AT_HOME, config=GUEST, ranks=2, tp=2, more=(_UNFUSED, *OVERLAP)),
}


def skip_unless_possible(case: Case) -> None:
    """Skip where this machine cannot run a case, and say why."""
    if RELEASE < (0, 19):
        pytest.skip("the small training script of older releases has layers for CPU alone")
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < case.ranks:
        pytest.skip(f"needs {case.ranks} GPU{'s' if case.ranks > 1 else ''}, here are {found}")
    if (capability := torch.cuda.get_device_capability()) < case.capability:
        pytest.skip(f"needs compute capability {case.capability}, this is {capability}")
    for module in case.modules:
        try:
            with warnings.catch_warnings(action="ignore"):
                importlib.import_module(module)
        except Exception as error:  # not there, or built against another torch, a CUDA library missing, ...
            pytest.skip(f"needs {module} ({_NEEDS[module]}): {type(error).__name__}: {error}")


@functools.cache
def report(name: str, *, launcher: str = "hotspa_megatron.launch") -> dict[str, Any]:
    """What ``hotspa verify`` finds of a case: its static run, another order of sums, its length groups."""
    case = CASES[name]
    skip_unless_possible(case)
    logs = workspace() / f"{launcher} {name}"
    # Megatron wants this order of work on GPUs under tensor and context parallelism.
    before = os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert before == "1", f"CUDA_DEVICE_MAX_CONNECTIONS={before}: Megatron needs 1"
    _, found, errors = verified(logs, *torchrun(case.line(), case.config, ranks=case.ranks, launcher=launcher))
    assert found.get("differences"), (found, errors)
    print({"noise": found["noise"], "differences": found["differences"], "allowed": case.allowed})
    return found


def segments_of(found: dict[str, Any]) -> frozenset[tuple[str, str]]:
    return frozenset(
        (strategy, kind.strip("()")) for strategy, kind in map(str.split, found["runs"]["config"]["segments"])
    )


@pytest.mark.gpu
@pytest.mark.timeout(360)
@pytest.mark.parametrize("name", CASES)
def test_a_mixed_run_equals_the_static_one(name: str) -> None:
    case, found = CASES[name], report(name)
    assert segments_of(found) == case.segments
    for key, allowed in zip(("loss", "grad_norm"), case.allowed, strict=True):
        assert found["differences"]["config"][key] <= max(2 * found["noise"][key], allowed), key
        assert found["noise"][key] <= 10 * allowed, f"{key}: the static run itself is not repeatable"
    moved = found["runs"]["config"]["switch_bytes"]
    assert (moved > 0) == any(kind == "guest" for _, kind in case.segments)


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("fused", "plain"), [("local, fused", "local"), ("te, fused", "te")])
def test_fused_kernels_train_as_the_others_do(fused: str, plain: str) -> None:
    for run in ("static", "config"):
        one, other = (report(name)["runs"][run] for name in (fused, plain))
        for key, allowed in zip(("losses", "grad_norms"), CASES[plain].allowed, strict=True):
            assert one[key] == pytest.approx(other[key], rel=allowed), (run, key)


@pytest.mark.gpu
@pytest.mark.timeout(360)
def test_a_guest_whose_gradients_are_lost_is_seen() -> None:
    """The negative control."""
    found = report("local, guest", launcher="examples.demo.without_fold")
    assert not found["passed"] and found["differences"]["config"]["grad_norm"] > 10 * CASES["local, guest"].allowed[1]


# --------------------------------------------------------------------------------------------------------------- on CPU


def _read(rank: int, world_size: int, lines: Sequence[tuple[int, tuple[str, ...]]]) -> list[list[tuple[str, str]]]:
    """What Megatron and the hooks make of each command line at its number of ranks: strategies and their kinds."""
    from megatron.training import arguments as megatron_arguments

    from hotspa_megatron.config import load_config, resolve
    from hotspa_megatron.hooks import arguments, install

    install.install()
    read = []
    for ranks, line in lines:
        os.environ["WORLD_SIZE"] = str(ranks)
        sys.argv = ["pretrain", *line]
        args = megatron_arguments.parse_args()
        # Refuses what the file does not allow, and then whatever Megatron itself refuses.
        megatron_arguments.validate_args(args)
        assert args.accumulate_allreduce_grads_in_fp32 and args.bf16
        resolved = resolve(
            load_config(args.hotspa_config), shape=arguments.shape_of(args), home=arguments.home_of(args)
        )
        read.append([(str(each.strategy), str(each.kind)) for each in (*resolved.strategies, resolved.home)])
    return read


def test_every_command_line_is_what_megatron_and_its_file_allow() -> None:
    documents = Path("documents")
    lines = {name: (*case.line(documents), *flag(case.config)) for name, case in CASES.items()}
    asked = [(CASES[name].ranks, line) for name, line in lines.items()]
    (read,) = run_ranks(_read, 1, asked, prepare=import_megatron, init_process_group=False)
    for (name, line), found in zip(lines.items(), read, strict=True):
        case = CASES[name]
        assert frozenset(found) == case.segments, name
        check_flags([each for each in line if each != "--hotspa-config"])
        users = read_users_command(torchrun(case.line(documents), case.config, ranks=case.ranks))
        assert (users.home.tp, users.home.cp) == (case.tp, case.cp)
    without = (*CASES["te, fp8"].line(documents), *flag(SIBLINGS))
    with pytest.raises(AssertionError, match="--fp8-format: never ran"):
        run_ranks(_read, 1, [(1, without)], prepare=import_megatron, init_process_group=False)


def _keeps_its_compiler(rank: int, world_size: int, place: str) -> bool:
    from megatron.core.datasets import utils as dataset_utils

    def compile_helpers() -> None:
        raise AssertionError("make: no makefile found")

    dataset_utils.compile_helpers, dataset_utils.__file__ = compile_helpers, place
    example_script().take_compiled_helpers()
    return bool(dataset_utils.compile_helpers is compile_helpers)


@pytest.mark.skipif(RELEASE < (0, 19), reason="older releases have a script for CPU")
def test_the_example_compiles_no_helpers_that_a_wheel_has_compiled(tmp_path: Path) -> None:
    """On CPU the stand-in sees to it."""

    def keeps() -> bool:
        (kept,) = run_ranks(
            _keeps_its_compiler, 1, str(tmp_path / "utils.py"), prepare=import_megatron, init_process_group=False
        )
        return bool(kept)

    assert not keeps()
    (tmp_path / "Makefile").touch()
    assert keeps()


class Attention(torch.nn.Module):
    """Transformer Engine's DotProductAttention, as far as groups go: its documented attributes, and their setter."""

    def __init__(self, config: Any, groups: Any, stream: Any) -> None:
        super().__init__()
        self.config, self.tp_group = config, groups.tp
        parallel = config.context_parallel_size > 1
        self.cp_group = groups.cp if parallel else None
        self.cp_global_ranks = dist.get_process_group_ranks(groups.cp) if parallel else None
        self.cp_stream = stream if parallel else None
        self.cp_comm_type = "a2a" if parallel else "p2p"

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any, cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        self.cp_group, self.cp_global_ranks = cp_group, cp_global_ranks
        self.cp_stream, self.cp_comm_type = cp_stream, cp_comm_type


class AttentionOfOld(Attention):
    """The same before Transformer Engine 1.10: nothing chooses how ranks exchange keys and values."""

    def __init__(self, config: Any, groups: Any, stream: Any) -> None:
        super().__init__(config, groups, stream)
        del self.cp_comm_type

    def set_context_parallel_group(self, cp_group: Any, cp_global_ranks: Any, cp_stream: Any) -> None:  # type: ignore[override]
        self.cp_group, self.cp_global_ranks, self.cp_stream = cp_group, cp_global_ranks, cp_stream


@dataclasses.dataclass(frozen=True)
class Held:
    """What attention keeps of its ranks; ``cp`` and ``tp``: its groups' members, ``size``: its configuration's."""

    cp: tuple[int, ...] | None
    cp_ranks: tuple[int, ...] | None
    has_stream: bool
    comm_type: str | None
    tp: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, module: Attention) -> Held:
        members = dist.get_process_group_ranks
        return cls(
            cp=None if module.cp_group is None else tuple(members(module.cp_group)),
            cp_ranks=None if module.cp_global_ranks is None else tuple(module.cp_global_ranks),
            has_stream=module.cp_stream is not None,
            comm_type=getattr(module, "cp_comm_type", None),
            tp=tuple(members(module.tp_group)),
            size=module.config.context_parallel_size,
        )


def _pointed_at(
    rank: int, world_size: int, home: Strategy, sibling: Strategy, kind: type[Attention], undoes: bool
) -> tuple[Held, Held, Held, bool]:
    """Attention of home before, under and after a sibling on rank 0, and whether it then has home's own objects again."""
    from hotspa_megatron.hooks.model import home_modules_under

    _, states = home_on_the_fake_backend(home, rank=0)
    state = states.create(sibling)
    module = kind(types.SimpleNamespace(context_parallel_size=home.cp), states.home.groups, torch.cuda.Stream())
    if not undoes:
        Patches.undo_all = lambda self: None  # type: ignore[method-assign]
    before, own = Held.of(module), dict(vars(module))
    with home_modules_under([torch.nn.Sequential(module)], states.home, state):
        during = Held.of(module)
    return before, during, Held.of(module), vars(module) == own


def pointed_at(
    home: Strategy, sibling: Strategy, kind: type[Attention], *, undoes: bool
) -> tuple[Held, Held, Held, bool]:
    case = (home, sibling, kind, undoes)
    ((before, during, after, same),) = run_ranks(
        _pointed_at, 1, *case, prepare=import_megatron, init_process_group=False
    )
    return before, during, after, same


CP2, DP2 = Strategy(tp=1, cp=2, pp=1, dp=1), Strategy(tp=1, cp=1, pp=1, dp=2)
TP2_CP2, TP2_DP2 = Strategy(tp=2, cp=2, pp=1, dp=1), Strategy(tp=2, cp=1, pp=1, dp=2)


@pytest.mark.parametrize("kind", [Attention, AttentionOfOld])
@pytest.mark.parametrize(
    ("home", "sibling", "members"),
    [(CP2, DP2, (0,)), (DP2, CP2, (0, 1)), (TP2_CP2, TP2_DP2, (0,)), (TP2_DP2, TP2_CP2, (0, 2))],
    ids=str,
)
def test_a_sibling_points_transformer_engine_at_its_ranks_and_back(
    home: Strategy, sibling: Strategy, members: tuple[int, ...], kind: type[Attention]
) -> None:
    """Groups are shared: a sibling's may be one that home has in another role."""
    before, during, after, same = pointed_at(home, sibling, kind, undoes=True)
    assert during.cp == during.cp_ranks == members and during.has_stream
    assert during.size == sibling.cp and during.tp == before.tp == tuple(range(home.tp))
    assert during.comm_type == before.comm_type
    assert before.cp == (None if home.cp == 1 else tuple(range(0, home.world_size, home.tp)))
    assert after == before and same


def test_a_sibling_that_is_not_undone_is_seen() -> None:
    """The negative control."""
    before, during, after, same = pointed_at(CP2, DP2, Attention, undoes=False)
    assert after == during != before and not same
