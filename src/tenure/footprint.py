"""What a session will need of memory, said before it runs: weights, slab, and the activations of one chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tenure.config import SessionConfig
from tenure.kernels.native import native

if TYPE_CHECKING:
    from tenure.engine import Engine

_BLOCK = 48 << 20
"""Largest block of attention statistics: 32 MB of fp32 and half of that in bf16."""

_WINDOW = 128
"""Queries that statistics look at, by default."""


@dataclass(frozen=True)
class Footprint:
    """Bytes that a model and one session hold at the most.

    Args:
        weights: of the model, each storage once.
        slab: of the session: raw keys, values and, where it is kept, the rotated copy.
        activations: temporaries of one chunk.
    """

    weights: int
    slab: int
    activations: int

    @property
    def total(self) -> int:
        """All of it; the interpreter and its libraries come on top."""
        return self.weights + self.slab + self.activations


def footprint(engine: Engine, config: SessionConfig) -> Footprint:
    """What a session of these options needs.

    Activations are those of a decoder layer: of its gated feed-forward (residual states, gate and up, the activated
    gate; with int8 weights the activated gate and its rounded form, or the weight of both unpacked) and of its attention
    (states, queries rotated in fp32, their output, keys and values packed for the kernel, a block of statistics). They
    do not live at the same time, but an allocator keeps the memory of both.

    Args:
        engine: with the model loaded.
        config: of the session; one without a budget grows, so its slab is counted as 0.
    """
    model, layout = engine.adapter.model, engine.layout
    shape, size, chunk = model.config.get_text_config(), layout.dtype.itemsize, config.chunk
    slots = config.capacity or 0
    hidden, heads = int(shape.hidden_size), int(shape.num_attention_heads) * layout.head_dim
    keys = layout.kv_heads * layout.head_dim
    wide = int(shape.intermediate_size)
    feed = chunk * size * 4 * hidden
    if engine.config.weights != "int8":
        feed += chunk * size * 3 * wide
    elif (kernels := native()) is not None and kernels.can_multiply(torch.empty(0, dtype=layout.dtype)):
        feed += chunk * (size + 1) * wide + 8 * chunk * wide // kernels.int8_span
    else:
        feed += chunk * size * 3 * wide + 2 * size * hidden * wide
    queries = chunk * (size * (3 * hidden + 3 * heads + 3 * keys) + 4 * 2 * heads)
    packed = 2 * size * (slots or chunk) * keys
    block = min(_BLOCK, 6 * _WINDOW * int(shape.num_attention_heads) * (slots or chunk))
    logits = 6 * int(shape.vocab_size)
    return Footprint(
        weights=engine.adapter.weight_bytes,
        slab=slots * layout.token_bytes * (3 if engine.config.rotate == "copy" else 2) // 2,
        activations=feed + queries + packed + block + logits,
    )
