"""Pretrain a GPT on Megatron-LM (megatron-core 0.19): a short stand-in for pretrain_gpt.py, which no wheel ships.

    torchrun --nproc-per-node 8 examples/pretrain_small.py <Megatron's arguments>
    torchrun --nproc-per-node 8 -m hotspa_megatron.launch examples/pretrain_small.py <...> --hotspa-config FILE

The script knows nothing of hotspa_megatron and runs without it. It covers what a plain GPT needs: GPTDataset or mock
data, tensor, pipeline and context parallelism, and packed documents (--dataloader-inter-document-masking).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets import utils as dataset_utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import (
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

# What get_batch returns, in this order; forward_step unpacks the same names.
FIELDS = (
    "attention_mask",
    "cu_seqlens",
    "cu_seqlens_padded",
    "labels",
    "loss_mask",
    "max_seqlen",
    "position_ids",
    "tokens",
)


def get_batch(data_iterator: Iterator[dict[str, Any]], vp_stage: int | None = None) -> list[Any]:
    """One micro-batch as this rank needs it, by FIELDS; what a pipeline stage has no use for is None."""
    args = get_args()
    packed = args.dataloader_inter_document_masking
    at_an_end = is_first_or_last_pipeline_stage(vp_stage)
    if not at_an_end and not packed:
        return [None] * len(FIELDS)

    batch: dict[str, Any] = {}
    if mpu.get_tensor_model_parallel_rank() == 0:  # the other tensor ranks have no data of their own
        sample = next(data_iterator)
        for field in FIELDS:
            value = sample.get(field)
            batch[field] = None if value is None else value.cuda(non_blocking=True)
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=packed,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch = flatten_batch_for_packed_sequences(batch)
    if at_an_end:
        batch = get_batch_on_this_cp_rank(
            batch,
            is_hybrid_cp=False,
            cp_group=mpu.get_context_parallel_group(),
            use_per_sequence_balancing=packed,  # document lengths are not multiples of 2 * cp
        )
    return [batch.get(field) for field in FIELDS]


def loss_func(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """The sum of the token losses, how many tokens that is, and both for the log."""
    mask = loss_mask.view(-1).float()
    loss = (losses.view(-1).float() * mask).sum()
    num_tokens = mask.sum().detach().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.to(loss.dtype)])}


def packed_seq_params(cu_seqlens: torch.Tensor, cu_seqlens_padded: torch.Tensor | None, max_seqlen: Any) -> Any:
    """Where the sequences of a packed micro-batch begin and end; get_batch gives (1, N), the kernels take (N)."""
    cu_seqlens = cu_seqlens.squeeze(0)
    update_seqlen_stats_from_cu_seqlens(cu_seqlens)  # Megatron's FLOPs count: real tokens, not padding
    padded = None if cu_seqlens_padded is None else cu_seqlens_padded.squeeze(0)
    bounds = cu_seqlens if padded is None else padded
    longest = int(max_seqlen.item())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def forward_step(data_iterator: Iterator[dict[str, Any]], model: Any) -> tuple[torch.Tensor, partial[Any]]:
    """One micro-batch through this pipeline stage; Megatron's schedule calls it."""
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    attention_mask, cu_seqlens, cu_seqlens_padded, labels, loss_mask, max_seqlen, position_ids, tokens = get_batch(
        data_iterator, vp_stage
    )
    packing = None if cu_seqlens is None else packed_seq_params(cu_seqlens, cu_seqlens_padded, max_seqlen)
    output = model(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask, packed_seq_params=packing)
    return output, partial(loss_func, loss_mask)


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """The train, valid and test datasets that the command line names."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        inter_document_masking=args.dataloader_inter_document_masking,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
    )

    def reads_data() -> bool:
        at_an_end: bool = is_first_or_last_pipeline_stage(vp_stage)
        return mpu.get_tensor_model_parallel_rank() == 0 and (at_an_end or args.dataloader_inter_document_masking)

    kind = MockGPTDataset if args.mock_data else GPTDataset
    train, valid, test = BlendedMegatronDatasetBuilder(kind, num_samples, reads_data, config).build()
    return train, valid, test


def take_compiled_helpers() -> None:
    """Where Megatron is a wheel's, which brings its dataset helpers compiled, keep it from compiling them at every start.

    It would fail: the Makefile that it calls is in a checkout, and in no wheel.
    """
    if not Path(str(dataset_utils.__file__)).with_name("Makefile").exists():
        dataset_utils.compile_helpers = lambda: None


def main() -> None:
    """Read Megatron's command line and train."""
    take_compiled_helpers()
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    datasets_provider.is_distributed = True  # type: ignore[attr-defined]  # every rank calls it, not tensor rank 0 only
    pretrain(config, datasets_provider, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
