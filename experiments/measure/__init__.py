"""Measurements of this machine and this code, as ratios within one run."""
