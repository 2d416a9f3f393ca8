"""Models under strategies: what a built model holds, guests beside home, and siblings on home's own modules.

Home's model is Megatron's. A guest is built by Megatron's own builder and wrapped in its DDP, without the distributed
optimizer and without overlap; its parameter and gradient memory exists only while it runs. A sibling has no model: for
its segment, home's modules look at the sibling's context-parallel groups.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hotspa_megatron.hooks import compat
from hotspa_megatron.hooks.parallel_state import ParallelState, ParallelStates, preserved_random_state
from hotspa_megatron.hooks.patching import Patches
from hotspa_megatron.planning.param_layout import (
    OUTPUT_LAYER,
    WORD_EMBEDDINGS,
    Layer,
    Layout,
    LogicalParameter,
    Place,
    RankPieces,
    flat_shards,
    model_layout,
)
from hotspa_megatron.runtime.storage import Storage, flatten, resident_bytes
from hotspa_megatron.strategy import Strategy

_LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def chunks_of(model: Sequence[Any]) -> list[Any]:
    """The plain models inside DDP and precision wrappers."""
    from megatron.core.utils import unwrap_model

    return list(unwrap_model(list(model)))


# --------------------------------------------------------------------------------------------- logical parameters of home


@dataclasses.dataclass(frozen=True)
class LogicalModel:
    """The whole model as read off home: parameters sorted by name, home's layers per stage, tied embeddings or not."""

    parameters: tuple[LogicalParameter, ...]
    home_layers: tuple[tuple[int, ...], ...]
    tied: bool

    def layout(self, strategy: Strategy, layers: Sequence[Sequence[int]]) -> Layout:
        return model_layout(self.parameters, strategy, layers, self.tied)


def global_name(model: Any, name: str) -> str:
    """Megatron's parameter name with the layer's global number, and one name for both copies of tied embeddings."""
    match = _LAYER_NAME.fullmatch(name)
    if match:
        number = model.decoder.layers[int(match[1])].layer_number - 1
        return f"decoder.layers.{number}.{match[2]}"
    if name == OUTPUT_LAYER and model.share_embeddings_and_output_weights:
        return WORD_EMBEDDINGS
    return name


def _place_of(name: str) -> Place:
    match = _LAYER_NAME.fullmatch(name)
    if match:
        return Layer(int(match[1]))
    if name.startswith("embedding."):
        return "embedding"
    if name == OUTPUT_LAYER or name.startswith("decoder.final_layernorm."):
        return "head"
    raise ValueError(f"parameter {name} has no known place in the pipeline; only GPT models are supported")


def _logical(model: Any, name: str, parameter: Any, tp: int) -> LogicalParameter:
    shape = tuple(parameter.shape)
    name = global_name(model, name)
    if not getattr(parameter, "tensor_model_parallel", False):
        return LogicalParameter(name=name, shape=shape, place=_place_of(name))
    dim, stride = parameter.partition_dim, parameter.partition_stride
    if ".linear_fc1." in name and model.config.gated_linear_unit:
        # Some versions leave the attribute at 1; what lies in memory is [gate part; up part] in all of them.
        stride = 2
    whole = tuple(size * tp if index == dim else size for index, size in enumerate(shape))
    return LogicalParameter(name=name, shape=whole, place=_place_of(name), split_dim=dim, split_stride=stride)


def read_home(model: Sequence[Any], home: Strategy) -> LogicalModel:
    """Read the logical parameters off home's model on every rank and put them together. Collective.

    Raises ValueError for a parameter that has no place, RuntimeError where ranks disagree on one.
    """
    own: dict[str, LogicalParameter] = {}
    layers: list[int] = []
    for chunk in chunks_of(model):
        layers += [layer.layer_number - 1 for layer in chunk.decoder.layers]
        for name, parameter in chunk.named_parameters():
            logical = _logical(chunk, name, parameter, home.tp)
            own[logical.name] = logical
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (own, layers))
    merged: dict[str, LogicalParameter] = {}
    stages: list[tuple[int, ...]] = [()] * home.pp
    for rank, (theirs, their_layers) in enumerate(gathered):
        stages[home.coordinates(rank).pp] = tuple(their_layers)
        for name, logical in theirs.items():
            if merged.setdefault(name, logical) != logical:
                raise RuntimeError(
                    f"rank {rank} holds {logical}, another rank {merged[name]}: models differ between ranks"
                )
    tied = bool(chunks_of(model)[0].share_embeddings_and_output_weights)
    return LogicalModel(tuple(merged[name] for name in sorted(merged)), tuple(stages), tied)


