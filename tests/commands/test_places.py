"""Places that cannot be written are refused before a session is played, and cost no report where that comes too late."""

from __future__ import annotations

import errno
import json

import pytest

from tenure.commands.play import Player

SMALL = ("--budget", 128, "--chunk", 64)


@pytest.fixture
def unplayed(monkeypatch):
    monkeypatch.setattr(Player, "__init__", lambda *_, **__: pytest.fail("played"))


@pytest.fixture
def full(monkeypatch):
    """A disk that turns out to be full when a session is saved, or a picture drawn."""
    from matplotlib.figure import Figure

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tenure.sessionstore.replace_file", fail)
    monkeypatch.setattr(Figure, "savefig", fail)


@pytest.mark.parametrize("command", ["run", "compress", "chat"])
@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("tier:one", "--tier: the engine has no tier that outlives it"),
        ("{folder}", "--save: could not be written: {folder} is a folder"),
        ("{folder}/file/saved", "--save: could not be written: {folder}/file is no folder"),
    ],
)
def test_a_place_for_a_session(tenure, tiny_folder, story, tmp_path, unplayed, command, place, words):
    (tmp_path / "file").write_text("")
    given = [command, *([] if command == "chat" else [story]), "-m", tiny_folder, *SMALL]
    result = tenure(*given, "--save", place.format(folder=tmp_path), code=2, stdin="Hello\n")
    assert words.format(folder=tmp_path) in " ".join(result.stderr.split())
    assert result.stdout == ""


@pytest.mark.parametrize("command", ["explain", "calibrate"])
@pytest.mark.parametrize(
    ("plot", "words"),
    [
        ("curves.xyz", "--plot: '.xyz' is no format of pictures"),
        ("curves", "--plot: 'curves' is no format of pictures"),
        ("file/curves.svg", "is no folder"),
    ],
)
def test_a_place_for_a_picture(tenure, tiny_folder, story, tmp_path, unplayed, command, plot, words):
    (tmp_path / "file").write_text("")
    result = tenure(command, story, "-m", tiny_folder, "--plot", tmp_path / plot, code=2)
    assert words in " ".join(result.stderr.split())


@pytest.mark.parametrize("command", ["run", "compress"])
def test_a_save_that_fails_leaves_the_report(tenure, tiny_folder, story, tmp_path, full, command):
    result = tenure(command, story, "-m", tiny_folder, *SMALL, "--json", "--save", tmp_path / "s", code=2)
    assert json.loads(result.stdout)["stats"]["tokens"] > 0
    assert "No space left on device" in result.stderr


def test_a_picture_that_fails_leaves_the_report(tenure, tiny_folder, story, tmp_path, full):
    result = tenure(
        "explain", story, "-m", tiny_folder, *SMALL, "--json", "--plot", tmp_path / "s.svg", code=2
    )
    assert json.loads(result.stdout)["spans"]
    assert "--plot: could not be written: No space left on device" in result.stderr


def test_compressed_sessions_go_into_tiers_too(tenure, tiny_folder, story, tmp_path):
    tier = f"disk:{tmp_path}/tier:10M"
    tenure("compress", story, "-m", tiny_folder, "--tier", tier, "--save", "tier:one")
    tenure(
        "chat", "-m", tiny_folder, "--tier", tier, "--load", "tier:one", "--max-tokens", 2, stdin="Hello\n"
    )
