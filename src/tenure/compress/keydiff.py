"""KeyDiff: keys that are unlike the others stay. Looks at no attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import normalize

from tenure.compress.base import Context, Scorer


@dataclass(frozen=True)
class KeyDiff(Scorer):
    """KeyDiff (arXiv 2504.15364): the smaller the cosine of a key and the mean of all normalised keys, the better.

    On rotated keys, as in kvpress.
    """

    name: ClassVar[str] = "keydiff"
    paper: ClassVar[str] = "KeyDiff, arXiv 2504.15364"

    def score(self, context: Context) -> Tensor:
        """See the class."""
        keys = normalize(context.rotated.float(), dim=-1)
        anchor = normalize(keys.mean(2, keepdim=True), dim=-1)
        return -(keys * anchor).sum(-1)
