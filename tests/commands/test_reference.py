"""The configuration page is what the code says."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from tenure.commands.reference import meanings, render
from tenure.config import EngineConfig, SessionConfig
from tenure.errors import ConfigError
from tenure.planners import PLANNERS
from tenure.policies import POLICIES

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_committed_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == render(), (
        "run python -m tenure.commands.reference > docs/configuration.md"
    )


@pytest.mark.parametrize("config", [EngineConfig, SessionConfig, *POLICIES.values(), *PLANNERS.values()])
def test_every_option_has_a_meaning(config):
    told = meanings(config)
    for item in fields(config):
        if item.name.startswith("_"):
            continue
        assert told.get(item.name, "").endswith("."), item.name
        assert "see above" not in told[item.name].lower()


@pytest.mark.parametrize("name", [item.name for item in fields(SessionConfig)])
def test_the_variables_of_a_session_are_those_that_are_read(name):
    variable = f"TENURE_{name.upper()}"
    try:
        read = getattr(SessionConfig.load(env={variable: "?"}), name) == "?"
    except ConfigError:
        read = True  # it was looked at, and refused
    row = next(line for line in render().split("## One session")[1].splitlines() if f"| `{name}` |" in line)
    assert (f"`{variable}`" in row) == read
