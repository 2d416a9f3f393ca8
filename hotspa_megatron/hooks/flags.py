"""Megatron's flags that matter beside ours: which work, which only GPUs can show, which are refused, and in what words.

One table: a job's start asks it, ``hotspa plan`` names what a script's flags conflict with from it, docs/flags.md is made
of it, and a test walks it. Flags that it does not list are Megatron's own affair: they reach home as they are. Imports
neither torch nor Megatron.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, TypeAlias

from hotspa_megatron.config import Untested
from hotspa_megatron.strict_yaml import one_line

FLAG: Final = "--hotspa-config"
OLDEST: Final = (0, 17)
"""The oldest release of megatron-core that is supported."""
NEWEST: Final = (0, 19)
"""The newest one that the tests run."""
OR_WITHOUT: Final = f", or train without our flag ({FLAG} is set)"
"""What the line of every refused flag ends with."""
_LONGEST_VALUE: Final = 60


@dataclass(frozen=True, kw_only=True)
class Works:
    """Flags, with the values that matter, that a test here trains with, under several strategies.

    ``test``: file and name, under tests/. ``since``: the release that brought the flags; ``until``: from which on they no
    longer do what they say.
    """

    flags: str
    test: str
    note: str = ""
    since: str = ""
    until: str = ""


@dataclass(frozen=True, kw_only=True)
class OnGpus:
    """Flags that only GPUs can run: written to their documentation, not run by the authors.

    ``left_out``: what was not run is a command line without them.
    """

    flags: str
    note: str = ""
    since: str = ""
    left_out: bool = False


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A flag that the step under several strategies cannot honour.

    ``asked`` looks at Megatron's argument namespace, ``example`` is what a command line says to be refused, ``reason``
    says why, ``fix`` what to do. ``since``: the release from which on it is refused, or the branch that alone has it.
    ``unless``: the name under ``allow_untested`` that lets it pass.
    """

    flag: str
    asked: Callable[[Any], Any]
    reason: str
    fix: str = "remove it"
    example: str = ""
    dest: str = ""
    since: str = ""
    unless: Untested | None = None

    def line(self, given: str) -> str:
        """What a job ends with whose command line gives this value; nothing for a flag without."""
        value = f" (given: {given})" if given else ""
        allow = f", let it run (allow_untested: [{self.unless}])" if self.unless else ""
        return f"{self.flag}: {self.reason}{value}; {self.fix}{allow}{OR_WITHOUT}"


class Conflict(NamedTuple):
    """A flag that a command line gives and a job would refuse, with the line that it would end with."""

    flag: str
    line: str
    unless: Untested | None


def _as_given(value: Any) -> str:
    """A flag's value as a command line has it; nothing for a flag without."""
    if value is None or isinstance(value, bool):
        return ""
    parts = value if isinstance(value, list | tuple) else [value]
    text = one_line(("," if isinstance(value, tuple) else " ").join(map(str, parts)))
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


@dataclass(frozen=True, kw_only=True)
class Newer:
    """Releases of Megatron newer than what the tests run, by an ``example``: ``compat`` refuses them, in its own words."""

    example: str
    unless: Untested


Row: TypeAlias = Works | OnGpus | Refusal | Newer


def settings(flags: str) -> list[str]:
    """The flags of a row one by one, each with the values that follow it."""
    return re.findall(r"--\S+(?: (?!--)\S+)*", flags)


def _refused(flag: str, reason: str, *, value: str = "", dest: str = "", **more: Any) -> Refusal:
    """A flag that is refused wherever it is given."""
    dest = dest or flag[2:].replace("-", "_")
    return Refusal(flag=flag, asked=lambda args: getattr(args, dest, None), reason=reason, example=f"{flag} {value}".strip(),
                   dest=dest, **more)  # fmt: skip


