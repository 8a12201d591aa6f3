"""Where each message lies in what the model's own chat template writes.

Templates are programs: they trim, escape, merge and drop. To find out where a message went, the
conversation is rendered twice, once with the real texts and once with a unique mark in the place of every
text. What stands between two marks is the template's own writing, and the real rendering is walked along
it.

History is rendered from its skeleton alone (roles and call ids, marks for texts), so nothing here needs an
old text, and a template that treats old turns differently from new ones (reasoning that is dropped later)
cannot change what has been read already: only what follows the last mark of the history is new.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from tenure.errors import MessageError, ModelError
from tenure.skeleton import Entry

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tenure.messages import Message

# Texts that templates look for inside contents; they stay where they are when the rest becomes marks.
_TAGS = re.compile(r"(</?(?:think|tool_response|tool_call)>)")
_CACHED = 256
# Texts of one message, or of one call's arguments, that get a mark of their own.
_PARTS = 64


class Refused(Exception):  # noqa: N818
    """The template raised an error; the text is the template's own."""


class Moved(Exception):  # noqa: N818
    """The template writes a text again or out of order: that of new message `index`, or an old one (None)."""

    def __init__(self, index: int | None = None, kind: str = "text") -> None:
        super().__init__(index)
        self.index = index
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Layout:
    """New text, in order: the rest of the last turn (or the template's preamble), the messages, the prompt.

    Args:
        text: everything that the template adds to what has been read.
        starts: where each new message starts, and last where the generation prompt starts.
        contents: the ranges of each message's own texts, in order.
        foreign: all ranges that messages brought along: their texts and the words of their calls.
        reasoning: of each message, `kept`, `dropped` or None.
    """

    text: str
    starts: list[int]
    contents: list[list[tuple[int, int]]]
    foreign: list[tuple[int, int]]
    reasoning: list[str | None]


@dataclass(slots=True)
class _Atom:
    """A text that the template is asked to place."""

    message: int
    text: str
    kind: Literal["text", "reasoning", "call"]
    where: tuple[int, int] | None = None


@dataclass(slots=True)
class _Glue:
    """The template's writing between two marks: its range with marks and its range with the real texts."""

    marked: tuple[int, int]
    real: tuple[int, int]
    exact: bool

    def place(self, position: int, same: bool) -> int:
        if self.exact or same:
            return self.real[0] + position - self.marked[0]
        return max(self.real[0], self.real[1] - (self.marked[1] - position))


