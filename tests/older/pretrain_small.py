"""examples/pretrain_small.py for megatron-core 0.17 and 0.18, whose training loops are called otherwise.

Only what the tests' own runs need: GPTDataset or mock data without packing, so that stock runs of these releases can be
compared. forward_step unpacks what each release's own pretrain_gpt.py unpacks.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank
from megatron.training import get_args, pretrain
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

RELEASE = tuple(int(part) for part in importlib.metadata.version("megatron-core").split(".")[:2])
DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}
FIELDS = ("attention_mask", "labels", "loss_mask", "position_ids", "tokens")


def read_batch(data_iterator: Iterator[dict[str, Any]], vp_stage: int | None) -> dict[str, Any]:
    """One micro-batch as this rank needs it; what a pipeline stage has no use for is None."""
    args = get_args()
    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(FIELDS)
    if RELEASE < (0, 18):
        from megatron.training.utils import get_batch_on_this_tp_rank

        batch = get_batch_on_this_tp_rank(data_iterator)
        batch = {field: batch.get(field) for field in FIELDS}
        return get_batch_on_this_cp_rank(batch)
    from megatron.core.utils import get_batch_on_this_tp_rank

    batch = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        sample = next(data_iterator)
        for field in (*FIELDS, "cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size"):
            value = sample.get(field)
            batch[field] = None if value is None else value.cuda(non_blocking=True)
    batch = get_batch_on_this_tp_rank(
        batch,
        is_sft=False,
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
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())


if RELEASE < (0, 18):

    def get_batch(data_iterator: Iterator[dict[str, Any]], vp_stage: int | None = None) -> tuple[Any, ...]:
        batch = read_batch(data_iterator, vp_stage)
        names = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
        return (*(batch[name] for name in names), None)

    def forward_step(data_iterator: Iterator[dict[str, Any]], model: Any) -> tuple[torch.Tensor, partial[Any]]:
        vp_stage = get_attr_wrapped_model(model, "vp_stage")
        tokens, labels, loss_mask, attention_mask, position_ids, packed_seq_params = get_batch(data_iterator, vp_stage)
        output = model(
            tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask,
            packed_seq_params=packed_seq_params,
        )  # fmt: skip
        return output, partial(loss_func, loss_mask)

else:

    def get_batch(data_iterator: Iterator[dict[str, Any]], vp_stage: int | None = None) -> tuple[Any, ...]:
        batch = read_batch(data_iterator, vp_stage)
        names = ("attention_mask", "cu_seqlens", "cu_seqlens_padded", "labels", "loss_mask", "max_seqlen",
                 "position_ids", "tokens")  # fmt: skip
        return tuple(batch.get(name) for name in names)

    def forward_step(data_iterator: Iterator[dict[str, Any]], model: Any) -> tuple[torch.Tensor, partial[Any]]:
        vp_stage = get_attr_wrapped_model(model, "vp_stage")
        attention_mask, cu_seqlens, cu_seqlens_padded, labels, loss_mask, max_seqlen, position_ids, tokens = get_batch(
            data_iterator, vp_stage
        )
        packing = None
        if cu_seqlens is not None:
            bounds = (cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded)[0]
            longest = int(max_seqlen.item())
            packing = PackedSeqParams(
                qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, cu_seqlens_q_padded=bounds,
                cu_seqlens_kv_padded=bounds, max_seqlen_q=longest, max_seqlen_kv=longest,
            )  # fmt: skip
        output = model(
            tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask, packed_seq_params=packing
        )
        return output, partial(loss_func, loss_mask)


def loss_func(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """The sum of the token losses, how many tokens that is, and both for the log."""
    mask = loss_mask.view(-1).float()
    loss = (losses.view(-1).float() * mask).sum()
    num_tokens = mask.sum().detach().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.to(loss.dtype)])}


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """The model that the command line describes, of Megatron's local modules."""
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


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
    )

    def reads_data() -> bool:
        return mpu.get_tensor_model_parallel_rank() == 0 and bool(is_first_or_last_pipeline_stage(vp_stage))

    kind = MockGPTDataset if args.mock_data else GPTDataset
    train, valid, test = BlendedMegatronDatasetBuilder(kind, num_samples, reads_data, config).build()
    return train, valid, test


def main() -> None:
    """Read Megatron's command line and train."""
    datasets_provider.is_distributed = True  # type: ignore[attr-defined]  # every rank calls it, not tensor rank 0 only
    if RELEASE < (0, 18):
        pretrain(datasets_provider, model_provider, ModelType.encoder_or_decoder, forward_step, args_defaults=DEFAULTS)
        return
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    container = pretrain_cfg_container_from_args(parse_and_validate_args(args_defaults=DEFAULTS))
    pretrain(container, datasets_provider, model_provider, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
