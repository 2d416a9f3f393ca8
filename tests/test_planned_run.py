"""From documents to losses: what ``hotspa plan`` chooses for a corpus, file and flags taken as they come, trains as static."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hotspa_megatron.cli.main import main
from hotspa_megatron.planning import hardware
from tests.training import STATIC, Job, arguments, corpus, difference, lengths_for, train


def test_a_plan_made_from_a_corpus_trains_like_the_static_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    short = np.minimum(np.random.default_rng(5).lognormal(4.6, 0.8, (4, 23)), 400).astype(int).tolist()
    steps = [[*some, long] for some, long in zip(short, (900, 1000, 800, 1024), strict=True)]
    documents = corpus(lengths_for(steps))
    text = (Path(hardware.__file__).parent / "hardware" / "cpu-gloo.yaml").read_text()
    # So small that the longest documents fit no single rank, and the others do.
    for field, old, mib in (("memory_mib", 4096, 5), ("reserved_mib", 512, 1), ("margin_mib", 256, 1)):
        assert f"{field}: {{value: {old}," in text
        text = text.replace(f"{field}: {{value: {old},", f"{field}: {{value: {mib},")
    cluster, path = tmp_path / "small.yaml", tmp_path / "hotspa.yaml"
    cluster.write_text(text)
    longest = ("--seq-length", "1024", "--max-position-embeddings", "1024", "--split", "100,0,0")
    line = arguments("--use-distributed-optimizer", *longest, documents=documents, iterations=4, batch=24)
    options = ["--hardware", str(cluster), "--world-size", "4", "--corpus", str(documents), "-o", str(path), "--json"]
    assert main(["plan", *options, "--", *line]) == 0
    said = json.loads(capsys.readouterr().out)
    assert {group["kind"] for group in said["groups"]} > {"home"}, "one strategy for all lengths shows nothing"

    line = (*line, *said["megatron_flags"])
    planned, static = train(Job(line, path.read_text())), train(Job(line, STATIC))
    assert planned.losses == pytest.approx(static.losses, rel=1e-6) and len(planned.losses) == 4
    assert difference(planned.grad_norms, static.grad_norms) < 1e-4
    # It was not the static run twice: each strategy that was chosen had its share of every step.
    chosen = {group["strategy"] for group in said["groups"]}
    assert [{segment.strategy for segment in step.segments} for step in planned.steps] == [chosen] * 4
    assert {segment.strategy for step in static.steps for segment in step.segments} == {said["home"]}
