"""The flag, what it refuses to run with, and what planning needs of Megatron's argument namespace."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hotspa_megatron.hooks.conversations import BYTE_VOCABULARY
from hotspa_megatron.planning.model_shape import ModelShape
from hotspa_megatron.strategy import Strategy

FLAG = "--hotspa-config"


@dataclass(frozen=True)
class Refusal:
    """A Megatron flag that the step under several strategies cannot honour. ``reason`` says why and what to do."""

    flag: str
    asked: Callable[[Any], Any]
    reason: str


def _is_set(name: str) -> Callable[[Any], Any]:
    return lambda args: getattr(args, name, None)


def _above_one(name: str) -> Callable[[Any], Any]:
    return lambda args: (getattr(args, name, None) or 1) > 1


REFUSALS: tuple[Refusal, ...] = (
    Refusal("--micro-batch-size", _above_one("micro_batch_size"), "must be 1: tokens_per_microbatch takes its place"),
    Refusal("--microbatch-group-size-per-virtual-pipeline-stage",
            lambda args: (getattr(args, "microbatch_group_size_per_vp_stage", None) or args.pipeline_model_parallel_size)
            != args.pipeline_model_parallel_size,
            "other than the pipeline size is not supported: replicas would need more micro-batches than they may have"),
    Refusal("--num-experts", _is_set("num_experts"), "mixture-of-experts models are not supported yet"),
    Refusal("--multi-latent-attention", _is_set("multi_latent_attention"), "is not supported yet"),
    Refusal("--mtp-num-layers", _is_set("mtp_num_layers"), "multi-token prediction keeps one strategy's groups"),
    Refusal("--heterogeneous-layers-config-path", _is_set("heterogeneous_layers_config_path"), "is not supported yet"),
    Refusal("--fim-data", _is_set("fim_data"), "rewrites documents when it draws them, so lengths are unknown beforehand"),
    Refusal("--dataloader-type", lambda args: getattr(args, "dataloader_type", None) == "external",
            "external: the samples' lengths cannot be known; use single or cyclic"),
    Refusal("--hybrid-context-parallel", _is_set("hybrid_context_parallel"), "chooses strategies itself; use one of both"),
    Refusal("--hierarchical-context-parallel-sizes", _is_set("hierarchical_context_parallel_sizes"), "is not supported"),
    Refusal("--use-tp-pp-dp-mapping", _is_set("use_tp_pp_dp_mapping"), "only Megatron's default rank order is supported"),
    Refusal("--num-distributed-optimizer-instances", _above_one("num_distributed_optimizer_instances"),
            "above 1 is not supported: a fold must find one owner of every gradient"),
    Refusal("--use-megatron-fsdp", _is_set("use_megatron_fsdp"), "shards parameters in a layout of its own"),
    Refusal("--use-torch-fsdp2", _is_set("use_torch_fsdp2"), "shards parameters in a layout of its own"),
    Refusal("--overlap-param-gather-with-optimizer-step", _is_set("overlap_param_gather_with_optimizer_step"),
            "is not supported; --overlap-param-gather is"),
    Refusal("--ddp-average-in-collective", _is_set("ddp_average_in_collective"), "gradients are sums here, divided once"),
    Refusal("--cuda-graph-impl", lambda args: getattr(args, "cuda_graph_impl", "none") not in (None, "none"),
            "graphs have fixed shapes and groups"),
    Refusal("--optimizer-cuda-graph", _is_set("optimizer_cuda_graph"), "graphs have fixed shapes"),
    Refusal("--fp8-format", _is_set("fp8"), "scaling state belongs to one strategy's layout; not supported yet"),
    Refusal("--fp4-format", _is_set("fp4"), "scaling state belongs to one strategy's layout; not supported yet"),
    Refusal("--tp-comm-overlap", _is_set("tp_comm_overlap"), "its buffers have one fixed shape"),
    Refusal("--use-precision-aware-optimizer", _is_set("use_precision_aware_optimizer"), "is not supported yet"),
    Refusal("--defer-embedding-wgrad-compute", _is_set("defer_embedding_wgrad_compute"), "is not supported"),
    Refusal("--delay-wgrad-compute", _is_set("delay_wgrad_compute"), "is not supported"),
    Refusal("--decrease-batch-size-if-needed", _is_set("decrease_batch_size_if_needed"), "is not supported"),
    # Before 0.18 it works; since then there is a schedule in its place, and Megatron passes over it.
    Refusal("--rampup-batch-size",
            lambda args: getattr(args, "rampup_batch_size", None) and hasattr(args, "step_batch_size_schedule"),
            "is ignored by this Megatron; write the ramp as --step-batch-size-schedule"),
    Refusal("--phase-transition-iterations", _is_set("phase_transition_iterations"), "is not supported"),
    Refusal("--perform-rl-step", _is_set("perform_rl_step"), "is not supported"),
    Refusal("--inprocess-restart", _is_set("inprocess_restart"), "is not supported"),
    Refusal("--yaml-cfg", _is_set("yaml_cfg"), "is not supported; give the same settings as flags"),
    Refusal("--save-wgrads-interval", _is_set("save_wgrads_interval"), "saves gradients of home's segment alone"),
    Refusal("--save-dgrads-interval", _is_set("save_dgrads_interval"), "sees home's modules alone"),
    Refusal("--save-activations-interval", _is_set("save_activations_interval"), "sees home's modules alone"),
    Refusal("--ddp-param-name-patterns-for-fp32-local-accumulation",
            _is_set("ddp_param_name_patterns_for_fp32_local_accumulation"), "is not supported"),
    Refusal("--spec", _is_set("spec"), "a layer specification of your own is not supported"),
    Refusal("--gtp-weight-remat-size", _above_one("gtp_weight_remat_size"), "is not supported"),
    Refusal("--lazy-mpu-init", _is_set("lazy_mpu_init"), "is not supported"),
    Refusal("--fake-process-group", _is_set("fake_process_group"), "exchanges nothing between ranks"),
)  # fmt: skip


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


def check_flags(args: Any) -> None:
    """Raise ValueError, one line, for the first flag that cannot be honoured. Changes nothing."""
    for refusal in REFUSALS:
        if refusal.asked(args):
            raise ValueError(f"{refusal.flag}: {refusal.reason} ({FLAG} is set)")


def check_megatron_samples(args: Any) -> None:
    """Raise ValueError where ``samples: megatron`` could not be what stock Megatron trains on with the same flags."""
    missing = [
        flag
        for flag in ("--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss")
        if not getattr(args, flag[2:].replace("-", "_"))
    ]
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


def _padded_vocab_size(args: Any) -> int:
    """Home's padded vocabulary, as stock Megatron computes it."""
    if args.padded_vocab_size is not None:
        return int(args.padded_vocab_size)
    from megatron.training.vocab_utils import calculate_padded_vocab_size

    return calculate_padded_vocab_size(
        args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size, logging_enabled=False
    )
