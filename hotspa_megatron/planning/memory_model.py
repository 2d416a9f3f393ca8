"""How many bytes a rank holds under an execution, and how many tokens of a micro-batch then still fit.

Parameters, gradients and optimizer state are counted exactly, stage by stage, from ``param_layout``. Activations are
counted from the tensors that the backward pass keeps: of fused layers scaled to published measurements, of Megatron's local
ones as they are, which tests hold against measured peaks. Beside them lie the communicators of all strategies of a plan, and
what guests' moves keep. Never allocates anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from hotspa_megatron.config import SwitchConfig
from hotspa_megatron.planning.alignment import alignment_of
from hotspa_megatron.planning.communicators import added_sizes
from hotspa_megatron.planning.execution import Execution
from hotspa_megatron.planning.hardware import Hardware
from hotspa_megatron.planning.model_shape import ModelShape
from hotspa_megatron.planning.packing import LARGEST_MICRO_BATCH
from hotspa_megatron.planning.param_layout import Layout, gpt_parameters, model_layout
from hotspa_megatron.strategy import Strategy, layers_by_stage, stage_layers

ADAM_BYTES: Final = 12
"""Optimizer state per bf16 parameter: fp32 master copy and both moments."""
GIB: Final = 2**30
"""Bytes."""


def adam_bytes(parameter_bytes: int) -> int:
    """Adam's state per parameter of so many bytes: fp32 parameters are their own master copy."""
    return ADAM_BYTES if parameter_bytes == 2 else ADAM_BYTES - 4


_KEPT: Final = 1.14
"""What is kept beside the tensors counted, as a factor: workspaces, statistics, dropout-free residual copies.

With ``_GATHERED`` it fits Hydraulis' bytes per token, layer and hidden channel at tp 1, 2, 4, 8 and 16: 38, 39, 42, 48, 61.
"""
_GATHERED: Final = 1.4
"""Bytes per hidden channel, token and layer, in 16-bit formats, of what tp does not divide: inputs gathered over tp."""
_LOGITS_BYTES: Final = 8
"""Per vocabulary entry and token: 16-bit logits, their fp32 copy that turns into the softmax, a 16-bit gradient."""
_CHUNK_BYTES: Final = SwitchConfig.chunk_mb << 20
"""Each of the two buffers of a switch."""
_GLOO_CHUNK_BYTES: Final = 1 << 24
"""The same with gloo, which gains nothing from larger ones: ``runtime.transport.GLOO_PACE.buffer``."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes of the fullest rank. ``home_resident``: home's own, where a guest runs beside it.

    ``activations`` includes the logits. ``communicators``: of those that home does not have. ``transfers``: gradients of guests
    on their way home, and what a guest's own moves take above the activations, beside which they never are. ``total`` is what
    is compared with ``limit``.
    """

    parameters: int
    gradients: int
    optimizer: int
    home_resident: int
    activations: int
    communicators: int
    transfers: int
    limit: int

    @property
    def total(self) -> int:
        model = self.parameters + self.gradients + self.optimizer + self.home_resident
        return model + self.activations + self.communicators + self.transfers

    @property
    def fits(self) -> bool:
        return self.total <= self.limit


