"""Options that several commands of ``tenure bench`` have."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str, typer.Option(help="A name of `tenure models list`, a folder, a GGUF file or a hub id.")
]
Dtype = Annotated[str, typer.Option(help="auto, bf16, fp16 or fp32.")]
Device = Annotated[str, typer.Option(help="A torch device.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print only JSON, as the last line.")]
Record = Annotated[
    Path | None, typer.Option(help="Also write the result with machine and commit to this file.")
]
