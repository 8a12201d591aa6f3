"""How much of waiting prompts goes into the next forward, so that streams stay steady while prompts are read.

A forward that carries only single tokens takes a known time. Prompt tokens that ride along make it longer; their
number is steered so that it stays below a multiple of that time, up when there is room and down at once when it was
too long (additive increase, multiplicative decrease; our choice).
"""

from __future__ import annotations

from collections.abc import Sequence

_LEAST = 6
_SMOOTH = 0.1


class Pacer:
    """Splits the token allowance of a forward over the prompts that wait.

    Args:
        chunk: prompt tokens of a forward at most.
        smooth: longest forward while somebody streams, as a multiple of one without prompts.
    """

    def __init__(self, chunk: int, smooth: float) -> None:
        self._chunk = chunk
        self._smooth = smooth
        self._quiet: dict[int, float] = {}
        self._cap = float(min(chunk, 64))

    @property
    def cap(self) -> int:
        """Prompt tokens that may ride along with single tokens."""
        return max(_LEAST, min(self._chunk, int(self._cap)))

    def shares(self, waiting: Sequence[int], *, streams: int) -> list[int]:
        """Tokens that each waiting prompt may compute now.

        Args:
            waiting: tokens of each prompt, in order of importance.
            streams: sessions that compute a single token in the same forward.
        """
        left = self.cap if streams else self._chunk
        shares = [0] * len(waiting)
        open_ = [place for place, tokens in enumerate(waiting) if tokens]
        while left > 0 and open_:
            # An even share each; what a short prompt leaves goes to the others.
            part = max(1, left // len(open_))
            for place in list(open_):
                take = min(part, waiting[place] - shares[place], left)
                shares[place] += take
                left -= take
                if shares[place] == waiting[place]:
                    open_.remove(place)
        return shares

    def observe(self, seconds: float, *, prefill: int, streams: int) -> None:
        """Learn from a forward."""
        if not streams:
            return
        known = self._quiet.get(streams)
        if not prefill:
            self._quiet[streams] = seconds if known is None else known + _SMOOTH * (seconds - known)
            return
        if known is None:
            known = min(self._quiet.values(), default=0.0)
        if not known:
            return
        if seconds > self._smooth * known:
            self._cap = max(_LEAST, self._cap * max(0.5, self._smooth * known / seconds))
        elif prefill >= self.cap:
            self._cap = min(self._chunk, self._cap + max(2.0, 0.05 * self._cap))
