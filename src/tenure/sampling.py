"""From logits to the next token, with transformers' own processors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList, MinPLogitsWarper, TemperatureLogitsWarper, TopPLogitsWarper

from tenure.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How a turn is generated.

    Args:
        max_tokens: tokens produced at most; counts tokens, never positions.
        temperature: 0 takes the most likely token.
        top_p: nucleus sampling, 1 takes all.
        min_p: least probability as a share of the largest, 0 takes all.
        seed: of the draw; None draws one.
        stop: texts that end the turn and are not part of it.
    """

    max_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        checks = (
            ("max_tokens", self.max_tokens >= 1, "Give 1 or more"),
            ("temperature", 0 <= self.temperature < float("inf"), "Give 0 or more"),
            ("top_p", 0 < self.top_p <= 1, "Give a share in (0, 1]"),
            ("min_p", 0 <= self.min_p < 1, "Give a share in [0, 1)"),
            ("stop", all(self.stop), "Give non-empty texts"),
        )
        for option, good, way_out in checks:
            if not good:
                raise ConfigError(f"{getattr(self, option)!r} cannot be used", option=option, way_out=way_out)


class Sampler:
    """Draws one token after another for one turn."""

    def __init__(self, options: SamplingOptions) -> None:
        self._greedy = options.temperature == 0
        self._warpers = LogitsProcessorList()
        if self._greedy:
            return
        self._warpers.append(TemperatureLogitsWarper(options.temperature))
        if options.top_p < 1:
            self._warpers.append(TopPLogitsWarper(options.top_p))
        if options.min_p > 0:
            self._warpers.append(MinPLogitsWarper(options.min_p))
        # Drawn on the CPU, so that a seed gives the same text on every device.
        self._generator = torch.Generator()
        if options.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(options.seed)

    def __call__(self, logits: Tensor) -> int:
        """The next token id from fp32 logits ``[vocabulary]``."""
        if self._greedy:
            return int(logits.argmax())
        scores = self._warpers(None, logits[None].cpu())
        return int(torch.multinomial(scores.softmax(-1)[0], 1, generator=self._generator))
