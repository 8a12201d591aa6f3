"""What binds stored keys and values to a model: they mean nothing to another one.

Weights are identified by a sample: tensors up to 16 KiB as a whole, larger ones by 8 blocks of 2 KiB, evenly
spread, besides name, shape and dtype of each. That takes milliseconds where the whole of a model takes seconds. It
tells apart whatever training, quantising or converting makes; an edit by hand of a few numbers between the blocks
goes unseen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any, Self

import torch
from torch import Tensor

from tenure.errors import ConfigError
from tenure.models.rope import Rope

FORMAT = 1
"""Version of what is stored, sessions and spans alike; a change of their meaning raises it."""

_WHOLE = 1 << 14
_BLOCKS, _BLOCK = 8, 1 << 11


@dataclass(frozen=True)
class Fingerprint:
    """What keys and values depend on, besides the tokens.

    Args:
        weights: digest of the model's parameters, of its rotary angles and of how its weights are stored.
        tokenizer: digest of the tokenizer and its chat template; empty without one.
        dtype: of keys and values.
        shape: layers, kv heads and width of a head.
        format: see ``FORMAT``.
    """

    weights: str
    tokenizer: str
    dtype: str
    shape: tuple[int, int, int]
    format: int = FORMAT

    @property
    def digest(self) -> str:
        """All of it in 32 hexadecimal digits."""
        return blake2b(repr(asdict(self)).encode(), digest_size=16).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "shape": list(self.shape)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """What :meth:`to_json` gave.

        Raises:
            KeyError: a part is missing.
        """
        return cls(
            str(data["weights"]),
            str(data["tokenizer"]),
            str(data["dtype"]),
            tuple(data["shape"]),
            int(data["format"]),
        )

    def check(self, stored: Fingerprint, source: str) -> None:
        """Refuse what another model has made.

        Args:
            stored: fingerprint of what is to be used here.
            source: where it was found.

        Raises:
            ConfigError: names every part that differs.
        """
        ours, theirs = asdict(self), asdict(stored)
        differs = []
        for name, value in ours.items():
            if theirs[name] != value:
                shown = name in ("dtype", "shape", "format")
                differs.append(f"{name} ({theirs[name]}, here {value})" if shown else name)
        if differs:
            raise ConfigError(
                f"was made with another {', '.join(differs)}",
                option=source,
                way_out="Use the model, dtype and version of Tenure that made it",
            )


def fingerprint(
    weights: str,
    tokenizer: Any,
    ropes: Sequence[Rope],
    *,
    windows: Sequence[int | None],
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    storage: str,
) -> Fingerprint:
    """Fingerprint of an engine.

    Args:
        weights: from :func:`weights_digest`, of the model as it was loaded.
        tokenizer: of Hugging Face, or None.
        ropes: the rotary embedding of each layer.
        windows: of the layers, see :class:`~tenure.cache.rows.Layout`.
        dtype: of keys and values.
        shape: layers, kv heads and width of a head.
        storage: in which form weights are computed with, ``int8`` for example.
    """
    known = blake2b(digest_size=16)
    rope, *others = dict.fromkeys(ropes)
    for part in (weights, storage, rope.kind, repr(rope.attention_factor)):
        known.update(part.encode() + b"\0")
    known.update(_bytes(rope.inv_freq.cpu()))
    for other in others:
        known.update(f"{other.kind} {other.attention_factor!r}\0".encode() + _bytes(other.inv_freq.cpu()))
    if others or windows:
        known.update(f"{[ropes.index(one) for one in ropes]} {tuple(windows)}".encode())
    return Fingerprint(known.hexdigest(), _tokenizer_digest(tokenizer), str(dtype), shape)


def weights_digest(model: torch.nn.Module) -> str:
    """Digest of a model's parameters by the sample that the module describes."""
    known = blake2b(digest_size=16)
    for name, parameter in sorted(model.named_parameters()):
        known.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\0".encode())
        known.update(_bytes(_sample(parameter.detach())))
    return known.hexdigest()


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    if flat.nbytes <= _WHOLE:
        return flat.cpu()
    count = _BLOCK // flat.itemsize
    starts = torch.linspace(0, len(flat) - count, _BLOCKS, dtype=torch.float64).long().tolist()
    return torch.stack([flat[start : start + count] for start in starts]).cpu()


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _tokenizer_digest(tokenizer: Any) -> str:
    if tokenizer is None:
        return ""
    known = blake2b(digest_size=16)
    text = tokenizer.backend_tokenizer.to_str()
    # What stands before is how the last call wanted its ids cut and padded.
    known.update(text[max(0, text.find('"added_tokens"')) :].encode())
    known.update(b"\0" + str(tokenizer.chat_template).encode("utf-8", "surrogatepass"))
    return known.hexdigest()
