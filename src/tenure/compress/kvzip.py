"""KVzip: what the model needs to repeat the context is what stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tenure.cache.ragged import Entries
from tenure.compress.base import Context, Scorer, take, top
from tenure.errors import ConfigError


@dataclass(frozen=True)
class KVzip(Scorer):
    """KVzip (arXiv 2505.23416): all of the context is repeated, forced token by token, behind the session.

    A token's score is the largest share of attention that any query of the repetition gives it; the best of all layers
    and heads stay. The context is repeated in pieces, each behind a request that names the end of the piece before.
    Shares are of all that a query sees; the paper's leave out the other pieces.

    Args:
        piece: tokens that are repeated at a time.
        lead: tokens of the piece before that the request names.
    """

    piece: int = 512
    lead: int = 8
    name: ClassVar[str] = "kvzip"
    paper: ClassVar[str] = "KVzip, arXiv 2505.23416"

    def __post_init__(self) -> None:
        if self.piece < 1:
            raise ConfigError("0 tokens are no piece", option="piece", way_out="Give 1 or more")

    def score(self, context: Context) -> Tensor:
        """See the class."""
        ids = context.ids[0].tolist()
        score = torch.zeros(context.shape, device=context.keys.device)
        room = max(1, context.reader.limit - len(context.cue(1, ids[: self.lead])))
        piece = min(self.piece, room)
        for number, start in enumerate(range(0, len(ids), piece)):
            cue = context.cue(number, ids[max(0, start - self.lead) : start])
            probes = context.reader.behind([*cue, *ids[start : start + piece]], first=len(cue))
            for layer in range(context.shape[0]):
                shares = context.shares(layer, probes)
                torch.maximum(score[layer], shares.amax((1, 2)), out=score[layer])
        return score

    def compress(self, context: Context, budget: int) -> Entries:
        """See :class:`~tenure.compress.base.Compressor`."""
        score = self.score(context)
        return take(context, top(score, budget), score)
