"""Layers of several kinds, experts and recurrences as arguments of Megatron-LM, and back."""