def local_tensors(model: Sequence[Any], logical: LogicalModel) -> dict[int, Any]:
    """This rank's parameters by index into the logical ones. RuntimeError for one that home's model does not have."""
    index = {parameter.name: i for i, parameter in enumerate(logical.parameters)}
    found: dict[int, Any] = {}
    for chunk in chunks_of(model):
        for name, parameter in chunk.named_parameters():
            known = index.get(global_name(chunk, name))
            if known is None:
                raise RuntimeError(f"parameter {global_name(chunk, name)} is not in home's model")
            found[known] = parameter
    return found


def check_against(layout: Layout, tensors: Mapping[int, torch.nn.Parameter], rank: int) -> None:
    """Raise RuntimeError where the built model and the planned layout of this rank differ in any parameter."""
    planned = {piece.parameter for piece in layout.pieces(rank)}
    for index in sorted(planned | set(tensors)):
        name = layout.parameters[index].name
        if index not in planned or index not in tensors:
            raise RuntimeError(
                f"{name} is {'built but not planned' if index in tensors else 'planned but not built'} on rank {rank}"
            )
        built, shape = tuple(tensors[index].shape), layout.local_shape(index, rank)
        if built != shape:
            raise RuntimeError(
                f"{name} has local shape {built} on rank {rank}, but {shape} was planned under {layout.strategy}"
            )


def owned_gradients(model: Sequence[Any], layout: Layout, tensors: Mapping[int, torch.nn.Parameter]) -> RankPieces:
    """The gradient elements that each rank's optimizer reads at home: its shard, or all of its tensors. Collective."""
    index_of = {parameter: index for index, parameter in tensors.items()}
    own: dict[int, list[tuple[int, int]]] = {}
    for chunk in model:
        sharded = chunk.ddp_config.use_distributed_optimizer
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            for parameter, (first, last, bucket_index, *_) in buffer.param_index_map.items():
                low, high = first, last
                if sharded:
                    bucket = buffer.buckets[bucket_index]
                    size = bucket.grad_data.numel() // buffer.data_parallel_group.size()
                    shard = bucket.offset + buffer.data_parallel_group.rank() * size
                    low, high = max(first, shard), min(last, shard + size)
                if low < high:
                    own[index_of[parameter]] = [(low - first, high - first)]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return flat_shards(layout, dict(enumerate(gathered)))


# ------------------------------------------------------------------------------------------------------------- guests


