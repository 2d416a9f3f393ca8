"""Which rank holds which region of every parameter under a strategy.

A parameter is known by its global name (Megatron's own module name with the global layer number) and its whole shape; a
layout says where its regions lie in the ranks' local tensors. The map is physical: the interleaved halves of a gated
fc1, uneven stages, both copies of tied embeddings, the flat intervals of the distributed optimizer. Nothing here moves
data or knows a device; ``reshard_plan`` reads two layouts and decides the transfers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol

from hotspa_megatron.planning.model_shape import ModelShape
from hotspa_megatron.strategy import Strategy

WORD_EMBEDDINGS: Final = "embedding.word_embeddings.weight"
OUTPUT_LAYER: Final = "output_layer.weight"
"""Untied: a parameter of its own. Tied: the last stage's local name of its copy of the word embeddings, with pp > 1."""

Point = tuple[int, ...]
Interval = tuple[int, int]


class Box(NamedTuple):
    """A half-open n-dimensional region: ``lo[d] <= index[d] < hi[d]`` in every dim, counted in elements."""

    lo: Point
    hi: Point

    @property
    def shape(self) -> Point:
        return tuple(high - low for low, high in zip(self.lo, self.hi, strict=True))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The common region, or None where there is none."""
        lo = tuple(map(max, self.lo, other.lo))
        hi = tuple(map(min, self.hi, other.hi))
        return Box(lo, hi) if all(low < high for low, high in zip(lo, hi, strict=True)) else None

    def contains(self, other: Box) -> bool:
        return all(mine <= theirs for mine, theirs in zip(self.lo, other.lo, strict=True)) and all(
            theirs <= mine for mine, theirs in zip(self.hi, other.hi, strict=True)
        )

    def shift(self, offset: Point) -> Box:
        """The region moved by ``offset``."""
        return Box(added(self.lo, offset), added(self.hi, offset))


def added(left: Point, right: Point) -> Point:
    return tuple(a + b for a, b in zip(left, right, strict=True))


def subtracted(left: Point, right: Point) -> Point:
    return tuple(a - b for a, b in zip(left, right, strict=True))


class Layer(NamedTuple):
    """The place of a decoder layer's parameters; ``number`` is global and counts from 0."""

    number: int


Place = Layer | Literal["embedding", "head"]
"""Where in the pipeline a parameter lives: with its layer, on the first stage, or on the last."""


@dataclass(frozen=True, kw_only=True)
class LogicalParameter:
    """One parameter of the whole model, whatever ranks its pieces lie on.

    ``shape`` is global, in elements. Tensor parallelism over n ranks splits dim ``split_dim`` (None: every rank of the
    tensor-parallel group holds all of it): the dim is ``split_stride`` equal blocks, each is cut into n equal parts,
    and a rank's local tensor is its parts of all blocks, joined in order. Stride 2 is a gated fc1, whose local tensor
    is [gate part; up part]; everything else, a fused QKV included, is stride 1.
    """

    name: str
    shape: Point
    place: Place
    split_dim: int | None = None
    split_stride: int = 1

    def __post_init__(self) -> None:
        if self.split_dim is not None and not 0 <= self.split_dim < len(self.shape):
            raise ValueError(f"{self.name}: split dim {self.split_dim} is outside shape {self.shape}")
        if self.split_stride < 1:
            raise ValueError(f"{self.name}: split stride {self.split_stride} must be at least 1")


class Piece(NamedTuple):
    """A region that one rank holds: ``box`` is global, ``start`` is where ``box.lo`` sits in the local tensor.

    ``parameter`` is an index into the layout's parameters.
    """

    parameter: int
    box: Box
    start: Point


class Holder(NamedTuple):
    """One rank that holds a region of some parameter; ``box`` and ``start`` as in ``Piece``."""

    rank: int
    box: Box
    start: Point


class Placement(Protocol):
    """What a reshard plan needs to know of one side: any assignment of regions to ranks."""

    @property
    def parameters(self) -> tuple[LogicalParameter, ...]: ...

    @property
    def world_size(self) -> int: ...

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """What the rank holds, sorted."""
        ...

    def holders(self, parameter: int) -> tuple[Holder, ...]:
        """Who holds the parameter of this index, sorted."""
        ...

    def local_shape(self, parameter: int, rank: int) -> Point:
        """Shape of the rank's local tensor that the starts of its pieces refer to."""
        ...


