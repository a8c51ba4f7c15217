"""Small models that tests share."""

from hexiopt.problem.model import ModelSpec
from hexiopt.testing import problems

TINY = problems()["two GPU types"].model.replace(name="tiny", num_layers=4)
"""Of 4 layers, 1,024 wide: 51 million parameters in its layers."""

TOY = ModelSpec(
    name="m",
    architecture="llama",
    num_layers=4,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    ffn_size=100,
    vocab_size=1000,
    max_positions=1000,
)
"""Of 4 layers, so small that nothing takes time or memory."""
