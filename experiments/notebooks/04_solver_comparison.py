# %% [markdown]
# # Comparing solvers
#
# Which solver should one use, and how does one tell? A fair comparison gives every solver the same problem and several
# seeds, looks at the whole search rather than at its end, and knows a lower bound, because a lead of one solver over
# another means little when both are far from what is possible. This notebook shows all of it, and then how small
# problems are *proved* to be solved.

# %%
import hexiopt as hx
from experiments.studies.orders.comparison import compare, summary
from experiments.studies.orders.picture import draw_beside_optimum, draw_ratios
from experiments.studies.orders.pipelines import sample

hx.solvers()

# %% [markdown]
# `planner`s search the whole plan space, `baseline`s the published one of another system, and `oracle`s prove what
# they find.
#
# ## Anytime curves
#
# The problem is Llama-2 7B on HexiScale's second mixed cluster (32 GPUs of four types). A step means something else to
# each solver, so each has its own budget in steps, and the curves are over seconds of the machine that ran them. Bands
# span three seeds.

# %%
problem = hx.Problem(hx.cluster("hexiscale_setting_2"), hx.model("llama2_7b"))
steps = {"random": 200, "hexiscale": 60, "local_search": 200, "portfolio": 400}
results = [
    hx.solve(problem, name, 600, seed, max_steps, progress=False)
    for name, max_steps in steps.items()
    for seed in range(3)
]
bound_s = hx.lower_bound(problem, time_limit_s=5)
compared = hx.Comparison.among(problem, results, bound_s)
compared.plot()

# %%
compared.summary()

# %% [markdown]
# The dotted line is the lower bound: no plan of this space can be below it. It turns "12 % better than random" into a
# statement about what is left to gain.
#
# ## The default at work
#
# `portfolio` walks from candidate to candidate by small moves, four walks at different temperatures, and draws those
# moves more often that lowered the step time more for their work. Its moves are called `walk.NAME`; those without
# `walk.` belong to the finish on the best plans, and to the annealing of `local_search`. Each move counts how often it
# was tried, how often it gave a valid candidate, and how often that was the best so far. Counts are summed over the
# seeds, and the moves that helped most often come first.

# %%
compared.operators()

# %% [markdown]
# The same as a picture: what the default's walks try, and what improves on the best candidate so far. Moves are shown
# that make more than one in a hundred tries.

# %%
walks = [row for row in compared.operators() if row["solver"] == "portfolio" and row["operator"].startswith("walk.")]
tried, improved = (sum(row[name] for row in walks) for name in ("proposed", "improved"))
parts = {
    row["operator"].removeprefix("walk."): {
        "of the tries": 100 * row["proposed"] / tried,
        "of the improvements": 100 * row["improved"] / max(1, improved),
    }
    for row in sorted(walks, key=lambda row: -row["improved"])
    if row["proposed"] > tried / 100
}
hx.plot.bars(parts, unit="share (%)").figure

# %% [markdown]
# ## Proofs for small problems
#
# With a handful of GPUs, `exact` finds the best plan *and* proves it: it divides the space into cases, bounds each
# from below, and closes all whose bound is not below the best plan found. Tests hold it to brute force over every plan
# of the smallest problems. Two solvers on ever larger clusters of two RTX 4090 and some RTX 3090:

# %%
tiny = hx.model("tiny")
work = hx.Workload(global_batch=8, seq_len=512, schedule="1f1b", recompute="none", optimizer_sharding=0)
rows, shares = [], {}
for others in (0, 1, 2):
    gpus = {"rtx_4090": 2} | ({"rtx_3090": others} if others else {})
    small = hx.Problem(
        hx.Cluster.of(gpus, inter_gb_per_s=25), tiny, work, hx.Space(replicas=False, max_micro_batch_size=2)
    )
    proved = hx.solve(small, "exact", 600, max_steps=500_000, progress=False)
    portfolio = hx.solve(small, "portfolio", 600, max_steps=400, progress=False)
    compute_s = hx.lower_bound(small, time_limit_s=0)
    rows.append(
        {
            "GPUs": sum(gpus.values()),
            "exact (ms)": 1e3 * proved.objective,
            "its bound (ms)": 1e3 * proved.bound_s,
            "status": str(proved.status),
            "portfolio (ms)": 1e3 * portfolio.objective,
            "portfolio above the optimum (%)": 100 * (portfolio.objective / proved.objective - 1),
        }
    )
    shares[f"{sum(gpus.values())} GPUs"] = {
        "best plan, proved": 1e3 * proved.objective,
        "portfolio": 1e3 * portfolio.objective,
        "bound without a search": 1e3 * compute_s,
    }
hx.Frame.of(rows)

# %%
hx.plot.bars(shares, unit="step time (ms)").figure

# %% [markdown]
# `optimal` means that bound and plan coincide. The gap between the last two bars is what the proof had to close: the
# bound without a search knows only the speed of the GPUs, not that layers are whole, that pipelines have bubbles and
# that messages take time.

# %% [markdown]
# ## Optimal schedules of small pipelines
#
# Solvers choose stages; in which order a stage runs its micro-batches, the schedule says. How much would a better order
# give? For small pipelines constraint programming answers: of all orders of forwards, backwards and gradients of
# weights that memory has room for, it finds the one that ends first, and proves it. Random pipelines of 2 to 5 unlike
# stages and 3 to 8 micro-batches, in ticks; the gradients of weights of a micro-batch are one block. This is a step of
# the first with split backwards, in the order of 1F1B, and below it the optimal schedule. Numbers are micro-batches.

# %%
draw_beside_optimum(sample(1)[0])

# %% [markdown]
# Stage 2 is the slowest. Under 1F1B it has three micro-batches in flight and waits for the first to come back; the
# optimal schedule has it run five forwards before, for which there is memory.
#
# Is that all? For forty pipelines the order is also that of 1F1B with other numbers of micro-batches in flight, `the
# best` of all that fit into memory and do not rise from stage to stage. Whole backwards compute both gradients at once.

# %%
compared = compare(sample(40))
summary(compared)

# %%
draw_ratios(compared)

# %% [markdown]
# It is almost all: with the best numbers in flight few pipelines are left more than 2 % from the optimum.
