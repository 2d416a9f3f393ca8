"""Which rank holds which region of every parameter under a strategy.

A parameter is known by its global name (Megatron's own module name with the global numbers of layer and expert) and its
whole shape; a layout says where its regions lie in the ranks' local tensors. The map is physical: the interleaved halves
of a gated fc1, uneven and virtual stages, both copies of tied embeddings, experts on their own grid of ranks, the flat
intervals of the distributed optimizer. Nothing here moves data or knows a device; ``reshard_plan`` reads two layouts and
decides the transfers.
"""

from __future__ import annotations

import itertools
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
Ranks = range | tuple[int, ...]
"""Ascending global ranks: a range where they are evenly spaced, so that thousands of replicas cost nothing."""


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
    """One tensor of the whole model, whatever ranks its pieces lie on: a parameter, or a buffer that is kept.

    ``shape`` is global, in elements. Tensor parallelism over n ranks splits dim ``split_dim`` (None: every rank of the
    tensor-parallel group holds all of it): the dim is a row of blocks, each is cut into n equal parts, and a rank's
    local tensor is its parts of all blocks, joined in order. The blocks are ``split_stride`` equal ones, or those of
    ``split_sizes`` (elements along the dim, Megatron's partition_sizes times n). Two equal blocks are a gated fc1, whose
    local tensor is [gate part; up part]; unequal ones a fused projection whose parts are sharded one by one; everything
    else, a fused QKV included, is one block.

    ``expert`` is the global number of the expert that the tensor belongs to: then it lies on the experts' grid of ranks.
    """

    name: str
    shape: Point
    place: Place
    split_dim: int | None = None
    split_stride: int = 1
    split_sizes: tuple[int, ...] | None = None
    expert: int | None = None

    def __post_init__(self) -> None:
        if self.split_dim is not None and not 0 <= self.split_dim < len(self.shape):
            raise ValueError(f"{self.name}: split dim {self.split_dim} is outside shape {self.shape}")
        if self.split_stride < 1:
            raise ValueError(f"{self.name}: split stride {self.split_stride} must be at least 1")
        if self.split_sizes is None:
            return
        if self.split_dim is None or self.split_stride > 1:
            raise ValueError(f"{self.name}: split sizes {self.split_sizes} need a split dim and no split stride")
        if min(self.split_sizes) < 1 or sum(self.split_sizes) != self.shape[self.split_dim]:
            raise ValueError(
                f"{self.name}: split sizes {self.split_sizes} do not add up to dim {self.split_dim} of {self.shape}"
            )

    def blocks(self) -> tuple[Interval, ...]:
        """The blocks of the split dim that are cut one by one; none where nothing is split."""
        if self.split_dim is None:
            return ()
        size = self.shape[self.split_dim]
        sizes = self.split_sizes or (size // self.split_stride,) * self.split_stride
        return tuple(itertools.pairwise(itertools.accumulate(sizes, initial=0)))


@dataclass(frozen=True, kw_only=True)
class ExpertAxes:
    """How the experts of every mixture layer lie over the ranks of a pipeline stage, in Megatron's order tp-ep-dp.

    ``ep`` ranks share the ``experts`` out in equal runs of consecutive numbers; each expert is split over ``tp`` ranks
    (--expert-tensor-parallel-size), and what is left of the stage holds replicas. Raises ValueError for sizes below 1
    and where the experts do not divide.
    """

    experts: int
    ep: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        if min(self.experts, self.ep, self.tp) < 1:
            raise ValueError(f"experts {self.experts}, ep {self.ep} and expert tp {self.tp} must be at least 1")
        if self.experts % self.ep:
            raise ValueError(f"{self.experts} experts do not divide over ep {self.ep}")

    def ep_rank(self, expert: int) -> int:
        """The expert-parallel rank that holds an expert; ValueError for a number that no expert has."""
        if not 0 <= expert < self.experts:
            raise ValueError(f"expert {expert} is not one of {self.experts}")
        return expert // (self.experts // self.ep)


class Piece(NamedTuple):
    """A region that one rank holds: ``box`` is global, ``start`` is where ``box.lo`` sits in the local tensor.

    ``parameter`` is an index into the layout's parameters.
    """

    parameter: int
    box: Box
    start: Point


class Holding(NamedTuple):
    """A region of some parameter and every rank that holds it at the same place; ``box`` and ``start`` as in ``Piece``."""

    box: Box
    start: Point
    ranks: Ranks


class Placement(Protocol):
    """What a reshard plan needs to know of one side: any assignment of regions to ranks."""

    @property
    def parameters(self) -> tuple[LogicalParameter, ...]: ...

    @property
    def world_size(self) -> int: ...

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """What the rank holds, sorted."""
        ...

    def holdings(self, parameter: int) -> tuple[Holding, ...]:
        """Who holds the parameter of this index, sorted; no box and start come twice."""
        ...

    def local_shape(self, parameter: int, rank: int) -> Point:
        """Shape of the rank's local tensor that the starts of its pieces refer to."""
        ...


class _Grid(NamedTuple):
    """The ranks of a stage that hold a tensor: part t of ``width`` at ``offset + t``, and its replicas ``step`` apart."""

    width: int
    offset: int
    step: int

    def part(self, position: int) -> int | None:
        """Which part the rank at this position of its stage holds, None where it holds nothing."""
        part = (position - self.offset) % self.step
        return part if part < self.width else None


class Layout:
    """A model under a strategy: pieces of every rank. Made by ``model_layout``.

    Ranks that differ only in their dp and cp coordinates hold replicas. Parameters that are cut alike and live on the
    same stages share one result, so that a model of many layers costs little more than one of few.
    """

    def __init__(
        self,
        parameters: tuple[LogicalParameter, ...],
        strategy: Strategy,
        stages: tuple[tuple[int, ...], ...],
        experts: ExpertAxes | None = None,
    ) -> None:
        """``stages`` holds for each parameter the pipeline stages it lives on, ascending."""
        self.parameters = parameters
        self.strategy = strategy
        self.experts = experts
        self._stages = stages
        self._stage_size = strategy.world_size // strategy.pp
        self._places: dict[int, tuple[int, int]] = {}
        self._pieces: dict[tuple[int, int, int], tuple[Piece, ...]] = {}
        self._holdings: dict[tuple[object, ...], tuple[Holding, ...]] = {}

    @property
    def world_size(self) -> int:
        return self.strategy.world_size

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """What the rank holds, sorted by parameter and region; ValueError for a rank outside the strategy."""
        stage, position = self._place(rank)
        expert_grid = 1 if self.experts is None else self.experts.ep * self.experts.tp
        key = (stage, position % self.strategy.tp, position % expert_grid)
        if key not in self._pieces:
            self._pieces[key] = tuple(
                Piece(index, box, start)
                for index, parameter in enumerate(self.parameters)
                for box, start in self._parts_on(parameter, self._stages[index], stage, position)
            )
        return self._pieces[key]

    def holdings(self, parameter: int) -> tuple[Holding, ...]:
        """Every region of the parameter of this index with its ranks, sorted."""
        logical = self.parameters[parameter]
        grid, stages = self._grid(logical), self._stages[parameter]
        key = (logical.shape, logical.split_dim, logical.blocks(), grid, stages)
        if key not in self._holdings:
            if logical.split_dim is None:
                slots = [range(grid.width)]
            else:
                slots = [range(part, part + 1) for part in range(grid.width)]
            self._holdings[key] = tuple(
                sorted(
                    Holding(box, start, self._ranks(grid, slot, stages))
                    for slot in slots
                    for box, start in _parts(logical, grid.width, slot.start)
                )
            )
        return self._holdings[key]

    def holds(self, parameter: int, rank: int) -> bool:
        stage, position = self._place(rank)
        return stage in self._stages[parameter] and self._grid(self.parameters[parameter]).part(position) is not None

    def local_shape(self, parameter: int, rank: int) -> Point:
        """Shape of the rank's local tensor, in elements; ValueError where it has none."""
        logical = self.parameters[parameter]
        if not self.holds(parameter, rank):
            raise ValueError(f"rank {rank} holds nothing of {logical.name} under {self.strategy}")
        width = self._grid(logical).width
        return tuple(size // width if dim == logical.split_dim else size for dim, size in enumerate(logical.shape))

    def local_numel(self, rank: int) -> int:
        """Elements that the rank holds over all parameters."""
        return sum(piece.box.numel for piece in self.pieces(rank))

    def _place(self, rank: int) -> tuple[int, int]:
        """The rank's pipeline stage and its position among the ranks of that stage."""
        if rank not in self._places:
            stage = self.strategy.coordinates(rank).pp
            self._places[rank] = stage, rank - stage * self._stage_size
        return self._places[rank]

    def _grid(self, parameter: LogicalParameter) -> _Grid:
        if parameter.expert is None:
            return _Grid(self.strategy.tp, 0, self.strategy.tp)
        assert self.experts is not None  # model_layout refuses an expert without axes
        width = self.experts.tp
        return _Grid(width, width * self.experts.ep_rank(parameter.expert), width * self.experts.ep)

    def _parts_on(
        self, parameter: LogicalParameter, stages: tuple[int, ...], stage: int, position: int
    ) -> Iterator[tuple[Box, Point]]:
        grid = self._grid(parameter)
        part = grid.part(position)
        if stage in stages and part is not None:
            yield from _parts(parameter, grid.width, part)

    def _ranks(self, grid: _Grid, slot: range, stages: tuple[int, ...]) -> Ranks:
        """Every rank that holds one of the parts in ``slot``, on any of the stages."""
        first = [stage * self._stage_size for stage in stages]
        if len(slot) == grid.step:
            ranges = [range(start, start + self._stage_size) for start in first]
        else:
            ranges = [
                range(start + grid.offset + part, start + self._stage_size, grid.step)
                for start in first
                for part in slot
            ]
        return ranges[0] if len(ranges) == 1 else tuple(sorted(itertools.chain.from_iterable(ranges)))


class RankPieces:
    """An explicit assignment of regions to ranks, in the local tensors of ``layout``; ranks not named hold nothing.

    The pieces of one rank must not overlap; ``flat_shards`` sees to it.
    """

    def __init__(self, layout: Layout, pieces: Mapping[int, tuple[Piece, ...]]) -> None:
        self.layout = layout
        self._pieces = {rank: tuple(sorted(pieces[rank])) for rank in sorted(pieces)}
        ranks: dict[Piece, list[int]] = {}
        for rank, held in self._pieces.items():
            for piece in held:
                ranks.setdefault(piece, []).append(rank)
        holdings: dict[int, list[Holding]] = {}
        for parameter, box, start in sorted(ranks):
            holdings.setdefault(parameter, []).append(Holding(box, start, tuple(ranks[Piece(parameter, box, start)])))
        self._holdings = {parameter: tuple(of) for parameter, of in holdings.items()}

    @property
    def parameters(self) -> tuple[LogicalParameter, ...]:
        return self.layout.parameters

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        return self._pieces.get(rank, ())

    def holdings(self, parameter: int) -> tuple[Holding, ...]:
        return self._holdings.get(parameter, ())

    def local_shape(self, parameter: int, rank: int) -> Point:
        return self.layout.local_shape(parameter, rank)


def model_layout(
    parameters: Sequence[LogicalParameter],
    strategy: Strategy,
    layers: Sequence[Collection[int]],
    tied: bool,
    experts: ExpertAxes | None = None,
) -> Layout:
    """Lay ``parameters`` over the ranks of ``strategy``.

    ``layers`` holds, for each pipeline stage, the numbers of its decoder layers, counted from 0 (virtual stages: of all
    its chunks). ``tied``: the last stage holds a copy of the word embeddings, unless it is the first stage, too.
    ``experts`` says where parameters with an expert number lie. Buffers that are kept are laid out by a call of their
    own, so that a plan moves them in their own dtype.

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
        _check_split(parameter, strategy, experts)
        stages.append(_stages_of(parameter, strategy.pp, stage_of, tied))
    if tied and OUTPUT_LAYER in seen:
        raise ValueError(f"{OUTPUT_LAYER} is given, but tied embeddings leave {WORD_EMBEDDINGS} alone")
    stage_size = strategy.world_size // strategy.pp
    if experts is not None and stage_size % (experts.ep * experts.tp):
        raise ValueError(
            f"the {stage_size} ranks of a stage of {strategy} do not divide over ep {experts.ep} x expert tp {experts.tp}"
        )
    return Layout(tuple(parameters), strategy, tuple(stages), experts)


def _check_split(parameter: LogicalParameter, strategy: Strategy, experts: ExpertAxes | None) -> None:
    axis, parts = "tp", strategy.tp
    if parameter.expert is not None:
        if experts is None:
            raise ValueError(f"{parameter.name} belongs to expert {parameter.expert}, but no expert axes are given")
        experts.ep_rank(parameter.expert)
        axis, parts = "expert tp", experts.tp
    if parameter.split_dim is None:
        return
    size, sizes = parameter.shape[parameter.split_dim], parameter.split_sizes
    if any(block % parts for block in sizes) if sizes else size % (parameter.split_stride * parts):
        blocks = f"blocks of {', '.join(map(str, sizes))}" if sizes else str(parameter.split_stride)
        raise ValueError(
            f"{parameter.name}: dim {parameter.split_dim} of size {size} does not split into {blocks} x {axis} {parts} "
            "equal parts"
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


def _parts(parameter: LogicalParameter, width: int, part: int) -> Iterator[tuple[Box, Point]]:
    """Regions of one of ``width`` ranks that split a tensor, and where each starts in its local tensor, ascending."""
    origin = (0,) * len(parameter.shape)
    dim = parameter.split_dim
    if dim is None or width == 1:
        # With one rank the blocks lie side by side: one region, however many blocks.
        yield Box(origin, parameter.shape), origin
        return
    start = 0
    for first, last in parameter.blocks():
        size = (last - first) // width
        low = first + part * size
        lo = (*origin[:dim], low, *origin[dim + 1 :])
        hi = (*parameter.shape[:dim], low + size, *parameter.shape[dim + 1 :])
        yield Box(lo, hi), (*origin[:dim], start, *origin[dim + 1 :])
        start += size


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
