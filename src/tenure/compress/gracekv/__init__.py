"""GraceKV: partition, prototype trees, value flow, one auction, packing; a module each."""

from tenure.compress.gracekv.method import GraceKV

__all__ = ["GraceKV"]
