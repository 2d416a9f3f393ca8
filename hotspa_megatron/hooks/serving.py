"""Where a step's data come from: Megatron's own datasets are read, and our loader stands where its own would.

Each function here wraps one of Megatron's; ``install`` lists which.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from hotspa_megatron.hooks import checkpoint
from hotspa_megatron.hooks.conversations import conversations_from
from hotspa_megatron.hooks.data import StepLoader
from hotspa_megatron.hooks.flags import why_stock_crosses_documents
from hotspa_megatron.hooks.samples import (
    CheckedSamples,
    Documents,
    MegatronSamples,
    Samples,
    corpus_from,
    first_rank_of_every_group,
)
from hotspa_megatron.hooks.session import Session, current_session, refuse, say
from hotspa_megatron.planning.lengths import LengthHistogram


def read_documents_on_every_rank(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build_train_valid_test_data_iterators(provider: Any) -> Any:
        session = current_session()
        if session is None:
            return original(provider)
        if getattr(provider, "keywords", {}).get("vp_stage"):
            # Providers read for the first and the last chunk; here every chunk has what the first one of all has.
            first = functools.partial(provider, vp_stage=0)
            vars(first).update(vars(provider))
            provider = first
        with contextlib.ExitStack() as stack:
            stack.enter_context(first_rank_of_every_group())
            if session.first_sample == 0:
                stack.enter_context(checkpoint.nothing_consumed(session.args))
            return original(provider)

    return build_train_valid_test_data_iterators


def ask_provider_once(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build_train_valid_test_datasets(provider: Any, *rest: Any, **options: Any) -> Any:
        session = current_session()
        if session is None:
            return original(provider, *rest, **options)

        def with_few_training_samples(sizes: Any) -> Any:
            # Documents need no index of the run's chunks: Megatron would build one of all its iterations.
            if session.resolved.config.samples == "megatron" or not isinstance(sizes, (list, tuple)):
                return provider(sizes)
            return provider(type(sizes)((1, *sizes[1:])))

        train, valid, test = original(with_few_training_samples, *rest, **options)
        if session.args.skip_train:
            return train, valid, test
        session.train_dataset = train
        if session.loader is None:  # chunks of a pipeline with virtual stages ask once each, for one loader
            session.loader = _loader(session, train)
        return train, valid, test

    return build_train_valid_test_datasets


def _loader(session: Session, train: Any) -> StepLoader:
    from megatron.core.num_microbatches_calculator import get_current_global_batch_size

    args = session.args
    try:
        samples = CheckedSamples(_samples(session, train), vocabulary=session.resolved.shape.padded_vocab_size)
    except ValueError as error:
        refuse(error)
    say(samples.describe(args.global_batch_size))
    if session.resolved.config.samples == "megatron":
        why = why_stock_crosses_documents(
            mask_in_dataloader=args.create_attention_mask_in_dataloader,
            ends_in_dataloader=getattr(args, "dataloader_inter_document_masking", False),
            transformer_impl=args.transformer_impl,
            cp=args.context_parallel_size,
        )
        if why:
            say(f"losses are not those of stock Megatron: {why}, and this job does not")
    return StepLoader(
        samples, session.planner, position=lambda: (args.consumed_train_samples, get_current_global_batch_size())
    )


def _samples(session: Session, train: Any) -> Samples:
    args, config = session.args, session.resolved.config
    if args.sft:
        return conversations_from(
            train, prompt_format=args.sft_tokenizer_prompt_format, seed=args.seed, seq_length=args.seq_length,
            overlong=config.overlong_for_conversations(), log=say,
        )  # fmt: skip
    if config.samples == "megatron":
        return MegatronSamples(train, seq_length=args.seq_length)
    lengths = None if config.mock_lengths is None else LengthHistogram.named(config.mock_lengths)
    corpus = corpus_from(train, mock_lengths=lengths)
    return Documents(corpus, seed=args.seed, seq_length=args.seq_length, overlong=config.overlong)


def serve_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build_pretraining_data_loader(dataset: Any, *rest: Any, **options: Any) -> Any:
        session = current_session()
        if session is None or dataset is None or dataset is not session.train_dataset:
            return original(dataset, *rest, **options)
        return session.loader

    return build_pretraining_data_loader