class Layout:
    """A model under a strategy: pieces of every rank. Made by ``model_layout``.

    Ranks that differ only in their dp and cp coordinates hold replicas. Parameters that are cut alike and live on the
    same stages share one result, so that a model of many layers costs little more than one of few.
    """

    def __init__(
        self, parameters: tuple[LogicalParameter, ...], strategy: Strategy, stages: tuple[tuple[int, ...], ...]
    ) -> None:
        """``stages`` holds for each parameter the pipeline stages it lives on, ascending."""
        self.parameters = parameters
        self.strategy = strategy
        self._stages = stages
        self._pieces: dict[tuple[int, int], tuple[Piece, ...]] = {}
        self._holders: dict[tuple[Point, int | None, int, tuple[int, ...]], tuple[Holder, ...]] = {}

    @property
    def world_size(self) -> int:
        return self.strategy.world_size

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """What the rank holds, sorted by parameter and region; ValueError for a rank outside the strategy."""
        at = self.strategy.coordinates(rank)
        if (at.pp, at.tp) not in self._pieces:
            self._pieces[at.pp, at.tp] = tuple(
                Piece(index, box, start)
                for index, parameter in enumerate(self.parameters)
                if at.pp in self._stages[index]
                for box, start in _parts(parameter, self.strategy.tp, at.tp)
            )
        return self._pieces[at.pp, at.tp]

    def holders(self, parameter: int) -> tuple[Holder, ...]:
        """Every rank's regions of the parameter of this index, sorted by rank and region."""
        logical = self.parameters[parameter]
        key = (logical.shape, logical.split_dim, logical.split_stride, self._stages[parameter])
        if key not in self._holders:
            ranks = ((rank, self.strategy.coordinates(rank)) for rank in range(self.world_size))
            self._holders[key] = tuple(
                Holder(rank, box, start)
                for rank, at in ranks
                if at.pp in self._stages[parameter]
                for box, start in _parts(logical, self.strategy.tp, at.tp)
            )
        return self._holders[key]

    def holds(self, parameter: int, rank: int) -> bool:
        return self.strategy.coordinates(rank).pp in self._stages[parameter]

    def local_shape(self, parameter: int, rank: int) -> Point:
        """Shape of the rank's local tensor, in elements; ValueError where it has none."""
        logical = self.parameters[parameter]
        if not self.holds(parameter, rank):
            raise ValueError(f"rank {rank} holds nothing of {logical.name} under {self.strategy}")
        return tuple(
            size // self.strategy.tp if dim == logical.split_dim else size for dim, size in enumerate(logical.shape)
        )

    def local_numel(self, rank: int) -> int:
        """Elements that the rank holds over all parameters."""
        return sum(piece.box.numel for piece in self.pieces(rank))


class RankPieces:
    """An explicit assignment of regions to ranks, in the local tensors of ``layout``; ranks not named hold nothing.

    The pieces of one rank must not overlap; ``flat_shards`` sees to it.
    """

    def __init__(self, layout: Layout, pieces: Mapping[int, tuple[Piece, ...]]) -> None:
        self.layout = layout
        self._pieces = {rank: tuple(sorted(pieces[rank])) for rank in sorted(pieces)}
        holders: dict[int, list[Holder]] = {}
        for rank, held in self._pieces.items():
            for piece in held:
                holders.setdefault(piece.parameter, []).append(Holder(rank, piece.box, piece.start))
        self._holders = {parameter: tuple(sorted(of)) for parameter, of in holders.items()}

    @property
    def parameters(self) -> tuple[LogicalParameter, ...]:
        return self.layout.parameters

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        return self._pieces.get(rank, ())

    def holders(self, parameter: int) -> tuple[Holder, ...]:
        return self._holders.get(parameter, ())

    def local_shape(self, parameter: int, rank: int) -> Point:
        return self.layout.local_shape(parameter, rank)


def model_layout(
    parameters: Sequence[LogicalParameter], strategy: Strategy, layers: Sequence[Collection[int]], tied: bool
) -> Layout:
    """Lay ``parameters`` over the ranks of ``strategy``.

    ``layers`` holds, for each pipeline stage, the numbers of its decoder layers, counted from 0 (virtual stages: of all
    its chunks). ``tied``: the last stage holds a copy of the word embeddings, unless it is the first stage, too.

    Raises ValueError, naming the parameter, where a tensor does not split evenly or a layer is on no stage or on two.
    """
    if len(layers) != strategy.pp:
        raise ValueError(f"layers are given for {len(layers)} stages, but {strategy} has {strategy.pp}")
    stage_of: dict[int, int] = {}
    for stage, numbers in enumerate(layers):
        for number in numbers:
            if number in stage_of:
                raise ValueError(f"layer {number} is on stage {stage_of[number]} and on stage {stage}")
            stage_of[number] = stage
    seen: set[str] = set()
    stages = []
    for parameter in parameters:
        if parameter.name in seen:
            raise ValueError(f"{parameter.name} is given twice")
        seen.add(parameter.name)
        _check_split(parameter, strategy)
        stages.append(_stages_of(parameter, strategy.pp, stage_of, tied))
    if tied and OUTPUT_LAYER in seen:
        raise ValueError(f"{OUTPUT_LAYER} is given, but tied embeddings leave {WORD_EMBEDDINGS} alone")
    return Layout(tuple(parameters), strategy, tuple(stages))


