"""Chat messages to spans of token ids, rendering only what is new.

The history of a session is its token ids as they were read and generated, reasoning included; it is never
rendered or encoded again. What a template does to older turns when it renders a whole conversation (dropping
reasoning, moving the system text) therefore does not reach a session. `Transcript.render_all` renders a whole
list afresh, for callers that send it every time; `common_prefix` tells how much of it the session has
already.

Rules:
- A list is rendered in place, in order. A message that the template refuses, leaves out or rewrites is
  refused with its index. Where a template moves a text (Mistral moves the system text into the last user
  message), the list is rendered turn by turn, so that each text stays where it first stood.
- `developer` is rendered as `system`.
- A special marker inside a message's text is ordinary text: it cannot close a turn.
- The template's own markers are kept as they are. A start-of-text id that only the tokenizer adds comes
  once, at the start of the session.
- A token that two messages share (a closing and a header that merge) belongs to the later one.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from tenure.encode import Encoder, common_prefix, cut
from tenure.errors import MessageError
from tenure.layout import ChatTemplate, Layout, Moved, Refused, common_text
from tenure.messages import Message
from tenure.parts import Part, inner_parts
from tenure.pieces import Piece
from tenure.regions import AnyRegion, Region
from tenure.skeleton import Entry, Node, State
from tenure.toolcalls import CallForm, form_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

__all__ = ["Message", "Piece", "State", "Transcript", "common_prefix"]

# Exchanges of the skeleton that are rendered before new messages; all of it when the template wants more.
_WINDOW = 48
# Characters that are encoded again to find where a held-back closing begins.
_LOOK_BACK = 256


class Transcript:
    """Renders one session's messages.

    Args:
        tokenizer: a fast Hugging Face tokenizer with a chat template.
        tools: JSON schemas of the tools the model may call.
        template_options: further variables of the template, such as `{"enable_thinking": False}`.
        eos_ids: end-of-text ids of the model's generation config.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        eos_ids: Collection[int] = (),
    ) -> None:
        self._template = ChatTemplate(tokenizer, tools, dict(template_options or {}))
        self._encoder = Encoder(tokenizer)
        self._bos_text: str = tokenizer.bos_token or ""
        self._eos_ids = {*eos_ids}
        if tokenizer.eos_token_id is not None:
            self._eos_ids.add(tokenizer.eos_token_id)
        self._varies: dict[tuple[str, int], bool] = {}
        self._stop_ids: frozenset[int] | None = None
        self._end: str | None = None
        self._state = State()
        self.regions: Sequence[str] | None = None
        """Names of the regions that messages may carry; those of `Region` if None."""

    # State

    def snapshot(self) -> State:
        """The present state, to go back to with `restore`."""
        return self._state

    def restore(self, state: State) -> None:
        """Go back to a state of this transcript or of one it was forked from."""
        self._state = state

    def fork(self) -> Transcript:
        """An independent transcript in the same state."""
        twin = object.__new__(Transcript)
        twin.__dict__.update(self.__dict__)
        return twin

    @property
    def tools(self) -> list[Mapping[str, Any]]:
        """JSON schemas of the tools the model may call."""
        return list(self._template.tools or [])

    @property
    def template_options(self) -> dict[str, Any]:
        """Further variables of the template."""
        return dict(self._template.options)

    @property
    def call_form(self) -> CallForm | None:
        """How the model writes calls of its tools; None where it has none, or its template knows none."""
        return form_of(self._template.source) if self._template.tools else None

    @property
    def turn_open(self) -> bool:
        """Whether an assistant's turn is open: its header was given out and its closing was not."""
        return self._state.turn

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an assistant's turn: end-of-text ids and the template's own end-of-turn id."""
        if self._stop_ids is None:
            ids, _ = self._encoder.encode(self._assistant_end())
            markers = [token for token in ids if token in self._encoder.special]
            self._stop_ids = frozenset(self._eos_ids.union(markers[:1]))
        return self._stop_ids

    def encode(self, text: str) -> list[int]:
        """Ids of a text that goes on in the middle of a session: nothing is added before it."""
        return self._encoder.encode(text, [(0, len(text))])[0]

    def export(self) -> list[dict[str, Any]]:
        """What is known of each message of the history, oldest first, without its text.

        `reasoning` is `kept` or `dropped` for messages that came with reasoning (the template decides), `as
        generated` for the model's own turns (whatever it wrote is history), else None.
        """
        return [
            {
                "role": entry.role,
                "span": entry.span,
                "tool_calls": [call for call, _ in entry.calls],
                "tool_call_id": entry.tool_call_id,
                "reasoning": "as generated" if entry.generated else entry.reasoning,
            }
            for entry in self._state.entries()
        ]

    # Rendering

    def open(
        self,
        messages: Iterable[object],
        add_generation_prompt: bool = False,
        *,
        last_id: int | None = None,
    ) -> list[Piece]:
        """Render what is new: the closing of an open turn, the messages, the assistant's header.

        Args:
            messages: strings, mappings or `Message`s to add to the history.
            add_generation_prompt: open an assistant's turn; its header is the last piece, possibly empty.
            last_id: the last id of an open turn. When it is the end-of-turn id already, that is not repeated.

        Returns:
            Pieces in order; their ids joined are what follows the ids of the session so far.

        Raises:
            MessageError: malformed, or refused by the template; nothing has changed.
        """
        parsed = [Message.parse(message, index, self.regions) for index, message in enumerate(messages)]
        for index, message in enumerate(parsed):
            words = [
                message.name,
                message.tool_call_id,
                *(word for call in message.call_names for word in call),
            ]
            if any(self._encoder.has_marker(word or "") for word in words):
                raise MessageError("a name or an id holds a special marker of the model", index=index)
        before = self._state
        if not parsed and not (add_generation_prompt and before.last):
            raise MessageError(
                "the list of messages is empty", option="messages", way_out="Send at least one"
            )
        try:
            closing = self.close(last_id=last_id) if before.turn else []
            return closing + self._add(parsed, 0, add_generation_prompt)
        except BaseException:
            self._state = before
            raise

    def close(
        self, *, last_id: int | None = None, tool_calls: Sequence[Mapping[str, Any]] = ()
    ) -> list[Piece]:
        """Give out what belongs to the last span and was not given out yet; afterwards other ids may follow.

        For an open turn these are the template's closing tokens. `open` does this by itself; call it before
        raw ids, or to record the calls that a turn made, which strict templates want to see before a tool
        result.

        Args:
            last_id: see `open`.
            tool_calls: the calls of the turn that ends, in the OpenAI form.
        """
        state = self._state
        if state.last is None:
            return []
        entry = state.last.entry
        if state.turn:
            text = self._assistant_end()
            if tool_calls:
                message = Message.parse({"role": "assistant", "tool_calls": tool_calls})
                entry = entry._replace(calls=message.call_names)
        elif state.read is not None:
            text = state.carry + self._closing()[0][state.read :]
        else:
            return []
        ids, _ = self._encoder.encode(text)
        if ids and ids[0] == last_id:
            del ids[0]
        node = Node(state.last.parent, entry)
        self._state = replace(state, last=node, turn=False, read=None, carry="")
        return [Piece(ids, "closing", _region(entry), entry.role)] if ids else []

    def raw(self) -> None:
        """Say that raw ids stand between the messages. Call `close` before they are added."""
        self._state = replace(self._state, started=True)

    def render_all(self, messages: Iterable[object], add_generation_prompt: bool = False) -> list[Piece]:
        """Render a whole conversation as for a new session; this transcript stays as it is."""
        twin = self.fork()
        twin._state = State()
        return twin.open(messages, add_generation_prompt)

    # Inside

    def _assistant_end(self) -> str:
        if self._end is None:
            try:
                self._end = self._template.closing([Entry("user"), Entry("assistant")])
            except Refused:
                self._end = ""
        return self._end

    def _one_start(self, text: str, ids: list[int], ends: list[int]) -> None:
        """See that the session's first ids, and they alone, begin with the start-of-text id."""
        state, bos = self._state, self._encoder.bos
        if not state.started and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
            ends.insert(0, 0)
        elif state.started and state.last is None and text.startswith(self._bos_text or "\0"):
            # Raw ids came first. A start-of-text marker goes, unless it is the marker of every header.
            header = self._template.header("user")
            if header is None or not header.startswith(self._bos_text):
                del ids[0], ends[0]

    def _closing(self) -> tuple[str, list[Entry]]:
        """What the template writes after the last text, and the history that tells: all of it if it wants more."""
        history = self._state.entries(_WINDOW)
        try:
            return self._template.closing(history), history
        except Refused:
            history = self._state.entries()
            return self._template.closing(history), history

    def _add(self, messages: list[Message], offset: int, prompt: bool) -> list[Piece]:
        try:
            layout = self._lay_out(messages, prompt)
        except Moved as moved:
            turns = _turns(messages)
            if len(turns) == 1:
                does = (
                    "leaves this message's text out"
                    if moved.kind == "missing"
                    else "moves this message's text"
                )
                raise MessageError(
                    f"the model's chat template {does}",
                    index=offset + (moved.index or 0),
                    way_out="Send it under another role, or together with the message that it belongs to",
                ) from None
            pieces: list[Piece] = []
            for number, turn in enumerate(turns):
                pieces += self._add(turn, offset, prompt and number == len(turns) - 1)
                offset += len(turn)
            return pieces
        except Refused as refused:
            raise self._refusal(messages, offset, str(refused)) from None
        except MessageError as error:
            raise MessageError(
                error.cause, index=offset + (error.index or 0), way_out=error.way_out
            ) from None
        return self._pieces(messages, offset, prompt, layout)

    def _lay_out(self, messages: list[Message], prompt: bool) -> Layout:
        state = self._state
        history = self._state.entries(_WINDOW)
        try:
            return self._template.lay_out(history, messages, prompt, state.read)
        except Moved:
            # The template repeats the rules in the last turn; they stand at the start of the session already.
            spoken = [entry for entry in history if entry.role not in ("system", "developer")]
            if not spoken or len(spoken) == len(history):
                raise
            return self._template.lay_out(spoken, messages, prompt, state.read)
        except Refused:
            return self._template.lay_out(self._state.entries(), messages, prompt, state.read)

    def _refusal(self, messages: list[Message], offset: int, words: str) -> MessageError:
        way_out = "Change the order or the roles of the messages to what the model was trained on"
        cause = f"the model's chat template refuses this message: {words}"
        if not messages:
            return MessageError(cause, option="messages", way_out=way_out)
        index = offset + self._template.culprit(self._state.entries(), messages)
        return MessageError(cause, index=index, way_out=way_out)

    def _pieces(self, messages: list[Message], offset: int, prompt: bool, layout: Layout) -> list[Piece]:
        state = self._state
        text, shift = state.carry + layout.text, len(state.carry)
        own = [[(a + shift, b + shift) for a, b in ranges] for ranges in layout.contents]
        foreign = [(0, shift)] * bool(shift) + [(a + shift, b + shift) for a, b in layout.foreign]
        ids, ends = self._encoder.encode(text, foreign, start=not state.started)
        self._one_start(text, ids, ends)
        first = self._preamble(messages, text, own) if state.last is None else 0
        marks = cut(ids, ends, [max(start + shift, first) for start in layout.starts])
        if state.last is None and not first:
            marks[0] = 0

        for message, reasoning in zip(messages, layout.reasoning, strict=True):
            self._state = self._state.append(Entry.of(message, reasoning))
        self._state = replace(self._state, read=None, carry="")
        stop = (
            len(ids)
            if prompt or not messages
            else self._hold(text, layout.starts[-1] + shift, own, ids, ends, marks[-2])
        )
        marks = [*marks[:-1], marks[-1] if prompt else stop]

        pieces = []
        tool_names = self._template.tool_names if state.last is None else ()
        if marks[0]:
            if state.last is None:
                region = Region.TOOLS if self._template.tools else Region.SYSTEM
                pieces.append(Piece(ids[: marks[0]], "preamble", region, "system"))
            else:
                before = state.last.entry
                pieces.append(Piece(ids[: marks[0]], "closing", _region(before), before.role))
        for index, (message, (left, right)) in enumerate(zip(messages, pairwise(marks), strict=True)):
            inside = None
            if own[index]:
                begin = cut(ids, ends, [own[index][0][0]])[0]
                end = cut(ids, ends, [own[index][-1][1] - 1])[0] + 1
                inside = (max(begin, left) - left, min(end, right) - left)
            bounds = (layout.starts[index] + shift, layout.starts[index + 1] + shift)
            parts = inner_parts(text, bounds, message.memory_region, foreign, tool_names)
            pieces.append(
                Piece.of(
                    message, offset + index, ids[left:right], inside, _ids_of(parts, ids, ends, left, right)
                )
            )
        if prompt:
            parts = inner_parts(text, (layout.starts[-1] + shift, len(text)), Region.ASSISTANT, foreign, ())
            inner = _ids_of(parts, ids, ends, marks[-1], len(ids))
            pieces.append(Piece(ids[marks[-1] :], "prompt", Region.ASSISTANT, "assistant", parts=inner))
            self._state = self._state.append(Entry("assistant", generated=True))
            self._state = replace(self._state, turn=True)
        return pieces

    def _preamble(self, messages: list[Message], text: str, own: list[list[tuple[int, int]]]) -> int:
        """Characters that the template writes before the first message on its own account."""
        if not messages or not own[0] or messages[0].role in ("system", "developer"):
            return 0
        header = self._template.header(messages[0].role)
        before = text[: own[0][0][0]]
        return len(before) - len(header) if header and before.endswith(header) else 0

    def _hold(
        self,
        text: str,
        end: int,
        own: list[list[tuple[int, int]]],
        ids: list[int],
        ends: list[int],
        least: int,
    ) -> int:
        """Hold back a closing that hangs on what follows (tool results that merge into one block).

        Returns the number of ids that are certain.
        """
        last = self._state.last
        if last is None or not own[-1]:
            return len(ids)
        key = (last.entry.role, len(last.entry.calls))
        if self._varies.get(key) is False:
            return len(ids)
        closing, history = self._closing()
        nexts = self._template.continuations(history)
        common = min((common_text(closing, other) for other in nexts), default=len(closing))
        self._varies[key] = common < len(closing)
        if common == len(closing) or not text.endswith(closing):
            return len(ids)
        bare = end - len(closing)  # where the closing begins
        certain = bare + common
        index = max(least, cut(ids, ends, [max(0, certain - _LOOK_BACK)])[0])
        begin = ends[index - 1] if index else 0
        endings = [other[common:] for other in (closing, *nexts)]
        same, place = self._encoder.settled(text[:certain], begin, endings, own[-1])
        self._state = replace(self._state, read=max(0, place - bare), carry=text[place:bare])
        return index + same


def _ids_of(parts: list[Part], ids: list[int], ends: list[int], left: int, right: int) -> tuple[Part, ...]:
    """Ranges of characters as ranges of the ids from `left` to `right`, counted from `left`."""
    found = []
    for start, stop, region in parts:
        begin, end = cut(ids, ends, [start, stop])
        begin, end = max(begin, left), min(end, right)
        if begin < end:
            found.append((begin - left, end - left, region))
    return tuple(found)


def _turns(messages: list[Message]) -> list[list[Message]]:
    """Split a list where the speaker changes: questions with their rules, answers with their tool results."""
    answers = ("assistant", "tool")
    return [list(turn) for _, turn in groupby(messages, key=lambda message: message.role in answers)]


def _region(entry: Entry) -> AnyRegion:
    return Message(entry.role).memory_region