def _refused_above(least: int, flag: str, reason: str, *, dest: str = "", **more: Any) -> Refusal:
    """A size that is refused where it is above ``least``."""
    dest = dest or flag[2:].replace("-", "_")

    def asked(args: Any) -> bool:
        size = getattr(args, dest, None)
        return isinstance(size, int) and size > least  # a word that is no number is Megatron's parser's to refuse

    return Refusal(flag=flag, asked=asked, reason=reason, example=f"{flag} {least + 1}", dest=dest, **more)


def _shards_apart_from_tp(shards: str, tp: str) -> Callable[[Any], bool]:
    def asked(args: Any) -> bool:
        size = getattr(args, tp, None) or 1
        return (getattr(args, shards, None) or size) != size

    return asked


INTER_DOCUMENT_MASKING: Final = "--dataloader-inter-document-masking"
"""Has stock Megatron's data loader, from 0.19 on, give the attention the ends of documents."""

_TRAINING = "test_training.py"
_MIXED = f"{_TRAINING}::test_mixed_training_equals_the_static_one"
_FLAGS = "test_flags.py"
_EVERYDAY = f"{_FLAGS}::test_everyday_flags_train_as_the_static_run_does"
_SCHEDULES = (
    "test_gradients.py::test_gradients_with_interleaved_schedules_and_recomputation_per_strategy_equal_the_reference"
)
_INTERLEAVING = "refused under 0.17, whose interleaved schedule gave wrong gradients"
_NOT_FUSED = (
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion "
    "--no-rope-fusion --no-persist-layer-norm"
)
_RESUME = "test_checkpoint.py::test_resuming_continues_the_unbroken_run_bit_for_bit"

