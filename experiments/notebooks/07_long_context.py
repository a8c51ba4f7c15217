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
import hexiopt as hx

cluster = hx.cluster("hexiseq_testbed")
cluster

# %% [markdown]
# ## Even and uneven layouts, from 16K to 256K tokens
#
# `space.sequence` allows sequence layouts. `hexiseq` is the paper's scheduler, `ring`, `ulysses` and `usp` are the
# even layouts, each with all of its own freedoms (data parallelism, micro-batches, recomputation, sharding).

# %%
LENGTHS = {f"{length}K": 1024 * length for length in (16, 64, 256)}
problems = {
    name: hx.Problem(cluster, hx.model("gpt_7b"), hx.Workload(global_batch=8, seq_len=seq_len), hx.Space(sequence=True))
    for name, seq_len in LENGTHS.items()
}
SOLVERS = {"hexiseq": "HexiSeq (uneven)", "usp": "USP", "ulysses": "Ulysses", "ring": "Ring Attention"}
found = {
    (name, solver): hx.solve(problem, solver, 600, max_steps=200, progress=False)
    for name, problem in problems.items()
    for solver in SOLVERS
}
tokens_per_s = {
    name: {label: found[name, solver].cost.tokens_per_s / 1e3 for solver, label in SOLVERS.items()} for name in problems
}
hx.plot.bars(tokens_per_s, unit="thousand tokens/s").figure

# %%
rows = []
for name in problems:
    ours = found[name, "hexiseq"].cost.tokens_per_s
    even = {label: found[name, solver].cost.tokens_per_s for solver, label in SOLVERS.items() if solver != "hexiseq"}
    best = max(even, key=lambda label: even[label])
    rows.append({"tokens": name, "uneven (tokens/s)": ours, "best even": best, "× best even": ours / even[best]})
hx.Frame.of(rows)

# %% [markdown]
# ## Where does the gain come from?
#
# `hexiseq` has a switch for each kind of unevenness. Uneven **tokens** are worth nearly everything; with them, uneven
# heads and groups have little left to balance.

# %%
at = problems["64K"]
FREEDOMS = ("uneven_tokens", "uneven_heads", "uneven_groups")
variants = {"all uneven": {}} | {f"without {name.replace('_', ' ')}": {name: False} for name in FREEDOMS}
variants["all even"] = dict.fromkeys(FREEDOMS, False)
layouts = {
    label: hx.solve(at, "hexiseq", 600, max_steps=200, progress=False, **options) for label, options in variants.items()
}
hx.plot.bars(
    {label: {"step time": one.cost.step_time_s} for label, one in layouts.items()}, unit="step time at 64K tokens (s)"
).figure

# %% [markdown]
# ## Together with pipelines
#
# HexiSeq takes data, tensor and pipeline parallelism as given. Here the search decides stage by stage whether a stage
# divides its matrices (TP) or its sequences. A model of 70 billion parameters on 32 GPUs of three generations needs
# both:

# %%
large = hx.Problem(hx.cluster("hexiseq_sim_1"), hx.model("gpt_70b"), hx.Workload(global_batch=8, seq_len=131072))
alone = hx.solve(large, "portfolio", 600, max_steps=150, progress=False)
joint = hx.solve(large, "portfolio", 600, max_steps=150, progress=False, constraints={"sequence": True})
print(f"pipelines and TP only:  {alone.cost.tokens_per_s:8,.0f} tokens/s")
print(f"with sequence layouts:  {joint.cost.tokens_per_s:8,.0f} tokens/s")

# %%
joint.plot()

# %%
joint.plan.stages()
