"""The session of `make demo`: three definitions, a long stretch of source files, questions about the former.

Everything is derived from a seed and from the Python standard library of the machine, so that nothing has to
be downloaded and no model can know the answers.
"""

from __future__ import annotations

import random
import re
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tenure.bench.longsession.filler import cut
from tenure.errors import ConfigError
from tenure.messages import Message
from tenure.sessionfile import Probe, SessionFile
from tenure.transcript import Transcript

if TYPE_CHECKING:
    from collections.abc import Sequence

SYSTEM = (
    "You are a coding assistant in a long session. Answer questions about the project with the exact names, "
    "numbers and codes that were given."
)

# Read in this order; each exists in every Python from 3.11 on.
MODULES = (
    *("heapq", "bisect", "textwrap", "shlex", "fnmatch", "queue", "sched", "csv", "string", "graphlib"),
    *("contextlib", "calendar", "configparser", "cmd", "filecmp", "zipapp", "getopt", "gettext", "numbers"),
    *("optparse", "pprint", "random", "selectors", "statistics", "tempfile", "timeit", "trace", "types"),
    *(
        "uuid",
        "wave",
        "weakref",
        "argparse",
        "ast",
        "difflib",
        "dis",
        "doctest",
        "enum",
        "fractions",
        "ftplib",
    ),
    *("functools", "gzip", "imaplib", "inspect", "ipaddress", "locale", "mailbox", "mimetypes", "netrc"),
    *(
        "nntplib",
        "pdb",
        "pickle",
        "pickletools",
        "platform",
        "plistlib",
        "poplib",
        "pydoc",
        "shutil",
        "smtplib",
    ),
    *(
        "socket",
        "socketserver",
        "ssl",
        "subprocess",
        "tarfile",
        "threading",
        "traceback",
        "turtle",
        "zipfile",
    ),
)
PER_FILE = 2000  # tokens of one file at most, so that no single file fills the session

_ANIMALS = ("Kestrel", "Marlin", "Badger", "Heron", "Lynx", "Osprey", "Stoat", "Wombat", "Ibis", "Tapir")
_STATES = (
    "QUARANTINED",
    "DORMANT",
    "SHELVED",
    "LAPSED",
    "STRANDED",
    "DEFERRED",
    "MUZZLED",
    "ADRIFT",
    "BENCHED",
)


class _Topic(NamedTuple):
    span: str
    work: str
    noun: str
    constant: str
    meaning: str
    error: str
    thing: str
    state: str


_TOPICS = (
    _Topic(
        "def-shards",
        "splits uploads into shards",
        "Planner",
        "MAX_PARALLEL_SHARDS",
        "the most shards that may be open at once",
        "a shard is larger than its slot",
        "upload",
        "its owner is over quota",
    ),
    _Topic(
        "def-leases",
        "hands out leases on build machines",
        "Broker",
        "LEASE_RENEWAL_MS",
        "the time in milliseconds between two renewals of a lease",
        "a lease is renewed twice",
        "lease",
        "its machine stops answering",
    ),
    _Topic(
        "def-invoices",
        "matches invoices with payments",
        "Ledger",
        "SETTLEMENT_BATCH_ROWS",
        "the number of rows that are settled in one batch",
        "two payments claim one invoice",
        "invoice",
        "no payment arrives in time",
    ),
)


def build_demo(tokenizer: Any, tokens: int = 12_000, seed: int = 0) -> SessionFile:
    """Make the demo session.

    Args:
        tokenizer: of the model that will read it; decides how much filler fits.
        tokens: length of the session before the questions, in tokens of the model's own rendering; the last
            file is cut at a line so that this is met within one line.
        seed: of names and values. One seed gives one session on one version of Python.

    Returns:
        Messages, then twelve probes, one for each fact. Each probe reads the span of its definition.

    Raises:
        ConfigError: `tokens` leaves no room for any filler, or the files have too little text for it.
    """
    rng = random.Random(seed)
    messages = [Message("system", SYSTEM)]
    probes: list[Probe] = []
    names = rng.sample(_ANIMALS, len(_TOPICS))
    states = rng.sample(_STATES, len(_TOPICS))
    values = rng.sample(range(1013, 9989), 2 * len(_TOPICS))
    for topic, name, state in zip(_TOPICS, names, states, strict=True):
        value, code = str(values.pop()), f"E{values.pop()}"
        owner = name + topic.noun
        messages.append(
            Message("user", _definition(topic, owner, value, code, state), span=topic.span, step="define")
        )
        messages.append(Message("assistant", f"Understood. I will keep the definition of {owner} in mind."))
        asked = (
            (f"What is the name of the class that {topic.work}?", owner),
            (f"What is the value of {topic.constant}?", value),
            (f"Which error code is raised when {topic.error}?", code),
            (f"Which status does the {topic.thing} get when {topic.state}?", state),
        )
        for number, (question, fact) in enumerate(asked, 1):
            step = f"{topic.span}-{number}"
            probes.append(Probe(question, step, (fact,), (topic.span,), max_tokens=32))
    messages += _filler(tokenizer, messages, tokens)
    rng.shuffle(probes)
    return SessionFile((*messages, *probes), title=f"Demo: {len(probes)} facts before {tokens:,} tokens")


def facts_found(answer: str, expect: Sequence[str]) -> list[bool]:
    """Which of the expected texts an answer holds.

    A text is found when it stands in the answer, in any case, on word boundaries: `37` is not in `370` nor
    in `E37`. Runs of white space count as one space, and a comma between digits is dropped, so that `1,750`
    holds `1750`.
    """
    said = _plain(answer)
    return [re.search(rf"(?<!\w){re.escape(_plain(fact))}(?!\w)", said) is not None for fact in expect]


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"(?<=\d),(?=\d{3})", "", text)).strip().casefold()


def _definition(topic: _Topic, owner: str, value: str, code: str, state: str) -> str:
    return (
        f"Definition for this project, please remember it:\n"
        f"The class {owner} {topic.work}.\n"
        f"{topic.constant} = {value}  # {topic.meaning}\n"
        f"When {topic.error}, {owner} raises error code {code}.\n"
        f"When {topic.state}, the {topic.thing} gets the status {state}."
    )


def _filler(tokenizer: Any, before: list[Message], tokens: int) -> list[Message]:
    transcript = Transcript(tokenizer)
    left = tokens - sum(len(piece.ids) for piece in transcript.open(before))
    filler: list[Message] = []
    folder = Path(sysconfig.get_paths()["stdlib"])
    for module in MODULES:
        path = folder / f"{module}.py"
        if not path.is_file():
            continue
        step = None if filler else "survey"
        ask = Message("assistant", f"Next I read {path.name} of the standard library.", step=step)
        found = _cut(transcript, ask, path, min(left, PER_FILE))
        if found is None:
            break
        text, used = found
        transcript.open([ask, text])
        filler += [ask, text]
        left -= used
    else:
        raise ConfigError(f"{tokens:,} tokens are more than the demo's files hold", option="tokens")
    if not filler:
        raise ConfigError(
            f"{tokens:,} tokens leave no room for filler", option="tokens", way_out="Give 2,000 or more"
        )
    return filler


def _cut(transcript: Transcript, ask: Message, path: Path, room: int) -> tuple[Message, int] | None:
    """The start of a file, in whole lines, that fits with its announcement; None when no line does."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)

    def make(count: int) -> list[Message]:
        return [ask, Message("tool", f"$ cat {path.name}\n" + "".join(lines[:count]))]

    found = cut(transcript, make, len(lines), room)
    return None if found is None else (found[0][1], found[1])
