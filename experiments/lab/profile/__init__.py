"""Measures this machine: what its operators and links take, and the coefficients that follow."""
