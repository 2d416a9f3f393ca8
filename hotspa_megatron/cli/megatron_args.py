"""A Megatron command line, read for the few flags that planning needs; Megatron itself is neither imported nor run.

Names and defaults are those of megatron.training's own parser in megatron-core 0.19; every other flag is passed over.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

from hotspa_megatron.planning.memory_model import adam_bytes
from hotspa_megatron.planning.model_shape import ModelShape
from hotspa_megatron.strategy import Strategy

_FP32_BYTES: Final = 4
_MOST_LAYERS: Final = 10_000
"""Above those of any model; each is looked at on its own, so that a mistyped number would take hours."""
_REFUSED_FLAGS: Final = {
    "--num-experts": "experts are not available in this version",
    "--multi-latent-attention": "multi-latent attention is not available in this version",
    "--mtp-num-layers": "multi-token prediction is not available in this version",
    "--pipeline-model-parallel-layout": "a pipeline layout of one's own is not available in this version",
    "--account-for-embedding-in-pipeline-split": "a stage for the embedding is not available in this version",
    "--account-for-loss-in-pipeline-split": "a stage for the loss is not available in this version",
    "--use-tp-pp-dp-mapping": "only Megatron's default rank order tp-cp-ep-dp-pp is available in this version",
    "--tensor-parallel-num-weight-shards": "weight shards apart from tp are not available in this version",
    "--hybrid-context-parallel": "it splits batches by length itself, as this package does",
    "--dynamic-context-parallel": "it splits batches by length itself, as this package does",
    "--use-megatron-fsdp": "FSDP is not available in this version",
    "--use-torch-fsdp2": "FSDP is not available in this version",
    "--attention-output-gate": "gated attention output is not available in this version",
    "--experimental-attention-variant": "experimental attention is not available in this version",
    "--heterogeneous-layers-config-path": "layers that differ are not available in this version",
    "--hybrid-layer-pattern": "hybrid models are not available in this version",
    "--spec": "the parameters of a layer spec of one's own are not known",
    "--yaml-cfg": "only flags are read here",
    "--use-checkpoint-args": "the checkpoint is not read here; write the model's flags out",
}


@dataclass(frozen=True, kw_only=True)
class MegatronCommandLine:
    """What a Megatron command line says about the model and its home strategy.

    ``optimizer_bytes`` is the optimizer's state in bytes per parameter, fp32 master copy included; None where it is
    not plain Adam with fp32 state. ``optimizer_note`` then says which flag is why.
    """

    shape: ModelShape
    home: Strategy
    optimizer_bytes: int | None
    optimizer_note: str | None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"command line: {message.removeprefix('argument ')}")


def read_command_line(arguments: Sequence[str], *, world_size: int | None) -> MegatronCommandLine:
    """Read Megatron's flags; ``ValueError`` names the flag. ``world_size`` None: one replica, dp 1."""
    for argument in arguments:
        flag = argument.split("=", 1)[0]
        if flag in _REFUSED_FLAGS:
            raise ValueError(f"command line: {flag}: {_REFUSED_FLAGS[flag]}; remove it")
    flags, _ = _parser().parse_known_args(list(arguments))
    _check(flags)
    sizes = {
        "tp": flags.tensor_model_parallel_size,
        "cp": flags.context_parallel_size,
        "pp": flags.pipeline_model_parallel_size,
    }
    try:
        world = math.prod(sizes.values()) if world_size is None else world_size
        home = Strategy.from_world(world, **sizes, vpp=_virtual_stages(flags))
    except ValueError as problem:
        raise ValueError(f"command line: {problem}; change the parallel sizes or --world-size") from None
    shape = _shape(flags)
    optimizer_bytes, note = _optimizer(flags, shape)
    return MegatronCommandLine(shape=shape, home=home, optimizer_bytes=optimizer_bytes, optimizer_note=note)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="megatron", allow_abbrev=False, add_help=False)
    for flag in ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"):
        parser.add_argument(flag, type=_size, default=1)
    parser.add_argument("--expert-model-parallel-size", type=_size, default=1)
    parser.add_argument("--num-query-groups", type=_size, default=1)
    parser.add_argument("--make-vocab-size-divisible-by", type=_size, default=128)
    for flag in (
        "--num-layers",
        "--encoder-num-layers",
        "--hidden-size",
        "--ffn-hidden-size",
        "--num-attention-heads",
        "--kv-channels",
        "--seq-length",
        "--encoder-seq-length",
        "--max-position-embeddings",
        "--vocab-size",
        "--padded-vocab-size",
        "--decoder-first-pipeline-num-layers",
        "--decoder-last-pipeline-num-layers",
        "--num-layers-per-virtual-pipeline-stage",
        "--num-virtual-stages-per-pipeline-rank",
    ):
        parser.add_argument(flag, type=_size)
    for flag in (
        "--sequence-parallel",
        "--group-query-attention",
        "--use-rotary-position-embeddings",
        "--swiglu",
        "--quick-geglu",
        "--untie-embeddings-and-output-weights",
        "--qk-layernorm",
        "--disable-bias-linear",
        "--add-qkv-bias",
        "--bf16",
        "--fp16",
        "--accumulate-allreduce-grads-in-fp32",
        "--grad-reduce-in-bf16",
        "--use-distributed-optimizer",
        "--use-precision-aware-optimizer",
    ):
        parser.add_argument(flag, action="store_true")
    positions = ["learned_absolute", "rope", "yarn", "mrope", "relative", "none"]
    parser.add_argument("--position-embedding-type", choices=positions, default="learned_absolute")
    parser.add_argument("--normalization", choices=["LayerNorm", "RMSNorm"], default="LayerNorm")
    parser.add_argument("--softmax-type", choices=["vanilla", "off-by-one", "learnable"], default="vanilla")
    parser.add_argument("--main-grads-dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--optimizer", default="adam")
    parser.add_argument("--transformer-impl", default="transformer_engine")
    parser.add_argument("--tokenizer-type")
    return parser


