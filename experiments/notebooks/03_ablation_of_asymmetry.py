# %% [markdown]
# # What is each asymmetry worth?
#
# A planner for mixed GPUs may give the stages of a pipeline different numbers of layers and TP degrees, let pipelines
# differ, share the batch unevenly, recompute here and not there, and replicate a single stage. Each freedom makes the
# search harder and the runtime more complicated, so it should earn its place. This notebook turns off each of them on
# three clusters, over several seeds.

# %%
from statistics import median

import hexiopt as hx

SEEDS = range(3)
problems = {
    "lab: 2 × 4090, 4 × 3090": hx.Problem(
        hx.cluster("small_mixed"), hx.model("llama2_7b"), hx.Workload(global_batch=64, seq_len=2048)
    ),
    "HexiScale's setting 1: 40 GPUs": hx.Problem(hx.cluster("hexiscale_setting_1"), hx.model("llama2_7b")),
    "HexiScale's setting 2: 32 GPUs": hx.Problem(hx.cluster("hexiscale_setting_2"), hx.model("llama2_7b")),
}
FREEDOMS = {
    "uneven_layers": "equal layers in a pipeline",
    "uneven_tp": "one TP degree",
    "uneven_batch": "equal batches of pipelines",
    "uneven_structure": "pipelines all alike",
    "recompute_per_stage": "one recompute policy",
    "replicas": "no replicated stages",
}
WHOLE, NONE = "the whole space", "none of the freedoms"
spaces = (
    {WHOLE: {}} | {label: {name: False} for name, label in FREEDOMS.items()} | {NONE: dict.fromkeys(FREEDOMS, False)}
)

# %% [markdown]
# ## The searches
#
# Three clusters, eight plan spaces, three seeds: 72 annealing searches of 300 steps each.

# %%
found = {
    (cluster, label): [
        hx.solve(problem, "local_search", 600, seed, 300, constraints=off, progress=False) for seed in SEEDS
    ]
    for cluster, problem in problems.items()
    for label, off in spaces.items()
}
rows = []
for label in spaces:
    row = {"plan space": label}
    row |= {f"{cluster} (s)": median(run.objective for run in found[cluster, label]) for cluster in problems}
    rows.append(row)
hx.Frame.of(rows, title="Median step time over seeds")

# %% [markdown]
# ## Credit where it is due
#
# A search may miss a plan. But every plan of a restricted space is valid in the whole space, and every plan of the
# space without any freedom is valid in all others. Each space is therefore *credited* with the best plan found inside
# it. What is left is the loss that the restriction itself causes, as far as these searches know.


# %%
def best_s(cluster: str, label: str) -> float:
    """The best step time of any search whose space lies inside that of `label`."""
    inside = {WHOLE: list(spaces), NONE: [NONE]}.get(label, [label, NONE])
    return min(run.objective for one in inside for run in found[cluster, one])


loss = {
    label: {cluster: 100 * (best_s(cluster, label) / best_s(cluster, WHOLE) - 1) for cluster in problems}
    for label in spaces
    if label != WHOLE
}
hx.plot.bars(loss, unit="longer step without it (%)").figure

# %% [markdown]
# **Losses do not add up.** One freedom often makes up for another: where all pipelines must be alike, uneven layers
# still balance each of them. So the loss of a single freedom understates what it does, and on the two larger clusters
# the last group, without any of them, says far more than the sum of the others:

# %%
for cluster in problems:
    single = sum(own[cluster] for label, own in loss.items() if label != NONE)
    print(f"{cluster:32} sum of single losses {single:5.1f} %, all at once {loss[NONE][cluster]:5.1f} %")

# %% [markdown]
# On the small lab the sum is the larger one, which cannot be right: with so few GPUs each restricted search is stopped
# before it has found what its space contains.
#
# **What a freedom is worth depends on the cluster.** Uneven layers matter everywhere, because they are what lets a
# slow GPU help without holding up the fast ones. Machines of eight like GPUs hardly need replicated stages.
#
# ## How sure is that?
#
# The spread over seeds says how much of a difference may be luck of the search. Where the lines of two bars overlap,
# longer searches are needed before one draws a conclusion: with so small a budget, a smaller space is even searched
# better now and then than the whole one.

# %%
spread = {
    label: {
        cluster: [100 * (run.objective / best_s(cluster, WHOLE) - 1) for run in found[cluster, label] if run.plan]
        for cluster in problems
    }
    for label in spaces
}
hx.plot.bars(spread, unit="step time above the best known plan (%), median and range of three seeds").figure

# %% [markdown]
# ## With and without, side by side
#
# The plan of the whole space on HexiScale's second setting, and below it the one without any freedom:

# %%
setting = "HexiScale's setting 2: 32 GPUs"
hx.plot.layers(min(found[setting, WHOLE], key=lambda run: run.objective)).figure

# %%
hx.plot.layers(min(found[setting, NONE], key=lambda run: run.objective)).figure

# %% [markdown]
# The study `python -m experiments.studies ablation` asks the same with longer searches and more settings; its page is
# [What each asymmetry is worth](../../docs/results/ablation.md).
