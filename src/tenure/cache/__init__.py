"""Cached keys and values: segments, and the attention over them. Knows nothing of sessions, plans or text."""