TABLE: Final[tuple[tuple[str, tuple[Row, ...]], ...]] = (
    ("Megatron itself", (
        Newer(example=f"{NEWEST[0]}.{NEWEST[1] + 1}.0", unless="megatron"),
    )),
    ("Parallelism of home", (
        Works(flags="--tensor-model-parallel-size --context-parallel-size --pipeline-model-parallel-size "
                    "--sequence-parallel", test=_MIXED),
        Works(flags="--num-virtual-stages-per-pipeline-rank", test=_MIXED, note=_INTERLEAVING),
        Works(flags="--num-layers-per-virtual-pipeline-stage", test=_SCHEDULES, note=_INTERLEAVING),
        Works(flags="--decoder-first-pipeline-num-layers", test=f"{_TRAINING}::test_other_models",
              note="home and its siblings keep the split; a guest's is even"),
        Works(flags="--decoder-last-pipeline-num-layers",
              test="test_gradients.py::test_gradients_of_every_mix_equal_the_reference", note="as above"),
        Works(flags="--pipeline-model-parallel-layout", test=_SCHEDULES, note="as above"),
        Refusal(flag="--microbatch-group-size-per-virtual-pipeline-stage",
                asked=lambda args: (getattr(args, "microbatch_group_size_per_vp_stage", None)
                                    or args.pipeline_model_parallel_size) != args.pipeline_model_parallel_size,
                reason="other than the pipeline size is not supported: replicas would need more micro-batches than they may "
                       "have",
                example="--microbatch-group-size-per-virtual-pipeline-stage 3",
                dest="microbatch_group_size_per_vp_stage"),
        Refusal(flag="--tensor-parallel-num-weight-shards",
                asked=_shards_apart_from_tp("tensor_parallel_num_weight_shards", "tensor_model_parallel_size"),
                reason="other than the tensor-parallel size is not supported",
                example="--tensor-parallel-num-weight-shards 8", dest="tensor_parallel_num_weight_shards", since="0.19"),
        OnGpus(flags="--cp-comm-type", note="p2p, a2a, all_gather: Transformer Engine's; one choice for all strategies"),
        _refused("--hierarchical-context-parallel-sizes", "is not supported", value="2 2"),
        _refused("--hybrid-context-parallel", "chooses strategies itself"),
        _refused("--dynamic-context-parallel", "chooses strategies itself", since="dev"),
        _refused("--use-tp-pp-dp-mapping", "only Megatron's default rank order is supported"),
        _refused("--use-megatron-fsdp", "shards parameters in a layout of its own"),
        _refused("--use-torch-fsdp2", "shards parameters in a layout of its own"),
        _refused("--lazy-mpu-init", "is not supported"),
        _refused("--fake-process-group", "exchanges nothing between ranks"),
        Works(flags="--distributed-backend gloo", test=_MIXED),
        OnGpus(flags="--distributed-backend nccl", note="between several GPUs"),
        Works(flags="--distributed-timeout-minutes --disable-gloo-process-groups", test=_EVERYDAY),
        OnGpus(flags="--nccl-communicator-config-path", note="given to every strategy's groups"),
        OnGpus(flags="--high-priority-stream-groups", note="home's groups, and those that a strategy shares with them"),
        _refused("--use-sharp", "the groups of guests would be made without it"),
        _refused("--use-nccl-ub", "its buffers are home's alone", dest="nccl_ub"),
    )),
    ("Models", (
        Works(flags="--group-query-attention --swiglu --normalization --position-embedding-type --qk-layernorm "
                    "--add-qkv-bias --untie-embeddings-and-output-weights", test=f"{_TRAINING}::test_other_models",
              note="positions: learned or rotary"),
        Works(flags="--rotary-base --use-rope-scaling --rotary-percent", test=_EVERYDAY),
        _refused("--multi-latent-attention", "is not supported yet"),
        _refused_above(0, "--mtp-num-layers", "multi-token prediction keeps one strategy's groups"),
        _refused("--heterogeneous-layers-config-path", "is not supported yet", value="layers.json"),
        _refused("--spec", "a layer specification of your own is not supported", value="some.module layers"),
        _refused("--attention-output-gate", "gated attention output is not supported"),
        _refused("--experimental-attention-variant", "is not supported", value="gated_delta_net"),
        _refused("--qk-clip", "looks at home's segment alone"),
        _refused("--log-max-attention-logit", "looks at home's segment alone"),
        _refused("--freeze-all-layers", "there is nothing to train", since="0.19"),
    )),
    ("Experts", (
        _refused("--num-experts", "mixture-of-experts models are not supported yet", value="4"),
        _refused_above(1, "--expert-model-parallel-size", "mixture-of-experts models are not supported yet"),
        Refusal(flag="--expert-tensor-parallel-size",
                asked=_shards_apart_from_tp("expert_tensor_parallel_size", "tensor_model_parallel_size"),
                reason="other than the tensor-parallel size is not supported", example="--expert-tensor-parallel-size 8",
                dest="expert_tensor_parallel_size"),
        _refused("--overlap-moe-expert-parallel-comm", "drops the boundaries of packed sequences"),
    )),
    ("Precision", (
        Works(flags="--bf16", test=f"{_TRAINING}::test_mixed_training_in_bf16_differs_by_no_more_than_static_layouts_do"),
        Works(flags="--accumulate-allreduce-grads-in-fp32 --grad-reduce-in-bf16",
              test=f"{_FLAGS}::test_low_precision_differs_by_no_more_than_static_layouts_do",
              note="gradients travel in main_grad's precision, unless `switch.fold_dtype` says bf16; added in it"),
        Works(flags="--fp16 --initial-loss-scale --min-loss-scale --loss-scale-window --hysteresis",
              test=f"{_FLAGS}::test_low_precision_differs_by_no_more_than_static_layouts_do",
              note="a guest's losses are scaled as home's; an overflow anywhere skips the step"),
        OnGpus(flags="--fp32-residual-connection", note="Megatron's local layers do not take it"),
        _refused("--fp8-format", "never ran under several strategies", value="e4m3", dest="fp8", unless="fp8"),
        _refused("--fp8-param-gather", "keeps parameters in fp8, which do not travel between strategies"),
        _refused("--fp4-format", "is not supported yet: scaling state belongs to one strategy's layout", value="e2m1",
                 dest="fp4"),
        _refused("--ddp-param-name-patterns-for-fp32-local-accumulation", "is not supported", value="norm"),
    )),
    ("Optimizer and data-parallel gradients", (
        Works(flags="--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size",
              test=f"{_TRAINING}::test_overlap_changes_nothing"),
        Works(flags="--clip-grad --weight-decay --lr-decay-style", test=_MIXED),
        Works(flags="--decoupled-lr --decoupled-min-lr", test=_EVERYDAY,
              note="the optimizer is home's: groups of parameters are Megatron's own"),
        Refusal(flag="--optimizer", asked=lambda args: getattr(args, "optimizer", "adam") not in ("adam", "sgd"),
                reason="other than adam and sgd never ran under several strategies", fix="write one of them",
                example="--optimizer muon", dest="optimizer"),
        Works(flags="--optimizer", test=f"{_FLAGS}::test_other_optimizers_and_counts_train_as_the_static_run_does",
              note="adam and sgd"),
        _refused("--use-precision-aware-optimizer", "is not supported yet"),
        _refused("--optimizer-cpu-offload", "needs --use-precision-aware-optimizer, which is not supported yet"),
        _refused("--optimizer-cuda-graph", "graphs have fixed shapes"),
        _refused("--overlap-param-gather-with-optimizer-step", "is not supported",
                 fix="write --overlap-param-gather"),
        _refused_above(1, "--num-distributed-optimizer-instances",
                       "above 1 is not supported: a fold must find one owner of every gradient"),
        _refused("--ddp-average-in-collective", "gradients are sums here, divided once"),
        Works(flags="--check-for-large-grads --no-check-for-nan-in-loss-and-grad "
                    "--check-weight-hash-across-dp-replicas-interval --log-num-zeros-in-grad", test=_EVERYDAY),
    )),
    ("Memory, kernels and graphs", (
        Works(flags="--recompute-granularity --recompute-method --recompute-num-layers",
              test="test_recompute.py::test_every_segment_recomputes_what_its_entry_says",
              note="what home does; a strategy may say otherwise"),
        Works(flags="--recompute-modules core_attn mlp", test=f"{_FLAGS}::test_recomputed_modules_are_those_of_every_segment",
              note="under every strategy that recomputes as home does or says selective; where home's flags do not say "
                   "selective, a strategy that does recomputes the core attention alone"),
        OnGpus(flags="--recompute-modules layernorm", note="Megatron itself needs Transformer Engine for it"),
        Works(flags="--distribute-saved-activations",
              test=f"{_FLAGS}::test_other_optimizers_and_counts_train_as_the_static_run_does"),
        Works(flags="--transformer-impl local", test=_MIXED),
        OnGpus(flags="--transformer-impl transformer_engine", note="Megatron's default"),
        Works(flags="--attention-backend unfused", test=_MIXED),
        OnGpus(flags="--attention-backend flash --attention-backend fused --attention-backend auto",
               note="Transformer Engine's, with packed sequences; auto is Megatron's default"),
        Works(flags=_NOT_FUSED, test=_MIXED),
        OnGpus(flags=_NOT_FUSED, left_out=True, note="fused kernels, which Megatron's defaults take on GPUs"),
        OnGpus(flags="--deterministic-mode --te-rng-tracker"),
        Works(flags="--cross-entropy-loss-fusion --empty-unused-memory-level", test=_EVERYDAY),
        Refusal(flag="--window-size", asked=lambda args: getattr(args, "window_size", None)
                and getattr(args, "transformer_impl", None) == "local",
                reason="is not supported by --transformer-impl local", example="--window-size 16,0", dest="window_size"),
        _refused_above(0, "--cpu-offloading-num-layers", "is not supported"),
        _refused("--fine-grained-activation-offloading", "keeps one strategy's order of micro-batches"),
        Refusal(flag="--cuda-graph-impl", asked=lambda args: getattr(args, "cuda_graph_impl", "none") not in (None, "none"),
                reason="graphs have fixed shapes and groups", example="--cuda-graph-impl local", dest="cuda_graph_impl"),
        _refused("--enable-cuda-graph", "graphs have fixed shapes and groups"),
        _refused("--external-cuda-graph", "graphs have fixed shapes and groups"),
        _refused("--tp-comm-overlap", "its buffers have one fixed shape"),
        _refused("--defer-embedding-wgrad-compute", "is not supported"),
        _refused("--delay-wgrad-compute", "is not supported"),
        _refused("--init-model-with-meta-device", "is not supported"),
    )),
    ("Batches and data", (
        _refused_above(1, "--micro-batch-size", "must be 1: tokens_per_microbatch takes its place", fix="write 1"),
        Works(flags="--step-batch-size-schedule", since="0.18",
              test=f"{_TRAINING}::test_a_growing_batch_takes_the_same_samples_in_the_same_order"),
        Works(flags="--rampup-batch-size", until="0.18",
              test=f"{_TRAINING}::test_a_ramped_batch_takes_the_same_samples_in_the_same_order"),
        # Since then there is a schedule in its place, and Megatron passes over it.
        Refusal(flag="--rampup-batch-size",
                asked=lambda args: getattr(args, "rampup_batch_size", None) and hasattr(args, "step_batch_size_schedule"),
                reason="is ignored by this Megatron", fix="write the ramp as --step-batch-size-schedule",
                example="--rampup-batch-size 4 4 64", dest="rampup_batch_size", since="0.18"),
        _refused("--decrease-batch-size-if-needed", "is not supported"),
        Works(flags="--train-samples --lr-decay-samples --lr-warmup-samples",
              test=f"{_FLAGS}::test_other_optimizers_and_counts_train_as_the_static_run_does",
              note="samples are documents, unless samples: megatron"),
        Works(flags="--iterations-to-skip",
              test=f"{_TRAINING}::test_skipped_iterations_leave_out_their_samples_and_no_others"),
        _refused("--phase-transition-iterations", "is not supported", value="5"),
        Works(flags="--data-path --split --seed", test=_MIXED),
        Works(flags="--mock-data",
              test="test_samples.py::test_mock_lengths_train_and_are_refused_where_they_have_no_effect"),
        Works(flags="--sft", test="test_conversations.py::test_mixed_training_on_conversations_equals_the_static_one_and_"
                                  "tokenises_once"),
        Works(flags="--reset-position-ids --reset-attention-mask --eod-mask-loss",
              test="test_samples.py::test_with_megatrons_samples_the_losses_are_those_of_stock_megatron",
              note="samples: megatron needs them; documents always are trained so"),
        Works(flags=INTER_DOCUMENT_MASKING, test=f"{_FLAGS}::test_document_ends_of_the_data_loader_change_nothing",
              note="attention ends with documents without it, too", since="0.19"),
        Works(flags="--no-mmap-bin-files --num-workers", test=_EVERYDAY),
        Refusal(flag="--dataloader-type", asked=lambda args: getattr(args, "dataloader_type", None) == "external",
                reason="external data loaders do not tell the samples' lengths", fix="write single or cyclic",
                example="--dataloader-type external", dest="dataloader_type"),
        _refused("--fim-data", "rewrites documents when it draws them, so lengths are unknown beforehand"),
        _refused("--perform-rl-step", "is not supported"),
        _refused("--logits-load-dir", "hands the model more than a batch", value="logits", since="0.19"),
        _refused("--logits-save-dir", "sees home's segment alone", value="logits", since="0.19"),
    )),
    ("Checkpoints", (
        Works(flags="--save --load --save-interval", test=_RESUME, note="plain Megatron checkpoints of home"),
        Works(flags="--async-save --async-strategy --use-persistent-ckpt-worker --ckpt-fully-parallel-load "
                    "--no-ckpt-fully-parallel-save --ckpt-assume-constant-structure --use-checkpoint-args --log-progress",
              test="test_resume.py::test_what_is_written_beside_the_training_is_a_whole_checkpoint_or_none",
              note="without the persistent worker, Megatron drops --async-save"),
        Works(flags="--save-params-interval", test=f"{_FLAGS}::test_parameters_saved_apart_are_homes", since="0.18"),
        _refused("--save-wgrads-interval", "saves gradients of home's segment alone", value="5"),
        _refused("--save-dgrads-interval", "sees home's modules alone", value="5"),
        _refused("--save-activations-interval", "sees home's modules alone", value="5", since="0.18"),
    )),
    ("The training loop and its logs", (
        Works(flags="--rerun-mode", test=_EVERYDAY,
              note="disabled; the default validate_results is every other test's; report_stats ends Megatron itself"),
        Works(flags="--eval-interval --eval-iters", test=f"{_TRAINING}::test_evaluation_under_the_flag_is_stock_megatrons",
              note="in home, on Megatron's own samples"),
        Works(flags="--timing-log-level",
              test="test_steps.py::test_timers_that_wait_for_every_rank_do_not_wait_for_idle_replicas"),
        Works(flags="--log-throughput --log-params-norm --manual-gc --manual-gc-interval "
                    "--exit-duration-in-mins --train-sync-interval", test=_EVERYDAY),
        _refused("--inprocess-restart", "is not supported"),
        _refused("--yaml-cfg", "is not supported", fix="give the same settings as flags", value="run.yaml"),
    )),
)  # fmt: skip


