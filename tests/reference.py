"""The masked reference (oracle O2): every key and value ever computed, evicted ones hidden by an explicit mask."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tenure.models.adapter import Adapter


class MaskedReference:
    """Runs a model over all rows it ever computed, of which a mask hides what a session evicted.

    It shares no cache, ledger or kernel with the engine: one softmax over all rows, rotation by complex numbers.
    """

    def __init__(self, model: Any) -> None:
        self._adapter = Adapter.attach(copy.deepcopy(model), executor="transformers")
        layers = self._adapter.layout.layers
        self._keys: list[Tensor | None] = [None] * layers
        self._values: list[Tensor | None] = [None] * layers
        self._length = 0

    def beside(self, session: Any, ids: list[int]) -> Tensor:
        """Logits of a chunk as a session would give them that is about to read it, on the CPU."""
        session.memory.prepare(len(ids))
        ledger = session.memory.ledger
        held = slice(0, ledger.rows)
        logical, position = (array[:, held].cpu().clone() for array in (ledger.logical, ledger.position))
        return self.run(ids, logical, position, ledger.next_position)

    def run(self, ids: list[int], logical: Tensor, position: Tensor, first: int) -> Tensor:
        """Logits of a chunk.

        Args:
            ids: the chunk.
            logical: ``[groups, rows]``, which tokens the session holds.
            position: ``[groups, rows]``, where they stand.
            first: rotary position of the chunk's first token.
        """
        total = self._length + len(ids)
        self._visible, self._positions = [], []
        for rows, places in zip(logical, position, strict=True):
            visible = torch.zeros(total, dtype=torch.bool)
            visible[rows] = True
            visible[self._length :] = True
            where = torch.zeros(total, dtype=torch.int64)
            where[rows] = places
            where[self._length :] = first + torch.arange(len(ids))
            self._visible.append(visible)
            self._positions.append(where)
        work = SimpleNamespace(attend=self._attend)
        with torch.no_grad():
            logits = self._adapter.run(torch.tensor(ids), work, torch.arange(len(ids)))  # type: ignore[arg-type]
        self._length = total
        return logits

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        old_k, old_v = self._keys[layer], self._values[layer]
        self._keys[layer] = k = k if old_k is None else torch.cat([old_k, k], 1)
        self._values[layer] = v = v if old_v is None else torch.cat([old_v, v], 1)
        group = layer % len(self._visible)
        n, total = q.shape[1], k.shape[1]
        q = self._rotate(layer, q, self._positions[group][total - n :])
        k = self._rotate(layer, k, self._positions[group])
        share = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(share, 0), v.repeat_interleave(share, 0)
        index = torch.arange(total)
        mask = self._visible[group][None] & (index[None] <= index[total - n :, None])
        window = self._window(layer)
        if window is not None:
            mask &= index[None] > index[total - n :, None] - window
        logits = (q @ k.transpose(1, 2)) * self._adapter.scale
        logits = logits.masked_fill(~mask, float("-inf"))
        if sinks is not None:
            logits = torch.cat([logits, sinks[:, None, None].expand(-1, n, 1)], -1)
            v = torch.cat([v, torch.zeros_like(v[:, :1])], 1)
        return (logits.softmax(-1) @ v).transpose(0, 1)

    def _window(self, layer: int) -> int | None:
        """As the layer's own module has it, or all layers by the config."""
        attention = self._adapter.model.model.layers[layer].self_attn
        config = self._adapter.model.config
        window = getattr(attention, "sliding_window", getattr(config, "sliding_window", None))
        return window or None if getattr(attention, "is_sliding", True) else None

    def _rotate(self, layer: int, x: Tensor, positions: Tensor) -> Tensor:
        rope = self._adapter.ropes[layer]
        half = rope.inv_freq.numel()
        turn = torch.polar(torch.ones(()), positions[:, None].float() * rope.inv_freq) * rope.attention_factor
        pair = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
        return torch.cat([pair.real, pair.imag, x[..., 2 * half :]], -1)