def _check_split(parameter: LogicalParameter, strategy: Strategy) -> None:
    if parameter.split_dim is None:
        return
    size, parts = parameter.shape[parameter.split_dim], parameter.split_stride * strategy.tp
    if size % parts:
        raise ValueError(
            f"{parameter.name}: dim {parameter.split_dim} of size {size} does not split into "
            f"{parameter.split_stride} x tp {strategy.tp} equal parts"
        )


def _stages_of(parameter: LogicalParameter, pp: int, stage_of: Mapping[int, int], tied: bool) -> tuple[int, ...]:
    match parameter.place:
        case Layer(number):
            if number not in stage_of:
                raise ValueError(f"{parameter.name}: layer {number} is on no pipeline stage")
            return (stage_of[number],)
        case "embedding":
            return (0, pp - 1) if tied and pp > 1 and parameter.name == WORD_EMBEDDINGS else (0,)
        case "head":
            return (pp - 1,)


def _parts(parameter: LogicalParameter, tp: int, tp_rank: int) -> Iterator[tuple[Box, Point]]:
    """Regions of one tensor-parallel rank and where each starts in its local tensor, ascending."""
    origin = (0,) * len(parameter.shape)
    dim = parameter.split_dim
    if dim is None or tp == 1:
        # With tp 1 the blocks lie side by side: one region, however many blocks.
        yield Box(origin, parameter.shape), origin
        return
    block = parameter.shape[dim] // parameter.split_stride
    part = block // tp
    for index in range(parameter.split_stride):
        low = index * block + tp_rank * part
        lo = (*origin[:dim], low, *origin[dim + 1 :])
        hi = (*parameter.shape[:dim], low + part, *parameter.shape[dim + 1 :])
        yield Box(lo, hi), (*origin[:dim], index * part, *origin[dim + 1 :])


def flat_shards(layout: Layout, intervals: Mapping[int, Mapping[int, Sequence[Interval]]]) -> RankPieces:
    """Restrict each rank to flat element intervals of its local tensors: the shards of a distributed optimizer.

    ``intervals[rank][parameter]`` are half-open intervals of the flattened local tensor, which may cross rows. What is
    not named is not held. Raises ValueError where an interval lies outside the tensor or two of one rank overlap.
    """
    return RankPieces(layout, {rank: shard_pieces(layout, rank, intervals[rank]) for rank in sorted(intervals)})


def shard_pieces(layout: Layout, rank: int, intervals: Mapping[int, Sequence[Interval]]) -> tuple[Piece, ...]:
    """The rank's pieces within flat intervals of its local tensors; their starts refer to the same local tensors."""
    by_parameter: dict[int, list[Piece]] = {}
    for piece in layout.pieces(rank):
        by_parameter.setdefault(piece.parameter, []).append(piece)
    shards = []
    for parameter in sorted(intervals):
        name = layout.parameters[parameter].name
        shape = layout.local_shape(parameter, rank)
        end = 0
        for first, last in sorted(intervals[parameter]):
            if not 0 <= first <= last <= math.prod(shape):
                raise ValueError(f"{name}: [{first}, {last}) is outside rank {rank}'s {math.prod(shape)} elements")
            if first < end:
                raise ValueError(f"{name}: intervals of rank {rank} overlap at element {first}")
            end = last
            for local in flat_boxes(shape, first, last):
                for piece in by_parameter[parameter]:
                    to_global = subtracted(piece.box.lo, piece.start)
                    box = piece.box.intersect(local.shift(to_global))
                    if box is not None:
                        shards.append(Piece(parameter, box, subtracted(box.lo, to_global)))
    return tuple(sorted(shards))


