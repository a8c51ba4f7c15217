"""What a rank computes of each different part of a model's layers."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from hexiopt.problem.kinds import Attention, Dense, Part
from hexiopt.problem.model import ModelSpec
from runtime.mapping.model_parts import layer_kinds
from runtime.mapping.parts import Range, RankShard
from runtime.model.attention import AttentionCall, WholeAttention
from runtime.model.attention_part import AttentionPart
from runtime.model.dense_part import DensePart
from runtime.model.layer import PartCall
from runtime.model.rope import Rope
from runtime.model.tensor_parallel import RankTpGroup


def part_calls(
    model: ModelSpec,
    shard: RankShard,
    tp: RankTpGroup,
    tokens: Sequence[Range],
    like: Tensor,
    attend: Callable[[Attention], AttentionCall] | None = None,
) -> Mapping[Part, PartCall]:
    """The parts of all layers, of which the rank holds `shard` and has `tokens` between its collectives.

    `like` has the type and device of hidden states. `attend` makes the attention itself (None: over `tokens`, which are
    all of a sequence).
    """
    seq_len = sum(end - first for first, end in tokens)
    rope, calls = Rope(model.head_dim, model.rope_theta, tokens, like), dict[Part, PartCall]()
    for part in dict.fromkeys(part for kind in layer_kinds(model) for part in kind.parts):
        match part:
            case Attention():
                whole = WholeAttention(part, shard, seq_len, like) if attend is None else attend(part)
                calls[part] = AttentionPart(part, model.norm_eps, tp, rope, whole)
            case Dense():
                calls[part] = DensePart(tp)
            case _:
                raise AssertionError("`untrainable` has refused it")
    return calls
