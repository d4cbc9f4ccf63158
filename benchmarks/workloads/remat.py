"""``jax.checkpoint`` around one block of a model, placed as a user does by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

BLOCK_INPUT = "block_input"
"""Name of what enters a block, for policies that go by names."""


def named_input(x: Any) -> Any:
    """The arrays of ``x`` under the name ``BLOCK_INPUT``."""
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, BLOCK_INPUT), x)


def checkpointed(
    block: Callable[..., Any], policy: Callable[..., Any] | None, *, stream: int = 1, loop: bool = False
) -> Callable[..., Any]:
    """``block`` under ``jax.checkpoint`` with ``policy``; ``block`` itself when that is None.

    ``stream``: position of the argument that goes from block to block; it gets the name ``BLOCK_INPUT``.
    ``loop``: the block is a scan's body, which XLA cannot merge with its clone.
    """
    if policy is None:
        return block

    def with_name(*args: Any) -> Any:
        return block(*args[:stream], named_input(args[stream]), *args[stream + 1 :])

    return jax.checkpoint(with_name, policy=policy, prevent_cse=not loop)
