"""A corpus that every Python brings along: the top-level functions and classes of its standard library.

One document is the source of one function or class, one token is one byte, and an end-of-document token closes each
document. The lengths are as skewed as those of real corpora: half are under 400 bytes, one in twenty is over 6,000.
"""

from __future__ import annotations

import ast
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

END_OF_DOCUMENT: Final = 256
VOCAB_SIZE: Final = 257  # Megatron's NullTokenizer takes the last one as its end of document

# Not what Python programs look like, or not there in every installation.
_LEFT_OUT: Final = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtledemo"}
)


@dataclass(frozen=True, kw_only=True)
class CorpusStatistics:
    """Lengths in tokens, the end of document included."""

    documents: int
    tokens: int
    median: int
    percentile_95: int
    longest: int


def standard_library() -> Path:
    """Where the running interpreter keeps its standard library."""
    return Path(sysconfig.get_path("stdlib"))


def documents(root: Path) -> Iterator[bytes]:
    """The source of each top-level function and class below a folder, decorators included, in the order of paths."""
    for path in sorted(root.rglob("*.py")):
        if _LEFT_OUT.intersection(path.relative_to(root).parts):
            continue
        source = path.read_bytes()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # odd escapes and the like are not ours to report
                tree = ast.parse(source)
        except (SyntaxError, ValueError):  # a template, or another Python's syntax
            continue
        lines = source.splitlines(keepends=True)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                yield b"".join(lines[first - 1 : node.end_lineno])


def statistics_of(corpus: Sequence[bytes]) -> CorpusStatistics:
    """What the lengths look like; the corpus holds at least one document."""
    lengths = np.array([len(document) + 1 for document in corpus])
    return CorpusStatistics(
        documents=len(lengths),
        tokens=int(lengths.sum()),
        median=int(np.median(lengths)),
        percentile_95=int(np.percentile(lengths, 95)),
        longest=int(lengths.max()),
    )


def write(corpus: Sequence[bytes], prefix: Path) -> None:
    """Write Megatron's ``prefix.bin`` and ``prefix.idx``; Megatron's import changes torch.cuda in this process."""
    # Megatron is imported here because it takes seconds, and --help and the report have no need of it.
    import torch

    from hotspa_megatron.hooks import cpu

    if cpu.needed():
        cpu.install()
    with cpu.quiet_imports():
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
        for document in corpus:
            tokens = np.append(np.frombuffer(document, dtype=np.uint8).astype(np.uint16), np.uint16(END_OF_DOCUMENT))
            builder.add_document(torch.from_numpy(tokens), [len(tokens)])
        builder.finalize(f"{prefix}.idx")