def flat_boxes(shape: Point, first: int, last: int) -> list[Box]:
    """Cut elements [first, last) of a row-major tensor into at most 2n - 1 boxes (n dims), in ascending order."""
    if first >= last:
        return []
    if not shape:
        return [Box((), ())]
    row = math.prod(shape[1:])
    first_row, first_column = divmod(first, row)
    last_row, last_column = divmod(last, row)
    if first_row == last_row:
        return _in_row(first_row, flat_boxes(shape[1:], first_column, last_column))
    boxes = []
    if first_column:
        boxes += _in_row(first_row, flat_boxes(shape[1:], first_column, row))
        first_row += 1
    if first_row < last_row:
        boxes.append(Box((first_row, *(0 for _ in shape[1:])), (last_row, *shape[1:])))
    if last_column:
        boxes += _in_row(last_row, flat_boxes(shape[1:], 0, last_column))
    return boxes


def _in_row(row: int, boxes: list[Box]) -> list[Box]:
    return [Box((row, *box.lo), (row + 1, *box.hi)) for box in boxes]


def gpt_parameters(shape: ModelShape) -> tuple[LogicalParameter, ...]:
    """Every parameter of Megatron's GPTModel with --transformer-impl local, in the order of its modules.

    For planning without a model; a live job reads its parameters off the model. Transformer Engine's names differ where
    it fuses a norm into the linear layer behind it (``self_attention.linear_qkv.layer_norm_weight`` for
    ``input_layernorm.weight``, ``mlp.linear_fc1.layer_norm_weight`` for ``pre_mlp_layernorm.weight``); the regions and
    their sizes are the same.
    """
    hidden = shape.hidden_size
    parameters = [
        LogicalParameter(name=WORD_EMBEDDINGS, shape=(shape.padded_vocab_size, hidden), place="embedding", split_dim=0)
    ]
    if shape.learned_positions is not None:
        name = "embedding.position_embeddings.weight"
        parameters.append(LogicalParameter(name=name, shape=(shape.learned_positions, hidden), place="embedding"))
    for number in range(shape.num_layers):
        parameters += _layer_parameters(shape, number)
    parameters += _norm("decoder.final_layernorm", hidden, "head", shape)
    if not shape.tied_embeddings:
        parameters.append(
            LogicalParameter(name=OUTPUT_LAYER, shape=(shape.padded_vocab_size, hidden), place="head", split_dim=0)
        )
    return tuple(parameters)


def _layer_parameters(shape: ModelShape, number: int) -> list[LogicalParameter]:
    layer, place = f"decoder.layers.{number}", Layer(number)
    hidden, channels = shape.hidden_size, shape.kv_channels
    attention = shape.num_attention_heads * channels
    qkv = attention + 2 * shape.num_query_groups * channels
    blocks = 2 if shape.gated_linear_unit else 1

    def column(name: str, rows: int, *, bias: bool, stride: int = 1) -> list[LogicalParameter]:
        """Rows, and the bias with them, are split over tp."""
        shapes: dict[str, Point] = {"weight": (rows, hidden)} | ({"bias": (rows,)} if bias else {})
        return [
            LogicalParameter(name=f"{layer}.{name}.{kind}", shape=of, place=place, split_dim=0, split_stride=stride)
            for kind, of in shapes.items()
        ]

    def row(name: str, columns: int) -> list[LogicalParameter]:
        """Columns are split over tp; the bias is added after the sum over tp, so every rank holds all of it."""
        made = [LogicalParameter(name=f"{layer}.{name}.weight", shape=(hidden, columns), place=place, split_dim=1)]
        if shape.linear_bias:
            made.append(LogicalParameter(name=f"{layer}.{name}.bias", shape=(hidden,), place=place))
        return made

    parameters = _norm(f"{layer}.input_layernorm", hidden, place, shape)
    parameters += row("self_attention.linear_proj", attention)
    parameters += column("self_attention.linear_qkv", qkv, bias=shape.linear_bias or shape.qkv_bias)
    if shape.qk_layernorm:
        parameters += _norm(f"{layer}.self_attention.q_layernorm", channels, place, shape)
        parameters += _norm(f"{layer}.self_attention.k_layernorm", channels, place, shape)
    parameters += _norm(f"{layer}.pre_mlp_layernorm", hidden, place, shape)
    parameters += column("mlp.linear_fc1", blocks * shape.ffn_hidden_size, bias=shape.linear_bias, stride=blocks)
    parameters += row("mlp.linear_fc2", shape.ffn_hidden_size)
    return parameters


def _norm(name: str, size: int, place: Place, shape: ModelShape) -> list[LogicalParameter]:
    kinds = ("weight",) if shape.rms_norm else ("weight", "bias")
    return [LogicalParameter(name=f"{name}.{kind}", shape=(size,), place=place) for kind in kinds]
