"""What a decoder layer consists of: mixers over tokens (attention, recurrences), then mixers over channels (a dense
MLP, experts). A model is a sequence of such kinds by depth.

Widths are in elements, `hidden_size` is the model's.
"""

from dataclasses import dataclass, fields, replace
from math import ceil
from typing import Any, ClassVar

from hexiopt.checks import flag_in, is_whole
from hexiopt.errors import InputError, quoted
from hexiopt.problem.form import QK_NORMS

_MOST = 2**22  # of a width or a count
_NONE_TO = {"window": (1, 2**27)}  # fields that may be None, and their ranges


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a layer. Raises InputError where a number is not one that such a part can have."""

    name: ClassVar[str]
    optional: ClassVar[tuple[str, ...]] = ()
    """Counts that may be 0."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is bool:
                flag_in(value, f"{self.name}: {field.name}")
            elif field.name in _NONE_TO and value is None:
                continue
            elif field.type is int or field.name in _NONE_TO:
                low, high = _NONE_TO.get(field.name, (0 if field.name in self.optional else 1, _MOST))
                if not is_whole(value) or not low <= value <= high:
                    self._fail(f"{field.name}: {quoted(value)} is not a whole number from {low} to {high}; state one")

    def _fail(self, rule: str) -> None:
        raise InputError(f"{self.name}: {rule}")

    def to_dict(self) -> dict[str, Any]:
        """The fields that differ from their defaults, with the part's name under `part`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        differ = {field.name: values[field.name] for field in fields(self) if values[field.name] != field.default}
        return {"part": self.name, **differ}


@dataclass(frozen=True, kw_only=True)
class Attention(Part):
    """Softmax attention, causal.

    Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) makes queries from `q_rank` values (0: directly) and
    keys and values from `kv_rank` values a token, beside `rope_dim` rotated values that all key heads share; keys and
    values are made for each query head, so that `kv_heads` is `heads`. Elsewhere both are 0.
    """

    name: ClassVar[str] = "attention"
    optional: ClassVar[tuple[str, ...]] = ("q_rank", "kv_rank", "rope_dim")

    heads: int
    kv_heads: int
    qk_dim: int
    """Width of a query head and of a key head."""
    v_dim: int
    window: int | None = None
    """Tokens that a token attends to, itself included; None: all before it."""
    chunked: bool = False
    """The window is the chunk of the sequence that the token is in (Llama 4)."""
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    bias: bool = False
    """Of query, key and value projections; of the projections to latent vectors where there are such."""
    output_bias: bool = False
    qk_norm: str = "none"
    """As `Form.qk_norm`."""
    qk_norm_vectors: int = 1
    gated: bool = False
    """The query projection makes a gate of the output too (Qwen3-Next)."""
    sinks: bool = False
    """A trained score a head beside those of the keys (gpt-oss)."""
    keys_are_values: bool = False
    """Keys and values are the same projection (Gemma 4)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.qk_norm not in QK_NORMS:
            self._fail(f"qk_norm: {quoted(self.qk_norm)} is not known; take one of {', '.join(QK_NORMS)}")
        if self.heads % self.kv_heads:
            self._fail(f"{self.heads} heads are not a multiple of {self.kv_heads} key-value heads; change one")
        if self.kv_rank and (self.kv_heads != self.heads or self.rope_dim >= self.qk_dim):
            self._fail("latent keys and values are made for every head, rope_dim of qk_dim values are shared")
        if not self.kv_rank and (self.q_rank or self.rope_dim):
            self._fail("q_rank and rope_dim belong to latent attention; state kv_rank, or leave them out")
        if self.chunked and self.window is None:
            self._fail("chunked attention needs a window; state it")
        if self.keys_are_values and (self.kv_rank or self.qk_dim != self.v_dim):
            self._fail("keys_are_values needs keys as wide as values, from one projection")

    @property
    def pair_flops(self) -> int:
        """Forward FLOPs of a (query, key) pair of a head: its score, and the weighted value."""
        return 2 * (self.qk_dim + self.v_dim)

    def pairs(self, seq_len: int) -> float:
        """(query, key) pairs of a head for a sequence that the mask leaves; a query and the key of its own token count
        half."""
        window = seq_len if self.window is None else min(self.window, seq_len)
        if self.chunked:
            chunks, rest = divmod(seq_len, window)
            return 0.5 * (chunks * window**2 + rest**2)
        return window * seq_len - 0.5 * window**2


@dataclass(frozen=True, kw_only=True)
class Recurrent(Part):
    """A recurrence with a state of `key_dim` by `value_dim` values a head, scanned in chunks of `chunk` tokens.

    Mamba-2 (Dao and Gu, arXiv 2405.21060), whose groups share keys and queries, or with `delta` the gated delta rule
    (Yang et al., arXiv 2412.06464). Before it stands a convolution over `conv` tokens.
    """

    name: ClassVar[str] = "recurrent"

    heads: int
    groups: int
    """Key and query heads, each of which serves equally many heads."""
    key_dim: int
    value_dim: int
    conv: int = 4
    conv_bias: bool = True
    chunk: int = 128
    delta: bool = False
    norm: bool = True
    """A gated norm of the output."""
    bias: bool = False
    """Of the projections."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads % self.groups:
            self._fail(f"{self.heads} heads are not a multiple of {self.groups} groups; change one")

    @property
    def scan_flops_per_token(self) -> int:
        """Forward FLOPs per token of the scan: causal halves of scores and weighted values inside a chunk, states made
        and read between chunks, and with `delta` a triangular system of the chunk's keys."""
        key_heads = self.heads if self.delta else self.groups
        inside = self.chunk * (self.key_dim * key_heads + self.value_dim * self.heads)
        system = self.chunk * self.key_dim * self.heads if self.delta else 0
        return inside + system + 4 * self.key_dim * self.value_dim * self.heads

    @property
    def scan_elements(self) -> int:
        """FP32 elements a token and head that the backward of the scan holds (`runtime/model/scans.py`): what it makes,
        values, keys and queries as they are multiplied, a chunk's matrices, a state, and steps, decays and writes."""
        state = ceil(self.key_dim * self.value_dim / self.chunk)
        if self.delta:
            return 4 * self.value_dim + 8 * self.key_dim + 5 * self.chunk + 8 + state
        return 4 * self.value_dim + 4 * self.key_dim + 3 * self.chunk + 5 + state

    @property
    def moment_elements(self) -> int:
        """FP32 elements a token and head that this backward makes for a moment beside them: of its gated norm, or the
        gradients of a chunk's matrices. Counted in `tests/experiments/lab/test_scan_memory.py`."""
        inside = self.chunk + 3 * self.value_dim + 2 * self.key_dim * self.delta
        return max(6 * self.value_dim, inside)


