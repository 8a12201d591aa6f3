"""What a transcript remembers of its messages: their roles and call ids, and none of their texts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tenure.messages import Message


class Entry(NamedTuple):
    """What stays of a message when its text is gone."""

    role: str
    calls: tuple[tuple[str, str], ...] = ()  # id and name
    tool_call_id: str | None = None
    name: str | None = None
    has_text: bool = True
    generated: bool = False
    reasoning: str | None = None
    span: str | None = None

    @classmethod
    def of(cls, message: Message, reasoning: str | None) -> Entry:
        """What stays of a message whose reasoning the template `kept` or `dropped`."""
        return cls(
            message.role,
            message.call_names,
            message.tool_call_id,
            message.name,
            bool(message.content.strip()),
            False,
            reasoning,
            message.span,
        )

    def as_chat(self, mark: str) -> dict[str, Any]:
        """The message with a mark for its text and for the arguments of its calls."""
        chat: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        chat["content"] = mark if self.has_text or not self.calls else ""
        if self.calls:
            chat["tool_calls"] = [
                {"id": call, "type": "function", "function": {"name": name, "arguments": {"text": mark}}}
                for call, name in self.calls
            ]
        if self.tool_call_id is not None:
            chat["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            chat["name"] = self.name
        return chat


class Node(NamedTuple):
    """A history, newest entry first. Forks and snapshots share it."""

    parent: Node | None
    entry: Entry


@dataclass(frozen=True, slots=True)
class State:
    """Where a transcript stands. Immutable and small: keep one for each place that a session may go back to.

    Args:
        last: skeleton of the history.
        rules: the system messages at its start.
        started: whether the session has any ids.
        turn: whether an assistant's turn is open.
        read: characters of the last message's closing that have been read, None for all.
        carry: end of the last message's text that waits for what follows.
    """

    last: Node | None = None
    rules: tuple[Entry, ...] = ()
    started: bool = False
    turn: bool = False
    read: int | None = None
    carry: str = ""

    def append(self, entry: Entry) -> State:
        """The state after one more message."""
        rules = self.rules
        if entry.role in ("system", "developer") and (self.last is None or self.last.entry in rules):
            rules = (*rules, entry)
        return replace(self, last=Node(self.last, entry), rules=rules, started=True)

    def entries(self, limit: int | None = None) -> list[Entry]:
        """The skeleton, oldest first.

        With a limit, the rules at its start and the last exchanges: `limit` entries or a few more, cut where
        the roles that remain are still in an order that the template takes: between two of one role if it has taken
        such before.
        """
        found: list[Entry] = []
        node = self.last
        while node is not None:
            if limit is not None and len(found) >= limit:
                before, after = node.entry.role, found[-1].role
                if after == "user" and before in ("assistant", "tool", "user"):
                    return [*self.rules, *reversed(found)]
                if after == "assistant" and before in ("tool", "assistant"):
                    return [*self.rules, Entry("user"), *reversed(found)]
            found.append(node.entry)
            node = node.parent
        return found[::-1]
