"""Samples: documents as they stand in the index, Megatron's own samples, cut at document ends, and mock documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotspa_megatron.config import ConfigError, load_config
from hotspa_megatron.hooks.samples import Corpus, Documents, Piece, Source, masked
from hotspa_megatron.planning.lengths import LengthHistogram
from tests.spawn import run_ranks
from tests.test_data_faults import refusal
from tests.test_training import SHARDED, assert_equal, strategies_of
from tests.training import GROUPED_QUERIES, Job, arguments, corpus, import_megatron, on_mock_data, train

RESET = ("--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss")
MEGATRON = "samples: megatron\n"


class _Memory:
    """An indexed dataset in memory: token i of document d is 100 d + i."""

    def get(self, index: int, offset: int = 0, length: int | None = None) -> Any:
        return 100 * index + np.arange(offset, offset + (length or 0))


def documents(lengths: tuple[int, ...], overlong: Any = "split", limit: int = 10) -> Documents:
    source = Source(_Memory(), np.arange(len(lengths)), np.array(lengths, np.int64), -1)
    return Documents(Corpus((source,), (1.0,), None), seed=3, seq_length=limit, overlong=overlong)


def by_document(samples: Documents, count: int) -> list[Piece]:
    return sorted(samples.pieces(0, count), key=lambda piece: (piece.document, piece.start))


def test_every_target_of_every_document_is_trained_once_in_an_epoch() -> None:
    lengths = (1, 2, 11, 12, 21, 22, 5, 35)
    targets = []
    for piece in documents(lengths).pieces(0, len(lengths)):
        text = documents(lengths).text(piece)
        assert len(text.inputs) == piece.length <= 10
        assert (text.targets == text.inputs + 1).all() and text.counted.all()
        targets += text.targets.tolist()
    # All tokens but each document's first, which nothing predicts.
    assert sorted(targets) == [100 * d + i for d, length in enumerate(lengths) for i in range(1, length)]


def test_overlong_documents_follow_the_rule() -> None:
    lengths = (5, 11, 12, 35)
    pieces = ((0, 10), (10, 10), (20, 10), (30, 4))
    assert by_document(documents(lengths, "split"), 4)[-4:] == [Piece(0, 3, start, n) for start, n in pieces]
    assert by_document(documents(lengths, "truncate"), 4) == [Piece(0, 0, 0, 4)] + [
        Piece(0, d, 0, 10) for d in (1, 2, 3)
    ]
    assert [piece.document for piece in by_document(documents(lengths, "drop"), 4)] == [0, 1]
    with pytest.raises(
        ValueError, match=r"document [23] of source 0\) has (11|34) input positions, more than --seq-length 10"
    ):
        documents(lengths, "error").pieces(0, 4)
    # Equality fits.
    assert len(documents((11, 5), "error").pieces(0, 2)) == 2


def test_a_document_without_a_target_counts_as_a_sample_and_trains_nothing() -> None:
    assert documents((1, 1, 1)).pieces(0, 7) == []


@pytest.mark.parametrize("overlong", ["split", "truncate", "drop"])
def test_token_shares_are_shares_of_what_is_trained(overlong: Any) -> None:
    lengths = (np.full(500, 11), np.tile([101, 1001], 50))
    sources = tuple(Source(_Memory(), np.arange(len(n)), n.astype(np.int64), -1) for n in lengths)
    corpus_of_two = Corpus(sources, (0.5, 0.5), None)
    samples = Documents(corpus_of_two, seed=1, seq_length=200, overlong=overlong)
    pieces = samples.pieces(0, 50_000)
    tokens = [sum(piece.length for piece in pieces if piece.source == source) for source in (0, 1)]
    assert abs(tokens[0] / sum(tokens) - 0.5) < 0.02
    # So is the line that says how many tokens a step holds.
    assert abs(sum(tokens) / 50_000 / corpus_of_two.mean_length(200, overlong) - 1) < 0.02


def test_a_source_that_would_train_nothing_is_refused() -> None:
    sources = tuple(
        Source(_Memory(), np.arange(5), np.full(5, length, np.int64), -1, name=f"source-{length}")
        for length in (11, 1001)
    )
    with pytest.raises(ValueError, match="source-1001: no document has a target within --seq-length 200"):
        Documents(Corpus(sources, (0.5, 0.5), None), seed=1, seq_length=200, overlong="drop")


def test_masking_follows_the_inputs_and_the_padding() -> None:
    text = masked(np.array([7, 9, 3, 9, 5, 0]), masked_token=9, pad_token=0)
    assert text.inputs.tolist() == [7, 9, 3, 9, 5]
    assert text.targets.tolist() == [9, 3, 9, 5, 0]
    assert text.counted.tolist() == [True, False, True, False, False]


def test_megatron_samples_hold_what_its_own_dataset_gives() -> None:
    assert run_ranks(_compare_with_dataset, 1, corpus(), prepare=import_megatron)[0] > 100


def _compare_with_dataset(rank: int, world_size: int, prefix: Path) -> int:
    import torch
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    from hotspa_megatron.hooks.samples import MegatronSamples

    class Tokenizer:
        vocab_size, eod, pad = 121, 120, 7

        def __init__(self) -> None:
            self.unique_identifiers: dict[str, Any] = {}

    pieces = 0
    for blend in ([str(prefix)], None), ([str(prefix), str(prefix)], [0.3, 0.7]):
        config = GPTDatasetConfig(
            random_seed=1, sequence_length=64, blend=blend, split="90,10,0", path_to_cache=f"{prefix}-compare",
            tokenizer=Tokenizer(), reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True,
            create_attention_mask=True,
        )  # fmt: skip
        dataset = BlendedMegatronDatasetBuilder(GPTDataset, [40, 0, 0], lambda: True, config).build()[0]
        samples = MegatronSamples(dataset, seq_length=64)
        for index in range(40):
            stock, begin = dataset[index], 0
            for piece in samples.pieces(index, 1):
                assert piece.start == begin
                begin += piece.length
                text, where = samples.text(piece), slice(piece.start, begin)
                assert (text.inputs == stock["tokens"][where].numpy()).all()
                assert (text.targets == stock["labels"][where].numpy()).all()
                assert (text.counted == stock["loss_mask"][where].numpy().astype(bool)).all()
                assert (stock["position_ids"][where] == torch.arange(piece.length)).all()
                # True is masked: inside a piece everything before is seen, of earlier pieces nothing.
                assert not stock["attention_mask"][0, begin - 1, piece.start : begin].any()
                assert stock["attention_mask"][0, begin - 1, : piece.start].all()
                pieces += 1
            assert begin == 64
    return pieces


@pytest.mark.long
@pytest.mark.parametrize("positions", ["learned_absolute", "rope"])
def test_with_megatrons_samples_the_losses_are_those_of_stock_megatron(positions: str) -> None:
    """The oracle that is not ours: no flag, no hooks of ours in the step, dense masks from Megatron's own dataset."""
    model = (*GROUPED_QUERIES, "--swiglu", "--disable-bias-linear", "--normalization", "RMSNorm",
             "--position-embedding-type", positions)  # fmt: skip
    line = [
        each for each in arguments(*RESET, iterations=8, batch=8, model=model) if "--no-create-attention" not in each
    ]
    stock = train(Job((*line, SHARDED), None))
    home = train(Job((*line, SHARDED), MEGATRON + "strategies: []"))
    mixed = train(
        Job((*line, SHARDED), MEGATRON + "strategies: [{max_length: 32, tp: 2, pp: 2}, {max_length: 128, tp: 4}]")
    )
    for name, run in (("home only", home), ("mixed", mixed)):
        assert_equal(f"samples: megatron, {positions}, {name}", run, stock, (stock, home))
        assert [each.consumed_samples for each in run.iterations] == [
            each.consumed_samples for each in stock.iterations
        ]
    assert {kind for step in mixed.steps for kind in (segment.kind for segment in step.segments)} == {"guest", "home"}


