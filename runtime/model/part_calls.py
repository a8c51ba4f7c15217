"""What a rank computes of each different part of a model's layers."""

from collections.abc import Callable, Mapping, Sequence
from math import sqrt

from torch import Tensor

from hexiopt.files.models.execution import yarn_scale
from hexiopt.problem.execution import Execution, Rotation
from hexiopt.problem.kinds import Attention, Dense, Experts, Part, Recurrent
from hexiopt.problem.model import ModelSpec
from runtime.mapping.model_parts import execution_of, layer_kinds
from runtime.mapping.parts import Range, RankShard
from runtime.model.attention import AttentionCall, WholeAttention
from runtime.model.attention_part import AttentionPart
from runtime.model.block_attention import Scores
from runtime.model.layer import DensePart, PartCall, no_part
from runtime.model.recurrent_part import RecurrentPart
from runtime.model.rope import QueryScale, Rope
from runtime.model.tensor_parallel import RankTpGroup


def part_calls(
    model: ModelSpec,
    shard: RankShard,
    tp: RankTpGroup,
    tokens: Sequence[Range],
    like: Tensor,
    attend: Callable[[Attention, Scores], AttentionCall] | None = None,
    route: Callable[[Experts], PartCall] | None = None,
) -> Mapping[Part, PartCall]:
    """The parts of all layers, of which the rank holds `shard` and has `tokens` between its collectives.

    `like` has the type and device of hidden states. `attend` makes the attention itself (None: over `tokens`, which are
    all of a sequence), and `route` what is computed of experts, where there are such.
    """
    seq_len, execution = sum(end - first for first, end in tokens), execution_of(model)
    seq_end = max((end for _, end in tokens), default=0)
    ropes, calls = dict[tuple[Rotation, int], Rope](), dict[Part, PartCall]()

    def rope(part: Attention) -> Rope | QueryScale | None:
        rotation = execution.window_rotation if part.window is not None else None
        rotation = rotation or execution.rotation
        if rotation is None:
            tuned = execution.temperature
            # The first tokens are as they are.
            return QueryScale(tuned, tokens, like) if tuned is not None and seq_end >= tuned.tokens else None
        dim = int((part.rope_dim or part.qk_dim) * rotation.share)
        if (rotation, dim) not in ropes:
            ropes[rotation, dim] = Rope(rotation, dim, tokens, like, execution.rope_interleaved)
        return ropes[rotation, dim]

    for part in dict.fromkeys(part for kind in layer_kinds(model) for part in kind.parts):
        match part:
            case Experts():
                assert route is not None, "somebody brings tokens to experts"
                calls[part] = route(part)
            case _ if shard.hosts:
                calls[part] = no_part
            case Attention():
                scores = Scores(score_scale(part, execution), execution.score_cap)
                whole = WholeAttention(part, shard, seq_len, like, scores) if attend is None else attend(part, scores)
                calls[part] = AttentionPart(part, shard, execution, model.norm_eps, tp, rope(part), whole)
            case Recurrent():
                calls[part] = RecurrentPart(part, shard, execution, model.norm_eps, tp)
            case Dense():
                calls[part] = DensePart(part.gated, model.activation, tp)
            case _:
                raise AssertionError("`untrainable` has refused it")
    return calls


def score_scale(part: Attention, execution: Execution) -> float | None:
    """The factor of attention's scores; None: 1 / sqrt of a head's width. With latent attention YaRN's own scale of all
    dimensions is one of them, as it is in transformers (`modeling_deepseek_v3.py`)."""
    rotation = execution.rotation
    if not part.kv_rank or rotation is None or rotation.rule == "default" or not rotation.mscale_all_dim:
        return execution.score_scale
    return yarn_scale(rotation, rotation.mscale_all_dim) ** 2 / sqrt(part.qk_dim)
