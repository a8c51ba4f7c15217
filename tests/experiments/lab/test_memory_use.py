"""The memory model against the runtime: states to the byte, activations and logits by saved tensors, all in all."""

from dataclasses import replace

import pytest
import torch

from experiments.lab.memory import States, memory_use
from hexiopt.cost.executors.memory import Memory
from hexiopt.numbers.messages import MESSAGE_PRECISIONS
from hexiopt.plan.parallelism import SequenceGroup, SequenceParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.workload import RECOMPUTE_POLICIES, Workload
from hexiopt.schedules.registry import GPIPE, INTERLEAVED, ONE_F_ONE_B, SCHEDULES
from hexiopt.schedules.schedule import Schedule
from runtime.model.loss import chunked_cross_entropy
from runtime.model.tensor_parallel import RankTpGroup
from runtime.saved import label_saved
from tests.conftest import STRESS
from tests.runtime.expert_plans import expert_model
from tests.runtime.memory_cases import LLAMA, Compared, compare, even_plan, measure
from tests.runtime.model.test_decoder import tiny
from tests.slow import slow_but

STATES = ("weights", "gradients", "master", "optimizer")
SEQ_LEN = 128
CLOSE = 0.01  # the promise is 3 %
MODELS: dict[str, ModelSpec] = {
    "llama": LLAMA,
    "tied": replace(LLAMA, tied_embeddings=True),
    "biases": replace(LLAMA, attention_bias=True, mlp_bias=True),
    "no-groups": replace(LLAMA, num_kv_heads=4),
    "one-key-head": replace(LLAMA, num_kv_heads=1),
    "six-heads": replace(LLAMA, num_heads=6, num_kv_heads=3),
    "qwen2": replace(LLAMA, architecture="qwen2", attention_bias=True),
    "qwen3": replace(LLAMA, architecture="qwen3"),
    "odd": replace(LLAMA, ffn_size=321, vocab_size=513),
}


def check_all(comparisons: list[Compared], rounding: float = 1e-12) -> None:
    """States to the byte, or a rounding of it; what the backward needs, closely."""
    for comparison in comparisons:
        at = f"pipeline {comparison.pipeline}, stage {comparison.stage}"
        for part in STATES:
            assert getattr(comparison.predicted, part) == pytest.approx(
                getattr(comparison.measured, part), rel=rounding
            ), (at, part)
        check_saved(comparison)


def check_saved(comparison: Compared, close: float = CLOSE) -> None:
    for part in ("activations", "logits"):
        assert abs(comparison.off(part)) <= close, (
            comparison.pipeline,
            comparison.stage,
            part,
            comparison.predicted,
            comparison.measured,
        )


# ------------------------------------------------------------------ policies, schedules, positions


@pytest.mark.parametrize(
    ("schedule", "policy"),
    slow_but(
        [*zip(SCHEDULES[:2], RECOMPUTE_POLICIES, strict=False)],
        [
            (schedule, policy)
            for k, schedule in enumerate(SCHEDULES)
            for j, policy in enumerate(RECOMPUTE_POLICIES)
            if STRESS or schedule == ONE_F_ONE_B or j == k
        ],
    ),
)
def test_every_policy_and_schedule_at_every_position(schedule: Schedule, policy: str) -> None:
    """Two stages with more micro-batches than they hold; under 1F1B also four."""
    chunks = 2 if schedule == INTERLEAVED else 1
    plan = even_plan(LLAMA, schedule, policy, chunks=chunks)
    comparisons = compare(plan, LLAMA, Workload(4, SEQ_LEN))
    check_all(comparisons)
    assert comparisons[0].measured.activations > comparisons[1].measured.activations or schedule == GPIPE
    if schedule == ONE_F_ONE_B:
        check_all(compare(even_plan(LLAMA, schedule, policy, stages=4, batches=5), LLAMA, Workload(5, SEQ_LEN)))
    elif STRESS:
        deep = replace(LLAMA, num_layers=8)
        plan = even_plan(deep, schedule, policy, stages=4, batches=8, chunks=chunks)
        check_all(compare(plan, deep, Workload(8, SEQ_LEN)))


