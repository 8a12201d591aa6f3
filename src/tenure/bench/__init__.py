"""Benchmarks: ``tenure bench NAME``. Each prints a table and, as its last line, JSON; ``--record`` keeps it."""
