"""Calibration: how long attention to each region lives, measured with a full cache."""