@dataclasses.dataclass
class Guest:
    """A guest's model. ``parameters`` and ``gradients``: this rank's tensors by logical index, valid while resident."""

    state: ParallelState
    model: list[Any]
    layout: Layout
    parameters: dict[int, Any]
    _parameter_storage: list[Storage]
    _gradient_storage: list[Storage]

    @property
    def config(self) -> Any:
        from megatron.core.utils import get_model_config

        return get_model_config(self.model[0])

    @property
    def gradients(self) -> dict[int, torch.Tensor]:
        return {index: parameter.main_grad for index, parameter in self.parameters.items()}

    @property
    def parameter_bytes(self) -> int:
        """Bytes of this rank's parameters while they are resident."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.parameters.values())

    @property
    def resident_bytes(self) -> int:
        """Bytes of parameter and gradient memory held now on this rank."""
        return resident_bytes(self._parameter_storage) + resident_bytes(self._gradient_storage)

    def materialise(self) -> None:
        """Give parameters memory (undefined until the switch fills it) and gradients zeros."""
        self.materialise_parameters()
        for storage in self._gradient_storage:
            storage.materialise()
        for chunk in self.model:
            # Zeroes the buffers and resets DDP's own flags with them.
            chunk.zero_grad_buffer()

    def materialise_parameters(self) -> None:
        """Give parameters alone memory; what they hold stays where they have some."""
        for storage in self._parameter_storage:
            storage.materialise()

    def release_parameters(self) -> None:
        for storage in self._parameter_storage:
            storage.release()

    def release_gradients(self) -> None:
        for storage in self._gradient_storage:
            storage.release()


def build_guest(
    states: ParallelStates,
    strategy: Strategy,
    logical: LogicalModel,
    layers: Sequence[Sequence[int]],
    build: Callable[[ParallelState], list[Any]],
) -> Guest:
    """Build a guest with Megatron's own builder and release its memory. Collective.

    ``build`` makes the DDP-wrapped model under the active strategy. RuntimeError where it is not what was planned.
    """
    with states.activate(strategy) as state, preserved_random_state():
        model = build(state)
    layout = logical.layout(strategy, layers)
    tensors = local_tensors(model, logical)
    check_against(layout, tensors, dist.get_rank())
    gradients = [Storage(b.grad_data) for chunk in model for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    # In the order of the plans: what a message brings then lies side by side.
    parameters = flatten([tensors[index] for index in sorted(tensors)])
    guest = Guest(state, model, layout, tensors, parameters, gradients)
    for chunk in model:
        chunk.train()
    guest.release_parameters()
    guest.release_gradients()
    return guest


def builder_for(
    args: Any, *, cfg_container: Any, model_provider: Any, model_type: Any
) -> Callable[[ParallelState], list[Any]]:
    """How this job builds its model: from its model configuration (0.19 on) or its model provider."""

    def from_configuration(state: ParallelState) -> list[Any]:
        configuration = copy.deepcopy(cfg_container.model)
        _set_sizes(getattr(configuration, "transformer", configuration), state)
        if getattr(configuration, "should_pad_vocab", False):
            configuration.vocab_size, configuration.should_pad_vocab = args.padded_vocab_size, False
        ddp = copy.deepcopy(cfg_container.ddp)
        for name, value in _GUEST_DDP.items():
            setattr(ddp, name, value)
        builder = configuration.get_builder_cls()(configuration)
        return list(
            builder.build_distributed_models(
                pg_collection=state.groups, ddp_config=ddp, wrap_with_ddp=True, data_parallel_random_init=False
            )
        )

    def from_provider(state: ParallelState) -> list[Any]:
        from megatron.training import training

        patches = Patches()
        for name, value in _GUEST_DDP.items():
            if hasattr(args, name):
                patches.set(args, name, value)
        try:
            return list(training.get_model(model_provider, model_type, pg_collection=state.groups))
        finally:
            patches.undo_all()

    return from_configuration if getattr(cfg_container, "model", None) is not None else from_provider


_GUEST_DDP = {
    "use_distributed_optimizer": False,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "align_param_gather": False,
}


def _set_sizes(transformer: Any, state: ParallelState) -> None:
    """Point a TransformerConfig at a guest's layout; the same fields as in the argument namespace."""
    for name in compat.TENSOR_PARALLEL_FIELDS:
        if getattr(transformer, name, None) is not None:
            setattr(transformer, name, state.strategy.tp)
    transformer.pipeline_model_parallel_size = state.strategy.pp
    transformer.virtual_pipeline_model_parallel_size = state.strategy.vpp if state.strategy.vpp > 1 else None
    transformer.microbatch_group_size_per_vp_stage = state.strategy.pp
    # As Megatron sets them: transfers overlap where stages interleave, and only there.
    transformer.overlap_p2p_comm = state.strategy.vpp > 1
    transformer.batch_p2p_comm = not transformer.overlap_p2p_comm
    transformer.context_parallel_size = state.strategy.cp
    transformer.sequence_parallel = state.sizes["sequence_parallel"]
    if state.strategy.pp > 1 and transformer.pipeline_dtype is None:
        transformer.pipeline_dtype = transformer.params_dtype
    for name in compat.UNEVEN_PIPELINE_FIELDS:
        if hasattr(transformer, name):
            setattr(transformer, name, False if isinstance(getattr(transformer, name), bool) else None)


