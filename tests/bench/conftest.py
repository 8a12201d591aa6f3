"""The fixtures of the commands' tests."""

from tests.commands.conftest import tenure, tiny_folder

__all__ = ["tenure", "tiny_folder"]
