"""What a GGUF file says about its model, and whether the file is whole.

transformers reads weights and most of the metadata. Read here is what it leaves out: the scaling of the rotary
frequencies, a head size that is not hidden size / heads, an end-of-turn token, and truncation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tenure.errors import ModelError, UnsupportedModelError

CONTROL, USER_DEFINED = 3, 4  # token types of the GGUF format: both are matched whole in text
ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral files say "llama"


@dataclass(frozen=True, slots=True)
class GgufFacts:
    """Facts read from a GGUF file.

    Attributes:
        architecture: llama.cpp's name of the model family.
        has_output: whether the output projection is stored, also if the model ties it to the embedding.
        matrix_types: ggml type names of all tensors with two or more dimensions.
        head_dim: size of an attention head, or None if the file leaves it to the default.
        rope_scaling: transformers' form of the frequency scaling, or None.
        markers: text -> id of every token that must stay whole, with True if it is a control token.
        eot_id: the end-of-turn token, where the file names one.
        pre_tokenizer: llama.cpp's name of the pre-tokenizer.
        parameters: number of stored weights.
    """

    architecture: str
    has_output: bool
    matrix_types: frozenset[str]
    head_dim: int | None
    rope_scaling: dict[str, Any] | None
    markers: dict[str, tuple[int, bool]] = field(repr=False)
    eot_id: int | None
    pre_tokenizer: str | None
    parameters: int


def read_gguf(path: Path) -> GgufFacts:
    """Read and check the header of a GGUF file; no weight is read.

    Raises:
        ModelError: not a GGUF file, or shorter than its header says.
        UnsupportedModelError: a family or a rotary scaling that Tenure cannot reproduce.
    """
    from gguf import GGUFReader

    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError("not a GGUF file: its first bytes are not 'GGUF'", option=str(path))
    try:
        reader = GGUFReader(path)
        end = max((int(t.data_offset) + int(t.n_bytes) for t in reader.tensors), default=0)
    except Exception as error:  # the reader meets a cut file with whatever numpy raises
        raise _truncated(path, f"its header cannot be read ({type(error).__name__}: {error})") from error
    if end == 0 or end > size:
        raise _truncated(path, f"it has {size:,} bytes, its header promises {end:,}")
    return _facts(path, reader)


def _truncated(path: Path, cause: str) -> ModelError:
    return ModelError(f"the file is truncated or damaged: {cause}", option=str(path), way_out="Fetch it again")


def _facts(path: Path, reader: Any) -> GgufFacts:
    def get(key: str, default: Any = None) -> Any:
        found = reader.get_field(key)
        return default if found is None else found.contents()

    if get("split.count", 1) > 1:
        raise UnsupportedModelError(
            f"this is one of {get('split.count')} pieces of a model",
            option=str(path),
            way_out="Join the pieces into one GGUF file first",
        )
    architecture = str(get("general.architecture"))
    if architecture not in ARCHITECTURES or get(f"{architecture}.expert_count", 0):
        kind = f"{architecture} with experts" if architecture in ARCHITECTURES else architecture
        raise UnsupportedModelError(
            f"GGUF files of the family {kind!r} are not supported",
            option=str(path),
            way_out="Use a dense Llama, Mistral, Qwen2 or Qwen3 model, or a folder with safetensors",
        )
    tensors = {t.name: t for t in reader.tensors}
    tokens = get("tokenizer.ggml.tokens", [])
    types = get("tokenizer.ggml.token_type", [])
    return GgufFacts(
        architecture=architecture,
        has_output="output.weight" in tensors,
        matrix_types=frozenset(t.tensor_type.name for t in tensors.values() if len(t.shape) > 1),
        head_dim=get(f"{architecture}.attention.key_length"),
        rope_scaling=_rope_scaling(path, architecture, get, tensors),
        markers={
            token: (index, kind == CONTROL)
            for index, (token, kind) in enumerate(zip(tokens, types, strict=False))
            if kind in (CONTROL, USER_DEFINED)
        },
        eot_id=get("tokenizer.ggml.eot_token_id"),
        pre_tokenizer=get("tokenizer.ggml.pre"),
        parameters=sum(int(t.n_elements) for name, t in tensors.items() if not name.startswith("rope_")),
    )


def _rope_scaling(path: Path, arch: str, get: Any, tensors: dict[str, Any]) -> dict[str, Any] | None:
    """Rotary scaling in transformers' words. transformers' own GGUF reader drops it without a word."""
    if "rope_freqs.weight" in tensors:
        factors = [float(x) for x in tensors["rope_freqs.weight"].data]
        return _llama3_scaling(path, factors, float(get(f"{arch}.rope.freq_base", 10_000.0)))
    kind = get(f"{arch}.rope.scaling.type", "none")
    if kind == "none" and not any(name.startswith("rope_factors") for name in tensors):
        return None
    factor = float(get(f"{arch}.rope.scaling.factor", 1.0))
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    original = get(f"{arch}.rope.scaling.original_context_length")
    if kind == "yarn" and original is not None:
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": int(original)}
    raise UnsupportedModelError(
        f"rotary scaling {kind!r} of this GGUF file is not supported",
        option=str(path),
        way_out="Use a folder with the original config.json and safetensors",
    )


def _llama3_scaling(path: Path, factors: list[float], base: float) -> dict[str, Any]:
    """Llama-3's scaling from the divisors of the frequencies that llama.cpp stores in its place.

    The parameters are not in the file. All published Llama-3 models share them but for the factor, which is the
    largest divisor; the divisors they give must be those stored.
    """
    low, high, original, factor = 1.0, 4.0, 8192, max(factors)
    expected = []
    for index in range(len(factors)):
        wavelength = 2 * math.pi * base ** (index / len(factors))
        smooth = (original / wavelength - low) / (high - low)
        smooth = min(max(smooth, 0.0), 1.0)
        expected.append(1 / ((1 - smooth) / factor + smooth))
    if any(abs(a - b) > 1e-3 * b for a, b in zip(factors, expected, strict=True)):
        raise UnsupportedModelError(
            "the stored rotary factors are not those of Llama-3's scaling",
            option=str(path),
            way_out="Use a folder with the original config.json and safetensors",
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
