"""A folder with a model in it: is it whole, what is it, does it fit memory."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenure.errors import ModelError

_SAMPLES, _SAMPLE_BYTES = 64, 4096
_ITEM_BYTES = {"float32": 4, "fp32": 4, "float16": 2, "fp16": 2, "bfloat16": 2, "bf16": 2}
_SPARE = 1.1  # activations, the tokenizer and the interpreter, beside the weights


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """What :func:`inspect_folder` finds.

    Attributes:
        fingerprint: sha256, in hex, over the configuration and the weights' headers, sizes and a sample of
            their bytes. Equal for copies of a model, different for fine-tunes of it.
        weight_bytes: bytes of all weights as stored.
        parameters: number of stored weights; of those in 4 bits as many as they are once unpacked.
    """

    fingerprint: str
    weight_bytes: int
    parameters: int


def inspect_folder(folder: Path) -> FolderFacts:
    """Check that ``folder`` can be loaded and identify its weights, reading some hundred KB.

    Raises:
        ModelError: no ``config.json``, no safetensors, missing shards, or a weight file that is cut short.
    """
    config = folder / "config.json"
    if not config.is_file():
        inside = sorted(path.name for path in folder.glob("*.gguf"))
        hint = (
            f"Give the file itself: {folder / inside[0]}"
            if inside
            else "Give the folder that holds config.json"
        )
        raise ModelError("the folder has no config.json", option=str(folder), way_out=hint)
    digest = hashlib.sha256(_canonical(config))
    total = parameters = 0
    for path in _weight_files(folder):
        header, size = _read_header(path)
        digest.update(path.name.encode() + size.to_bytes(8, "little") + header)
        _sample(path, size, digest)
        total += size
        parameters += sum(
            _weights(name, entry["shape"]) for name, entry in json.loads(header).items() if name[:2] != "__"
        )
    return FolderFacts(digest.hexdigest(), total, parameters)


def _weights(name: str, shape: list[int]) -> int:
    """Weights in a stored tensor: two a byte in the blocks of MXFP4, none in their scales."""
    return _count(shape) * {"blocks": 2, "scales": 0}.get(name.rpartition("_")[2], 1)


def _canonical(config: Path) -> bytes:
    try:
        data = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"config.json is not JSON: {error}", option=str(config)) from error
    if not isinstance(data, dict):
        raise ModelError("config.json is not a JSON object", option=str(config))
    return json.dumps(data, sort_keys=True).encode()


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError("the index of the weights is damaged", option=str(index)) from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelError(
                f"{len(missing)} of {len(names)} weight files are missing, the first is {missing[0]}",
                option=str(folder),
                way_out="Fetch the folder again",
            )
        return [folder / name for name in names]
    pickled = any(folder.glob("pytorch_model*.bin"))
    raise ModelError(
        "the folder has no model.safetensors" + (", only pickled weights" if pickled else ""),
        option=str(folder),
        way_out="Save the model with save_pretrained, which writes safetensors",
    )


def _read_header(path: Path) -> tuple[bytes, int]:
    """Header JSON and file size in bytes; checks that the file is as long as its header says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if 0 < length <= size - 8 else b""
    try:
        entries = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        end = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, KeyError, AttributeError, TypeError, IndexError) as error:
        raise ModelError(
            "the header of the weight file is damaged", option=str(path), way_out="Fetch it again"
        ) from error
    if end != size:
        raise ModelError(
            f"the weight file has {size:,} bytes, its header promises {end:,}",
            option=str(path),
            way_out="Fetch it again",
        )
    return header, size


def _sample(path: Path, size: int, digest: Any) -> None:
    # Fine-tunes of one model share header and size, so some of the weights have to be read.
    with path.open("rb") as file:
        for n in range(_SAMPLES):
            file.seek(size * n // _SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))


def _count(shape: list[int]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def check_memory(
    weight_bytes: int, dtype: Any, *, parameters: int | None = None, device: str = "cpu"
) -> None:
    """Refuse a model whose weights do not fit what memory is free now.

    Args:
        weight_bytes: bytes of the weights as stored.
        dtype: type to load in: a torch dtype or its name ("bf16", "float32", ...).
        parameters: number of stored weights; without it, two bytes each are assumed.
        device: "cpu", or a CUDA device.

    Raises:
        ModelError: with both sizes and a way out.
    """
    needed = (weight_bytes // 2 if parameters is None else parameters) * item_bytes(dtype)
    available = free_memory(device)
    if needed * _SPARE <= available:
        return
    way_out = "Use a smaller model (tenure models list)"
    if item_bytes(dtype) == 4:
        way_out += " or --dtype bf16, which needs half"
    raise ModelError(
        f"the weights need {needed / 1e9:.1f} GB in {_name(dtype)}, "
        f"{available / 1e9:.1f} GB of {device} memory are free",
        option="model",
        way_out=way_out,
    )


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def item_bytes(dtype: Any) -> int:
    """Bytes of a weight in a torch dtype, or in the one of that name.

    Raises:
        ModelError: models do not load in it.
    """
    name = _name(dtype)
    if name not in _ITEM_BYTES:
        raise ModelError(
            f"{name!r} is not a floating type that models load in",
            option="dtype",
            way_out="Use bf16, fp16 or fp32",
        )
    return _ITEM_BYTES[name]


def free_memory(device: str) -> int:
    """Bytes that can be allocated now on "cpu" or a CUDA device."""
    if device.startswith("cuda"):
        import torch

        held = torch.cuda.memory_stats(device)
        reserved, used, rest = (
            int(held.get(f"{name}_bytes.all.current", 0))
            for name in ("reserved", "allocated", "inactive_split")
        )
        # What torch holds and does not use is free too, but for rests of blocks of which a part is in use.
        return int(torch.cuda.mem_get_info(device)[0]) + reserved - used - rest
    import psutil

    free = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:  # a container's own limit; psutil sees the machine
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return free
    reclaimable = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
    return min(free, max(limit - used + reclaimable, 0))