@pytest.mark.parametrize("policy", slow_but(("none",), RECOMPUTE_POLICIES))
def test_messages_in_8_bits_save_what_is_predicted(policy: str) -> None:
    """Next to nothing: what is quantised, or has been, stands beside them for a moment. How many messages are on their
    way at the worst one differs from run to run."""
    plan, size = even_plan(LLAMA, policy=policy, stages=4, batches=5, size=4), 4
    message_bytes = size * SEQ_LEN * LLAMA.hidden_size * 2
    whole, small = (
        compare(plan, LLAMA, Workload(5 * size, SEQ_LEN, message_precision=precision))
        for precision in MESSAGE_PRECISIONS
    )
    check_all(small)
    for before, after in zip(whole, small, strict=True):
        assert after.measured.buffers < after.predicted.buffers
        saved = before.peak_bytes - after.peak_bytes
        assert abs(before.predicted.tensors - after.predicted.tensors - saved) < message_bytes


@pytest.mark.parametrize("zero", slow_but((1,), (0, 1)))
def test_gradients_in_8_bits_hold_what_is_predicted(zero: int) -> None:
    """What three pipelines send each other, and what comes: two thirds of all; predicted is the whole."""
    plan = even_plan(LLAMA, stages=1, pipelines=3, zero=zero)
    for comparison in compare(plan, LLAMA, Workload(12, SEQ_LEN, gradient_precision="fp8")):
        exact, sums = comparison.predicted.weights, comparison.predicted.gradients - comparison.predicted.weights
        assert comparison.measured.gradients - exact == pytest.approx(2 / 3 * sums, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 3] if STRESS else [3])
@pytest.mark.parametrize("policy", RECOMPUTE_POLICIES if STRESS else ["selective"])
@pytest.mark.parametrize("schedule", SCHEDULES if STRESS else [ONE_F_ONE_B], ids=str)
def test_tensor_parallel_stages(schedule: Schedule, policy: str, tp: int) -> None:
    """Over three ranks, heads are 2, 1 and 1, columns 107, 107 and 106, and tokens 43, 43 and 42."""
    plan = even_plan(LLAMA, schedule, policy, tp=tp, batches=2, chunks=2 if schedule == INTERLEAVED else 1)
    check_all(compare(plan, LLAMA, Workload(2, SEQ_LEN)))


@pytest.mark.parametrize("case", slow_but(("granite_swa",), ("granite_swa", "arcee", "youtu", "llama4_text")))
def test_kinds_of_layers(case: str) -> None:
    """Windows in some layers, with sinks; a plain MLP; latent attention; chunks, the last one shorter."""
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 320, "vocab_size": 512}
    windows = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 32}
    latent = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
    chunks = {"attention_chunk_size": 48, "intermediate_size_mlp": 320, "head_dim": 32}
    cases = {"granite_swa": windows, "youtu": latent | {"num_key_value_heads": 4}, "llama4_text": chunks}
    more = cases.get(case, {})
    model = tiny(case, **sizes | more, num_hidden_layers=4, max_position_embeddings=4096)
    check_all(compare(even_plan(model), model, Workload(4, SEQ_LEN)))


@pytest.mark.parametrize("policy", slow_but(("none",), ("none", "selective")))
@pytest.mark.parametrize("case", ["granitemoehybrid", "nemotron_h"])
def test_experts_of_hybrids(case: str, policy: str) -> None:
    """Beside a shared MLP; behind a projection, without a gate. Biases that balance experts are not priced."""
    model = expert_model(case, 4, hidden_size=512, inner=256)
    if case == "nemotron_h":
        (part,) = {kind.experts for kind in model.layers} - {None}
        wide = replace(part, latent=128)
        layers = tuple(kind.with_experts(wide) if kind.experts else kind for kind in model.layers)
        model = model.replace(layers=layers)
    plan = even_plan(model, policy=policy, stages=1)
    (comparison,) = compare(plan, model, Workload(4, SEQ_LEN, "fp32", routing="forced"))
    assert comparison.off("weights") == pytest.approx(0, abs=1e-4)
    check_saved(comparison)


