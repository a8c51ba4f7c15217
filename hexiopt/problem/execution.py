"""What a decoder computes that no price reads: rotations, scales, caps, places of norms, how experts are chosen."""

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


@dataclass(frozen=True)
class Temperature:
    """By what queries of later tokens are multiplied, against attention that spreads over ever more keys: by
    1 + `scale` · ln(1 + ⌊n / `tokens`⌋) that of the n-th token of a sequence (Llama 4, after Nakanishi, arXiv
    2501.19399)."""

    tokens: float
    scale: float


SOFTMAX, SIGMOID, OF_CHOSEN = "softmax", "sigmoid", "softmax of the chosen"


@dataclass(frozen=True)
class RouterRule:
    """How logits become choices of experts and their weights.

    `scores` are the softmax over all experts, the sigmoid of each, or, once experts are chosen, the softmax over those
    (gpt-oss). With `is_normalized` the weights of a token's experts sum to one, before all are multiplied by `scale`.
    Of `num_groups` of experts only the `top_groups` with the largest sums of two scores are chosen from (DeepSeek-V3,
    arXiv 2412.19437, section 2.1.2). With `has_bias`, a bias that balances loads is added to the scores for the choice.
    """

    scores: str = SOFTMAX
    is_normalized: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    has_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class Execution:
    """The facts of a `config.json` of `type` that training needs beyond the shape. The defaults are Llama's."""

    type: str
    """The `model_type` of Hugging Face, by whose names weights are stored."""
    rotation: Rotation | None = field(default_factory=Rotation)
    """Of layers that attend to all tokens; None: positions are not used."""
    window_rotation: Rotation | None = None
    """Of layers with windows or chunks; None: as `rotation`."""
    temperature: Temperature | None = None
    """Of layers that are not rotated."""
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
    router: RouterRule | None = None
    """Of layers with experts; None: it is not known."""
    gate_alpha: float | None = None
    """Experts compute (up + 1) · gate · sigmoid(alpha · gate), where both are clamped to `gate_limit` (gpt-oss)."""
    gate_limit: float = float("inf")
