"""Retention policies, one file each. To add one: its file, a line here, a row in the test matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tenure.policies.auto import Auto
from tenure.policies.base import Look, Policy, View, select
from tenure.policies.foresight import Foresight
from tenure.policies.full import Full
from tenure.policies.h2o import H2O
from tenure.policies.memdecay import MemDecay
from tenure.policies.random import Random
from tenure.policies.recency import Recency
from tenure.policies.snapkv import SnapKV
from tenure.policies.tova import TOVA
from tenure.registry import make

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (Full, Random, Recency, H2O, SnapKV, TOVA, Foresight, MemDecay, Auto)
}


def make_policy(name: str, options: Mapping[str, Any] | None = None) -> Policy:
    """A policy by name.

    Args:
        name: a key of ``POLICIES``.
        options: fields of the policy.

    Raises:
        ConfigError: unknown name or field.
    """
    return make(POLICIES, name, options or {}, option="policy")


__all__ = [
    "H2O",
    "POLICIES",
    "TOVA",
    "Auto",
    "Foresight",
    "Full",
    "Look",
    "MemDecay",
    "Policy",
    "Random",
    "Recency",
    "SnapKV",
    "View",
    "make_policy",
    "select",
]
