"""The session that every peer plays: definitions, then files to read, turn by turn, then questions."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tenure.bench.demo_session import build_demo, facts_found
from tenure.messages import Message
from tenure.transcript import Transcript


@dataclass(frozen=True)
class Script:
    """Token ids, so that every peer reads the same.

    Args:
        turns: ids of each turn, from its first message to the header of the answer.
        closing: ids that end an answer.
        questions: ids of each question, to be asked behind the last turn.
        expect: what its answer must hold.
        spans: for each turn, ``[start, stop, span id]`` of the messages that a question will read.
        reads: spans that each question reads.
    """

    turns: list[list[int]]
    closing: list[int]
    questions: list[list[int]]
    expect: list[list[str]]
    spans: list[list[tuple[int, int, str]]]
    reads: list[list[str]]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def build(tokenizer: Any, *, turns: int, tokens: int, seed: int) -> Script:
    """Cut the coding session of the demo into turns.

    Args:
        tokenizer: of the model; all peers share it.
        turns: how many.
        tokens: new tokens a turn, met to within one file.
        seed: of names and values in the definitions.
    """
    session = build_demo(tokenizer, tokens=turns * tokens, seed=seed)
    transcript = Transcript(tokenizer)
    cut: list[list[int]] = []
    spans: list[list[tuple[int, int, str]]] = []
    batch: list[Message] = []
    closing: list[int] = []
    messages = list(session.messages)
    for number, message in enumerate(messages):
        batch.append(message)
        before = transcript.snapshot()
        pieces = transcript.open(batch, add_generation_prompt=True)
        size = sum(len(piece.ids) for piece in pieces)
        last = number == len(messages) - 1
        if size < tokens * 0.75 and not last:
            transcript.restore(before)
            continue
        if cut:
            first = pieces.pop(0)  # the closing of the answer before, which each peer adds itself
            closing = first.ids
        at, found = 0, []
        for piece in pieces:
            if piece.span is not None:
                found.append((at, at + len(piece.ids), piece.span))
            at += len(piece.ids)
        cut.append([token for piece in pieces for token in piece.ids])
        spans.append(found)
        batch = []
    questions = []
    for probe in session.probes:
        fork = transcript.fork()
        pieces = fork.open([probe.message], add_generation_prompt=True)
        questions.append([token for piece in pieces[1:] for token in piece.ids])
    return Script(
        turns=cut,
        closing=closing,
        questions=questions,
        expect=[list(probe.expect) for probe in session.probes],
        spans=spans,
        reads=[list(probe.reads) for probe in session.probes],
    )


def score(tokenizer: Any, script: Script, answers: list[list[int]]) -> tuple[int, int]:
    """Facts found and facts asked for."""
    found = [
        hit
        for ids, expect in zip(answers, script.expect, strict=True)
        for hit in facts_found(tokenizer.decode(ids, skip_special_tokens=True), expect)
    ]
    return sum(found), len(found)
