"""From logits to the next token, with transformers' own processors."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, MinPLogitsWarper, TemperatureLogitsWarper, TopPLogitsWarper

from tenure.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from tenure.grammar import Grammar


_COLD = 1e-4
"""Below it the likeliest token is as good as certain, and logits divided by the temperature overflow."""


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How a turn is generated.

    Args:
        max_tokens: tokens produced at most; counts tokens, never positions.
        temperature: 0 takes the most likely token.
        top_p: nucleus sampling, 1 takes all.
        min_p: least probability as a share of the largest, 0 takes all.
        seed: of the draw; None draws one.
        stop: texts that end the turn and are not part of it; one, several or None.
        grammar: what the text must be, see :class:`tenure.grammar.Grammar`; None leaves it free.
        ignore_eos: never take an id that ends the turn; for measuring.
        one_call: end the turn behind its first call of a tool.
        logprobs: also note each token's log-probability and those of so many likeliest ones; None notes nothing.
    """

    max_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] | str | None = ()
    grammar: Grammar | None = None
    logprobs: int | None = None
    one_call: bool = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else () if self.stop is None else self.stop
        if not isinstance(stop, Iterable):
            raise ConfigError(f"{stop!r} cannot be used", option="stop", way_out="Give texts")
        stop = tuple(stop)
        object.__setattr__(self, "stop", stop)
        for name in ("max_tokens", "temperature", "top_p", "min_p"):
            kinds, word = (int, "whole number") if name == "max_tokens" else ((int, float), "number")
            if not isinstance(getattr(self, name), kinds) or isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"{getattr(self, name)!r} cannot be used", option=name, way_out=f"Give a {word}"
                )
        checks = (
            ("max_tokens", self.max_tokens >= 1, "Give 1 or more"),
            ("temperature", 0 <= self.temperature < float("inf"), "Give 0 or more"),
            ("top_p", 0 < self.top_p <= 1, "Give a share in (0, 1]"),
            ("min_p", 0 <= self.min_p < 1, "Give a share in [0, 1)"),
            ("seed", self.seed is None or _is_seed(self.seed), "Give a whole number from 0 to 2**63 - 1"),
            ("logprobs", self.logprobs is None or _is_count(self.logprobs), "Give 0 to 20"),
            ("stop", all(isinstance(text, str) and text for text in stop), "Give non-empty texts"),
        )
        for option, good, way_out in checks:
            if not good:
                raise ConfigError(f"{getattr(self, option)!r} cannot be used", option=option, way_out=way_out)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 20


def _is_seed(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def sampling_options(**options: Any) -> SamplingOptions:
    """Options by name.

    Raises:
        ConfigError: an unknown name, or a value that cannot be used.
    """
    known = [field.name for field in fields(SamplingOptions)]
    if unknown := sorted(set(options) - set(known)):
        raise ConfigError("unknown option", option=unknown[0], way_out="Known: " + ", ".join(known))
    return SamplingOptions(**options)


@dataclass(frozen=True)
class TokenChoice:
    """A sampled token among its alternatives, by the model's own distribution: before temperature and grammar.

    Args:
        token: its id.
        logprob: natural logarithm of its probability.
        top: ids and log-probabilities of the likeliest tokens.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Sampler:
    """Draws one token after another for one turn.

    Args:
        options: of the turn.
        stop_ids: ids that end it; a grammar allows them where its text is complete.
    """

    def __init__(self, options: SamplingOptions, stop_ids: Collection[int] = ()) -> None:
        self.choice: TokenChoice | None = None
        """The last token with its log-probabilities, where they were asked for."""
        self._logprobs = options.logprobs
        self._never = sorted(stop_ids) if options.ignore_eos else []
        self._matcher = None if options.grammar is None else options.grammar.matcher(stop_ids)
        self._greedy = options.temperature < _COLD
        self._warpers = LogitsProcessorList()
        if self._greedy:
            return
        self._warpers.append(TemperatureLogitsWarper(float(options.temperature)))
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
        """The next token id from fp32 logits ``[vocabulary]``.

        Raises:
            ModelError: they hold no numbers to choose by.
        """
        if not logits.max().isfinite():  # NaN, if there is one, is the largest
            raise ModelError(
                "the logits are not finite",
                option="model",
                way_out="Use dtype fp32 or bf16, and check the weights",
            )
        if self._never:
            logits = logits.index_fill(0, torch.tensor(self._never, device=logits.device), float("-inf"))
        allowed = logits if self._matcher is None else self._matcher.mask(logits)
        if self._greedy:
            token = int(allowed.argmax())
        else:
            scores = self._warpers(None, allowed[None].cpu())
            token = int(torch.multinomial(scores.softmax(-1)[0], 1, generator=self._generator))
        if self._matcher is not None:
            self._matcher.accept(token)
        if self._logprobs is not None:
            self.choice = _choice(logits, token, self._logprobs)
        return token

    @property
    def finished(self) -> bool:
        """Whether a grammar's text is complete and nothing may follow."""
        return self._matcher is not None and self._matcher.finished


def _choice(logits: Tensor, token: int, count: int) -> TokenChoice:
    scores = logits.float().log_softmax(-1)
    values, ids = scores.topk(min(count, len(scores)))
    return TokenChoice(token, float(scores[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