def test_documents_are_not_what_stock_megatron_trains_on() -> None:
    """Negative control of the comparison above: the same command line on documents gives other losses."""
    model = (*GROUPED_QUERIES, "--swiglu", "--disable-bias-linear", "--normalization", "RMSNorm",
             "--position-embedding-type", "rope")  # fmt: skip
    line = [
        each for each in arguments(*RESET, iterations=8, batch=8, model=model) if "--no-create-attention" not in each
    ]
    stock, other = train(Job((*line, SHARDED), None)), train(Job((*line, SHARDED), "strategies: []"))
    with pytest.raises(AssertionError):
        assert_equal("documents", other, stock, (stock, stock))


# ------------------------------------------------------------------------------------------------------ mock documents

LOGNORMAL = "lognormal:mean=60,sigma=1,max=400"


def test_mock_documents_have_the_lengths_that_are_named_and_megatrons_tokens() -> None:
    run_ranks(_compare_mock_documents, 1, prepare=import_megatron)


def _compare_mock_documents(rank: int, world_size: int) -> None:
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
    from megatron.core.tokenizers import MegatronTokenizer

    from hotspa_megatron.hooks.samples import corpus_from

    def built(seed: int) -> Any:
        tokenizer = MegatronTokenizer.from_pretrained(metadata_path={"library": "null-text"}, vocab_size=50)
        config = GPTDatasetConfig(
            random_seed=seed, sequence_length=64, split="90,10,0", tokenizer=tokenizer, reset_position_ids=False,
            reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
        )  # fmt: skip
        return BlendedMegatronDatasetBuilder(MockGPTDataset, [1, 1, 1], lambda: True, config).build()[0]

    named = LengthHistogram.named(LOGNORMAL)
    dataset = built(seed=1)
    before = dataset.dataset.sequence_lengths.copy()
    (stock,), (source,) = corpus_from(dataset).sources, corpus_from(dataset, mock_lengths=named).sources
    assert stock.lengths.max() == 4095 and len(source.lengths) == len(stock.lengths)
    drawn = LengthHistogram.of(source.lengths - 1)
    for share in (0.1, 0.5, 0.9, 1.0):
        assert abs(drawn.quantile(share) - named.quantile(share)) <= 0.02 * named.quantile(share) + 1
    for document in range(200):
        length = int(source.lengths[document])
        # What Megatron makes of a document of its own that has this length.
        twin = int(np.flatnonzero(dataset.dataset.sequence_lengths == length)[0])
        assert source.tokens(document, 0, length).tolist() == dataset.dataset[twin].tolist()
        assert source.tokens(document, 1, length - 1).tolist() == dataset.dataset[twin][1:].tolist()
    # Evaluation reads the provider's own data set, whose index was built over its own lengths.
    assert (dataset.dataset.sequence_lengths == before).all()
    (again,), (other,) = (corpus_from(built(seed), mock_lengths=named).sources for seed in (1, 2))
    assert (again.lengths == source.lengths).all() and not (other.lengths == source.lengths).all()