def test_policies_of_layers_and_unequal_stages() -> None:
    """Layers none, selective, full; and full alone before the head."""
    pipeline = even_plan(LLAMA).pipelines[0]
    stages = (
        replace(pipeline.stages[0], layers=((0, 3),), recompute=RECOMPUTE_POLICIES),
        replace(pipeline.stages[1], layers=((3, 4),), recompute=("full",)),
    )
    check_all(compare(Plan((replace(pipeline, stages=stages),)), LLAMA, Workload(4, SEQ_LEN)))


def test_layers_recomputed_together() -> None:
    """Three layers of which one input is kept, then one alone before the head; and two pairs in one stage."""
    pipeline = even_plan(LLAMA).pipelines[0]
    stages = (
        replace(pipeline.stages[0], layers=((0, 3),), recompute=("full", "joined", "joined")),
        replace(pipeline.stages[1], layers=((3, 4),), recompute=("full",)),
    )
    check_all(compare(Plan((replace(pipeline, stages=stages),)), LLAMA, Workload(4, SEQ_LEN)))
    for tp in (1, 2):
        pipeline = even_plan(LLAMA, stages=1, tp=tp).pipelines[0]
        stage = replace(pipeline.stages[0], recompute=("full", "joined") * 2)
        check_all(compare(Plan((replace(pipeline, stages=(stage,)),)), LLAMA, Workload(4, SEQ_LEN)))


def test_a_layer_recomputed_after_others_are_gone_takes_no_more_than_predicted() -> None:
    """The model adds what one layer recomputes to all that is stored, as if it were the last of its range."""
    pipeline = even_plan(LLAMA, stages=1).pipelines[0]
    stage = replace(pipeline.stages[0], recompute=("full", "none", "none", "none"))
    (comparison,) = compare(Plan((replace(pipeline, stages=(stage,)),)), LLAMA, Workload(4, SEQ_LEN))
    assert 0 < comparison.off("activations") < 0.5


# ------------------------------------------------------------------ models, widths, micro-batches, ZeRO

CASES = [
    # model, policy, TP, micro-batch size, precision, bytes of a gradient
    ("tied", "none", 1, 2, "bf16", 2),
    ("biases", "none", 2, 1, "fp32", 4),
    ("no-groups", "selective", 2, 2, "bf16", 4),
    ("six-heads", "none", 2, 1, "bf16", 2),
    ("qwen2", "none", 1, 1, "fp32", 4),
    ("qwen3", "none", 2, 2, "bf16", 2),
    ("qwen3", "selective", 1, 1, "fp32", 4),
    ("odd", "none", 2, 1, "bf16", 2),
]
if STRESS:
    CASES += [
        (model, policy, tp, size, precision, 2 if precision == "bf16" else 4)
        for model in MODELS
        for policy in RECOMPUTE_POLICIES
        for tp in (1, 2, 4)
        for size in (1, 2)
        for precision in ("bf16", "fp32")
    ]


@pytest.mark.parametrize(("name", "policy", "tp", "size", "precision", "gradient_bytes"), slow_but(CASES[1:2], CASES))
def test_one_stage_of_every_model(
    name: str, policy: str, tp: int, size: int, precision: str, gradient_bytes: int
) -> None:
    """Where nothing is sent, all tensors that exist at once are those of the prediction, closely."""
    model, workload = MODELS[name], Workload(2 * size, SEQ_LEN, precision=precision, gradient_bytes=gradient_bytes)
    plan = even_plan(model, GPIPE, policy, stages=1, tp=tp, batches=2, size=size)
    (comparison,) = compare(plan, model, workload)
    check_all([comparison])
    tables = SEQ_LEN * 2 * model.head_dim * workload.element_bytes
    assert comparison.measured.buffers == tables
    messages = 4 * size * SEQ_LEN // tp * model.hidden_size * workload.element_bytes
    gathered = 2 * size * SEQ_LEN * model.hidden_size * workload.element_bytes * (tp > 1)
    assert comparison.predicted.buffers == tables + messages + gathered
    tensors = comparison.predicted.tensors
    # Messages are none here, and what is let go of in a backward makes room for what it needs for a moment.
    assert -0.03 <= tensors / comparison.peak_bytes - 1 <= 0.1


