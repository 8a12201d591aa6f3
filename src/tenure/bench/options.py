"""Options that several commands of ``tenure bench`` have."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from tenure.commands.places import check_file
from tenure.errors import ConfigError

Number = TypeVar("Number", int, float)


def numbers(text: str, option: str, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    """Numbers that are separated by commas.

    Raises:
        ConfigError: something else, or none at all.
    """
    try:
        return tuple(kind(one) for one in text.split(","))
    except ValueError:
        raise ConfigError(
            f"{text!r} is no list of numbers", option=option, way_out="Give 1,2, for example"
        ) from None


def _writable(path: Path | None) -> Path | None:
    if path is not None:
        check_file(path, "record")
    return path


Model = Annotated[
    str, typer.Option(help="A name of `tenure models list`, a folder, a GGUF file or a hub id.")
]
Dtype = Annotated[str, typer.Option(help="auto, bf16, fp16 or fp32.")]
Device = Annotated[str, typer.Option(help="A torch device.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print only JSON, as the last line.")]
Record = Annotated[
    Path | None,
    typer.Option(help="Also write the result with machine and commit to this file.", callback=_writable),
]
