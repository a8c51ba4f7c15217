# %% [markdown]
# # A first plan
#
# Suppose a lab has two machines: one with two RTX 4090, one with four older RTX 3090, of which two share an NVLink
# bridge. Can it train Llama-2 7B, how fast, and which GPU should hold which layers? This notebook goes from the
# problem to a checked plan, and on to the questions that one asks next.

# %%
import hexiopt as hx

problem = hx.Problem(
    cluster=hx.cluster("small_mixed"),
    model=hx.model("llama2_7b"),
    workload=hx.Workload(global_batch=64, seq_len=2048),
)
problem

# %% [markdown]
# A *problem* has four parts: a cluster, a model, a workload, and the *plan space*, which is the set of plans that are
# allowed. All of them are immutable; `problem.replace(...)` returns a changed copy. Clusters and models come from a
# shipped name, a file or a mapping.
#
# `solve` searches. A budget in steps gives the same plan on every machine; without `max_steps` the search uses its
# time limit.

# %%
result = hx.solve(problem, "portfolio", seed=0, max_steps=6000, time_limit_s=600)
print(result)

# %% [markdown]
# **Step time** is the predicted duration of one optimiser step, **MFU** the share of all GPUs' peak that the model's
# own FLOPs use. The **lower bound** is a step time that no plan of the space can beat, and the **gap** is the distance
# to it: the most that a better search could still gain.
#
# ## The picture of a plan

# %%
result.plot()

# %% [markdown]
# **(a)** Each square is a GPU; its colour and label are those of its pipeline and stage. **(b)** The layers of each
# stage: faster GPUs hold more of them. **(c)** The step over time; each number is a micro-batch, the darker half its
# backward pass. **(d)** The memory of the fullest GPU of each stage.
#
# The same as a table, with one row per stage:

# %%
result.plan.stages()

# %% [markdown]
# `busy` is the share of the step in which a stage computes. A stage that is far less busy than the others waits for
# them; that is where a step loses its time. All of the time, part by part, for the GPUs that finish last:

# %%
result.cost.breakdown()

# %% [markdown]
# ## How good is it?
#
# `lower_bound` takes a time limit too, and what it returns holds whenever it stops. `above` attaches it to the result.

# %%
bounded = result.above(hx.lower_bound(problem, time_limit_s=10))
print(
    f"{bounded.cost.step_time_s:.2f} s a step; no plan takes less than {bounded.bound_s:.2f} s (gap {bounded.gap:.0%})"
)

# %% [markdown]
# A referee that was written without looking at any solver checks every plan that a solver returns. You can ask it too.

# %%
print(hx.check(problem, result.plan) or "Every rule is kept, and the memory of every GPU suffices.")

# %% [markdown]
# ## What if the plan were simpler?
#
# Constraints are part of the call. Here the search may use only stages of equal size, only one machine, or no tensor
# parallelism. Each of these plans lies in the space of the first search, so none should be faster.

# %%
variants = {
    "no constraint": {},
    "equal layers": {"uneven_layers": False},
    "one TP degree": {"uneven_tp": False},
    "no TP": {"max_tp": 1},
    "two pipelines": {"num_pipelines": 2},
    "only the RTX 3090": {"exclude": ("new",)},
    "only the RTX 4090": {"exclude": ("old",)},
}
solutions = {
    name: hx.solve(problem, max_steps=6000, time_limit_s=600, constraints=constraints)
    for name, constraints in variants.items()
}
step_s = {
    name: {"step time": solution.cost.step_time_s if solution.plan else None} for name, solution in solutions.items()
}
hx.plot.bars(step_s, unit="step time (s)", reference=bounded.bound_s).figure

# %% [markdown]
# The dashed line is the lower bound. A dash instead of a bar stands for a search without a plan, and its result says
# why:

# %%
print(solutions["only the RTX 4090"])

# %% [markdown]
# ## Save, load, price again
#
# A plan file holds the whole problem, so that it can be priced, explained and trained by itself. The command line
# reads it too: `hexiopt explain plan=plan.json`, `hexiopt train plan=plan.json`.

# %%
result.plan.save("plan.json")
loaded = hx.load_plan("plan.json")
loaded == result.plan

# %% [markdown]
# What would the *same plan* cost with shorter or longer sequences? `price` answers for any problem that has its GPUs
# and layers, and says whether it fits:

# %%
for seq_len in (1024, 2048, 4096):
    changed = problem.replace(workload=problem.workload.replace(seq_len=seq_len))
    cost = hx.price(changed, loaded)
    print(f"{seq_len:5,} tokens a sequence: {cost!r}")

# %% [markdown]
# Next: [a published case study](02_hexiscale_case_study.ipynb), [what each asymmetry is
# worth](../../docs/results/ablation.md), and [which machines to add](05_what_if.ipynb).