@dataclass(frozen=True, kw_only=True)
class Dense(Part):
    """An MLP of `ffn_size` columns."""

    name: ClassVar[str] = "dense"

    ffn_size: int
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class Experts(Part):
    """`count` MLPs of `ffn_size` columns, of which a router chooses `top_k` for each token; and `shared` columns that
    all tokens take, with a bias where the experts have one."""

    name: ClassVar[str] = "experts"
    optional: ClassVar[tuple[str, ...]] = ("shared", "latent", "router_vectors")

    count: int
    top_k: int
    ffn_size: int
    shared: int = 0
    gated: bool = True
    bias: bool = False
    shared_bias: bool = False
    router_bias: bool = False
    shared_gate: bool = False
    """A product of one column scales what the shared columns give (Qwen2-MoE)."""
    latent: int = 0
    """The experts, not the shared columns, run on vectors of so many values, projected from hidden_size and back
    (Nemotron 3 Super); 0: on hidden states."""
    latent_bias: bool = False
    router_vectors: int = 0
    """Trained vectors of hidden_size by which the router scales its input (Gemma 4)."""
    expert_scales: bool = False
    """A trained factor of each expert's output (Gemma 4)."""
    scales_input: bool = False
    """The router's weights multiply what experts read, not what they make (Llama 4)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_k > self.count:
            self._fail(f"top_k {self.top_k} is more than all {self.count} experts; choose at most {self.count}")

    def width(self, hidden_size: int) -> int:
        """Width of the vectors that experts read and make."""
        return self.latent or hidden_size


Mixer = Attention | Recurrent
Channels = Dense | Experts
PARTS: dict[str, type[Part]] = {part.name: part for part in (Attention, Recurrent, Dense, Experts)}


@dataclass(frozen=True)
class LayerKind:
    """A layer: its mixers over tokens, side by side, then its mixers over channels, side by side; either may be absent.

    `norms` are those of hidden_size values in the layer: 1 where all parts read the same. Raises InputError for a layer
    of no parts, or of two like parts.
    """

    mixers: tuple[Mixer, ...] = ()
    channels: tuple[Channels, ...] = ()
    norms: int = 2

    def __post_init__(self) -> None:
        if not self.parts or not is_whole(self.norms) or not 1 <= self.norms <= 8:
            raise InputError("model: a layer has at least one part and 1 to 8 norms; state them")
        for parts, kinds in ((self.mixers, (Attention, Recurrent)), (self.channels, (Dense, Experts))):
            if len({type(part) for part in parts}) < len(parts) or not all(isinstance(part, kinds) for part in parts):
                raise InputError(
                    "model: a layer mixes tokens by at most an attention and a recurrence, channels by at most an MLP "
                    "and experts; state others in layers of their own"
                )

    @property
    def parts(self) -> tuple[Mixer | Channels, ...]:
        """All parts in order."""
        return (*self.mixers, *self.channels)

    @property
    def attention(self) -> Attention | None:
        """The layer's attention, if it has one."""
        return next((part for part in self.mixers if isinstance(part, Attention)), None)

    @property
    def recurrent(self) -> Recurrent | None:
        """The layer's recurrence, if it has one."""
        return next((part for part in self.mixers if isinstance(part, Recurrent)), None)

    @property
    def dense(self) -> Dense | None:
        """The layer's MLP, if it has one."""
        return next((part for part in self.channels if isinstance(part, Dense)), None)

    @property
    def experts(self) -> Experts | None:
        """The layer's experts, if it has such."""
        return next((part for part in self.channels if isinstance(part, Experts)), None)

    def norm_sums(self, tp: int) -> tuple[int, int]:
        """Sums of squares of a token, of norms whose width `tp` ranks cut, that these add up: of all heads of queries
        and of keys, and of the groups of Mamba-2 that no rank has whole."""
        attention, recurrent = self.attention, self.recurrent
        of_heads = 2 if attention is not None and attention.qk_norm == "whole" else 0
        is_cut = recurrent is not None and recurrent.norm and not recurrent.delta and recurrent.groups % tp > 0
        return (of_heads, recurrent.groups if recurrent is not None and is_cut else 0) if tp > 1 else (0, 0)

    def with_experts(self, experts: Experts) -> "LayerKind":
        """The layer with other experts in the place of its own."""
        return replace(self, channels=tuple([experts if part is self.experts else part for part in self.channels]))

    def to_dict(self) -> dict[str, Any]:
        """The parts and the number of norms, as JSON values."""
        return {"parts": [part.to_dict() for part in self.parts], "norms": self.norms}