@pytest.mark.parametrize(
    ("name", "tp", "size", "precision", "chunk"),
    slow_but(
        [("tied", 2, 1, "fp32", 50)],
        [
            ("llama", 1, 2, "bf16", 32),
            ("tied", 2, 1, "fp32", 50),
            ("odd", 2, 2, "bf16", 100),
            ("odd", 1, 1, "fp32", 999),
        ],
    ),
)
def test_a_loss_in_chunks_holds_what_is_predicted(name: str, tp: int, size: int, precision: str, chunk: int) -> None:
    """Under GPipe, where the last stage holds what both micro-batches keep."""
    model = MODELS[name]
    whole = Workload(2 * size, SEQ_LEN, precision=precision)
    chunked = replace(whole, loss_chunk_tokens=chunk)
    plan = even_plan(model, GPIPE, stages=1, tp=tp, batches=2, size=size)
    (comparison,) = compare(plan, model, chunked)
    check_all([comparison])
    tensors = comparison.predicted.tensors
    assert -0.03 <= tensors / comparison.peak_bytes - 1 <= 0.12
    if chunk <= 50:
        (before,) = compare(plan, model, whole)
        assert comparison.peak_bytes < before.peak_bytes


def test_one_chunk_has_logits_at_once() -> None:
    """Beside the gradients of the head and of what it reads, no more than a chunk's logits and scores."""
    tokens, hidden, rows, chunk = 64, 8, 1000, 16
    x, head = torch.ones(tokens, 1, hidden, dtype=torch.bfloat16), torch.ones(rows, hidden, dtype=torch.bfloat16)
    labels, tp = torch.zeros(tokens, 1, dtype=torch.int64), RankTpGroup(0, ((0, tokens),))
    states = States((x.requires_grad_(), head.requires_grad_()), (), (), (), ())
    memory = memory_use(
        states,
        torch.device("cpu"),
        lambda: chunked_cross_entropy(x, head, labels, (0, rows), tp, chunk),
        lambda: 0,
    )
    gradients, small = x.nbytes + head.nbytes, 4096
    assert memory.peak_bytes <= 2 * gradients + chunk * rows * (2 + 4) + small


@pytest.mark.parametrize("precision", slow_but(("bf16",), ("bf16", "fp32")))
def test_sharded_states(precision: str) -> None:
    """Two pipelines, each with half of every master and moment; gradients and weights whole."""
    plan = even_plan(LLAMA, stages=2, pipelines=2, batches=2, zero=1)
    check_all(compare(plan, LLAMA, Workload(4, SEQ_LEN, precision=precision)))


@pytest.mark.slow
def test_norms_that_more_ranks_share_than_pipelines_are_fewer_than_predicted() -> None:
    """They are spread over TP groups too: exactly that is predicted too much."""
    shared = LLAMA.num_layers * LLAMA.layer.vectors.whole + LLAMA.final_norm_params
    for comparison in compare(
        even_plan(LLAMA, stages=1, tp=2, pipelines=2, batches=2, zero=1), LLAMA, Workload(4, SEQ_LEN)
    ):
        for part in ("weights", "gradients"):
            assert getattr(comparison.predicted, part) == getattr(comparison.measured, part)
        for part, width in (("master", 4), ("optimizer", 8)):
            assert getattr(comparison.predicted, part) - getattr(comparison.measured, part) == width * shared * (
                1 / 2 - 1 / 4
            )
        check_saved(comparison)


