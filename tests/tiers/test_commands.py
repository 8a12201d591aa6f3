"""``tenure tiers``, and sessions that the other commands save and go on with."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tenure import Engine
from tenure.sessiontier import SCHEME
from tenure.tiers.base import SESSIONS
from tenure.tiers.blob import Blob
from tenure.tiers.spec import parse_tier
from tenure.tiers.stack import TierStack, open_tier
from tests.commands.conftest import session_file, story, tenure, tiny_folder
from tests.tiers.conftest import at
from tests.tiers.records import record

__all__ = ["session_file", "story", "tenure", "tiny_folder"]

SMALL = ("--budget", 112, "--chunk", 32, "--slack", 4)


@pytest.fixture(params=["disk", "valkey"])
def tier(request, tmp_path, valkey_server):
    return f"disk:{tmp_path}/spans:1M" if request.param == "disk" else at(valkey_server()).where


def test_ls_stats_gc(tenure, tier, tmp_path):
    stack = TierStack([parse_tier("host:1"), parse_tier(tier)], "f")
    for seed in range(3):
        stack.put(str(seed), record(seed=seed))
    stack.flush()
    rows = json.loads(tenure("tiers", "ls", tier, "--json").stdout)
    assert {(row["kind"], row["key"]) for row in rows} == {("span", str(seed)) for seed in range(3)}
    assert all(row["bytes"] > 3000 and row["age_s"] < 60 for row in rows)
    (stats,) = json.loads(tenure("tiers", "stats", tier, "--json").stdout)
    assert (stats["spans"], stats["sessions"], stats["span_bytes"]) == (
        3,
        0,
        sum(row["bytes"] for row in rows),
    )
    assert json.loads(tenure("tiers", "gc", "host:1M", tier, "--json").stdout)[0]["over_size"] == 0
    if tier.startswith("disk"):
        small = f"disk:{tmp_path}/spans:{rows[0]['bytes'] + 10}B"
        assert json.loads(tenure("tiers", "gc", small, "--json").stdout)[0]["over_size"] == 2
        assert [row["key"] for row in json.loads(tenure("tiers", "ls", tier, "--json").stdout)] == ["2"]
    for command in ("ls", "stats", "gc"):
        shown = tenure("tiers", command, tier).stdout
        assert rows[0]["tier"] in shown, "two tiers can be told apart in a pipe"
        assert "…" not in shown
    stack.close()


def test_names_are_shown_as_they_are(tenure, tier, tmp_path):
    one = open_tier(parse_tier(tier))
    for name in ("[/x]", "[red]zz"):
        one.write(SESSIONS + name, Blob.of({"kind": "session"}, np.zeros(9, np.uint8), [9]))
    shown = tenure("tiers", "ls", tier).stdout
    assert "[/x]" in shown
    assert "[red]zz" in shown


def test_a_folder_that_is_looked_at_is_not_made(tenure, tmp_path):
    for command in ("ls", "stats", "gc"):
        assert "there is no folder" in tenure("tiers", command, f"disk:{tmp_path}/typo:1M", code=2).stderr
    assert not (tmp_path / "typo").exists()


def test_bad_tiers(tenure):
    assert "no tier" in tenure("tiers", "ls", "tape:/x", code=2).stderr
    assert "URL" in tenure("tiers", "stats", "valkey:1M", code=2).stderr
    assert "refused" in tenure("tiers", "ls", "valkey://127.0.0.1:1/0", code=2).stderr


def test_run_and_chat_save_and_go_on(tenure, tiny_folder, story, tier, tmp_path, session_file):
    place = tmp_path / "saved"
    tenure("run", story, "--model", tiny_folder, *SMALL, "--json", "--save", place, "--tier", "host:1M")
    told = Engine.load(tiny_folder).restore(place)
    assert "pump" in told.memory.ledger.spans
    more = session_file(
        {"role": "user", "content": "The belt is red. ", "span": "belt", "step": "late"},
        {"probe": "Which colour has the belt?", "expect": ["red"], "reads": ["belt"], "max_tokens": 4},
    )
    again = json.loads(
        tenure(
            "run",
            more,
            "--model",
            tiny_folder,
            "--load",
            place,
            "--json",
            "--save",
            f"{SCHEME}a",
            "--tier",
            tier,
        ).stdout
    )
    assert again["budget"] == 112, "the options that it was saved with"
    assert again["tokens"] > len(told)
    out = tenure(
        "chat", "--model", tiny_folder, "--tier", tier, "--load", f"{SCHEME}a", "--max-tokens", 4,
        stdin=f"/explain belt\nhello\n/save {tmp_path}/other\n",
    ).stdout  # fmt: skip
    assert "belt" in out
    assert "saved" in out
    assert len(Engine.load(tiny_folder).restore(tmp_path / "other")) > again["tokens"]
    assert "no such session" in tenure(
        "chat", "--model", tiny_folder, "--tier", tier, "--load", f"{SCHEME}b", code=2
    ).stderr.replace("\n", " ")


def test_a_place_that_cannot_be_written(tenure, tiny_folder, story, tmp_path):
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "x"
    failed = tenure("run", story, "--model", tiny_folder, *SMALL, "--quiet", "--save", place, code=2)
    assert "could not be written" in failed.stderr.replace("\n", " ")