@dataclass(slots=True)
class ChatTemplate:
    """A tokenizer's chat template with its tools and options.

    Args:
        tokenizer: a Hugging Face tokenizer.
        tools: JSON schemas of the tools the model may call.
        options: further variables of the template, such as `enable_thinking`.
    """

    tokenizer: Any
    tools: Sequence[Mapping[str, Any]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    _nonce: str = field(default_factory=lambda: secrets.token_hex(6))
    _cuts: dict[tuple[object, ...], int] = field(default_factory=dict)

    def mark(self, number: int) -> str:
        """The unique text that stands for text `number`."""
        return f"Q{self._nonce}x{number}Z"

    def marks(self, text: str) -> dict[int, tuple[int, int]]:
        """Last place of each mark in a rendering, in order of place."""
        found: dict[int, tuple[int, int]] = {}
        for match in re.finditer(rf"Q{self._nonce}x(\d+)Z", text):
            number = int(match[1])
            found.pop(number, None)
            found[number] = match.span()
        return found

    def render(self, chat: Sequence[Mapping[str, Any]], prompt: bool = False) -> str:
        """The template's text. Raises `Refused` with its words, `ModelError` when there is no template."""
        from jinja2 import TemplateError

        if not getattr(self.tokenizer, "chat_template", None):
            raise ModelError(
                "the tokenizer has no chat template",
                option="model",
                way_out="Set tokenizer.chat_template, or append raw ids",
            )
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(chat),
                tools=list(self.tools) if self.tools else None,
                add_generation_prompt=prompt,
                tokenize=False,
                **self.options,
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise Refused(str(error)) from error
        return text

    def lay_out(
        self,
        history: Sequence[Entry],
        new: Sequence[Message],
        prompt: bool,
        read: int | None = None,
        deep: bool = True,
    ) -> Layout:
        """Place new messages after a history.

        Args:
            history: skeleton of what has been read.
            new: messages to add.
            prompt: whether the assistant's header follows.
            read: characters after the last mark of the history that have been read; None for all of its
                closing.
            deep: whether to look into the arguments of calls.

        Raises:
            Refused: the template does not take this list.
            Moved: it writes a text twice or out of order.
            MessageError: it leaves out or rewrites a message's text.
        """
        old = self._skeleton(history)
        base = len(old)
        drafts, atoms = self._drafts(new, base, deep)
        marked = self.render(old + drafts, prompt)
        real = self.render(old + [message.as_chat() for message in new], prompt) if new else marked
        places = self.marks(marked)
        try:
            self._check(marked, places, atoms, base)
        except Moved as moved:
            if deep and moved.kind == "call":
                return self.lay_out(history, new, prompt, read, deep=False)
            raise

        starts = [self._start(old, drafts, new, count, marked, places, atoms) for count in range(len(new))]
        last = (
            self._start(old, drafts, new, len(new), marked, places, atoms)
            if prompt or not new
            else len(marked)
        )
        starts.append(last)

        anchor = max((number for number in places if number < base), default=None)
        begin = 0 if anchor is None else places[anchor][1]
        begin_real = 0 if anchor is None else self.marks(real).get(anchor, places[anchor])[1]
        glues = self._walk(marked, places, begin, real, begin_real, atoms, base)

        def put(position: int) -> int:
            glue = next(glue for glue in glues if position <= glue.marked[1])
            left, right = glue.marked[0], glue.real[0]
            return glue.place(position, real.startswith(marked[left:position], right))

        first = put(starts[0] if read is None else min(starts[0], begin + read)) if history else 0
        layout = Layout(
            real[first:], [put(start) - first for start in starts], [[] for _ in new], [], [None] * len(new)
        )
        for atom in atoms:
            if atom.where:
                where = (atom.where[0] - first, atom.where[1] - first)
                layout.foreign.append(where)
                if atom.kind != "call":
                    layout.contents[atom.message].append(where)
            if atom.kind == "reasoning":
                layout.reasoning[atom.message] = "kept" if atom.where else "dropped"
        return layout

    def closing(self, history: Sequence[Entry]) -> str:
        """What the template writes after the last text of a history."""
        text = self.render(self._skeleton(history))
        return text[max((end for _, end in self.marks(text).values()), default=0) :]

    def continuations(self, history: Sequence[Entry]) -> list[str]:
        """What follows the last text of a history, for each way of going on that the template allows."""
        old = self._skeleton(history)
        found = []
        nexts: list[list[dict[str, Any]]] = [
            [Entry(role).as_chat(self.mark(len(old)))] for role in ("tool", "user", "assistant")
        ]
        for new, prompt in [([], True), *((new, False) for new in nexts)]:
            try:
                text = self.render(old + new, prompt)
            except Refused:
                continue
            ends = [end for number, (_, end) in self.marks(text).items() if number < len(old)]
            if ends:
                found.append(text[max(ends) :])
        return found

    def header(self, message: Message) -> str | None:
        """What the template writes before the text of such a message later in a conversation, if it tells."""
        role = "system" if message.role == "developer" else message.role
        other = Entry("user" if role == "assistant" else "assistant")
        for between in ([other], []):
            history = [Entry(role), *between]
            old = self._skeleton(history)
            try:
                text = self.render([*old, Entry(role).as_chat(self.mark(len(old)))])
                closing = self.closing(history)
            except Refused:
                continue
            places = self.marks(text)
            if len(old) in places and len(old) - 1 in places:
                return text[places[len(old) - 1][1] : places[len(old)][0]].removeprefix(closing)
        return None

    def culprit(self, history: Sequence[Entry], new: Sequence[Message]) -> int:
        """Index of the first new message that makes the template refuse."""
        old = self._skeleton(history)
        chat = old + [message.as_chat() for message in new]
        for count in range(len(new) - 1, 0, -1):
            try:
                self.render(chat[: len(old) + count])
            except Refused:
                continue
            return count
        return 0

    def _skeleton(self, history: Sequence[Entry]) -> list[dict[str, Any]]:
        return [entry.as_chat(self.mark(number)) for number, entry in enumerate(history)]

    def _drafts(
        self, new: Sequence[Message], base: int, deep: bool
    ) -> tuple[list[dict[str, Any]], list[_Atom]]:
        """The new messages with marks for their texts, for the names of their calls and the texts in those."""
        atoms: list[_Atom] = []

        def stand_in(index: int, text: str, kind: Literal["text", "reasoning", "call"]) -> str:
            if not text.strip():
                return text
            atoms.append(_Atom(index, text, kind))
            return self.mark(base + len(atoms) - 1)

        def inside(index: int, value: Any, most: int) -> Any:
            if isinstance(value, str):
                return stand_in(index, value, "call") if len(atoms) < most else value
            if isinstance(value, dict):
                return {key: inside(index, item, most) for key, item in value.items()}
            if isinstance(value, list):
                return [inside(index, item, most) for item in value]
            return value

        drafts = []
        for index, message in enumerate(new):
            draft = message.as_chat()
            if message.reasoning_content is not None:
                draft["reasoning_content"] = stand_in(index, message.reasoning_content, "reasoning")
            parts = _TAGS.split(message.content)
            if len(parts) > _PARTS:
                parts = [message.content]
            # What stands before an assistant's </think> is reasoning, which templates may drop.
            spoken = 0
            if message.role == "assistant" and "</think>" in parts:
                spoken = len(parts) - parts[::-1].index("</think>")
            draft["content"] = "".join(
                part
                if _TAGS.fullmatch(part)
                else stand_in(index, part, "text" if place >= spoken else "reasoning")
                for place, part in enumerate(parts)
            )
            for call in draft.get("tool_calls", ()):
                function = call["function"]
                function["name"] = stand_in(index, function["name"], "call")
                if deep:
                    function["arguments"] = inside(index, function["arguments"], len(atoms) + _PARTS)
            drafts.append(draft)
        return drafts, atoms

    def _check(self, marked: str, places: dict[int, tuple[int, int]], atoms: list[_Atom], base: int) -> None:
        numbers = [int(number) for number in re.findall(rf"Q{self._nonce}x(\d+)Z", marked)]
        new = [number for number in numbers if number >= base]
        if new and min(numbers[numbers.index(new[0]) :]) < base:
            raise Moved
        for before, number in pairwise([-1, *new]):
            if number <= before:
                atom = atoms[number - base]
                raise Moved(atom.message, atom.kind)
        for number, atom in enumerate(atoms, base):
            if atom.kind == "text" and number not in places:
                raise MessageError(
                    "the model's chat template leaves this message's text out",
                    index=atom.message,
                    way_out="Send it under another role, or together with the message that it belongs to",
                )

    def _start(
        self,
        old: list[dict[str, Any]],
        drafts: list[dict[str, Any]],
        new: Sequence[Message],
        count: int,
        marked: str,
        places: dict[int, tuple[int, int]],
        atoms: list[_Atom],
    ) -> int:
        """Where message `count` starts: where the rendering of what stands before it and the whole part."""
        base = len(old)
        if not old and count == 0:
            return 0
        limit = base + sum(atom.message < count for atom in atoms)
        seen = {number: end for number, (_, end) in places.items() if number < limit}
        begin = max(seen.values(), default=0)
        until = min((start for start, _ in places.values() if start >= begin), default=len(marked))
        key = (
            base + count > 1,
            drafts[count - 1]["role"] if count else old[-1]["role"],
            count < len(drafts),
            marked[begin:until],
        )
        usable = (
            bool(seen)
            and max(seen) == limit - 1
            and (count == 0 or any(a.message == count - 1 for a in atoms))
        )
        if usable and key in self._cuts:
            return begin + self._cuts[key]
        try:
            before = self.render(old + drafts[:count])
        except Refused:
            return begin
        common = {number: end for number, (_, end) in self.marks(before).items() if number in seen}
        here = max(common, key=lambda number: seen[number], default=None)
        begin_here, begin_before = (0, 0) if here is None else (seen[here], common[here])
        start = begin_here + common_text(before[begin_before:], marked[begin_here:])
        if usable and len(self._cuts) < _CACHED:
            self._cuts[key] = start - begin
        return max(start, begin)

    def _walk(
        self,
        marked: str,
        places: dict[int, tuple[int, int]],
        begin: int,
        real: str,
        cursor: int,
        atoms: list[_Atom],
        base: int,
    ) -> list[_Glue]:
        glues: list[_Glue] = []
        stops = [(*places[number], atoms[number - base]) for number in places if number >= base]
        for place, (start, end, atom) in enumerate(stops):
            glue = marked[begin:start]
            follow = marked[end : stops[place + 1][0] if place + 1 < len(stops) else len(marked)]
            found = _find(real, cursor, glue, atom.text, follow)
            if found is None:
                if atom.kind == "text":
                    raise MessageError(
                        "the model's chat template rewrites this message's text", index=atom.message
                    )
                continue
            glues.append(_Glue((begin, start), (cursor, found[0]), found[0] == cursor + len(glue)))
            atom.where = found
            begin, cursor = end, found[1]
        exact = real[cursor:] == marked[begin:]
        glues.append(_Glue((begin, len(marked)), (cursor, len(real)), exact))
        return glues


def common_text(a: str, b: str) -> int:
    """Length of the common start of two texts."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _find(real: str, cursor: int, glue: str, text: str, follow: str) -> tuple[int, int] | None:
    """Range of a text in the rendering, behind `glue` and before `follow` if the template writes them so."""
    at = cursor + len(glue)
    if real.startswith(glue, cursor):
        for form in _forms(text):
            if real.startswith(form, at) and real.startswith(follow, at + len(form)):
                return at, at + len(form)
    # The template looks at the text itself: look for it behind the end of its header, then anywhere.
    head = glue[glue.rstrip("\n").rfind("\n") + 1 :] or glue
    for before in (head, ""):
        for form in _forms(text):
            at = real.find(before + form, cursor)
            if at >= 0:
                return at + len(before), at + len(before) + len(form)
    return None


def _forms(text: str) -> Iterator[str]:
    """The ways in which templates write a text: as it is, trimmed, or quoted as JSON."""
    yield text
    yield text.strip()
    yield text.strip("\n")
    yield text.rstrip()
    yield text.lstrip()
    yield text.lstrip("\n")
    yield text.rstrip("\n")
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield json.dumps(text)[1:-1]
