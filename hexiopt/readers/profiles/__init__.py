"""Measured times of layers and links, and the formats in which others publish theirs."""
