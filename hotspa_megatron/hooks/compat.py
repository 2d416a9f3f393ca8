"""What differs between the supported versions of Megatron, checked by signature at start.

Every other file of this room calls Megatron through names that are the same in all of them, or through this one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import traceback
from collections.abc import Iterable, Mapping
from typing import Any, Final

from hotspa_megatron.hooks.flags import FLAG, NEWEST, OLDEST
from hotspa_megatron.strategy import Strategy

UNEVEN_PIPELINE_ARGUMENTS = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Arguments that make home's pipeline stages uneven; absent ones do not exist in the version at hand."""

UNEVEN_PIPELINE_FIELDS = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""The same as fields of TransformerConfig."""

TENSOR_PARALLEL_FIELDS = (
    "tensor_model_parallel_size",
    "tensor_parallel_num_weight_shards",
    "expert_tensor_parallel_size",
    "expert_tensor_parallel_num_weight_shards",
)
"""The tensor-parallel sizes, as arguments and as fields of TransformerConfig.

From 0.19 on Megatron derives a weight-rematerialisation axis as shards // tp: they must all switch together.
"""


HOOKED: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "megatron.training.arguments": {"add_megatron_arguments": ("parser",), "validate_args": ("args",)},
    "megatron.training.initialize": {
        "_initialize_distributed": ("get_embedding_ranks", "get_position_embedding_ranks"),
    },
    "megatron.training.checkpointing": {
        "check_checkpoint_args": ("checkpoint_args",),
        "read_metadata": (),
    },
    "megatron.training.training": {
        "pretrain": ("forward_step_func",),
        "setup_model_and_optimizer": ("model_type",),
        "load_checkpoint": ("opt_param_scheduler",),
        "save_checkpoint": ("iteration",),
        "build_train_valid_test_data_iterators": ("build_train_valid_test_datasets_provider",),
        "build_train_valid_test_datasets": ("build_train_valid_test_datasets_provider",),
        "build_pretraining_data_loader": ("dataset", "consumed_samples"),
        "train_step": ("forward_step_func", "data_iterator", "model", "optimizer", "config", "forward_backward_func"),
        "dummy_train_step": ("data_iterator",),
        "training_log": ("iteration",),
        "print_rank_last": ("message",),
        "maybe_finalize_async_save": (),
        "train": (),
    },
    "megatron.core.timers": {"Timers.log": ("names",), "Timers.write": ("names",)},
    "megatron.core.pipeline_parallel.schedules": {"forward_step": (), "backward_step": ()},
    "megatron.core.parallel_state": {
        "initialize_model_parallel": (
            *("pipeline_model_parallel_comm_backend", "context_parallel_size", "distributed_timeout_minutes"),
            *("nccl_communicator_config_path", "order", "get_embedding_ranks", "get_position_embedding_ranks"),
            "create_gloo_process_groups",
        ),
    },
}
"""What is replaced or called from the start on, with the parameters that are relied on by name."""

_UNKNOWN: Final = "this version of hotspa_megatron does not know it"


def version() -> str:
    from megatron.core.package_info import __version__

    return str(__version__)


def release() -> tuple[int, ...]:
    """Major and minor number."""
    return tuple(int(part) for part in version().split(".")[:2])


def check_tested() -> None:
    """Raise ValueError for a Megatron that is newer than what the tests run."""
    if release() > NEWEST:
        raise ValueError(
            f"megatron-core {version()} is newer than {NEWEST[0]}.{NEWEST[1]}, the newest that was tested; install that, or "
            f"write allow_untested: [megatron] to try it ({FLAG} is set)"
        )


def check_version() -> None:
    """Raise ValueError for a Megatron that is older than supported, that cannot be imported, or whose names have changed."""
    try:
        found_release = release()
    except Exception as error:
        raise ValueError(not_imported("megatron.core", error)) from None
    if found_release < OLDEST:
        raise ValueError(
            f"megatron-core {version()} is older than {OLDEST[0]}.{OLDEST[1]}, the oldest supported; upgrade it"
        )
    for module, functions in HOOKED.items():
        try:
            holder = importlib.import_module(module)
        except Exception as error:  # half an installation of what Megatron uses raises anything
            raise ValueError(not_imported(module, error)) from None
        for path, parameters in functions.items():
            name = f"{module.removeprefix('megatron.')}.{path}"
            try:
                function: Any = functools.reduce(getattr, path.split("."), holder)
            except AttributeError:
                raise ValueError(f"megatron-core {version()}: there is no {name}; {_UNKNOWN}") from None
            known = inspect.signature(function).parameters
            if missing := [each for each in parameters if each not in known]:
                raise ValueError(f"megatron-core {version()}: {name} has no parameter {', '.join(missing)}; {_UNKNOWN}")


def not_imported(module: str, error: Exception) -> str:
    """What failed, and the file that raised it: Megatron imports much that it can do without, and so do those packages."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    what = str(error).strip().splitlines()[:1] or [""]
    return f"{module} cannot be imported: {type(error).__name__}: {what[0]} (raised in {last}); repair or remove that package"


def interleaves() -> bool:
    """Whether this Megatron's gradients with virtual stages are those of a single process."""
    return release() >= (0, 18)


def check_interleaving(strategies: Iterable[Strategy]) -> None:
    """ValueError for virtual stages where they give wrong gradients."""
    interleaved = [str(each) for each in strategies if each.vpp > 1]
    if interleaved and not interleaves():
        raise ValueError(
            f"{interleaved[0]}: virtual pipeline stages need megatron-core 0.18 or newer, and this is {version()}, whose "
            "interleaved schedule gave wrong gradients here; write vpp 1, or remove --num-layers-per-virtual-pipeline-stage"
        )


def local_attention_names() -> list[tuple[Any, str]]:
    """Modules, and names in them, from which builders of --transformer-impl local take their attention."""
    from megatron.core.models import backends

    names: list[tuple[Any, str]] = [(backends, "DotProductAttention")]
    with contextlib.suppress(ModuleNotFoundError):  # from 0.19 on
        names.append((importlib.import_module("megatron.training.models.gpt"), "MCoreDotProductAttention"))
    return names


def process_groups() -> Any:
    """Megatron's ProcessGroupCollection of the active parallel state."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    return ProcessGroupCollection.use_mpu_process_groups()


def initialize_model_parallel(strategy: Strategy, args: Any, *, embedding_ranks: Any, position_ranks: Any) -> None:
    """Megatron's own initialisation for ``strategy``; options come from the command line's ``args``.

    No gloo twins: only checkpoints use them, and those are home's.
    """
    from megatron.core import parallel_state

    options = {
        "pipeline_model_parallel_comm_backend": args.pipeline_model_parallel_comm_backend,
        "context_parallel_size": strategy.cp,
        "distributed_timeout_minutes": args.distributed_timeout_minutes,
        "nccl_communicator_config_path": args.nccl_communicator_config_path,
        "order": "tp-cp-ep-dp-pp",
        "get_embedding_ranks": embedding_ranks,
        "get_position_embedding_ranks": position_ranks,
        "create_gloo_process_groups": False,
    }
    virtual = strategy.vpp if strategy.vpp > 1 else None
    parallel_state.initialize_model_parallel(strategy.tp, strategy.pp, virtual, **options)