def conflicts_in(args: Any) -> Iterator[Conflict]:
    """What Megatron's argument namespace asks for that is refused, in the table's order."""
    for row in _REFUSED:
        if row.asked(args):
            yield Conflict(row.flag, row.line(_as_given(getattr(args, row.dest, None))), row.unless)


def conflicts(arguments: Sequence[str]) -> list[Conflict]:
    """What a command line asks for that a job would refuse, read off its words, without Megatron's parser."""
    given: dict[str, list[str]] = {}
    flag = ""
    for word in (part for each in arguments for part in (each.split("=", 1) if each.startswith("--") else [each])):
        if word.startswith("--"):
            flag = word
            given[flag] = []
        elif flag:
            given[flag].append(word)
    names = {
        "--pipeline-model-parallel-size": "pipeline_model_parallel_size",
        "--tensor-model-parallel-size": "tensor_model_parallel_size",
        "--transformer-impl": "transformer_impl",
        **{row.flag: row.dest for row in _REFUSED},
    }
    # The newest releases have this one.
    said = SimpleNamespace(pipeline_model_parallel_size=1, step_batch_size_schedule=None)
    vars(said).update({names[flag]: _read(words) for flag, words in given.items() if flag in names})
    return list(conflicts_in(said))


def _read(words: Sequence[str]) -> bool | int | str | list[str]:
    """What follows a flag, as Megatron's parser would have it where that matters here."""
    if len(words) > 1:
        return list(words)
    return True if not words else int(words[0]) if words[0].isdecimal() else words[0]


_REFUSED: Final = tuple(row for _, rows in TABLE for row in rows if isinstance(row, Refusal))
DOCUMENT_FLAGS: Final = ("--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss")
"""What samples: megatron asks for: they cut Megatron's own samples at document ends without us, too."""


def why_stock_crosses_documents(
    *, mask_in_dataloader: bool, ends_in_dataloader: bool, transformer_impl: str, cp: int
) -> str | None:
    """Why stock Megatron attends across document ends in spite of --reset-attention-mask; None where it does not.

    Only the data loader's mask keeps it within a document, or what ``INTER_DOCUMENT_MASKING`` adds. The mask is not cut for
    context parallelism, and Transformer Engine's causal attention passes over it (its documentation; not run).
    """
    if ends_in_dataloader:
        return None
    if not mask_in_dataloader:
        return "with --no-create-attention-mask-in-dataloader it attends across documents"
    if transformer_impl != "local":
        return f"with --transformer-impl {transformer_impl} it attends across documents"
    return "under context parallelism it attends across documents" if cp > 1 else None
