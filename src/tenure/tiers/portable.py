"""The archive of a session as plain data: keys of what the stores hold, and the records that only memory has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tenure.tiers.record import Portable, SpanRecord

if TYPE_CHECKING:
    from tenure.memory import Memory


def archive_json(memory: Memory, tensors: dict[str, Tensor]) -> dict[str, Any] | None:
    """What :func:`fill_archive` needs; records are added to the tensors. None without an archive."""
    capture = memory.capture
    if capture is None:
        return None
    keys, records = capture.archive.describe() if isinstance(capture.archive, Portable) else ({}, [])
    return {
        "upto": capture.upto,
        "keys": keys,
        "records": [_record_json(f"record.{number}", one, tensors) for number, one in enumerate(records)],
        "parts": [_record_json(f"part.{number}", one, tensors) for number, one in enumerate(capture.parts)],
    }


def fill_archive(memory: Memory, data: Mapping[str, Any] | None, tensors: Mapping[str, Tensor]) -> None:
    """Take up an archive that was saved. Without one here what it held is lost; without one there it begins now."""
    capture = memory.capture
    if capture is None:
        return
    if data is None:
        capture.resume(memory.ledger.length, [])
        return
    if isinstance(capture.archive, Portable):
        capture.archive.adopt(data["keys"])
    for one in data["records"]:
        capture.archive.put(_record(memory, one, tensors))
    capture.resume(data["upto"], [_record(memory, one, tensors) for one in data["parts"]])


def _record_json(name: str, record: SpanRecord, tensors: dict[str, Tensor]) -> dict[str, Any]:
    tensors[f"{name}.keys"], tensors[f"{name}.values"] = record.keys, record.values
    tensors[f"{name}.score"] = record.score
    return {"name": name, "span": record.span, "start": record.start, "tokens": len(record)}


def _record(memory: Memory, data: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> SpanRecord:
    name, start = data["name"], data["start"]
    ids: Sequence[int] = memory.ids[start : start + data["tokens"]]
    keys, values, score = (tensors[f"{name}.{part}"] for part in ("keys", "values", "score"))
    return SpanRecord(data["span"], start, ids, keys, values, score)