def _mock_arguments() -> tuple[str, ...]:
    return on_mock_data(arguments(iterations=2, batch=8))


def test_mock_lengths_train_and_are_refused_where_they_have_no_effect() -> None:
    config = f"strategies: [{{max_length: 32, tp: 2}}]\nmock_lengths: {LOGNORMAL}"
    run = train(Job(_mock_arguments(), config, ranks=2))
    assert "8 of them are 4" in run.output and all(4 < loss < 6 for loss in run.losses)
    assert len({step.tokens for step in run.steps}) == 2 and all(step.tokens < 8 * 400 for step in run.steps)
    assert {kind for _, kind in strategies_of(run)} == {"guest", "home"}
    assert "mock_lengths: is for --mock-data alone" in refusal(Job(arguments(), config, ranks=1))
    megatron = config + "\nsamples: megatron"
    assert "mock_lengths: has no effect on samples: megatron" in refusal(Job(_mock_arguments(), megatron, ranks=1))


@pytest.mark.parametrize(
    ("value", "problem"),
    [("normal", "'normal' names no lengths"), ("lognormal:1,2", "names no lengths"), ("[1]", "a list stands where")],
)
def test_unknown_mock_lengths_are_refused_with_their_line(tmp_path: Path, value: str, problem: str) -> None:
    path = tmp_path / "hotspa.yaml"
    path.write_text(f"strategies: []\nmock_lengths: {value}\n")
    with pytest.raises(ConfigError, match=rf"hotspa\.yaml:2: mock_lengths: .*{problem}"):
        load_config(path)


def test_mock_lengths_are_read_and_belong_to_the_digest(tmp_path: Path) -> None:
    path = tmp_path / "hotspa.yaml"
    (tmp_path / "lengths.txt").write_text("5\n7\n")
    digests = set()
    for value in ("null", "wikipedia", LOGNORMAL, str(tmp_path / "lengths.txt")):
        path.write_text(f"strategies: []\nmock_lengths: {value}\n")
        config = load_config(path)
        assert config.mock_lengths == (None if value == "null" else value)
        digests.add(config.digest())
    assert len(digests) == 4