def _size(text: str) -> int:
    # int() alone would take " 4", "4_0" and digits of other scripts.
    if not re.fullmatch(r"[1-9][0-9]{0,11}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _check(flags: argparse.Namespace) -> None:
    """Refuse what is missing, contradicts itself or adds parameters that are not counted here."""
    flags.num_layers = flags.num_layers or flags.encoder_num_layers
    flags.seq_length = flags.seq_length or flags.encoder_seq_length
    required = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings")
    if missing := [f"--{name.replace('_', '-')}" for name in required if getattr(flags, name) is None]:
        raise ValueError(f"command line: {', '.join(missing)}: missing; add what Megatron is given")
    if flags.num_layers > _MOST_LAYERS:
        raise ValueError(
            f"command line: --num-layers: {flags.num_layers} are more than any model has; write at most {_MOST_LAYERS}"
        )
    if flags.bf16 and flags.fp16:
        raise ValueError("command line: --bf16: given together with --fp16; remove one")
    if flags.expert_model_parallel_size != 1:
        raise ValueError(
            "command line: --expert-model-parallel-size: experts are not available in this version; remove it"
        )
    if flags.softmax_type == "learnable":
        raise ValueError("command line: --softmax-type: learnable is not available in this version; remove it")
    if flags.position_embedding_type == "relative":
        raise ValueError(
            "command line: --position-embedding-type: relative is not available in this version; write rope"
        )
    if flags.max_position_embeddings < flags.seq_length:
        raise ValueError(
            f"command line: --max-position-embeddings: {flags.max_position_embeddings} is less than "
            f"--seq-length {flags.seq_length}; write at least that"
        )


def _virtual_stages(flags: argparse.Namespace) -> int:
    """Virtual stages of each pipeline stage, as Megatron derives them; ``ValueError`` where the flags do not go together."""
    per_stage, stages = flags.num_layers_per_virtual_pipeline_stage, flags.num_virtual_stages_per_pipeline_rank
    if per_stage is None and stages is None:
        return 1
    given = "--num-virtual-stages-per-pipeline-rank" if per_stage is None else "--num-layers-per-virtual-pipeline-stage"
    if per_stage is not None and stages is not None:
        raise ValueError(
            f"command line: {given}: given together with --num-virtual-stages-per-pipeline-rank; remove one"
        )
    if flags.decoder_first_pipeline_num_layers or flags.decoder_last_pipeline_num_layers:
        raise ValueError(f"command line: {given}: with uneven stages Megatron cuts chunks in its own way, unknown here")
    pp, layers = flags.pipeline_model_parallel_size, flags.num_layers
    if per_stage is not None and layers % (pp * per_stage):
        raise ValueError(
            f"command line: {given}: {layers} layers do not divide over pp {pp} and virtual stages of {per_stage} layers"
        )
    virtual = int(stages if per_stage is None else layers // pp // per_stage)
    if virtual > 1 and layers % (pp * virtual):
        raise ValueError(
            f"command line: {given}: {layers} layers do not divide over pp {pp} with {virtual} virtual stages"
        )
    return virtual


def _shape(flags: argparse.Namespace) -> ModelShape:
    heads, hidden = flags.num_attention_heads, flags.hidden_size
    if flags.kv_channels is None and hidden % heads:
        raise ValueError(
            f"command line: --hidden-size: {hidden} does not divide over {heads} attention heads; give --kv-channels"
        )
    if flags.ffn_hidden_size is not None:
        ffn = flags.ffn_hidden_size
    else:
        # Megatron rounds this one down to a multiple of 64, in floating point.
        ffn = int((4 * hidden * 2 / 3) / 64) * 64 if flags.swiglu else 4 * hidden
    rotary = flags.use_rotary_position_embeddings or flags.position_embedding_type != "learned_absolute"
    return ModelShape(
        num_layers=flags.num_layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=flags.num_query_groups if flags.group_query_attention else heads,
        kv_channels=flags.kv_channels or hidden // heads,
        padded_vocab_size=_padded_vocab_size(flags),
        seq_length=flags.seq_length,
        gated_linear_unit=flags.swiglu or flags.quick_geglu,
        tied_embeddings=not flags.untie_embeddings_and_output_weights,
        rms_norm=flags.normalization == "RMSNorm",
        qk_layernorm=flags.qk_layernorm,
        linear_bias=not flags.disable_bias_linear,
        # As Megatron sets it: biases of the linear layers bring this one along.
        qkv_bias=flags.add_qkv_bias or not flags.disable_bias_linear,
        learned_positions=None if rotary else flags.max_position_embeddings,
        # Megatron turns it off at tp 1, for every strategy then: they are built from the same arguments.
        sequence_parallel=flags.sequence_parallel and flags.tensor_model_parallel_size > 1,
        layers_in_first_stage=flags.decoder_first_pipeline_num_layers,
        layers_in_last_stage=flags.decoder_last_pipeline_num_layers,
        parameter_bytes=2 if flags.bf16 or flags.fp16 else _FP32_BYTES,
        gradient_bytes=_gradient_bytes(flags),
        distributed_optimizer=flags.use_distributed_optimizer,
        local_layers=flags.transformer_impl == "local",
    )


def _gradient_bytes(flags: argparse.Namespace) -> int:
    """Bytes of one main_grad element; bf16 keeps fp32 sums unless told otherwise, fp16 only where told."""
    if not flags.bf16 and not flags.fp16:
        return _FP32_BYTES
    in_fp32 = flags.accumulate_allreduce_grads_in_fp32 or (flags.bf16 and flags.main_grads_dtype == "fp32")
    return _FP32_BYTES if in_fp32 and not (flags.bf16 and flags.grad_reduce_in_bf16) else 2


def _padded_vocab_size(flags: argparse.Namespace) -> int:
    """Home's padded vocabulary, as Megatron computes it from what the tokenizer says of its size."""
    if flags.padded_vocab_size is not None:
        return int(flags.padded_vocab_size)
    if flags.vocab_size is None:
        raise ValueError(
            f"command line: --vocab-size: missing, and the tokenizer ({flags.tokenizer_type or 'none given'}) is not "
            "opened here; add --vocab-size or --padded-vocab-size"
        )
    size = flags.vocab_size + (1 if flags.tokenizer_type == "NullTokenizer" and _null_tokenizer_adds_one() else 0)
    multiple = flags.make_vocab_size_divisible_by * flags.tensor_model_parallel_size
    return int(-(-size // multiple) * multiple)


def _null_tokenizer_adds_one() -> bool:
    """Before megatron-core 0.18 the NullTokenizer put its end-of-document token behind --vocab-size."""
    release = installed_megatron()
    return release is not None and release < (0, 18)


def installed_megatron() -> tuple[int, int] | None:
    """The release of the installed megatron-core; None where none is installed, as beside a checkout."""
    try:
        release = re.match(r"(\d+)\.(\d+)", importlib.metadata.version("megatron-core"))
    except importlib.metadata.PackageNotFoundError:
        return None
    return None if release is None else (int(release[1]), int(release[2]))


def _optimizer(flags: argparse.Namespace, shape: ModelShape) -> tuple[int | None, str | None]:
    """Bytes of optimizer state per parameter, or the flag that keeps them from being known."""
    if flags.optimizer != "adam":
        return None, f"--optimizer {flags.optimizer}"
    if flags.use_precision_aware_optimizer:
        return None, "--use-precision-aware-optimizer"
    return adam_bytes(shape.parameter_bytes), None
