"""The transcripts of ``tenure bench regions``: an agent's session with 24 one-line facts, three in each region.

Everything is drawn from a seed. Facts have the same form wherever they stand, and values that no model can know, so that
a region's score says only what memory kept of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tenure.messages import Message
from tenure.regions import Region

REGIONS: tuple[Region, ...] = (
    Region.SYSTEM,
    Region.TOOLS,
    Region.PLAN,
    Region.USER,
    Region.RETRIEVED,
    Region.TOOL_OUTPUT,
    Region.ASSISTANT,
    Region.SCRATCHPAD,
)
"""Regions that hold facts; ``other`` has no message of its own."""

FACTS = 24

VERSION = 2
"""Of transcripts and questions; results of different versions are never put together. In the first one answers
began as the model liked."""

_NAMES = (
    *(
        "kestrel",
        "marlin",
        "badger",
        "heron",
        "lynx",
        "osprey",
        "walrus",
        "wombat",
        "ibis",
        "tapir",
        "otter",
        "raven",
    ),
    *(
        "falcon",
        "salmon",
        "beaver",
        "gecko",
        "bison",
        "camel",
        "panda",
        "zebra",
        "moose",
        "ferret",
        "iguana",
        "jaguar",
    ),
    *(
        "koala",
        "lemur",
        "magpie",
        "newt",
        "ocelot",
        "parrot",
        "quail",
        "rabbit",
        "seal",
        "turtle",
        "viper",
        "weasel",
    ),
)

_OPENING = {
    Region.SYSTEM: "Be exact.",
    Region.TOOLS: "Tools: search(query), read(path), run(command).",
    Region.PLAN: "1. Look. 2. Compare. 3. Report.",
    Region.USER: "Go on with the inventory.",
    Region.RETRIEVED: "Page from the handbook.",
    Region.TOOL_OUTPUT: "exit 0",
    Region.ASSISTANT: "Done with this part.",
    Region.SCRATCHPAD: "Let me think.",
}

_PLACES = (
    "north hall",
    "dock",
    "annex",
    "tower",
    "yard",
    "cellar",
    "gate",
    "lab",
    "office",
    "depot",
    "garage",
    "attic",
)
_THINGS = (
    "pump",
    "valve",
    "crate",
    "ladder",
    "cable",
    "filter",
    "engine",
    "lamp",
    "sensor",
    "rotor",
    "panel",
    "belt",
)
_DOINGS = (
    "checked",
    "moved",
    "cleaned",
    "counted",
    "sealed",
    "painted",
    "tested",
    "packed",
    "repaired",
    "listed",
)
_PEOPLE = ("Ada", "Boris", "Chen", "Dana", "Emil", "Fatma", "Goran", "Hana", "Ivo", "Jana", "Karim", "Lena")
_WHEN = ("on Monday", "last week", "at noon", "in May", "today", "after lunch", "on Friday", "at night")


@dataclass(frozen=True)
class Fact:
    """One planted line.

    Args:
        region: where it stands.
        name: what is asked for.
        value: the answer.
    """

    region: Region
    name: str
    value: str

    @property
    def line(self) -> str:
        """The text of the fact."""
        return f"The code of {self.name} is {self.value}."

    @property
    def question(self) -> str:
        """What is asked."""
        return f"What is the code of {self.name}? Only the code."

    @property
    def beginning(self) -> str:
        """How the answer begins, whatever the model would say first."""
        return f"The code of {self.name} is"


@dataclass(frozen=True)
class AgentTranscript:
    """A session to be read, and what is asked afterwards.

    Args:
        messages: in order.
        facts: one for each question, equal shares a region.
    """

    messages: tuple[Message, ...]
    facts: tuple[Fact, ...]


def transcript(seed: int, tokens: int, count: Callable[[str], int]) -> AgentTranscript:
    """An agent's session of about ``tokens`` tokens.

    Args:
        seed: of facts, order and filler.
        tokens: wanted length, headers included.
        count: tokens of a text.
    """
    rng = random.Random(seed)
    names = rng.sample(_NAMES, FACTS)
    values = rng.sample(range(100, 1000), FACTS)
    facts = [
        Fact(REGIONS[number % len(REGIONS)], name, str(value))
        for number, (name, value) in enumerate(zip(names, values, strict=True))
    ]
    rounds = max(1, min(24, tokens // 1200))
    slots: list[tuple[Region, int]] = [(region, 0) for region in (Region.SYSTEM, Region.TOOLS, Region.PLAN)]
    for number in range(rounds):
        slots += [
            (region, number)
            for region in (
                Region.USER,
                Region.RETRIEVED,
                Region.SCRATCHPAD,
                Region.TOOL_OUTPUT,
                Region.ASSISTANT,
            )
        ]
    # The rules, the tools and the plan are said once, the rest as often as there are rounds.
    lines: dict[tuple[Region, int], list[str]] = {slot: [] for slot in slots}
    for fact in facts:
        once = fact.region in (Region.SYSTEM, Region.TOOLS, Region.PLAN)
        lines[fact.region, 0 if once else rng.randrange(rounds)].append(fact.line)
    opening = {slot: _OPENING[slot[0]] for slot in slots}
    used = sum(count(" ".join([opening[slot], *lines[slot]])) + 6 for slot in slots)
    filler = _fillers(rng)
    # Rules stay short, so that a pin on them fits the smallest budget; tool outputs and documents are the bulk.
    weight = {
        Region.SYSTEM: 0.0,
        Region.TOOLS: 0.5,
        Region.PLAN: 0.5,
        Region.RETRIEVED: 3.0,
        Region.TOOL_OUTPUT: 3.0,
    }
    shares = {slot: weight.get(slot[0], 1.0) for slot in slots}
    total = sum(shares.values())
    for slot in slots:
        room = (tokens - used) * shares[slot] / total
        while room > 0:
            line = next(filler[slot[0]])
            room -= count(line + "\n")
            if room > -4:
                lines[slot].append(line)
    messages = []
    for slot in slots:
        rng.shuffle(lines[slot])
        messages.append(_message(slot[0], [opening[slot], *lines[slot]]))
    return AgentTranscript(tuple(messages), tuple(facts))


def _message(region: Region, lines: list[str]) -> Message:
    text = "\n".join(lines)
    if region is Region.SYSTEM:
        return Message("system", text, span="rules")
    if region is Region.TOOLS:
        return Message("system", text, region=Region.TOOLS)
    if region is Region.PLAN:
        return Message("assistant", f"<plan>\n{text}\n</plan>")
    if region is Region.USER:
        return Message("user", text)
    if region is Region.RETRIEVED:
        return Message("user", f"<document>\n{text}\n</document>")
    if region is Region.TOOL_OUTPUT:
        return Message("user", text, region=Region.TOOL_OUTPUT)
    if region is Region.SCRATCHPAD:
        return Message("assistant", f"<think>\n{text}\n</think>")
    return Message("assistant", text)


def _fillers(rng: random.Random) -> dict[Region, Iterator[str]]:
    def prose() -> Iterator[str]:
        while True:
            yield (
                f"{rng.choice(_PEOPLE)} {rng.choice(_DOINGS)} the {rng.choice(_THINGS)} in the "
                f"{rng.choice(_PLACES)} {rng.choice(_WHEN)}."
            )

    def log() -> Iterator[str]:
        while True:
            yield f"{rng.choice(_PLACES)}/{rng.choice(_THINGS)} ok {rng.randrange(2, 99)} ms"

    def notes() -> Iterator[str]:
        while True:
            yield f"Maybe the {rng.choice(_THINGS)} is in the {rng.choice(_PLACES)}, or {rng.choice(_PEOPLE)} has it."

    def tools() -> Iterator[str]:
        while True:
            yield f"{rng.choice(_DOINGS)}_{rng.choice(_THINGS)}(id) - for a {rng.choice(_THINGS)}."

    found: dict[Region, Iterator[str]] = {region: prose() for region in REGIONS}
    return found | {Region.TOOL_OUTPUT: log(), Region.SCRATCHPAD: notes(), Region.TOOLS: tools()}
