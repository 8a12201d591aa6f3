"""Small sessions in which a fact is said early, drowned, and asked for again."""

from __future__ import annotations

import random
from typing import Any

from tests.chats import assistant, chat_session, tool, user

OPTIONS: dict[str, Any] = {"policy": "foresight", "budget": 192, "chunk": 32, "slack": 4}
# Without a plan, the newest stay: what the facts lose does not hang on a random model's attention.
OPTIONS["policy_options"] = {"min_recent": 8, "recent_ratio": 0.95}

FACTS = {
    "limits": "MAX_SHARDS is 48 and QUEUE_DEPTH is 7",
    "rule": "class FeeRule rounds half up, quantum 0.05",
    "codes": "error E417 means the ledger is frozen",
}


def filler(seed: int, count: int = 24) -> str:
    """Words that no fact has."""
    rng = random.Random(seed)
    return " ".join(
        rng.choice(["lorem", "ipsum", "dolor", "sit", "amet", "elit", "sed", "do"]) for _ in range(count)
    )


def drowned(engines: Any, facts: dict[str, str] = FACTS, **options: Any) -> Any:
    """A session that has read the facts, and then enough to have lost them."""
    if options.get("planner") == "retrieval":
        options["planner_options"] = {"allowance": 64} | options.get("planner_options", {})
    session = chat_session(engines, **(OPTIONS | options))
    for name, text in facts.items():
        session.append([user(text, span=name), assistant("noted")])
    for seed in range(6):
        session.append([tool(filler(seed), span=f"filler-{seed}"), assistant("go on")])
    return session
