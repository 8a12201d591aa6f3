"""Session files: an agent session as JSON lines, to be played and probed.

The format is described in docs/session-files.md. A file is read once, line by line, so that its size does not
matter until its messages are kept.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tenure.errors import ConfigError, MessageError, SessionFileError
from tenure.messages import Message
from tenure.plan import Plan, Read, Step
from tenure.region_table import RegionTable, region_changes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

FORMAT = 1

_MARKS = ("span", "region", "pin", "step", "reads")
_MESSAGE = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content", *_MARKS)
_PROBE = ("probe", "expect", "reads", "step", "max_tokens", "keep", "span")
_SESSION = ("title", "format", "regions")


@dataclass(frozen=True, slots=True)
class Probe:
    """A question to the session.

    Args:
        question: the user message to answer.
        step: the plan step that answers it.
        expect: short texts that a right answer holds.
        reads: spans that the answer needs.
        max_tokens: limit of the answer, None for the caller's default.
        keep: whether question and answer become part of the session. By default they are asked in a fork, so
            that answers cannot influence each other.
        span: id of the question's span.
    """

    question: str
    step: str
    expect: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    max_tokens: int | None = None
    keep: bool = False
    span: str | None = None

    @property
    def message(self) -> Message:
        """The question as a chat message."""
        return Message("user", self.question, step=self.step, reads=self.reads, span=self.span)


@dataclass(frozen=True, slots=True)
class SessionFile:
    """A session to be played.

    Args:
        entries: messages and probes in order.
        title: of the first line, or "".
        path: where it was read from, or "".
        regions: what the file changes in the table of regions, see :class:`~tenure.config.SessionConfig`.
    """

    entries: tuple[Message | Probe, ...]
    title: str = ""
    path: str = ""
    regions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Message | Probe]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def messages(self) -> list[Message]:
        """The messages without the probes."""
        return [entry for entry in self.entries if isinstance(entry, Message)]

    @property
    def probes(self) -> list[Probe]:
        """The probes without the messages."""
        return [entry for entry in self.entries if isinstance(entry, Probe)]

    def plan(self) -> Plan:
        """The plan that the file implies: its steps in order of appearance, with the reads of their lines."""
        reads: dict[str, list[Read]] = {}
        for entry in self.entries:
            if entry.step is not None:
                reads.setdefault(entry.step, []).extend(entry.reads)
        return Plan(Step(step, tuple(spans)) for step, spans in reads.items())


def load(path: str | Path) -> SessionFile:
    """Read a session file.

    Raises:
        SessionFileError: names the file and the line: not a file, not UTF-8, broken JSON, unknown fields,
            wrong types, a span that is read before it exists or defined twice, or nothing to play.
    """
    name = str(path)
    try:
        with open(path, "rb") as file:
            return parse(file, name)
    except OSError as error:
        raise SessionFileError(
            f"cannot be read: {error.strerror or error}", path=name, way_out="Give the path of a session file"
        ) from None


def parse(lines: Iterable[bytes], path: str = "session") -> SessionFile:
    """Read a session from the lines of a file; see `load`."""
    reader = _Reader(path)
    for number, line in enumerate(lines, 1):
        reader.line = number
        text = reader.decode(line)
        if text.strip():
            reader.add(text)
    if not reader.entries:
        raise SessionFileError("no messages", path=path, way_out="Write one JSON object a line")
    return SessionFile(tuple(reader.entries), reader.title, path, reader.regions)


class _Reader:
    def __init__(self, path: str) -> None:
        self.path = path
        self.line = 0
        self.title = ""
        self.regions: dict[str, dict[str, Any]] = {}
        self._names = RegionTable().names
        self.entries: list[Message | Probe] = []
        self._first = True
        self._spans: dict[str, int] = {}
        self._probes = 0
        self._step: str | None = None

    def decode(self, line: bytes) -> str:
        try:
            return line.decode("utf-8-sig" if self.line == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise self._error(
                f"not UTF-8: byte {error.start + 1} of the line", "Save the file as UTF-8"
            ) from None

    def add(self, text: str) -> None:
        try:
            obj = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._error(f"broken JSON: {error}", "Write one JSON object on each line") from None
        if not isinstance(obj, dict):
            raise self._error(f"expected an object, got {type(obj).__name__}")
        first, self._first = self._first, False
        if "session" in obj:
            self._header(obj, first)
        elif "probe" in obj:
            self._enter(self._probe(obj))
        else:
            self._known(obj, _MESSAGE)
            try:
                self._enter(Message.parse(obj, regions=self._names))
            except MessageError as error:
                raise self._error(error.cause, error.way_out) from None

    def _header(self, obj: dict[str, Any], first: bool) -> None:
        if not first:
            raise self._error("the session line must be the first")
        self._known(obj, ("session",))
        head = obj["session"]
        if not isinstance(head, dict):
            raise self._error(f"session: expected an object, got {type(head).__name__}")
        self._known(head, _SESSION)
        if head.get("format", FORMAT) != FORMAT:
            raise self._error(f"format {head['format']!r} is unknown", f"This version reads format {FORMAT}")
        self.title = self._typed(head, "title", str, "")
        regions = head.get("regions", {})
        if not isinstance(regions, dict):
            raise self._error(f"regions: expected an object, got {type(regions).__name__}")
        try:
            self.regions = region_changes(regions)
        except ConfigError as error:
            raise self._error(f"regions: {error.cause}", error.way_out) from None
        self._names = RegionTable(self.regions).names

    def _probe(self, obj: dict[str, Any]) -> Probe:
        self._known(obj, _PROBE)
        self._probes += 1
        question = self._typed(obj, "probe", str, "")
        if not question.strip():
            raise self._error("probe: no question")
        limit = self._typed(obj, "max_tokens", int, None)
        if limit is not None and limit < 1:
            raise self._error("max_tokens: must be 1 or more")
        expect = self._typed(obj, "expect", list, [])
        if not all(isinstance(fact, str) and fact.strip() for fact in expect):
            raise self._error("expect: must be a list of non-empty texts")
        keep = self._typed(obj, "keep", bool, False)
        # The marks and the text are checked as those of the message that the probe becomes.
        marks = {name: obj.get(name) for name in ("step", "reads", "span")}
        try:
            message = Message.parse({"role": "user", "content": question, **marks})
        except MessageError as error:
            raise self._error(error.cause, error.way_out) from None
        step = message.step or f"probe-{self._probes}"
        if message.span is not None and not keep:
            raise self._error("span: a probe that is not kept leaves no span", 'Add "keep": true')
        return Probe(question, step, tuple(expect), self._ids(message.reads), limit, keep, message.span)

    def _enter(self, entry: Message | Probe) -> None:
        unknown = [span for span in self._ids(entry.reads) if span not in self._spans]
        if unknown:
            known = ", ".join(list(self._spans)[-8:]) or "none"
            raise self._error(
                f"reads: no earlier line defines {', '.join(map(repr, unknown))}", f"Latest spans: {known}"
            )
        if isinstance(entry, Message):
            if entry.reads and entry.step is None:
                if self._step is None:
                    raise self._error("reads: no step is under way", 'Add a "step" to this line or before it')
                entry = replace(entry, step=self._step)
            self._step = entry.step or self._step
        if entry.span is not None:
            if entry.span in self._spans:
                raise self._error(
                    f"span: {entry.span!r} is defined in line {self._spans[entry.span]} already"
                )
            self._spans[entry.span] = self.line
        self.entries.append(entry)

    def _ids(self, reads: Sequence[Read]) -> tuple[str, ...]:
        for read in reads:
            if not isinstance(read, str):
                raise self._error(
                    f"reads: {read}", "Name the span by its id; a session file has one for each"
                )
        return tuple(read for read in reads if isinstance(read, str))

    def _known(self, obj: Mapping[str, Any], allowed: Sequence[str]) -> None:
        unknown = sorted(set(obj).difference(allowed))
        if unknown:
            raise self._error(f"unknown fields: {', '.join(unknown)}", f"Known: {', '.join(allowed)}")

    def _typed(self, obj: Mapping[str, Any], field: str, kind: type, default: Any) -> Any:
        value = obj.get(field, default)
        if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            wanted = {str: "a text", int: "a whole number", list: "a list", bool: "true or false"}[kind]
            raise self._error(f"{field}: expected {wanted}, got {type(value).__name__}")
        return default if value is None else value

    def _error(self, cause: str, way_out: str | None = None) -> SessionFileError:
        return SessionFileError(cause, path=self.path, line=self.line, way_out=way_out)


def dumps(entries: Sequence[Message | Probe], title: str = "") -> str:
    """Entries as the text of a session file."""
    lines: list[dict[str, Any]] = [{"session": {"title": title, "format": FORMAT}}]
    for entry in entries:
        probe = isinstance(entry, Probe)
        line: dict[str, Any] = {"probe": entry.question} if isinstance(entry, Probe) else {}
        values = {name: getattr(entry, name, None) for name in (_PROBE if probe else _MESSAGE)}
        lines.append(line | {name: value for name, value in values.items() if value or name == "content"})
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
