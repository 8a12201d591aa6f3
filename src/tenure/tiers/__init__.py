"""Tiers: where spans live once they have left the cache, and how they come back."""
