"""What a decoder computes that no price reads: rotations, scales, caps, places of norms."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """How queries and keys are rotated by their positions: RoPE (Su et al., arXiv 2104.09864) with the base `theta` of
    the first `share` of a head's values, its frequencies scaled by a rule of Hugging Face.

    `default` scales none, `linear` divides all by `factor`, `llama3` those of long waves, `yarn` (Peng et al., arXiv
    2309.00071) those between the waves that fit `fast` and `slow` times into `original_positions` tokens, and
    multiplies queries and keys by `attention_factor` (None: by `mscale` and `mscale_all_dim`, or by `factor`).
    """

    theta: float = 10_000.0
    share: float = 1.0
    rule: str = "default"
    factor: float = 1.0
    original_positions: int = 0
    low: float = 1.0
    high: float = 4.0
    fast: float = 32.0
    slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncates: bool = True
    """Whether the values between which YaRN interpolates are whole numbers."""


RULES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class Execution:
    """The facts of a `config.json` of `type` that training needs beyond the shape. The defaults are Llama's."""

    type: str
    """The `model_type` of Hugging Face, by whose names weights are stored."""
    rotation: Rotation | None = field(default_factory=Rotation)
    """Of layers that attend to all tokens; None: positions are not used."""
    window_rotation: Rotation | None = None
    """Of layers with windows; None: as `rotation`."""
    rope_interleaved: bool = False
    """A rotation turns neighbouring values, not those of two halves."""
    score_scale: float | None = None
    """Of attention's scores; None: 1 / sqrt of a head's width."""
    score_cap: float | None = None
    """Scores s become cap · tanh(s / cap)."""
    logit_cap: float | None = None
    """As `score_cap`, of logits."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Of what a sublayer adds to the hidden states."""
    logit_scale: float = 1.0
    unit_norms: bool = False
    """Norms multiply by one plus their weight."""
    norms_after: bool = False
    """The two norms of a layer are those of what its sublayers make, not of what they read (OLMo 2)."""
    step_limits: tuple[float, float] = (0.0, float("inf"))
    """The range of Mamba-2's steps of time."""