class MemoryModel:
    """Bytes of one model on one world. ``home`` given: its uneven stages hold for its layout; all others are even.

    ``home_layers``: the layers of home's stages, where they do not follow from the shape. ``optimizer_bytes``: state per
    parameter. ``fold_itemsize``: bytes per element of a guest's gradients on their way home; None: main_grad's. Results
    depend on the arguments alone and are kept.
    """

    def __init__(
        self,
        shape: ModelShape,
        hardware: Hardware,
        world_size: int,
        *,
        home: Strategy | None = None,
        home_layers: Sequence[Sequence[int]] | None = None,
        optimizer_bytes: int = ADAM_BYTES,
        fold_itemsize: int | None = None,
    ) -> None:
        self.shape = shape
        self.hardware = hardware
        self.world_size = world_size
        self.optimizer_bytes = optimizer_bytes
        self.fold_itemsize = shape.gradient_bytes if fold_itemsize is None else fold_itemsize
        self._home = home
        self._home_layers = home_layers
        self._layouts: dict[Strategy, Layout] = {}
        self._stages: dict[Strategy, Sequence[Sequence[int]]] = {}
        self._numels: dict[Strategy, tuple[int, ...]] = {}
        self._fold_bytes: dict[tuple[Strategy, Strategy, int], int] = {}
        self._static: dict[tuple[Strategy, Strategy], tuple[tuple[int, int, int, int, int, int], ...]] = {}
        self._communicators: dict[tuple[Strategy, frozenset[Strategy]], int] = {}

    @cached_property
    def _parameters(self) -> tuple[object, ...]:
        return gpt_parameters(self.shape)

    def plain(self, strategy: Strategy) -> Strategy:
        """The strategy that stands for all with its layout."""
        return Strategy.from_world(self.world_size, tp=strategy.tp, cp=1, pp=strategy.pp, vpp=strategy.vpp)

    def stages(self, strategy: Strategy) -> Sequence[Sequence[int]]:
        """Layers of each pipeline stage, all its chunks'."""
        if strategy not in self._stages:
            self._stages[strategy] = self._stages_of(strategy)
        return self._stages[strategy]

    def _stages_of(self, strategy: Strategy) -> Sequence[Sequence[int]]:
        shape = self.shape
        if self._home is not None and strategy.same_layout(self._home):
            if self._home_layers is not None:
                return self._home_layers
            if strategy.vpp == 1:
                first, last = shape.layers_in_first_stage, shape.layers_in_last_stage
                return stage_layers(shape.num_layers, strategy.pp, first, last)
        return layers_by_stage(stage_layers(shape.num_layers, strategy.pp * strategy.vpp), strategy.pp)

    def layout(self, strategy: Strategy) -> Layout:
        """Where the parameters lie; one for all strategies that lay them alike."""
        key = self.plain(strategy)
        if key not in self._layouts:
            self._layouts[key] = model_layout(
                self._parameters,  # type: ignore[arg-type]
                key,
                self.stages(strategy),
                self.shape.tied_embeddings,
            )
        return self._layouts[key]

    def numels(self, strategy: Strategy) -> tuple[int, ...]:
        """Parameters that a rank of each pipeline stage holds."""
        # Asked for hundreds of thousands of times: by the strategy itself first, by its layout where it is new.
        if strategy not in self._numels:
            key = self.plain(strategy)
            if key not in self._numels:
                layout = self.layout(strategy)
                per_stage = self.world_size // strategy.pp
                self._numels[key] = tuple(layout.local_numel(stage * per_stage) for stage in range(strategy.pp))
            self._numels[strategy] = self._numels[key]
        return self._numels[strategy]

    def optimizer_shard(self, home: Strategy, stage: int) -> int:
        """Bytes of optimizer state of a rank of the stage."""
        return self.optimizer_bytes * -(-self.numels(home)[stage] // self._shards(home))

    def activation_bytes(self, execution: Execution, stage: int) -> float:
        """Bytes that a rank of the stage keeps per token of a micro-batch (counted over all cp ranks).

        Under 1F1B stage s keeps pp - s micro-batches at most; interleaved schedules keep
        2 * (pp - s - 1) + (vpp - 1) * pp + 1 chunks.
        """
        strategy, shape = execution.strategy, self.shape
        stages, last = self.stages(strategy), stage == strategy.pp - 1
        if strategy.vpp == 1:
            live = float(strategy.pp - stage)
        else:
            live = (2 * (strategy.pp - stage - 1) + (strategy.vpp - 1) * strategy.pp + 1) / strategy.vpp
        full = self._local_layer_bytes(strategy) if shape.local_layers else self._layer_bytes(strategy.tp)
        parted = strategy.tp if shape.sequence_parallel else 1
        kept = shape.parameter_bytes * shape.hidden_size / parted
        layers, again = len(stages[stage]), execution.recompute
        per_token = live * layers * (full * (1 - again) + kept * again)
        # The layer that is being recomputed is there in full; where others are not recomputed, in the room that they left.
        recomputed = full * max(0.0, 1 - (1 - again) * layers) if again else 0.0
        if shape.local_layers:
            passing = recomputed + self._local_passing_bytes(strategy)
            per_token += max(passing, self._local_head_bytes(strategy)) if last else passing
        else:
            per_token += recomputed
            if last:
                per_token += _LOGITS_BYTES * shape.padded_vocab_size / strategy.tp
        return per_token / strategy.cp

    def held(self, execution: Execution, home: Strategy, tokens: int, others: Sequence[Strategy] = ()) -> Held:
        """What the fullest rank holds with micro-batches of ``tokens`` under an execution, ``home`` being resident.

        ``others``: those that the plan's other groups run under, home's aside; one that several groups share counts for each.
        """
        communicators = self._added_communicators(execution.strategy, home, others)
        found = []
        for stage, parameters, gradients, optimizer, resident, home_stage in self._fixed(execution.strategy, home):
            activations = round(
                self.activation_bytes(execution, stage) * tokens + self._weight_gradient_bytes(execution, stage)
            )
            moves = self._moves(execution.strategy, home, home_stage, others)
            waiting = sum(self.fold_bytes(other, home, home_stage) for other in others)
            found.append(
                Held(
                    parameters=parameters,
                    gradients=gradients,
                    optimizer=optimizer,
                    home_resident=resident,
                    activations=activations,
                    communicators=communicators,
                    transfers=waiting + max(0, moves - activations),
                    limit=self.hardware.usable_bytes,
                )
            )
        return max(found, key=lambda held: held.total)

    def capacity(self, execution: Execution, home: Strategy, others: Sequence[Strategy] = ()) -> int:
        """Tokens of a micro-batch that fit on every rank, a multiple of what the strategy aligns to; 0 where none do.

        ``others`` as for ``held``.
        """
        most = float(LARGEST_MICRO_BATCH)
        free = self.hardware.usable_bytes - self._added_communicators(execution.strategy, home, others)
        for stage, *fixed, home_stage in self._fixed(execution.strategy, home):
            left = free - sum(fixed) - sum(self.fold_bytes(other, home, home_stage) for other in others)
            if left < self._moves(execution.strategy, home, home_stage, others):
                return 0
            kept = left - self._weight_gradient_bytes(execution, stage)
            most = min(most, kept / self.activation_bytes(execution, stage))
        unit = alignment_of(execution.strategy, sequence_parallel=self.shape.sequence_parallel).total
        return max(0, int(most) // unit * unit)

    def fold_bytes(self, guest: Strategy, home: Strategy, home_stage: int) -> int:
        """What a rank of home's stage keeps from the end of a guest's segment to that of the step; 0 for home's siblings.

        Gradients that it owns at home arrive beside home's own, to be added last. What it sends lies there as well: about as
        much, since owners are spread evenly, less what is owned where it is; and no more than the guest has.
        """
        key = guest, home, home_stage
        if key not in self._fold_bytes:
            self._fold_bytes[key] = 0 if guest.same_layout(home) else self._fold_bytes_of(*key)
        return self._fold_bytes[key]

    def _fold_bytes_of(self, guest: Strategy, home: Strategy, home_stage: int) -> int:
        (whole,) = self.numels(Strategy.from_world(self.world_size, tp=1, cp=1, pp=1))
        owned, held = -(-self.numels(home)[home_stage] // self._shards(home)), min(self.numels(guest))
        return self.fold_itemsize * (owned + min(round(owned * (1 - held / whole)), max(self.numels(guest))))

    def _moves(self, strategy: Strategy, home: Strategy, home_stage: int, others: Sequence[Strategy]) -> int:
        """The most that a guest's own switch and fold take beside its parameters and gradients, without activations."""
        if strategy.same_layout(home):
            return 0
        # What a switch comes out of stays until it is done.
        guests = {each for each in others if not each.same_layout(home) and each != strategy}
        before = max((max(self.numels(each)) for each in guests), default=0)
        chunk = _GLOO_CHUNK_BYTES if self._on_gloo else _CHUNK_BYTES
        return max(2 * chunk + self.shape.parameter_bytes * before, self.fold_bytes(strategy, home, home_stage))

    @property
    def _on_gloo(self) -> bool:
        """Whether moves go through gloo, whose communicators take nothing of a device."""
        return self.hardware.communicator_bytes(max(2, self.world_size)) == 0

    def _added_communicators(self, strategy: Strategy, home: Strategy, others: Sequence[Strategy]) -> int:
        """Bytes of the communicators of all strategies that home does not have."""
        key = home, frozenset((strategy, *others))
        if key not in self._communicators:
            sizes = () if self._on_gloo else added_sizes(home, key[1])
            self._communicators[key] = sum(self.hardware.communicator_bytes(size) for size in sizes)
        return self._communicators[key]

    def _shards(self, home: Strategy) -> int:
        """Over how many ranks home's optimizer divides what a stage holds."""
        return home.dp * home.cp if self.shape.distributed_optimizer else 1

    def _fixed(self, strategy: Strategy, home: Strategy) -> tuple[tuple[int, int, int, int, int, int], ...]:
        """(stage, parameters, gradients, optimizer, home's, home's stage), all but stages in bytes, of every kind of rank."""
        key = self.plain(strategy), home
        if key not in self._static:
            shape, numels, at_home = self.shape, self.numels(strategy), self.numels(home)
            own = strategy.same_layout(home)
            pairs = {
                (rank * strategy.pp // self.world_size, rank * home.pp // self.world_size)
                for rank in self._firsts(strategy, home)
            }
            rows = []
            for stage, home_stage in sorted(pairs):
                optimizer = self.optimizer_shard(home, home_stage)
                resident = at_home[home_stage] * (shape.parameter_bytes + shape.gradient_bytes) + optimizer
                rows.append(
                    (
                        stage,
                        numels[stage] * shape.parameter_bytes,
                        numels[stage] * shape.gradient_bytes,
                        optimizer if own else 0,
                        0 if own else resident,
                        home_stage,
                    )
                )
            self._static[key] = tuple(rows)
        return self._static[key]

    def _firsts(self, strategy: Strategy, home: Strategy) -> list[int]:
        """One rank of every pair of stages: stages are runs of ranks, so that their first ranks do."""
        starts = {stage * self.world_size // each.pp for each in (strategy, home) for stage in range(each.pp)}
        return sorted(starts)

    def _layer_bytes(self, tp: int) -> float:
        """Bytes that one layer keeps per token of a rank without recomputation, with fused attention.

        Inputs of both norms and of what follows them; queries, keys, values and the attention's output; both sides of
        the activation function. Sequence parallelism divides the first by tp, tensor parallelism the others.
        """
        shape = self.shape
        size, hidden = shape.parameter_bytes, shape.hidden_size
        attention = shape.num_attention_heads * shape.kv_channels
        keys = max(shape.num_query_groups, min(tp, shape.num_attention_heads)) * shape.kv_channels
        wide = shape.ffn_hidden_size * (3 if shape.gated_linear_unit else 2)
        norms = 4 * hidden / (tp if shape.sequence_parallel else 1)
        split = (2 * attention + 2 * keys + wide) / tp
        # A gathered input is there once per layer, on every rank: divided by tp it grows with tp, as measured.
        return _KEPT * size * (norms + split) + _GATHERED * hidden * size / 2

    # ------------------------------------------------------------------------- layers of --transformer-impl local, as they are

    def _local_layer_bytes(self, strategy: Strategy) -> float:
        """Bytes that a layer of torch's own operators keeps per token of a rank, as saved-tensor hooks show them.

        Of each norm what comes in, the normalised and (RMSNorm) the weighted one; the fused projection, whose values are
        read in place; rotated queries and keys with the angles' cosines and sines; what attention gives, with a number per
        head; of a gated MLP both halves, the activated one, the other plus its offset, and their product. With context
        parallelism keys and values of all ranks, and attention's result in parts and as a whole.
        """
        shape, tp = self.shape, strategy.tp
        queries = shape.num_attention_heads * shape.kv_channels / tp
        keys = max(1.0, shape.num_query_groups / tp) * shape.kv_channels
        norms = 2 * ((3 if shape.rms_norm else 2) * shape.hidden_size + 1) / (tp if shape.sequence_parallel else 1)
        rotary, projection = shape.learned_positions is None, queries + 2 * keys
        attention = queries + shape.num_attention_heads / tp + (queries + 4 * shape.kv_channels if rotary else 0.0)
        if strategy.cp > 1:
            # Keys and values were copied for their journey: of the projection only unrotated queries are read later.
            attention += queries + 2 * keys * strategy.cp + (0.0 if rotary else projection)
        else:
            attention += projection + (keys if rotary else 0.0)
        mlp = (5 if shape.gated_linear_unit else 2) * shape.ffn_hidden_size / tp
        return shape.parameter_bytes * (norms + attention + mlp)

    def _local_passing_bytes(self, strategy: Strategy) -> float:
        """Bytes per token of a rank that come and go in a layer's backward pass at its fullest: within a gated MLP."""
        wide = (2 if self.shape.gated_linear_unit else 1) * self.shape.ffn_hidden_size / strategy.tp
        return self.shape.parameter_bytes * (wide + self.shape.hidden_size)

    def _local_head_bytes(self, strategy: Strategy) -> float:
        """The same of the last norm, the output layer and the loss: logits in single precision, and the hidden state's."""
        wide = self.shape.padded_vocab_size / strategy.tp
        copies = 1 if self.shape.parameter_bytes == 4 else 2
        return 4 * copies * wide + 4 * self.shape.parameter_bytes * self.shape.hidden_size

    def _weight_gradient_bytes(self, execution: Execution, stage: int) -> float:
        """Bytes of the largest gradient before it is added to the others: local layers do not add while they multiply."""
        shape, strategy = self.shape, execution.strategy
        if not shape.local_layers:
            return 0.0
        rows = (2 if shape.gated_linear_unit else 1) * shape.ffn_hidden_size
        if stage == strategy.pp - 1:
            rows = max(rows, shape.padded_vocab_size)
        return shape.parameter_bytes * shape.hidden_size * rows / strategy.tp
