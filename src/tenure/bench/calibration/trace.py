"""Lifetimes of attention: for each token, how long it is looked at by more than its fair share.

A transcript is read with a full cache in chunks of a few tokens; after each, the attention of the chunk's queries, a mean
over all heads and layers, says which tokens were looked at. Steps pass as in a session that wrote the assistant's
messages itself: with each of their tokens, and with 64 of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from tenure.cache.attend import Statistics
from tenure.engine import Engine
from tenure.messages import Message
from tenure.policies.base import Look
from tenure.policies.full import Full
from tenure.policies.normalise import visible
from tenure.region_table import STEP_TOKENS, Clock


@dataclass(frozen=True)
class Lifetimes:
    """Of the tokens of one region.

    Args:
        time: age at the last look, in ticks of the clock, ``[n]``.
        died: False where the token was still looked at near the end: its life is longer than ``time``.
        span: number of the message that each token belongs to, over all transcripts.
    """

    time: Tensor
    died: Tensor
    span: Tensor

    def __len__(self) -> int:
        return len(self.time)


@dataclass
class _Log:
    threshold: float
    grace: int
    page: int = 1
    ends: list[int] = field(default_factory=list)
    last: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))


@dataclass(frozen=True)
class Tracer(Full):
    """Keeps everything, and notes when each token was last looked at."""

    log: _Log = field(default_factory=lambda: _Log(1.0, 0))
    name: ClassVar[str] = "tracer"
    paper: ClassVar[str] = "none: a measurement"
    granularity: ClassVar[str] = "session"

    @property
    def statistics(self) -> Statistics | None:
        """All queries, mean over heads."""
        return Statistics(window=0, reduce="mean")

    def absorb(self, look: Look) -> Mapping[str, Tensor]:
        """Note what was looked at: mean attention of the queries that could see it, over the fair share of the others."""
        log, rows = self.log, look.mass.shape[1]
        log.ends.append(rows)
        chunk = len(log.ends) - 1
        log.last = torch.cat([log.last, torch.full((look.new,), chunk)])
        mean = (look.mass / visible(look))[0].cpu().clone()
        sinks = look.logical[0].cpu() < look.sinks
        mean[sinks] = 0.0
        fair = mean.sum() / max(1, int((~sinks).sum()))
        if log.page > 1:
            mean = _best_of_page(mean, look.logical[0].cpu(), look.region[0].cpu(), log.page)
        old = torch.arange(rows) < rows - look.new - log.grace
        log.last[(mean >= log.threshold * fair) & old] = chunk
        return {}


def _best_of_page(mean: Tensor, logical: Tensor, region: Tensor, size: int) -> Tensor:
    """Each token's value replaced by the largest among the tokens of its page: ``size`` tokens of one region."""
    begins = torch.zeros_like(logical)
    for key in (logical // size, region):
        begins[1:] |= key[1:] != key[:-1]
    page = begins.cumsum(0)
    best = torch.zeros(int(page[-1]) + 1, dtype=mean.dtype).scatter_reduce_(0, page, mean, "amax")
    return best[page]


def trace(
    engine: Engine,
    messages: Sequence[Message],
    *,
    threshold: float = 1.0,
    clock: Clock = "steps",
    stride: int = 16,
    grace: int = 128,
    window: int = 128,
    page: int = 16,
    spans: int = 0,
) -> dict[str, Lifetimes]:
    """Lifetimes by region in one transcript.

    Args:
        engine: the model.
        messages: the transcript.
        threshold: attention that counts as a look, in fair shares.
        clock: of the lifetimes.
        stride: tokens a chunk: how finely time is told.
        grace: tokens behind a token whose looks do not count, since everything local is looked at.
        window: last tokens of the transcript; what is looked at by them is still alive.
        page: tokens that live together: a look at one is a look at all; 1 tells them apart.
        spans: number of the first message.
    """
    log = _Log(threshold, grace, page)
    with engine.session(policy="full", positions="logical", chunk=stride, granularity="session") as session:
        session.memory.policy = Tracer(log=log)
        session.append(list(messages))
        ledger = session.memory.ledger
        rows = ledger.rows
        region = ledger.region[0, :rows].cpu()
        owner = ledger.span_index(ledger.logical[0, :rows]).cpu()
        sinks = session.config.sinks
        decoded = torch.tensor([span.role == "assistant" for span in ledger.spans])
        names = session.memory.aging.table.names
    ends = torch.tensor(log.ends)
    seen = ends[log.last] - 1  # the last token of the chunk that looked
    birth = torch.arange(rows)
    if clock == "turns":
        now = (~decoded).double().cumsum(0)[owner]
    elif clock == "steps":
        now = torch.where(decoded[owner], 1.0, 1 / STEP_TOKENS).double().cumsum(0)
    else:
        now = birth.double()
    time = now[seen] - now
    died = seen < rows - window
    fit = (birth >= sinks) & (birth < rows - grace - window)  # the others could not be looked at long enough
    return {
        name: Lifetimes(time[mine], died[mine], owner[mine] + spans)
        for code, name in enumerate(names)
        if bool((mine := fit & (region == code)).any())
    }


def join(parts: Sequence[Mapping[str, Lifetimes]]) -> dict[str, Lifetimes]:
    """Lifetimes of several transcripts by region."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {
        name: Lifetimes(
            *(
                torch.cat([getattr(part[name], key) for part in parts if name in part])
                for key in ("time", "died", "span")
            )
        )
        for name in names
    }
