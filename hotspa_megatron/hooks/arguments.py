"""The flag, what it refuses to run with, and what planning needs of Megatron's argument namespace."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any

from hotspa_megatron.config import Untested
from hotspa_megatron.hooks import flags
from hotspa_megatron.hooks.conversations import BYTE_VOCABULARY
from hotspa_megatron.hooks.flags import FLAG
from hotspa_megatron.planning.execution import Recompute
from hotspa_megatron.planning.memory_model import ADAM_BYTES, adam_bytes
from hotspa_megatron.planning.model_shape import ModelShape
from hotspa_megatron.strategy import Strategy


def add_flag(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the one flag to Megatron's parser."""
    parser.add_argument_group(title="hotspa").add_argument(
        FLAG,
        default=None,
        metavar="FILE|auto",
        help="Run the length groups of each mini-batch under the strategies of this YAML file (hotspa_megatron); auto: plan "
        "at start, and keep the file beside the checkpoints.",
    )
    return parser


def check_flags(args: Any, allowed: Collection[Untested] = ()) -> None:
    """Raise ValueError, one line, for the first flag that cannot be honoured. Changes nothing.

    ``allowed``: what the file lets run untested.
    """
    for conflict in flags.conflicts_in(args):
        if conflict.unless not in allowed:
            raise ValueError(conflict.line)


def check_megatron_samples(args: Any) -> None:
    """Raise ValueError where ``samples: megatron`` could not be what stock Megatron trains on with the same flags."""
    missing = [flag for flag in flags.DOCUMENT_FLAGS if not getattr(args, flag[2:].replace("-", "_"))]
    if missing:
        raise ValueError(
            f"samples: megatron cuts samples at document ends; add {' '.join(missing)}, which do so in Megatron"
        )
    if args.dataloader_type != "single":
        raise ValueError(f"samples: megatron follows --dataloader-type single, not {args.dataloader_type}")


def check_conversations(args: Any, *, samples: str) -> None:
    """Raise ValueError for what --sft cannot go with."""
    if samples == "megatron":
        raise ValueError(
            "samples: megatron cuts documents as GPTDataset draws them; --sft has conversations: remove one"
        )
    if args.mock_data:
        raise ValueError("--mock-data: there are no mock conversations; give --data-path with --sft")
    if args.tokenizer_type == "NullTokenizer":
        end = getattr(args, "null_tokenizer_eod_id", None)
        if args.vocab_size < BYTE_VOCABULARY or (end is not None and end < BYTE_VOCABULARY - 1):
            raise ValueError(
                f"--vocab-size {args.vocab_size}: NullTokenizer tokenises conversations by bytes, which takes at least "
                f"{BYTE_VOCABULARY} ids, the last of them, or a later one, as end of document"
            )


def check_mock_lengths(args: Any, *, samples: str) -> None:
    """Raise ValueError where ``mock_lengths`` would have no effect."""
    if not args.mock_data:
        raise ValueError("mock_lengths: is for --mock-data alone, which is not given; add it or remove the key")
    if samples == "megatron":
        raise ValueError(
            "mock_lengths: has no effect on samples: megatron, which are all --seq-length long; remove one"
        )


def shape_of(args: Any) -> ModelShape:
    """The model that Megatron's validated arguments describe."""
    heads = args.num_attention_heads
    groups = args.num_query_groups if args.group_query_attention else heads
    learned = args.position_embedding_type == "learned_absolute"
    low_precision = args.fp16 or args.bf16
    return ModelShape(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=args.kv_channels,
        padded_vocab_size=_padded_vocab_size(args),
        seq_length=args.seq_length,
        gated_linear_unit=bool(args.swiglu or getattr(args, "quick_geglu", False)),
        tied_embeddings=not args.untie_embeddings_and_output_weights,
        rms_norm=args.normalization == "RMSNorm",
        qk_layernorm=bool(args.qk_layernorm),
        linear_bias=bool(args.add_bias_linear),
        qkv_bias=bool(args.add_qkv_bias),
        learned_positions=args.max_position_embeddings if learned else None,
        sequence_parallel=bool(args.sequence_parallel),
        layers_in_first_stage=args.decoder_first_pipeline_num_layers,
        layers_in_last_stage=args.decoder_last_pipeline_num_layers,
        home_split_by_megatron=bool(
            getattr(args, "pipeline_model_parallel_layout", None)
            or getattr(args, "account_for_embedding_in_pipeline_split", False)
            or getattr(args, "account_for_loss_in_pipeline_split", False)
            # Megatron then cuts what first and last stages hold into chunks in its own way.
            or (
                getattr(args, "virtual_pipeline_model_parallel_size", None)
                and (args.decoder_first_pipeline_num_layers or args.decoder_last_pipeline_num_layers)
            )
        ),
        parameter_bytes=2 if low_precision else 4,
        gradient_bytes=4 if not low_precision or args.accumulate_allreduce_grads_in_fp32 else 2,
        distributed_optimizer=bool(args.use_distributed_optimizer),
        local_layers=args.transformer_impl == "local",
        # As Megatron's get_fp8_align_size has it.
        token_multiple=(32 if args.fp8_recipe == "mxfp8" else 16) if args.fp8 else 1,
    )


def home_of(args: Any) -> Strategy:
    """The strategy of the command line."""
    return Strategy.from_world(
        args.world_size,
        tp=args.tensor_model_parallel_size,
        cp=args.context_parallel_size,
        pp=args.pipeline_model_parallel_size,
        vpp=getattr(args, "virtual_pipeline_model_parallel_size", None) or 1,
    )


def recompute_of(args: Any) -> Recompute:
    """What the command line recomputes."""
    return Recompute.of_flags(args.recompute_granularity, args.recompute_method, args.recompute_num_layers)


def optimizer_bytes_of(args: Any, shape: ModelShape) -> int:
    """Optimizer state per parameter; as for Adam with fp32 state where the optimizer's is not known."""
    plain = args.optimizer == "adam" and not args.use_precision_aware_optimizer
    return adam_bytes(shape.parameter_bytes) if plain else ADAM_BYTES


def _padded_vocab_size(args: Any) -> int:
    """Home's padded vocabulary, as stock Megatron computes it."""
    if args.padded_vocab_size is not None:
        return int(args.padded_vocab_size)
    from megatron.training.vocab_utils import calculate_padded_vocab_size

    return calculate_padded_vocab_size(
        args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size, logging_enabled=False
    )
