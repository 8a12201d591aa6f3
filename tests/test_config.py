"""Options: every bad value by name, and file, environment and arguments in their order."""

from __future__ import annotations

import dataclasses

import pytest

from tenure.config import EngineConfig, SessionConfig
from tenure.errors import ConfigError

BAD = [
    ({"budget": 0}, "budget", "cannot hold 4 sinks"),
    ({"budget": -1}, "budget", "Give at least 5"),
    ({"budget": 4}, "budget", "Give at least 5, or fewer sinks"),
    ({"budget": 8, "sinks": 8}, "budget", "Give at least 9"),
    ({"budget": 0, "sinks": 0}, "budget", "Give at least 1"),
    ({"budget": "64"}, "budget", "not a whole number"),
    ({"budget": 64.0}, "budget", "not a whole number"),
    ({"budget": True}, "budget", "not a whole number"),
    ({"budget": None}, "budget", "needs a budget"),
    ({"budget": 64, "policy": "full"}, "budget", "Leave the budget out"),
    ({"limit": 4223}, "limit", "below budget 2048 + chunk 2048 + slack 128 = 4224"),
    ({"limit": 0}, "limit", "Give at least 4224"),
    ({"limit": "8k"}, "limit", "not a whole number"),
    ({"budget": 64, "chunk": 16, "slack": 4, "limit": 83}, "limit", "Give at least 84"),
    ({"chunk": 0}, "chunk", "Give at least 1"),
    ({"chunk": None}, "chunk", "not a whole number"),
    ({"slack": 0}, "slack", "Give at least 1"),
    ({"slack": 1.5}, "slack", "not a whole number"),
    ({"sinks": -1}, "sinks", "Give at least 0"),
    ({"sinks": "four"}, "sinks", "not a whole number"),
    ({"positions": "bound"}, "positions", "bounded, logical, compact"),
    ({"positions": None}, "positions", "bounded, logical, compact"),
    ({"granularity": "head"}, "granularity", "session, layer"),
]


@pytest.mark.parametrize(("options", "option", "words"), BAD, ids=str)
def test_bad_session_options(options, option, words):
    with pytest.raises(ConfigError) as caught:
        SessionConfig(**options)
    assert caught.value.option == option
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"dtype": "int8"}, "dtype"),
        ({"executor": "vllm"}, "executor"),
        ({"weights": "int4"}, "weights"),
        ({"weights": "int8", "executor": "transformers"}, "weights"),
        ({"rotate": "maybe"}, "rotate"),
        ({"threads": 0}, "threads"),
        ({"threads": "two"}, "threads"),
        ({"threads": 1.5}, "threads"),
    ],
)
def test_bad_engine_options(options, option):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**options)
    assert caught.value.option == option


def test_the_least_values_work():
    config = SessionConfig(budget=1, sinks=0, chunk=1, slack=1, limit=3)
    assert (config.position_limit, config.capacity) == (3, 3)
    assert SessionConfig(budget=5).capacity == 5 + 2048 + 128


def test_the_default_limit_is_the_least_power_of_two_that_is_enough():
    for budget, chunk, slack, limit in (
        (64, 16, 4, 128),
        (64, 60, 4, 128),
        (64, 61, 4, 256),
        (2048, 2048, 128, 8192),
    ):
        config = SessionConfig(budget=budget, chunk=chunk, slack=slack)
        assert config.position_limit == limit >= config.capacity
    assert SessionConfig(positions="logical").position_limit is None
    assert SessionConfig(positions="compact", limit=1).position_limit is None
    assert SessionConfig(policy="full", budget=None).position_limit is None
    assert SessionConfig(policy="full", budget=None).capacity is None


def test_configs_are_frozen():
    for config in (SessionConfig(), EngineConfig()):
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.extra = 1


# -- file, environment, arguments --------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tenure.toml"
    path.write_text(
        '[session]\nbudget = 100\nchunk = 32\nslack = 8\npolicy = "snapkv"\npolicy_options = { window = 7 }\n'
        '[engine]\ndtype = "fp32"\n'
    )
    return path


def test_arguments_over_environment_over_file_over_defaults(file):
    env = {"TENURE_CHUNK": "16", "TENURE_SLACK": "4", "OTHER": "x", "TENURE_POISON": "1"}
    config = SessionConfig.load(file, env=env, slack=2)
    assert (config.budget, config.chunk, config.slack, config.sinks) == (100, 16, 2, 4)
    assert (config.policy, dict(config.policy_options)) == ("snapkv", {"window": 7})
    assert SessionConfig.load(env={}) == SessionConfig()
    assert SessionConfig.load(file, env={}, slack=None).slack == 8, "None is not given"


def test_the_process_environment_counts(monkeypatch):
    monkeypatch.setenv("TENURE_BUDGET", "77")
    assert SessionConfig.load().budget == 77


def test_policy_full_drops_a_budget_that_was_not_asked_for_with_it(file):
    """A command line passes what was not given as None."""
    for given in ({}, {"budget": None}):
        assert SessionConfig.load(file, env={}, policy="full", **given).budget is None
        assert SessionConfig.load(env={"TENURE_POLICY": "full"}, **given).budget is None
    with pytest.raises(ConfigError, match="Leave the budget out"):
        SessionConfig.load(env={}, policy="full", budget=64)


@pytest.mark.parametrize(
    ("env", "option"),
    [
        ({"TENURE_BUDGET": "many"}, "TENURE_BUDGET"),
        ({"TENURE_CHUNK": ""}, "TENURE_CHUNK"),
        ({"TENURE_LIMIT": "1e4"}, "TENURE_LIMIT"),
        ({"TENURE_POSITIONS": "somewhere"}, "positions"),
        ({"TENURE_BUDGET": "0"}, "budget"),
    ],
)
def test_bad_environment(env, option):
    with pytest.raises(ConfigError) as caught:
        SessionConfig.load(env=env)
    assert caught.value.option == option


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[session]\nbudgett = 3\n", "unknown option 'budgett'"),
        ("[session]\nbudget = 'x'\n", "not a whole number"),
        ("[session]\nbudget = 2.0\n", "not a whole number"),
        ("[session]\nbudget = true\n", "not a whole number"),
        ("[session\n", "readable TOML"),
        ("session = 3\n", "Make it a table"),
        ("[session]\nbudget = 3\n", "Give at least 5"),
        ("[session]\npositions = 3\n", "3 is not known"),
    ],
)
def test_bad_files(tmp_path, text, words):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        SessionConfig.load(path, env={})
    assert words in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b'[session]\npolicy = "\xe9"\n')
    for path in (tmp_path / "missing.toml", tmp_path, latin):
        with pytest.raises(ConfigError, match="readable TOML") as caught:
            SessionConfig.load(path, env={})
        assert caught.value.option == str(path)


def test_unknown_arguments_are_named():
    with pytest.raises(ConfigError, match=r"unknown option 'bugdet'.*Known: budget, policy"):
        SessionConfig.load(env={}, bugdet=3)


@pytest.mark.parametrize("text", ["", "abc"])
def test_a_variable_that_is_no_number_is_refused_with_the_way_out(text):
    with pytest.raises(ConfigError, match=rf"TENURE_BUDGET: '{text}' is not a whole number.*unset it"):
        SessionConfig.load(env={"TENURE_BUDGET": text})
