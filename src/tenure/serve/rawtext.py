"""``/v1/completions``: raw texts and token ids, without a chat template."""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tenure.conversation import Conversation
from tenure.errors import ModelError
from tenure.pieces import Piece
from tenure.regions import Region
from tenure.sampling import SamplingOptions
from tenure.serve.chat import Gathered, about, usage
from tenure.serve.errors import ApiError, api_error
from tenure.serve.hints import read_hints
from tenure.serve.invalid import check_data
from tenure.serve.jobs import Finished, Reply, Started, Text
from tenure.serve.logprobs import Placed, listed
from tenure.serve.runner import new_id
from tenure.serve.sse import DONE, event

if TYPE_CHECKING:
    from tenure.engine import Engine
    from tenure.serve.config import ServeConfig

Prompt = str | list[int]


def prompts_of(prompt: str | Sequence[Any]) -> list[Prompt]:
    """The prompts of a request; a list of numbers is one.

    Raises:
        ApiError: there is none, or an empty one.
    """
    several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    found: list[Prompt] = list(prompt) if several else [prompt]  # type: ignore[list-item]
    if not 0 < len(found) <= 16 or not all(found):
        raise ApiError(400, "invalid_value", "1 to 16 prompts that are not empty are needed", param="prompt")
    return found


def raw_fields(
    prompt: Prompt,
    hints: Mapping[str, Any],
    sampling: Mapping[str, Any],
    engine: Engine,
    config: ServeConfig,
) -> dict[str, Any]:
    """Fields of a job. For a rendering thread.

    Raises:
        ApiError: too long, or ids that the model does not know.
    """
    read = read_hints(hints)
    if isinstance(prompt, str):
        check_data(prompt, "prompt")
    transcript = engine.transcript()
    if transcript is None:
        raise ModelError("the model has no tokenizer", option="model", way_out="Serve another model")
    ids: list[int] = (
        engine.tokenizer(prompt, verbose=False)["input_ids"] if isinstance(prompt, str) else prompt
    )
    if not ids:
        raise ApiError(400, "invalid_value", "the prompt has no tokens", param="prompt")
    if not 0 <= min(ids) <= max(ids) < engine.vocabulary:
        raise ApiError(
            400, "invalid_value", f"token ids must be in 0..{engine.vocabulary - 1}", param="prompt"
        )
    if len(ids) > config.max_prompt:
        raise ApiError(
            400,
            "context_length_exceeded",
            f"the prompt has {len(ids)} tokens, the limit is {config.max_prompt}; nothing was cut away",
            param="prompt",
        )
    transcript.raw()
    values = {name: value for name, value in sampling.items() if value is not None}
    values["max_tokens"] = min(values["max_tokens"], config.max_tokens)
    digest = hashlib.blake2b(array("I", ids).tobytes(), digest_size=16).digest()
    return {
        "conversation": Conversation([Piece(ids, "preamble", Region.OTHER, "user")], ids, transcript, True),
        "chain": [digest],
        "raw": True,
        "options": SamplingOptions(**values),
        "session": read.session,
        "salt": read.salt,
        "key": read.key,
        "priority": read.priority,
        "ttl": read.ttl,
        "hints": read.report,
    }


class Completion:
    """Builds the answers to one prompt.

    Args:
        model: name that is answered with.
        tokenizer: spells tokens for log-probabilities.
        n: answers.
        first: index of the first one in the response.
        include_usage: whether a stream ends with the counts.
    """

    def __init__(
        self, model: str, tokenizer: Any, *, n: int = 1, first: int = 0, include_usage: bool = False
    ) -> None:
        self.head = {
            "id": new_id("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._tokenizer = tokenizer
        self._first = first
        self._include_usage = include_usage
        self._got = Gathered(n)

    async def gather(self, replies: AsyncIterator[Reply]) -> Gathered:
        """All of it."""
        async for reply in replies:
            self._got.add(reply)
        return self._got

    def choices(self) -> list[dict[str, Any]]:
        """The answers."""
        return [
            self._choice(index, text, self._got.choices[index], self._got.reasons[index])
            for index, text in enumerate(self._got.texts)
        ]

    async def chunks(self, started: Started, replies: AsyncIterator[Reply]) -> AsyncIterator[bytes]:
        """The stream's events."""
        got = self._got
        try:
            got.add(started)
            async for reply in replies:
                got.add(reply)
                if isinstance(reply, Text):
                    yield self._chunk(self._choice(reply.index, reply.text, reply.choices, None))
                elif isinstance(reply, Finished):
                    yield self._chunk(self._choice(reply.index, "", [], reply.reason))
            if self._include_usage:
                yield event({**self.head, "choices": [], "usage": got.usage()})
        except Exception as error:
            yield event(api_error(error).body())
        yield DONE

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return event({**self.head, "choices": [choice]})

    def _choice(self, index: int, text: str, choices: list[Placed], reason: str | None) -> dict[str, Any]:
        logprobs = listed(self._tokenizer, choices) if choices else None
        return {"index": self._first + index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def joined(answers: Sequence[Completion], got: Sequence[Gathered]) -> dict[str, Any]:
    """One response of the answers to all prompts."""
    counts = [one.usage() for one in got]
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    total = {name: sum(count[name] for count in counts) for name in names}
    cached = sum(one.started.cached_tokens for one in got)
    return {
        **answers[0].head,
        "choices": [choice for answer in answers for choice in answer.choices()],
        "usage": {
            **usage(got[0].started, 0, got[0].counters),
            **total,
            "prompt_tokens_details": {"cached_tokens": cached},
        },
        "tenure": about(got[0].started),
    }
