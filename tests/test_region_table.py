"""The region table: defaults, changes, overrides of one message, files."""

from __future__ import annotations

import json
import math

import pytest

from tenure.errors import ConfigError
from tenure.region_table import DEFAULTS, MOST, RegionSpec, RegionTable, load_regions, region_changes
from tenure.regions import CustomRegion, Region, parse_region, reasoning


def test_defaults_cover_every_region_and_separate_rules_from_notes() -> None:
    assert set(DEFAULTS) == set(Region)
    table = RegionTable()
    assert table.names == [region.value for region in Region]
    assert table.spec("system").half_life >= 8 * table.spec("scratchpad").half_life


def test_changes_and_custom_regions() -> None:
    table = RegionTable({"system": {"pin": "soft"}, "memo": {"half_life": 300, "clock": "turns"}})
    assert table.spec("system") == RegionSpec(1.0, 160.0, pin="soft")
    assert table.spec("memo") == RegionSpec(DEFAULTS[Region.OTHER].base, 300, clock="turns")
    assert table.specs[table.code("memo")] is table.spec("memo")


def test_a_message_may_override_single_fields() -> None:
    table = RegionTable()
    region = parse_region({"name": "user", "half_life": 300, "pin": "hard"})
    assert region == "user:half_life=300,pin=hard"
    assert isinstance(region, CustomRegion)
    spec = table.spec(region)
    assert (spec.half_life, spec.pin, spec.base) == (300.0, "hard", DEFAULTS[Region.USER].base)
    assert table.code(region) == table.code(CustomRegion("user:half_life=300,pin=hard")), (
        "one row for equal texts"
    )
    assert table.code("user") == list(Region).index(Region.USER), "the region itself is as it was"
    assert table.spec("system:pin=none").pin is None
    assert table.spec("user:half_life=inf").half_life == math.inf


def test_rows_are_bounded() -> None:
    table = RegionTable()
    for number in range(MOST - len(DEFAULTS)):
        table.code(f"user:half_life={number + 1}")
    with pytest.raises(ConfigError, match=f"more than {MOST}"):
        table.code("user:base=0.123")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"user": {"half_life": 0}}, "half_life 0"),
        ({"user": {"half_life": -3}}, "half_life -3"),
        ({"user": {"half_life": "long"}}, "'long' is no number"),
        ({"user": {"base": math.inf}}, "base inf"),
        ({"user": {"base": math.nan}}, "base nan"),
        ({"user": {"cap": True}}, "cap True"),
        ({"user": {"pin": "firm"}}, "'firm' is no pin"),
        ({"user": {"clock": "hours"}}, "Known: tokens, steps, turns"),
        ({"user": {"halflife": 3}}, "'halflife' is no field"),
        ({"user": 3}, "expected fields"),
        ({"user:base=1": {}}, "no plain name"),
    ],
)
def test_refused(changes, words) -> None:
    with pytest.raises(ConfigError, match=words):
        RegionTable(changes)


@pytest.mark.parametrize("name", ["usr", "usr:base=1", "user:base", "user:base=x", "user:bas=1", "user:"])
def test_refused_names(name) -> None:
    with pytest.raises(ConfigError):
        RegionTable().code(name)


def test_files_of_a_calibration_and_tables(tmp_path) -> None:
    path = tmp_path / "table.json"
    rows = {"user": {"half_life": 77.0, "low": 60.0, "high": 90.0, "n": 412, "clock": "steps"}}
    for data in ({"regions": rows}, {"bench": "calibrate", "result": {"regions": rows}}):
        path.write_text(json.dumps(data))
        assert load_regions(path) == {"user": {"half_life": 77.0, "clock": "steps"}}
        assert region_changes(str(path)) == load_regions(path)
    assert region_changes({"user": {"half_life": 5}}) == {"user": {"half_life": 5}}
    for text in (
        "",
        "[]",
        "{}",
        '{"regions": []}',
        '{"regions": {"user": 3}}',
        '{"regions":{"user":{"half_life":0}}}',
    ):
        path.write_text(text)
        with pytest.raises(ConfigError):
            load_regions(path)
    with pytest.raises(ConfigError):
        load_regions(tmp_path / "absent.json")
    with pytest.raises(ConfigError):
        region_changes(3)


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("", []),
        ("no", []),
        ("<think>a</think>b", ["<think>a</think>"]),
        ("a<think>b</think>c<think>d", ["<think>b</think>", "<think>d"]),
        ("</think><think></think>", ["<think></think>"]),
    ],
)
def test_reasoning(text, blocks) -> None:
    assert [text[a:b] for a, b in reasoning(text)] == blocks
