"""Real text to train on, found in this checkout: the project's own documentation, then its sources, as bytes.

The same checkout gives the same batches in the same order, so two runs see the same data.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

VOCAB = 256
"""A token is a byte."""

_ROOT = Path(__file__).resolve().parent.parent
_DOCS = ("README.md", "docs/**/*.md")
_SOURCES = ("jaxtensile/*.py", "passes/*.py", "runtime/*.py", "examples/*.py", "tests/**/*.py")


def corpus(least: int = 200_000) -> np.ndarray:
    """README.md and docs/ as one array of bytes; source files follow while it is shorter than ``least``."""
    text = b"".join(path.read_bytes() for path in _files(_DOCS))
    for path in _files(_SOURCES):
        if len(text) >= least:
            break
        text += path.read_bytes()
    return np.frombuffer(text, np.uint8)


def batches(text: np.ndarray, *, batch: int, context: int, steps: int, seed: int = 0) -> Iterator[np.ndarray]:
    """``steps`` batches of ``batch`` windows, ``context`` tokens and the one that follows each."""
    if len(text) <= context + 1:
        raise ValueError(f"{len(text)} bytes of text are too few for windows of {context + 1}: lower the context")
    choose = np.random.default_rng(seed)
    for _ in range(steps):
        starts = choose.integers(0, len(text) - context - 1, size=batch, endpoint=True)
        yield np.stack([text[at : at + context + 1] for at in starts]).astype(np.int32)


def _files(patterns: tuple[str, ...]) -> list[Path]:
    return [path for pattern in patterns for path in sorted(_ROOT.glob(pattern))]
