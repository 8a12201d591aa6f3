"""Probes: queries that say which keys matter, and what they see.

Queries are not cached. They are computed again by reading tokens behind the session (a question, a repetition), by
reading the newest tokens once more in their own place, or are kept from the turn that followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tenure.cache.rows import CosSin
from tenure.errors import ConfigError
from tenure.kernels import Kernels

if TYPE_CHECKING:
    from tenure.engine import Engine
    from tenure.memory import Memory


@dataclass(frozen=True, eq=False)
class Probes:
    """``P`` queries in every layer.

    Args:
        raw: unrotated queries ``[L, H, P, D]``.
        lse: log-sum-exp of each over all that it saw, ``[L, H, P]`` fp32.
        position: ``[P]`` rotary positions.
    """

    raw: Tensor
    lse: Tensor
    position: Tensor

    def __len__(self) -> int:
        return len(self.position)

    def __getitem__(self, index: slice | Tensor) -> Probes:
        return Probes(self.raw[:, :, index], self.lse[:, :, index], self.position[index])

    def every(self, most: int) -> Probes:
        """At most ``most`` of them, evenly spread, the last one always among them."""
        if len(self) <= most:
            return self
        if most == 1:
            return self[-1:]
        return self[torch.linspace(0, len(self) - 1, most).round().long()]

    def queries(self, layer: int, kv_heads: int, cos_sin: CosSin, kernels: Kernels) -> Tensor:
        """Rotated queries of a layer by kv head, ``[G, g P, D]`` fp32: head by head, within one by probe."""
        raw = self.raw[layer].float()
        rotated = kernels.rotate(raw, *cos_sin(self.position))
        return rotated.reshape(kv_heads, -1, raw.shape[-1])

    def shares(
        self, layer: int, keys: Tensor, position: Tensor, cos_sin: CosSin, kernels: Kernels, scale: float
    ) -> Tensor:
        """Attention probabilities on rotated keys ``[G, T, D]`` of a layer: ``[G, g, P, T]`` fp32.

        They are shares of all that the queries saw, so they sum to less than one; keys behind a query have none.

        Args:
            layer: which one.
            keys: see above.
            position: ``[T]`` of the keys.
            cos_sin: angles of positions.
            kernels: the kernel module of the device.
            scale: factor on the logits.
        """
        queries = self.queries(layer, len(keys), cos_sin, kernels)
        logits = torch.bmm(queries, keys.float().transpose(1, 2)).mul_(scale)
        logits = logits.view(len(keys), -1, len(self), keys.shape[1])
        shares = logits.sub_(self.lse[layer].view(*logits.shape[:3], 1)).clamp_(max=0.0).exp_()
        behind = position > self.position[:, None]
        return shares.masked_fill_(behind, 0.0) if bool(behind.any()) else shares


def join(parts: Sequence[Probes]) -> Probes:
    """All probes of some readings."""
    return Probes(
        torch.cat([part.raw for part in parts], 2),
        torch.cat([part.lse for part in parts], 2),
        torch.cat([part.position for part in parts]),
    )


class Recorder:
    """Keeps the queries of a forward: the ``watch`` of a :class:`~tenure.cache.attend.Work`.

    Args:
        first: of the new tokens to keep.
    """

    def __init__(self, first: int = 0) -> None:
        self._first = first
        self._raw: list[Tensor] = []
        self._lse: list[Tensor] = []

    @property
    def count(self) -> int:
        """Queries that were kept."""
        return self._raw[0].shape[1] if self._raw else 0

    def __call__(self, layer: int, q: Tensor, lse: Tensor) -> None:
        """See :data:`~tenure.cache.attend.Watch`."""
        self._raw.append(q[:, self._first :].clone())
        self._lse.append(lse.flatten(0, 1)[:, self._first :].float().clone())

    @classmethod
    def of(cls, raw: Tensor, lse: Tensor) -> Recorder:
        """One that has kept what :meth:`state` gave."""
        recorder = cls()
        recorder._raw, recorder._lse = list(raw), list(lse)
        return recorder

    def state(self) -> tuple[Tensor, Tensor]:
        """Queries ``[L, H, P, D]`` and their log-sum-exps ``[L, H, P]``."""
        return torch.stack(self._raw), torch.stack(self._lse)

    def probes(self, position: Tensor) -> Probes:
        """What was kept, at the positions of these tokens."""
        return Probes(*self.state(), position)


class SessionReader:
    """See :class:`~tenure.compress.base.Reader`.

    Args:
        engine: the model.
        memory: of a session without waiting tokens, prepared for ``limit`` more.
        limit: tokens that one reading may have.
    """

    def __init__(self, engine: Engine, memory: Memory, limit: int) -> None:
        self._engine = engine
        self._memory = memory
        self.limit = limit

    def tail(self, count: int) -> Probes:
        """See :class:`~tenure.compress.base.Reader`: tokens that an eviction has left gaps between are left out."""
        ledger = self._memory.ledger
        count = min(count, ledger.rows, self.limit)
        logical = ledger.logical[:, ledger.rows - count : ledger.rows]
        position = ledger.position[:, ledger.rows - count : ledger.rows]
        places = torch.arange(-count, 0, device=logical.device)
        known = ((logical - ledger.length == places) & (position - ledger.next_position == places)).all(0)
        count = int(known.flip(0).cumprod(0).sum())
        if count == 0:  # the last token is always in the cache but for policies that drop it
            return self.behind(self._memory.ids[-1:])
        recorder = Recorder()
        self._engine.look(self._memory, self._memory.ids[-count:], recorder, hide=count)
        return recorder.probes(ledger.next_position + places[-count:])

    def behind(self, ids: Sequence[int], first: int = 0) -> Probes:
        """See :class:`~tenure.compress.base.Reader`."""
        if first >= self.limit:
            raise ConfigError(
                f"{first} tokens have to come before what is read, {self.limit} can be read at once",
                option="chunk",
                way_out="Give a larger chunk, or a method that reads nothing again, such as keydiff",
            )
        ids = list(ids)[: self.limit]
        recorder = Recorder(first)
        self._engine.look(self._memory, ids, recorder)
        start = self._memory.ledger.next_position
        return recorder.probes(
            torch.arange(start + first, start + len(ids), device=self._memory.rows.raw.device)
        )
