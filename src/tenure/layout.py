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

import re
import secrets
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from tenure.errors import MessageError, ModelError
from tenure.marks import Atom, draft, find
from tenure.skeleton import Entry

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tenure.messages import Message

# Kinds of places where one message ends and the next begins: they repeat through a session.
_CACHED = 256


class Refused(Exception):  # noqa: N818
    """The template raised an error; the text is the template's own."""


class Moved(Exception):  # noqa: N818
    """The template writes a text again, out of order or not at all.

    `index` is that of the new message, None for an old one; `kind` is `text`, `call` (a word of a call) or
    `missing`.
    """

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


class _Glue(NamedTuple):
    """The template's writing between two marks: its range with marks and its range with the real texts."""

    marked: tuple[int, int]
    real: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Marked:
    """A rendering with marks, of a history and of new messages.

    Args:
        old: the history as the template saw it.
        new: the new messages as the template saw them.
        atoms: the new texts; the first has the number `len(old)`.
        text: what the template wrote.
        places: where each mark stands, by number and in order.
        numbers: the numbers, ascending.
        owners: the new message of each atom.
    """

    old: list[dict[str, Any]]
    new: list[dict[str, Any]]
    atoms: list[Atom]
    text: str
    places: dict[int, tuple[int, int]]
    numbers: list[int]
    owners: list[int]


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

    @property
    def source(self) -> str:
        """The template's own text; that for tools where there are several."""
        template = getattr(self.tokenizer, "chat_template", None) or ""
        if isinstance(template, dict):
            template = template.get("tool_use") or template.get("default") or ""
        return str(template)

    @property
    def tool_names(self) -> tuple[str, ...]:
        """Names of the functions that the template shows."""
        functions = [tool.get("function", tool) for tool in self.tools or ()]
        return tuple(one["name"] for one in functions if isinstance(one, dict) and one.get("name"))

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
    ) -> Layout:
        """Place new messages after a history.

        Args:
            history: skeleton of what has been read.
            new: messages to add.
            prompt: whether the assistant's header follows.
            read: characters after the last mark of the history that have been read; None for all of its
                closing.

        Raises:
            Refused: the template does not take this list.
            Moved: it writes a text twice, out of order or not at all.
            MessageError: it rewrites a message's text.
        """
        marked = self._render_marked(history, new, prompt)
        chat = marked.old + [message.as_chat() for message in new]
        real = self.render(chat, prompt) if new else marked.text
        starts = [self._start(marked, count) for count in range(len(new))]
        starts.append(self._start(marked, len(new)) if prompt or not new else len(marked.text))

        split = bisect_left(marked.numbers, len(marked.old))
        begin = begin_real = 0
        if split:
            anchor = marked.numbers[split - 1]
            begin = marked.places[anchor][1]
            begin_real = self.marks(real).get(anchor, (0, begin))[1]
        glues = self._walk(marked, marked.numbers[split:], begin, real, begin_real)
        ends = [glue.marked[1] for glue in glues]

        def put(position: int) -> int:
            (left, right), (real_left, real_right) = glues[bisect_left(ends, position)]
            if real.startswith(marked.text[left:position], real_left):
                return real_left + position - left
            return max(real_left, real_right - (right - position))

        first = put(starts[0] if read is None else min(starts[0], begin + read)) if history else 0
        places = [put(start) - first for start in starts]
        layout = Layout(real[first:], places, [[] for _ in new], [], [None] * len(new))
        for atom in marked.atoms:
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
        nexts = [history[-1], *(Entry(role) for role in ("tool", "user", "assistant"))]
        for entry in (None, *nexts):
            new = [entry.as_chat(self.mark(len(old)))] if entry else []
            try:
                text = self.render(old + new, entry is None)
            except Refused:
                continue
            ends = [end for number, (_, end) in self.marks(text).items() if number < len(old)]
            if ends:
                found.append(text[max(ends) :])
        return found

    def header(self, role: str) -> str | None:
        """What the template writes before a text of that role later in a conversation, if it tells."""
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

    def _render_marked(
        self, history: Sequence[Entry], new: Sequence[Message], prompt: bool, depth: int = 2
    ) -> _Marked:
        """Render with marks, as few in calls as it takes that each is written once and in order."""
        old = self._skeleton(history)
        base = len(old)
        drafts, atoms = draft(new, lambda number: self.mark(base + number), depth)
        text = self.render(old + drafts, prompt)
        written = [int(number) for number in re.findall(rf"Q{self._nonce}x(\d+)Z", text)]
        fresh = [number for number in written if number >= base]
        known = written[: written.index(fresh[0])] if fresh else written
        if known != sorted(known) or (fresh and min(written[len(known) :]) < base):
            raise Moved
        for before, number in pairwise([-1, *fresh]):
            if number <= before:
                atom = atoms[number - base]
                if depth and atom.kind == "call":
                    return self._render_marked(history, new, prompt, depth - 1)
                raise Moved(atom.message, atom.kind)
        places = self.marks(text)
        for number, atom in enumerate(atoms, base):
            if atom.kind == "text" and number not in places:
                raise Moved(atom.message, "missing")
        return _Marked(old, drafts, atoms, text, places, sorted(places), [atom.message for atom in atoms])

    def _start(self, marked: _Marked, count: int) -> int:
        """Where new message `count` starts: where the whole goes beyond what precedes it."""
        base = len(marked.old)
        if not base and not count:
            return 0
        limit = base + bisect_left(marked.owners, count)
        split = bisect_left(marked.numbers, limit)
        begin = marked.places[marked.numbers[split - 1]][1] if split else 0
        after = marked.numbers[split : split + 1]
        until = marked.places[after[0]][0] if after else len(marked.text)
        # What stands between two texts repeats through a session, so that most places are known already. Not
        # when the message before has no text: then more than one message stands between.
        near = bool(split) and marked.numbers[split - 1] == limit - 1
        if count:
            near = near and bisect_left(marked.owners, count - 1) < bisect_left(marked.owners, count)
        before = marked.new[count - 1] if count else marked.old[-1]
        key = (base + count > 1, before["role"], count < len(marked.new), marked.text[begin:until])
        if near and key in self._cuts:
            return begin + self._cuts[key]
        try:
            text = self.render(marked.old + marked.new[:count])
        except Refused:
            return begin
        shared = {number: end for number, (_, end) in self.marks(text).items() if number < limit}
        last = max((number for number in shared if number in marked.places), default=None)
        whole, part = (0, 0) if last is None else (marked.places[last][1], shared[last])
        same = common_text(text[part:], marked.text[whole:])
        start = whole + same
        if same < len(text) - part and not count:
            # The template closes the last turn in another way now. What was read stays; only a header is new.
            start = max(start, until - len(self._header_of(marked, until) or ""))
        if near and len(self._cuts) < _CACHED:
            self._cuts[key] = start - begin
        return max(start, begin)

    def _header_of(self, marked: _Marked, until: int) -> str | None:
        """The header of the first new message, or the prompt, if it ends at that place."""
        if marked.new:
            header = self.header(marked.new[0]["role"])
        else:
            user = [Entry("user").as_chat(self.mark(0))]
            header = self.render(user, True)[len(self.render(user)) :]
        return header if header and marked.text.endswith(header, 0, until) else None

    def _walk(self, marked: _Marked, numbers: list[int], begin: int, real: str, cursor: int) -> list[_Glue]:
        """Find each text in the real rendering, from the end of the history on."""
        glues: list[_Glue] = []
        for place, number in enumerate(numbers):
            atom = marked.atoms[number - len(marked.old)]
            start, end = marked.places[number]
            after = numbers[place + 1 : place + 2]
            follow = marked.text[end : marked.places[after[0]][0] if after else len(marked.text)]
            found = find(real, cursor, marked.text[begin:start], atom.text, follow)
            if found is None:
                if atom.kind == "text":
                    raise MessageError(
                        "the model's chat template rewrites this message's text", index=atom.message
                    )
                continue
            glues.append(_Glue((begin, start), (cursor, found[0])))
            atom.where = found
            begin, cursor = end, found[1]
        glues.append(_Glue((begin, len(marked.text)), (cursor, len(real))))
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