@contextlib.contextmanager
def packed_only(model: Sequence[Any]) -> Iterator[None]:
    """Refuse a forward that is not told where the sequences of a pack begin: they would see each other."""

    def check(_: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = [*positional, *named.values()]
        if not any(getattr(value, "qkv_format", None) == "thd" for value in given):
            raise ValueError(
                "forward_step calls the model without packed_seq_params, so the sequences of a pack would see each "
                "other; build them from cu_seqlens and pass packed_seq_params=..., as Megatron's own forward_step does"
            )

    handles = [chunk.register_forward_pre_hook(check, with_kwargs=True) for chunk in chunks_of(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# ------------------------------------------------------------------------------------------------------------ siblings


@contextlib.contextmanager
def home_modules_under(model: Sequence[Any], home: ParallelState, sibling: ParallelState) -> Iterator[None]:
    """Let home's own modules run under a sibling's context-parallel groups, and restore home's.

    Swapped is whatever in a module's attributes is one of home's groups or its collection of them, and the configuration's
    sizes: storage, hooks and Parameter objects stay the ones that home's DDP knows.
    """
    fields = [field.name for field in dataclasses.fields(home.groups)]
    swap: dict[int, Any] = {}
    for name in fields:
        group = getattr(home.groups, name, None)
        if isinstance(group, dist.ProcessGroup) and id(group) not in swap:
            swap[id(group)] = getattr(sibling.groups, name)
    patches = Patches()
    try:
        for chunk in chunks_of(model):
            for module in chunk.modules():
                _point_at(module, swap, sibling, patches)
        yield
    finally:
        patches.undo_all()


def _point_at(module: torch.nn.Module, swap: Mapping[int, Any], sibling: ParallelState, patches: Patches) -> None:
    from megatron.core.process_groups_config import ProcessGroupCollection

    # As home left them: a group that is put in here may be one of home's own in another role, and must not be swapped again.
    held = list(vars(module).items())
    if hasattr(module, "set_context_parallel_group") and hasattr(module, "cp_group"):
        _switch_transformer_engine(module, sibling, patches)
    for name, value in held:
        if isinstance(value, ProcessGroupCollection):
            patches.set(module, name, sibling.groups)
        elif isinstance(value, dist.ProcessGroup) and id(value) in swap:
            patches.set(module, name, swap[id(value)])
        elif name == "config" and value.context_parallel_size != sibling.strategy.cp:
            patches.set(value, "context_parallel_size", sibling.strategy.cp)


def _switch_transformer_engine(module: Any, sibling: ParallelState, patches: Patches) -> None:
    """Point attention of Transformer Engine's at a sibling's ranks: it has one setter for all that it keeps of them."""
    # The setter's keywords are the attributes that it sets, and what is not given goes back to a default: the way in
    # which ranks exchange keys and values (--cp-comm-type) stays home's.
    before = {name: getattr(module, name) for name in _TRANSFORMER_ENGINES_CONTEXT if hasattr(module, name)}
    group = sibling.groups.cp
    module.set_context_parallel_group(
        **before
        | {
            "cp_group": group,
            "cp_global_ranks": dist.get_process_group_ranks(group),
            "cp_stream": before["cp_stream"] or _context_stream(),
        }
    )
    patches.on_undo(
        f"{type(module).__name__}.set_context_parallel_group", lambda: module.set_context_parallel_group(**before)
    )


_TRANSFORMER_ENGINES_CONTEXT = (
    "cp_group",
    "cp_global_ranks",
    "cp_stream",
    "cp_comm_type",
    "load_balancing_strategy",
)
"""What set_context_parallel_group takes, as far as the release at hand has it."""


@functools.cache
def _context_stream() -> torch.cuda.Stream:
    """The second stream of all attention whose home has no context parallelism; memory is kept apart by stream."""
    return torch.cuda.Stream()
