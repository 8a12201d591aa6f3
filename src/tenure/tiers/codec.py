"""Span records as entries of a store.

Layers lie one behind the other, keys before values, in parts of several MB each; scores and token ids come last. In
form ``raw`` a part is the numbers as they are. The others, all our choice:

- ``zstd``: the bytes of the numbers in planes (all high bytes, all low bytes), then Zstandard. Exact.
- ``int8``: symmetric, keys with a scale for each channel and 64 tokens, values with one for each token, as KIVI
  (arXiv 2402.02750) does for 2 bits: keys have outlier channels, values have not. Half the bytes, not exact.
- ``int8+zstd``: both.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tenure.errors import ConfigError
from tenure.tiers.blob import Blob, BrokenError, Bytes
from tenure.tiers.record import SpanRecord
from tenure.tiers.spec import CODECS

VERSION = 1
"""Of the layout of span entries."""

PART = 4 << 20
"""Bytes of a part, more or less: enough to be read at full speed, few enough to be checked while the next comes."""

_CHANNEL_TOKENS = 64


def encode(key: str, record: SpanRecord, fingerprint: str, codec: str = "raw") -> Blob:
    """A record as an entry.

    Args:
        key: of the entry.
        record: on the CPU.
        fingerprint: of what made it.
        codec: see the module.
    """
    layers, kv_heads, tokens, dim = record.keys.shape
    dtype = record.keys.dtype
    ids = np.asarray(record.ids, dtype=np.uint32)
    header = {
        "version": VERSION,
        "kind": "span",
        "key": key,
        "fingerprint": fingerprint,
        "span": record.span,
        "start": record.start,
        "ids": ids_digest(ids),
        "shape": [layers, kv_heads, tokens, dim],
        "groups": len(record.score),
        "dtype": str(dtype).removeprefix("torch."),
        "codec": codec,
    }
    tail = np.concatenate([_bytes(record.score.float()), ids.view(np.uint8)])
    layer_bytes = 2 * kv_heads * tokens * dim * dtype.itemsize
    groups = _groups(layers, layer_bytes)
    if codec == "raw":
        body = np.empty(layers * layer_bytes + tail.nbytes, np.uint8)
        both = _tensor(body[: layers * layer_bytes], dtype).view(layers, 2, kv_heads, tokens, dim)
        both[:, 0], both[:, 1] = record.keys, record.values
        body[layers * layer_bytes :] = tail
        lengths = [(stop - start) * layer_bytes for start, stop in groups]
    else:
        parts = [_pack(record.keys[a:b], record.values[a:b], codec) for a, b in groups]
        lengths = [len(part) for part in parts]
        body = np.concatenate([*parts, tail])
    return Blob.of(header, body, [*lengths, tail.nbytes])


def decode(blob: Blob, key: str, fingerprint: str) -> SpanRecord:
    """The record of an entry whose parts were checked.

    Raises:
        BrokenError: it is another one, or of another model.
    """
    header = blob.header
    wanted = {"version": VERSION, "kind": "span", "key": key, "fingerprint": fingerprint}
    for name, value in wanted.items():
        if header.get(name) != value:
            raise BrokenError(f"its {name} is {header.get(name)!r}, not {value!r}")
    if header.get("codec") not in CODECS:
        raise BrokenError(f"its codec {header.get('codec')!r} is not known")
    try:
        return _decode(blob, header)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise BrokenError(f"it cannot be read: {error}") from error


def _decode(blob: Blob, header: dict[str, Any]) -> SpanRecord:
    layers, kv_heads, tokens, dim = header["shape"]
    dtype: torch.dtype = getattr(torch, header["dtype"])
    layer_bytes = 2 * kv_heads * tokens * dim * dtype.itemsize
    *groups, (tail, _) = blob.ranges
    if header["codec"] == "raw":
        both = _tensor(blob.body[:tail], dtype).view(layers, 2, kv_heads, tokens, dim)
    else:
        both = torch.empty(layers, 2, kv_heads, tokens, dim, dtype=dtype)
        for (first, last), (start, stop) in zip(_groups(layers, layer_bytes), groups, strict=True):
            _unpack(blob.body[start:stop], both[first:last], header["codec"])
    rest = blob.body[tail:].copy()
    score = torch.from_numpy(rest[: -4 * tokens].view(np.float32)).view(header["groups"], tokens)
    ids = rest[-4 * tokens :].view(np.uint32)
    if ids_digest(ids) != header["ids"]:
        raise BrokenError("its token ids are not those of its header")
    return SpanRecord(header["span"], header["start"], ids.tolist(), both[:, 0], both[:, 1], score)


def ids_digest(ids: np.ndarray[Any, Any]) -> str:
    """blake2b of token ids."""
    return blake2b(np.asarray(ids, np.uint32).tobytes(), digest_size=16).hexdigest()


def _groups(layers: int, layer_bytes: int) -> list[tuple[int, int]]:
    """First and last layer of each part."""
    step = max(1, PART // max(1, layer_bytes))
    return [(first, min(layers, first + step)) for first in range(0, layers, step)]


def _pack(keys: Tensor, values: Tensor, codec: str) -> Bytes:
    """A part of some layers ``[l, kv_heads, n, D]``."""
    if codec == "zstd":
        plain = _bytes(torch.stack([keys, values], 1))
        planes = plain.reshape(-1, keys.dtype.itemsize).T
        return _compress(np.ascontiguousarray(planes).reshape(-1))
    packed_keys, key_scale = _quantise(_blocks(keys.float()), -2)
    packed_values, value_scale = _quantise(values.float(), -1)
    plain = np.concatenate(list(map(_bytes, (key_scale, value_scale, packed_keys, packed_values))))
    return _compress(plain) if codec == "int8+zstd" else plain


def _unpack(data: Bytes, out: Tensor, codec: str) -> None:
    """Fill ``[l, 2, kv_heads, n, D]`` from a part."""
    layers, _, kv_heads, tokens, dim = out.shape
    if codec == "zstd":
        size = out.dtype.itemsize
        planes = _decompress(data, out.numel() * size).reshape(size, -1)
        out.copy_(_tensor(np.ascontiguousarray(planes.T).reshape(-1), out.dtype).view(out.shape))
        return
    blocks = -(-tokens // _CHANNEL_TOKENS)
    shapes = [
        (torch.float32, (layers, kv_heads, blocks, 1, dim)),
        (torch.float32, (layers, kv_heads, tokens, 1)),
        (torch.int8, (layers, kv_heads, blocks, _CHANNEL_TOKENS, dim)),
        (torch.int8, (layers, kv_heads, tokens, dim)),
    ]
    lengths = [int(np.prod(shape)) * dtype.itemsize for dtype, shape in shapes]
    if codec == "int8+zstd":
        data = _decompress(data, sum(lengths))
    parts, start = [], 0
    for (dtype, shape), length in zip(shapes, lengths, strict=True):
        parts.append(_tensor(data[start : start + length], dtype).view(shape))
        start += length
    key_scale, value_scale, keys, values = parts
    out[:, 0] = (keys * key_scale).flatten(2, 3)[:, :, :tokens]
    out[:, 1] = values * value_scale


def _quantise(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """int8 and its scale along one dimension."""
    scale = x.abs().amax(dim, keepdim=True).clamp(min=1e-12) / 127
    return (x / scale).round().to(torch.int8), scale


def _blocks(keys: Tensor) -> Tensor:
    """``[l, kv_heads, n, D]`` to ``[l, kv_heads, blocks, 64, D]``, filled up with zeros."""
    padded = torch.nn.functional.pad(keys, (0, 0, 0, -keys.shape[2] % _CHANNEL_TOKENS))
    layers, kv_heads, tokens, dim = padded.shape
    return padded.view(layers, kv_heads, tokens // _CHANNEL_TOKENS, _CHANNEL_TOKENS, dim)


def _bytes(tensor: Tensor) -> Bytes:
    array: Bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return array


def _tensor(data: Bytes, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(data).view(dtype)


def _compress(data: Bytes) -> Bytes:
    return np.frombuffer(_zstd().ZstdCompressor(level=1).compress(data.data), np.uint8)


def _decompress(data: Bytes, length: int) -> Bytes:
    zstd = _zstd()
    try:
        plain = zstd.ZstdDecompressor().decompress(data.data, max_output_size=length)
    except zstd.ZstdError as error:
        raise BrokenError(f"it cannot be unpacked: {error}") from error
    return np.frombuffer(bytearray(plain), np.uint8)


def _zstd() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError(
            "the codec zstd needs the package zstandard",
            option="tiers",
            way_out="pip install 'tenure[tiers]', or use codec=raw",
        ) from error
    return zstandard
