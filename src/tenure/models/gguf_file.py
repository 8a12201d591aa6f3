"""What a GGUF file says about its model, and whether the file is whole.

transformers reads the weights and most of the metadata. Read here is what it, or one of its versions, leaves
out or gets wrong: the scaling of the rotary frequencies, the head size, special tokens, truncation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tenure.errors import ModelError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # files of Mistral models say "llama"
_CONTROL, _USER_DEFINED = 3, 4  # token types of the GGUF format: both are matched whole in text
_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_ORIGINAL = "Use a folder with the original config.json and safetensors"


@dataclass(frozen=True, slots=True)
class GgufTokens:
    """The tokenizer's part of a GGUF file.

    Attributes:
        model: "gpt2" for byte-level BPE, "llama" for sentencepiece.
        pre: llama.cpp's name of the pre-tokenizer.
        special: transformers' name of a special token -> its text.
        markers: text -> (id, is a control token) of every token that must stay whole.
        eot_id: the end-of-turn token, where the file names one.
        add_bos, add_eos: whether encoding with special tokens adds them.
    """

    model: str | None
    pre: str | None
    special: dict[str, str]
    markers: dict[str, tuple[int, bool]] = field(repr=False)
    eot_id: int | None
    add_bos: bool
    add_eos: bool


@dataclass(frozen=True, slots=True)
class GgufFacts:
    """Facts of a GGUF file.

    Attributes:
        architecture: llama.cpp's name of the model family.
        has_output: whether an output projection is stored, which files of tied models may do too.
        matrix_types: ggml type names of all tensors with two or more dimensions.
        head_dim: size of an attention head, or None if it is hidden size / heads.
        rope_scaling: the frequency scaling in transformers' form, or None.
        parameters: number of stored weights.
        tokens: the tokenizer's part.
    """

    architecture: str
    has_output: bool
    matrix_types: frozenset[str]
    head_dim: int | None
    rope_scaling: dict[str, Any] | None
    parameters: int
    tokens: GgufTokens

    @property
    def dtype(self) -> str:
        """torch's name of the type that the weights are kept in: their own, or bf16 where they are quantised."""
        if self.matrix_types <= {"F32"}:
            return "float32"
        return "float16" if self.matrix_types <= {"F32", "F16"} else "bfloat16"


