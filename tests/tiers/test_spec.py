"""How tiers are written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tenure import EngineConfig
from tenure.errors import ConfigError
from tenure.tiers.spec import parse_tier, parse_tiers, shown

G = 1 << 30


def test_each_kind():
    assert parse_tier("host:2GiB").capacity == 2 * G
    disk = parse_tier("disk:/data/a:b:1.5G?ttl=12h&codec=zstd")
    assert (disk.where, disk.capacity, disk.ttl, disk.codec) == ("/data/a:b", 3 * G // 2, 43200, "zstd")
    assert parse_tier("disk:~/x:1KB").where == str(Path.home() / "x")
    own = parse_tier("valkey:512M")
    assert (own.kind, own.where, own.capacity) == ("valkey", "", 512 << 20)
    url = parse_tier("redis://user:secret@cache:6380/2?timeout=0.2&ttl=30m&client_name=x")
    assert url.where == "redis://user:secret@cache:6380/2?client_name=x"
    assert (url.timeout, url.ttl, url.capacity) == (0.2, 1800, None)


def test_host_memory_comes_first_named_or_not(tmp_path):
    assert parse_tiers(()) == ()
    assert [spec.kind for spec in parse_tiers([f"disk:{tmp_path}:1M"])] == ["host", "disk"]
    with pytest.raises(ConfigError, match="first"):
        parse_tiers([f"disk:{tmp_path}:1M", "host:1M"])
    with pytest.raises(ConfigError, match="twice"):  # what moves down would overwrite itself, and be removed
        parse_tiers([f"disk:{tmp_path}:1M", f"disk:{tmp_path}:2M"])


@pytest.mark.parametrize(
    "text",
    [
        *("", "host:0", "host:x", "host:-1M", "host:1M?codec=gzip", "host:1M?ttl=soon", 7, "tape:/a:1M"),
        *("host:" + 400 * "9", "disk:/a:1M?ttl=", "disk:/a:1M?ttl=" + 400 * "9"),
        *("disk", "disk:", "disk:/a", "disk::1M", "disk:/a:1M?ttl=0", "disk:/a:1M?compress=1"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_option(text):
    with pytest.raises(ConfigError, match="tiers"):
        EngineConfig(tiers=(text,))


@pytest.mark.parametrize("codec", ["zstd", "int8+zstd"])
def test_a_codec_whose_package_is_missing_is_refused_with_what_to_install(monkeypatch, tmp_path, codec):
    text = f"disk:{tmp_path}:1M?codec={codec}"
    assert EngineConfig(tiers=(text,)).tiers == (text,)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"zstandard.*tenure\[tiers\]"):
        EngineConfig(tiers=(text,))
    assert parse_tier(f"disk:{tmp_path}:1M?codec=int8").codec == "int8"


def test_one_text_is_not_a_list():
    with pytest.raises(ConfigError, match="list"):
        EngineConfig(tiers="host:1M")


def test_reading_options_does_not_import_torch():
    code = "import sys, tenure.config, tenure.tiers.spec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_list_that_can_be_read_once_is_read_once():
    assert EngineConfig(tiers=(text for text in ("host:1M",))).tiers == ("host:1M",)
    for wrong in (None, 5):
        with pytest.raises(ConfigError, match=r"tiers: .* is no list"):
            EngineConfig(tiers=wrong)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("valkey://u:se@cret@h:1/0", "valkey://h:1/0"),
        ("valkey://h/0?password=secret", "valkey://h/0"),
        ("valkey://h/0?password=se@cret", "valkey://***"),
        ("rediss://u:se?cret@h", "rediss://***"),
        ("unix://u:secret@/run/x.sock?db=1", "unix:///run/x.sock"),
        ("disk:/a@b:1M", "disk:/a@b:1M"),
    ],
)
def test_passwords_are_not_shown(text, told):
    assert shown(text) == told


def test_errors_show_no_password():
    for text in ("valkey://u:secret@h?ttl=x", "valkey://h?password=secret&codec=y"):
        with pytest.raises(ConfigError, match="valkey://h") as caught:
            parse_tier(text)
        assert "secret" not in str(caught.value)


def test_host_memory_has_no_options():
    with pytest.raises(ConfigError, match=r"host:1G\?codec=int8.*no options"):
        parse_tier("host:1G?codec=int8")
