"""Options of a server: the file, the flags over it, and what is refused before a model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tenure.cli import app
from tenure.errors import ConfigError
from tenure.serve.config import ServeConfig


def write(folder: Path, text: str) -> Path:
    path = folder / "tenure.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_files_options_have_their_types(tmp_path):
    path = write(
        tmp_path,
        '[serve]\nport = 9000\nwait = 5\nstate = "/var/lib/tenure"\noperator = "ops"\ntraces = true\n'
        "[session]\nbudget = 64\n",
    )
    config = ServeConfig.load(path, port=9001)
    assert (config.port, config.wait, config.operator, config.traces) == (9001, 5, "ops", True)
    assert config.state == Path("/var/lib/tenure")
    assert ServeConfig.load(None) == ServeConfig()


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("port = true", "port"),
        ('port = "9000"', "port"),
        ("port = 70000", "port"),
        ("traces = 1", "traces"),
        ("state = 5", "state"),
        ("host = 5", "host"),
        ('grace = "long"', "grace"),
        ('host = "0.0.0.0"', "host"),
    ],
)
def test_a_file_that_cannot_work_is_refused_by_the_option(tmp_path, line, option):
    with pytest.raises(ConfigError) as error:
        ServeConfig.load(write(tmp_path, f"[serve]\n{line}\n"))
    assert error.value.option == option


def test_an_unknown_option_names_the_known_ones(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown option 'prot'.*port"):
        ServeConfig.load(write(tmp_path, "[serve]\nprot = 1\n"))
    with pytest.raises(ConfigError, match="Make it a table"):
        ServeConfig.load(write(tmp_path, "serve = 1\n"))


def test_flags_win_over_the_file_and_are_checked_before_a_model_is_loaded(tmp_path):
    path = write(tmp_path, '[serve]\nhost = "0.0.0.0"\nport = 70000\n')

    def run(*flags: str) -> str:
        done = CliRunner().invoke(app, ["serve", "--model", "no-such-model", "--config", str(path), *flags])
        assert done.exit_code == 2
        return done.output

    assert "70000 is no port" in run()
    assert "can be reached from other machines" in run("--port", "8000")
    assert "no-such-model" in run("--port", "8000", "--host", "127.0.0.1")