def read_gguf(path: Path) -> GgufFacts:
    """Read and check the header of a GGUF file; no weight is read.

    Raises:
        ModelError: not a GGUF file, or shorter than its header says.
        UnsupportedModelError: a family, a kind of attention or a rotary scaling that Tenure cannot reproduce.
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
        raise _damaged(path, f"its header cannot be read ({type(error).__name__}: {error})") from error
    if end == 0 or end > size:
        raise _damaged(path, f"it has {size:,} bytes, its header promises {end:,}")
    return _facts(path, reader)


def _damaged(path: Path, cause: str) -> ModelError:
    return ModelError(
        f"the file is truncated or damaged: {cause}", option=str(path), way_out="Fetch it again"
    )


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
    family = str(get("general.architecture"))
    if family not in ARCHITECTURES or get(f"{family}.expert_count", 0):
        kind = f"{family} with experts" if family in ARCHITECTURES else family
        raise UnsupportedModelError(
            f"GGUF files of the family {kind!r} are not supported",
            option=str(path),
            way_out="Use a dense Llama, Mistral, Qwen2 or Qwen3 model",
        )
    _check_attention(path, family, get)
    tensors = {t.name: t for t in reader.tensors}
    return GgufFacts(
        architecture=family,
        has_output="output.weight" in tensors,
        matrix_types=frozenset(t.tensor_type.name for t in tensors.values() if len(t.shape) > 1),
        head_dim=get(f"{family}.attention.key_length"),
        rope_scaling=_rope_scaling(path, family, get, tensors),
        parameters=sum(int(t.n_elements) for name, t in tensors.items() if not name.startswith("rope_")),
        tokens=_tokens(get),
    )


def _check_attention(path: Path, family: str, get: Callable[..., Any]) -> None:
    """Refuse attention that differs from what transformers makes of the family; it does not read these keys."""
    width, heads = get(f"{family}.embedding_length"), get(f"{family}.attention.head_count")
    plain = width // heads if isinstance(width, int) and isinstance(heads, int) and heads else None
    head_dim = get(f"{family}.attention.key_length", plain)
    rotated = get(f"{family}.rope.dimension_count", head_dim)
    window, context = get(f"{family}.attention.sliding_window", 0), get(f"{family}.context_length", 0)
    scale = get(f"{family}.attention.scale", 0.0)
    cause = None
    if rotated != head_dim:
        cause = f"it rotates {rotated} of {head_dim} channels of a head"
    elif 0 < window < context:
        cause = f"its sliding window of {window} tokens is not taken over from GGUF files"
    elif scale and head_dim and not math.isclose(scale, head_dim**-0.5, rel_tol=1e-3):
        cause = f"it scales attention by {scale:.4g}, not by {head_dim**-0.5:.4g}"
    if cause is not None:
        raise UnsupportedModelError(cause, option=str(path), way_out="Use another model of the family")


def _tokens(get: Callable[..., Any]) -> GgufTokens:
    texts, types = get("tokenizer.ggml.tokens", []), get("tokenizer.ggml.token_type", [])
    model = get("tokenizer.ggml.model")
    ids = {name: get(f"tokenizer.ggml.{key}_token_id") for key, name in _SPECIAL.items()}
    return GgufTokens(
        model=model,
        pre=get("tokenizer.ggml.pre"),
        special={name: texts[i] for name, i in ids.items() if i is not None and i < len(texts)},
        markers={
            text: (index, kind == _CONTROL)
            for index, (text, kind) in enumerate(zip(texts, types, strict=False))
            if kind in (_CONTROL, _USER_DEFINED)
        },
        eot_id=get("tokenizer.ggml.eot_token_id"),
        add_bos=bool(get("tokenizer.ggml.add_bos_token", model == "llama")),  # llama.cpp's default
        add_eos=bool(get("tokenizer.ggml.add_eos_token", False)),
    )


def _rope_scaling(
    path: Path, family: str, get: Callable[..., Any], tensors: dict[str, Any]
) -> dict[str, Any] | None:
    """Rotary scaling in transformers' words; its own GGUF reader drops it without a word."""
    if "rope_freqs.weight" in tensors:
        factors = [float(x) for x in tensors["rope_freqs.weight"].data]
        return _llama3_scaling(path, factors, float(get(f"{family}.rope.freq_base", 10_000.0)))
    older = float(get(f"{family}.rope.scale_linear", 1.0))
    kind = get(f"{family}.rope.scaling.type", "linear" if older not in (0.0, 1.0) else "none")
    if kind == "none" and not any(name.startswith("rope_factors") for name in tensors):
        return None
    factor = float(get(f"{family}.rope.scaling.factor", older))
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    original = get(f"{family}.rope.scaling.original_context_length")
    if kind == "yarn" and original is not None:
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": int(original)}
    raise UnsupportedModelError(
        f"the rotary scaling {kind!r} of this GGUF file is not supported", option=str(path), way_out=_ORIGINAL
    )


def _llama3_scaling(path: Path, factors: list[float], base: float) -> dict[str, Any]:
    """Llama-3's scaling from the divisors of the frequencies that llama.cpp stores in its place.

    Its parameters are not in the file. All published Llama-3 models share them but for the factor, which is
    the largest divisor; the divisors that follow must be those stored.
    """
    low, high, original, factor = 1.0, 4.0, 8192, max(factors)
    for index, stored in enumerate(factors):
        wavelength = 2 * math.pi * base ** (index / len(factors))
        smooth = min(max((original / wavelength - low) / (high - low), 0.0), 1.0)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if abs(stored - expected) > 1e-3 * expected:
            raise UnsupportedModelError(
                "the stored rotary factors are not those of Llama-3's scaling",
                option=str(path),
                way_out=_ORIGINAL,
            )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
