"""Planners on the command line: options of one, options of several, and names that are not known."""

from __future__ import annotations

import pytest

from tenure.commands.options import MemoryOptions
from tenure.errors import ConfigError


def test_options_of_planners():
    one = MemoryOptions(planner="retrieval", planner_option=["scorer=both", "most=3"]).session_config()
    assert (one.planner, one.planner_options) == ("retrieval", {"scorer": "both", "most": 3})
    options = ["retrieval.most=3", "online.habit=4"]
    both = MemoryOptions(planner="online+retrieval", planner_option=options).session_config()
    assert both.planner_options == {"retrieval": {"most": 3}, "online": {"habit": 4}}
    assert MemoryOptions().session_config().planner is None


@pytest.mark.parametrize(
    ("planner", "options", "words"),
    [
        ("retreival", [], "Did you mean 'retrieval'"),
        ("retrieval", ["most"], "'most' is not KEY=VALUE"),
        ("retrieval", ["most=0"], "planner retrieval, most: 0 is too small"),
        ("online+retrieval", ["most=3"], "planner_options: 'most' is not one of the planners"),
    ],
)
def test_planners_that_cannot_work_are_refused_before_anything_is_loaded(planner, options, words):
    with pytest.raises(ConfigError, match=words):
        MemoryOptions(planner=planner, planner_option=options).session_config()
