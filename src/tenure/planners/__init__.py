"""Planners: who says which spans the coming steps read."""
