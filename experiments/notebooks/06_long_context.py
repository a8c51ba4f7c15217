# %% [markdown]
# # Long contexts
#
# When a sequence is long, the activations of one sequence no longer fit into a GPU, and attention, which grows with
# the square of the length, dominates. Two ways to share a sequence are common. **Ring Attention** (context
# parallelism) cuts it into shards and passes keys and values around. **Ulysses** (head parallelism) exchanges shards
# for heads by all-to-all, so that a GPU attends to the whole sequence with some of the heads. **USP** combines them.
# All of them give every GPU the same share, which on mixed GPUs leaves the fast ones waiting.
#
# **HexiSeq** ([arXiv 2605.07569](https://arxiv.org/abs/2605.07569)) makes shares uneven: of tokens, of heads, and of
# the groups that exchange them. The paper measures 1.11 × the best even layout on average and 1.19 × at most, on a
# testbed of H100 and A100.

# %%
from collections import Counter

import hexiopt as hx

cluster = hx.cluster("hexiseq_testbed")
cluster

# %% [markdown]
# ## Even and uneven layouts, from 16K to 256K tokens
#
# `Space(sequence=True)` allows sequence layouts. `hexiseq` is the paper's scheduler; `ring`, `ulysses` and `usp` are
# the even layouts, each with all of its own freedoms (data parallelism, micro-batches, recomputation, sharding).


# %%
def of_length(thousands: int) -> hx.Problem:
    """A GPT-style 7B on the testbed, with 8 sequences of that many times 1,024 tokens."""
    work = hx.Workload(global_batch=8, seq_len=1024 * thousands)
    return hx.Problem(cluster, hx.model("gpt_7b"), work, hx.Space(sequence=True))


SOLVERS = {"hexiseq": "uneven (HexiSeq)", "usp": "USP", "ulysses": "Ulysses", "ring": "Ring Attention"}
LENGTHS = (16, 32, 64, 128, 256)
found = {
    (length, solver): hx.solve(of_length(length), solver, 600, max_steps=200, progress=False)
    for length in LENGTHS
    for solver in SOLVERS
}
tokens_per_s = {
    f"{length}K": {label: found[length, solver].cost.tokens_per_s / 1e3 for solver, label in SOLVERS.items()}
    for length in LENGTHS
}
hx.plot.bars(tokens_per_s, unit="thousand tokens per second").figure

# %%
rows = []
for length in LENGTHS:
    ours = found[length, "hexiseq"]
    even = {label: found[length, solver] for solver, label in SOLVERS.items() if solver != "hexiseq"}
    best = min(even, key=lambda label: even[label].objective)
    rows.append(
        {
            "tokens": f"{length}K",
            "uneven (tokens/s)": ours.cost.tokens_per_s,
            "best even": best,
            "× best even": even[best].objective / ours.objective,
            "pipelines": len(ours.plan.pipelines),
        }
    )
hx.Frame.of(rows)

# %% [markdown]
# Uneven layouts are ahead at every length. The paper finds gains that grow with the context; here they do not grow
# steadily, because there is more than one way to be uneven, as the last column shows. At 64K tokens the best plan has
# two pipelines, one of H100 and one of A100, which take different numbers of sequences, each with an even layout. The
# even baselines can do that too, so the gain is smallest there. Where a single pipeline spans both machines, the layout
# itself must be uneven.
#
# ## Who holds how much of a sequence?
#
# The plan for 128K tokens has one pipeline with one stage, in which all sixteen GPUs share each sequence:

# %%
at = found[128, "hexiseq"]
[stage] = at.plan.pipelines[0].stages
gpu_of = [cluster.machines[m].gpu.name for m in cluster.machine_of]
shares = {}
for group in stage.parallelism.groups:
    for device, tokens, heads in zip(group.devices, group.tokens, group.heads, strict=True):
        shares.setdefault(gpu_of[device], []).append((tokens, heads))
for name, own in shares.items():
    for (tokens, heads), number in Counter(own).items():
        print(f"{number} × {name}: {tokens:,} tokens and {heads} heads each")

# %% [markdown]
# By peak FLOPS an H100 is worth more than three A100, but the plan gives it less than twice the tokens. The cost model
# knows, from measured runs, that kernels use less of an H100's peak, and a part of a step is bound by memory and links,
# in which the two GPUs differ less.
#
# ## Which freedom gives the gain?
#
# `hexiseq` has a switch for each kind of unevenness.

# %%
FREEDOMS = ("uneven_tokens", "uneven_heads", "uneven_groups")
variants = {"all even": dict.fromkeys(FREEDOMS, False)}
for kept in FREEDOMS:
    variants[f"{kept.replace('_', ' ')} only"] = {name: name == kept for name in FREEDOMS}
variants["all uneven"] = {}
gains = {label: {} for label in variants if label != "all even"}
for length in (128, 256):
    step_s = {
        label: hx.solve(of_length(length), "hexiseq", 600, max_steps=200, progress=False, **options).objective
        for label, options in variants.items()
    }
    for label in gains:
        gains[label][f"{length}K"] = 100 * (step_s["all even"] / step_s[label] - 1)
hx.plot.bars(gains, unit="throughput above even layouts (%)").figure

# %% [markdown]
# Uneven **tokens** are worth everything on this cluster of two machines. Uneven heads alone help a little at 256K; with
# uneven tokens, they and uneven groups have nothing left to balance. [Layouts](../../docs/results/layouts.md) asks the
# same on larger clusters.
#
# ## Together with pipelines
#
# HexiSeq takes data, tensor and pipeline parallelism as given. Here the search decides stage by stage whether a stage
# divides its matrices (TP) or its sequences. On HexiScale's second mixed cluster (32 GPUs of four types) at 128K
# tokens, three searches compete: pipelines with TP only, one stage with a sequence layout only, and both together.

# %%
mixed = hx.Problem(
    hx.cluster("hexiscale_setting_2"), hx.model("gpt_7b"), hx.Workload(global_batch=8, seq_len=128 * 1024)
)
ways = {
    "pipelines and TP only": ("portfolio", 2000, {}),
    "sequence layouts only": ("hexiseq", 400, {"sequence": True, "num_stages": 1}),
    "both together": ("portfolio", 2000, {"sequence": True}),
}
plans = {
    label: hx.solve(mixed, solver, 600, max_steps=steps, constraints=space, progress=False)
    for label, (solver, steps, space) in ways.items()
}
hx.plot.bars(
    {label: {"tokens per second": one.cost.tokens_per_s} for label, one in plans.items()}, unit="tokens per second"
).figure

# %%
joint = plans["both together"]
joint.plot()

# %%
joint.plan.stages()

# %% [markdown]
# Neither way alone is best. The joint plan is a pipeline of three stages, each with a sequence layout that suits its
# links: the A800 exchange heads over NVLink (an all-to-all of eight), the GeForce cards pass keys and values round
# rings, and the two slowest machines share one stage of sixteen GPUs of two types. Between the stages only activations
# cross the network, as in any pipeline.
#
# `hexiopt plan` hints at `space.sequence=true` where a sequence is long. [Long
# contexts](../../docs/results/long_context.md) and [joint plans](../../docs/results/joint.md) have longer searches on
# more clusters, and say where we lose.
