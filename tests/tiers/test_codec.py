"""Entries: what goes in comes out, or is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tenure.tiers.blob import Blob, BrokenError, read_header
from tenure.tiers.codec import decode, encode
from tenure.tiers.spec import CODECS
from tests.tiers.records import record, same

EXACT = ("raw", "zstd")


def through_bytes(blob):
    """What a store does: header and body as bytes and back."""
    prefix, body = blob.prefix(), blob.body.tobytes()
    again = Blob(read_header(prefix), np.frombuffer(body, np.uint8).copy())
    again.check()
    return again


@settings(max_examples=40, deadline=None)
@given(
    codec=st.sampled_from(EXACT),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    tokens=st.integers(1, 200),
    layers=st.integers(1, 5),
    session=st.booleans(),
)
def test_exact_forms_give_back_every_bit(codec, dtype, tokens, layers, session):
    one = record(tokens=tokens, layers=layers, dtype=dtype, groups=1 if session else None)
    assert same(decode(through_bytes(encode("k", one, "f", codec)), "k", "f"), one)


def test_odd_numbers_survive():
    one = record(dtype=torch.bfloat16)
    one.keys[0, 0, 0, :4] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-40])
    again = decode(through_bytes(encode("k", one, "f", "zstd")), "k", "f")
    assert torch.equal(again.keys.view(torch.int16), one.keys.view(torch.int16))


@pytest.mark.parametrize("codec", ["int8", "int8+zstd"])
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 300])
def test_int8_is_off_by_half_a_step_of_its_scale_at_most(codec, tokens):
    one = record(tokens=tokens)
    one.keys[:, :, :, 3] *= 40  # keys have outlier channels
    again = decode(through_bytes(encode("k", one, "f", codec)), "k", "f")
    step = one.values.abs().amax(-1, keepdim=True) / 127
    assert ((again.values - one.values).abs() <= step / 2 + 1e-6).all()
    for start in range(0, tokens, 64):
        part, got = one.keys[:, :, start : start + 64], again.keys[:, :, start : start + 64]
        step = part.abs().amax(2, keepdim=True) / 127
        assert ((got - part).abs() <= step / 2 + 1e-6).all(), "an outlier channel does not spoil the others"
    assert torch.equal(again.score, one.score)
    assert list(again.ids) == list(one.ids)


def test_int8_takes_about_half():
    one = record(tokens=1024, dim=64, dtype=torch.bfloat16)
    assert encode("k", one, "f", "int8").nbytes < 0.56 * encode("k", one, "f").nbytes


def test_long_spans_are_cut_into_parts_of_several_mb_by_layers():
    one = record(tokens=1024, layers=24, heads=2, dim=64, dtype=torch.bfloat16)  # the 0.5b's shape
    blob = encode("k", one, "f")
    *parts, _ = (stop - start for start, stop in blob.ranges)
    assert sum(parts) == one.nbytes
    assert len(parts) == 3
    assert all(part % (2 * 2 * 1024 * 64 * 2) == 0 for part in parts), "whole layers"


@pytest.mark.parametrize("codec", CODECS)
def test_another_key_model_kind_or_version_is_refused(codec):
    blob = encode("k", record(), "f", codec)
    decode(blob, "k", "f")
    with pytest.raises(BrokenError, match="key"):
        decode(blob, "other", "f")
    with pytest.raises(BrokenError, match="fingerprint"):
        decode(blob, "k", "g")
    for name, value in (("version", 99), ("kind", "session"), ("codec", "new"), ("shape", [1, 2])):
        with pytest.raises(BrokenError):
            decode(Blob({**blob.header, name: value}, blob.body), "k", "f")


@pytest.mark.parametrize("codec", CODECS)
def test_any_changed_byte_is_found(codec):
    blob = encode("k", record(), "f", codec)
    prefix = bytearray(blob.prefix())
    for place in range(0, len(prefix), 7):
        changed = bytes(prefix[:place]) + bytes([prefix[place] ^ 4]) + bytes(prefix[place + 1 :])
        with pytest.raises((BrokenError, json.JSONDecodeError)):
            assert read_header(changed) == blob.header, "the header is not what was written"
    for place in range(0, blob.nbytes, 41):
        body = blob.body.copy()
        body[place] ^= 4
        with pytest.raises(BrokenError):
            Blob(blob.header, body).check()


@pytest.mark.parametrize("codec", ["zstd", "int8+zstd"])
def test_rubbish_behind_a_right_checksum_is_refused(codec):
    blob = encode("k", record(), "f", codec)
    body = blob.body.copy()
    body[: blob.ranges[0][1]] = 7
    forged = Blob.of({**blob.header}, body, [stop - start for start, stop in blob.ranges])
    with pytest.raises(BrokenError):
        decode(forged, "k", "f")
