"""Regions: names and guesses."""

from __future__ import annotations

import pytest

from tenure.errors import ConfigError
from tenure.messages import Message
from tenure.regions import Region, infer_region, parse_region


@pytest.mark.parametrize(
    ("role", "content", "region"),
    [
        ("system", "Be brief.", Region.SYSTEM),
        ("developer", "Be brief.", Region.SYSTEM),
        ("tool", "<document>x</document>", Region.TOOL_OUTPUT),
        ("user", "What is it?", Region.USER),
        ("user", "", Region.USER),
        ("user", 'Use this:\n<document index="1">\nx\n</document>\nWhat is it?', Region.RETRIEVED),
        ("user", "```document\nx\n```\nWhat is it?", Region.RETRIEVED),
        ("user", "```python\nx\n```", Region.USER),
        ("user", "What does <document> mean in HTML?", Region.USER),
        ("user", "<plan>\n1. look\n</plan>", Region.PLAN),
        ("assistant", "It is 48.", Region.ASSISTANT),
        ("assistant", "<think>\nhm\n</think>\n", Region.SCRATCHPAD),
        ("assistant", "<think>\nhm", Region.SCRATCHPAD),
        ("assistant", "<think>\nhm\n</think>\nIt is 48.", Region.ASSISTANT),
        ("assistant", " <plan>1. look</plan>", Region.PLAN),
        ("robot", "x", Region.OTHER),
    ],
)
def test_guesses(role: str, content: str, region: Region) -> None:
    assert infer_region(Message(role, content)) is region


def test_a_given_region_wins() -> None:
    assert Message("tool", "x", region=Region.PLAN).memory_region is Region.PLAN


def test_names() -> None:
    for region in Region:
        assert parse_region(region.value) is region
    words = r"unknown region 'tool-output'\. Did you mean 'tool_output'\? Known regions: system, tools"
    with pytest.raises(ConfigError, match=words):
        parse_region("tool-output")
    with pytest.raises(ConfigError, match=r"unknown region 'xyzzy'\. Known regions"):
        parse_region("xyzzy")


def test_a_long_paste_is_looked_at_only_near_its_ends() -> None:
    paste = "<document>" + "x < y " * 400_000 + "</document>"
    assert infer_region(Message("user", paste)) is Region.RETRIEVED