@pytest.mark.parametrize(("stages", "pipelines"), slow_but([(2, 1)], [(2, 1), (4, 1), (2, 2)]))
def test_a_tied_matrix_is_spread_over_both_ends(stages: int, pipelines: int) -> None:
    plan = even_plan(MODELS["tied"], stages=stages, pipelines=pipelines, batches=4 // pipelines, zero=1)
    check_all(compare(plan, MODELS["tied"], Workload(4, SEQ_LEN)))


@pytest.mark.slow
@pytest.mark.parametrize("groups", ["all", "machine", ((0, 2), (1,))])
def test_a_tied_matrix_is_spread_over_the_ends_of_unequal_pipelines(groups: str | tuple[tuple[int, ...], ...]) -> None:
    """One of two stages, and one of a single stage, whose end is both; three do not divide the matrix evenly."""
    stages = (Stage.of((0,), 0, 2), Stage.of((1,), 2, 4)), (Stage.of((2,), 0, 4),)
    plan = Plan(tuple(Pipeline(pipeline_stages, 2) for pipeline_stages in stages), ONE_F_ONE_B, Sharding(1, groups))
    check_all(compare(plan, MODELS["tied"], Workload(4, SEQ_LEN)), rounding=1e-4)


LOCKSTEP = [
    # model, ZeRO stage, stages, pipelines, precision, bytes of a gradient
    ("llama", 2, 2, 2, "bf16", 2),
    ("llama", 3, 2, 2, "bf16", 2),
    ("tied", 3, 1, 2, "bf16", 4),
    ("tied", 3, 2, 2, "fp32", 4),
    ("biases", 3, 4, 2, "fp32", 4),
    ("qwen3", 2, 1, 4, "bf16", 4),
]


@pytest.mark.parametrize(
    ("name", "zero", "stages", "pipelines", "precision", "width"), slow_but(LOCKSTEP[2:3], LOCKSTEP)
)
def test_units_whole_beside_shards(
    name: str, zero: int, stages: int, pipelines: int, precision: str, width: int
) -> None:
    """Under ZeRO-2 gradients, under ZeRO-3 weights too, of two units at most: to the byte."""
    model = MODELS[name]
    plan = even_plan(model, stages=stages, pipelines=pipelines, batches=2, zero=zero)
    comparisons = compare(plan, model, Workload(2 * pipelines, SEQ_LEN, precision=precision, gradient_bytes=width))
    check_all(comparisons)
    if stages == 1:
        tensors = comparisons[0].predicted.tensors
        assert -0.03 <= tensors / comparisons[0].peak_bytes - 1 <= 0.1


@pytest.mark.slow
def test_units_whole_beside_shards_with_tensor_parallelism() -> None:
    """Norms are spread over TP groups too, as under ZeRO-1."""
    shared = LLAMA.layer.vectors.whole * 2
    for comparison in compare(even_plan(LLAMA, tp=2, pipelines=2, batches=2, zero=3), LLAMA, Workload(4, SEQ_LEN)):
        assert (comparison.predicted.weights, comparison.predicted.gradients) == (
            comparison.measured.weights,
            comparison.measured.gradients,
        )
        norms = shared + comparison.stage * LLAMA.final_norm_params
        assert comparison.predicted.master - comparison.measured.master == 4 * norms * (1 / 2 - 1 / 4)
        check_saved(comparison)


# ------------------------------------------------------------------ sequence layouts

UNEVEN = SequenceParallel((SequenceGroup((0, 1), (60, 20), (3, 1)), SequenceGroup((2,), (48,), (4,))), "zigzag")


@pytest.mark.parametrize("policy", RECOMPUTE_POLICIES if STRESS else ["selective"])
def test_sequence_layouts_save_what_a_stage_of_their_tokens_does_and_attention_of_their_group(policy: str) -> None:
    """Of attention, a rank saves its heads of the group's tokens, in all layers or in the one recomputed; beside them
    its own tokens of all heads, as they come back from an all-to-all. What is recomputed alone is less than what the
    backward of an MLP has let go of before."""
    stage = Stage(UNEVEN, ((0, 4),), (policy,))
    ranks = [memory for _, memory in measure(Plan((Pipeline((stage,), 2),)), LLAMA, Workload(2, SEQ_LEN))]
    width = 2 * LLAMA.head_dim  # of a head, in BF16

    def attention(tokens: int, heads: int, kv_heads: int) -> int:
        """Queries, keys, values, output and log-sum-exp."""
        return tokens * (2 * (heads + kv_heads) * width + 4 * heads)

    layers = {"none": 4, "selective": 0, "full": 1}[policy]
    plain = even_plan(LLAMA, policy=policy, stages=1, batches=2)
    ((_, alone),) = measure(plain, LLAMA, Workload(2, UNEVEN.groups[0].tokens[0]))
    for rank, num_tokens, group, heads, kv_heads in zip(
        ranks, (60, 20, 48), (80, 80, 48), (3, 1, 4), (2, 1, 2), strict=True
    ):
        more = 0
        if group > num_tokens:
            more = layers * (attention(group, heads, kv_heads) - attention(num_tokens, 4, 2) + num_tokens * 4 * width)
        assert rank.parts.activations == pytest.approx(alone.parts.activations * num_tokens / 60 + more, rel=CLOSE)
        assert rank.parts.logits == alone.parts.logits * num_tokens / 60
        assert (rank.parts.weights, rank.parts.gradients) == (alone.parts.weights, alone.parts.gradients)
        assert rank.parts.buffers == alone.parts.buffers * num_tokens / 60 + (
            2 * 8 * group if group > num_tokens else 0
        )


# ------------------------------------------------------------------ the measurement itself


def parts_of(compute) -> Memory:  # type: ignore[no-untyped-def]
    weights = (WEIGHT,)
    return memory_use(States(weights, (), (), (), ()), torch.device("cpu"), compute, lambda: 40).parts


WEIGHT = torch.zeros(30, 10, requires_grad=True)


def test_saved_storages_count_once_and_weights_not_at_all() -> None:
    def compute() -> None:
        x = torch.zeros(20, 10, requires_grad=True)
        y = x @ WEIGHT.T  # keeps x
        z = (x[3:] * x[:-3]).sum()  # keeps two views of it
        w = y.exp()  # keeps what it makes
        (w.sum() + z).backward()  # type: ignore[no-untyped-call]

    parts = parts_of(compute)
    assert parts.activations == 4 * (20 * 10 + 20 * 30)
    assert (parts.weights, parts.buffers, parts.logits) == (4 * 300, 40, 0)


def test_what_backwards_have_used_is_not_held() -> None:
    def compute() -> None:
        for size in (5, 20, 10):
            (torch.zeros(size, 10, requires_grad=True) @ WEIGHT.T).sum().backward()  # type: ignore[no-untyped-call]

    assert parts_of(compute).activations == 4 * 20 * 10


def test_parts_are_told_apart_with_what_is_beside_them() -> None:
    def compute() -> None:
        x = torch.zeros(20, 10, requires_grad=True)
        y = x @ WEIGHT.T
        with label_saved("logits", transient_bytes=y.nbytes):
            z = y.exp()
        z.sum().backward()  # type: ignore[no-untyped-call]

    parts = parts_of(compute)
    assert (parts.activations, parts.logits) == (4 * 200, 4 * (600 + 600))


def test_the_peak_counts_every_tensor_while_it_lives() -> None:
    def compute() -> None:
        x = torch.zeros(1000)
        y = x + 1
        del x
        z = y.view(10, 100)
        del y
        del z
        torch.zeros(1500)

    states = States((WEIGHT,), (), (), (), ())
    assert memory_use(states, torch.device("cpu"), compute, lambda: 0).peak_bytes == 4 * (300 + 2000)
