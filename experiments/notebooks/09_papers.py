# %% [markdown]
# # Both papers, theirs beside ours
#
# Two papers lie behind this project: HexiScale ([arXiv 2409.01143](https://arxiv.org/abs/2409.01143)), which spreads
# pipelines over mixed GPUs, and HexiSeq ([arXiv 2605.07569](https://arxiv.org/abs/2605.07569)), which spreads long
# sequences over them. For every figure of theirs that can be had, this notebook shows the published number beside ours.
#
# Published numbers are measurements on GPUs, except where a paper says that it simulates or estimates. Ours are
# predictions of one cost model, from searches of a few seconds. So ratios can be compared, seconds and MFU hardly.
# [Results](../../docs/results/index.md) has longer searches, and where we lose.

# %%
from importlib.resources import files
from statistics import fmean, geometric_mean

import yaml

import hexiopt as hx


def published(name: str) -> dict:
    """The numbers of a paper, as experiments/data has them with their sources."""
    return yaml.safe_load(files("experiments").joinpath("data", f"{name}.yaml").read_text(encoding="utf-8"))


hexiscale, hexiseq = published("hexiscale"), published("hexiseq")
claims = []


def beside(claim: str, theirs: str, ours: str) -> None:
    """Keep a row of the table at the end, and print it."""
    claims.append({"claim": claim, "published": theirs, "here": ours})
    print(f"{claim}: published {theirs}; here {ours}.")


def found(problem: hx.Problem, solver: str, max_steps: int, **options: object) -> hx.Solution:
    """A search with a budget in steps, the same on any machine."""
    return hx.solve(problem, solver, 600, max_steps=max_steps, progress=False, **options)


# %% [markdown]
# ## HexiScale: mixed clusters of like FLOPS
#
# The paper sets three mixed clusters against homogeneous ones of A800 PCIe with nearly the same FLOPS. With the TFLOPS
# of each GPU from its released scheduler, the published differences can be recomputed.

# %%
SETTINGS = {
    "1": ("hexiscale_setting_1", "homogeneous_2x8_a800_pcie", ("llama2_7b", "llama2_13b")),
    "2": ("hexiscale_setting_2", "homogeneous_2x8_a800_pcie", ("llama2_7b", "llama2_13b")),
    "3": ("hexiscale_setting_3", "homogeneous_4x8_a800_pcie", ("llama_30b",)),
    "3_readme": ("hexiscale_setting_3_readme", "homogeneous_4x8_a800_pcie", ()),
}


def peak_flops(cluster: hx.Cluster) -> float:
    """Dense BF16 FLOP/s of all GPUs."""
    return sum(machine.num_gpus * machine.gpu.peak_flops("bf16") for machine in cluster.machines)


rows = []
for setting, (mixed, alike, _) in SETTINGS.items():
    ratio = peak_flops(hx.cluster(mixed)) / peak_flops(hx.cluster(alike))
    theirs = hexiscale["settings"][setting]["flops"]
    rows.append({"setting": setting, "published (%)": 100 * (theirs - 1), "recomputed (%)": 100 * (ratio - 1)})
hx.Frame.of(rows, title="FLOPS of the mixed cluster over the homogeneous one")

# %% [markdown]
# Settings 1 and 2 agree to the digit. Of setting 3 there are two versions, in the slides and in the README of the
# released code, and neither gives the published difference; we ship both.
#
# ## HexiScale: MFU, mixed beside homogeneous
#
# The README gives the MFU of HexiScale's plans, and of Megatron's on the A800 clusters.

# %%
mfu, ratios, ours, megatrons = {}, {}, {}, {}
for setting, (mixed, alike, models) in SETTINGS.items():
    for model in models:
        problem = hx.Problem(hx.cluster(mixed), hx.model(model))
        best = ours[setting, model] = found(problem, "local_search", 3000)
        if (alike, model) not in megatrons:
            megatrons[alike, model] = found(hx.Problem(hx.cluster(alike), hx.model(model)), "megatron", 150)
        megatron = megatrons[alike, model]
        name = f"setting {setting}, {model}"
        mfu[name] = {
            "HexiScale, published": hexiscale["settings"][setting]["mfu"][model],
            "mixed, predicted": 100 * best.cost.mfu,
            "Megatron on A800, published": hexiscale["settings"][setting]["megatron"][model],
            "Megatron on A800, predicted": 100 * megatron.cost.mfu,
        }
        said = mfu[name]["HexiScale, published"] / mfu[name]["Megatron on A800, published"]
        ratios[name] = {
            "published": said * hexiscale["settings"][setting]["flops"],
            "predicted": best.cost.tokens_per_s / megatron.cost.tokens_per_s,
        }
hx.plot.bars(mfu, unit="MFU (%)").figure

# %% [markdown]
# Predicted MFU is higher throughout: a prediction knows nothing of stragglers, data loading and the overheads of a
# young runtime, and the published runs on A800 went over TCP. It is so for *both* clusters, so the ratio of the two can
# be compared:

# %%
hx.plot.bars(ratios, unit="throughput of the mixed cluster over the homogeneous one").figure

# %%
said = hexiscale["homogeneous"]
own = [row["predicted"] for row in ratios.values()]
beside(
    "HexiScale, mixed over homogeneous, mean and most",
    f"{said['mean']:.2f} × and {said['most']:.2f} ×",
    f"{fmean(own):.2f} × and {max(own):.2f} × (Megatron only)",
)
gaps = {
    whose: min(row[f"Megatron on A800, {whose}"] - row[other] for row in mfu.values())
    for whose, other in (("published", "HexiScale, published"), ("predicted", "mixed, predicted"))
}
beside(
    "HexiScale, smallest gap in MFU without RDMA",
    f"{gaps['published']:.2f} points",
    f"{gaps['predicted']:.2f} points",
)

# %% [markdown]
# The paper's 0.83 × and 1.01 × are over Megatron, Galvatron and FSDP; the bars above are over Megatron alone. The
# smallest gap of 0.30 points is the one in the abstract of the paper's first version, which is called FlashFlex; its
# other one, 11.61 points against a cluster with RDMA, has no MFU beside it that could be compared.
#
# ## HexiScale: against planners that know mixed GPUs
#
# Published: 1.5 × to 2.4 × the throughput of Metis, AMP and Espresso on the same clusters. Our re-implementations of
# these planners search their published plan spaces under *our* cost model, and their plans run in our predicted
# runtime, with all of its overlap. That makes them stronger than the originals.

# %%
RIVALS = {"Metis (ATC 24)": "metis_atc24", "AMP": "amp", "Espresso": "espresso"}
rivals = {}
for setting, model in (("1", "llama2_7b"), ("2", "llama2_13b"), ("3", "llama_30b")):
    best = ours[setting, model]
    rivals[f"setting {setting}, {model}"] = {
        name: found(best.problem, solver, 120).objective / best.objective for name, solver in RIVALS.items()
    }
hx.plot.bars(rivals, unit="throughput of ours over theirs", reference=1.0).figure

# %%
own = [ratio for row in rivals.values() for ratio in row.values()]
said = hexiscale["rivals"]
beside(
    "HexiScale, over Metis, AMP and Espresso",
    f"{said['least']} to {said['most']} ×",
    f"{min(own):.2f} to {max(own):.2f} × (ours over our re-implementations)",
)

# %% [markdown]
# We do not find the published distance. A bar below 1 is a rival that is ahead within these budgets.
#
# ## HexiScale: against a random partition
#
# Published: 1.3 × to 3.3 × the estimated throughput, and earlier convergence. Here random partitions are completed as
# well as any others (layers, batches and recomputation are chosen optimally for them), so that only the partition
# differs.

# %%
problem = ours["2", "llama2_13b"].problem
partitions = {
    "both phases": hx.solver("hexiscale"),
    "phase 1 at random": hx.solver("hexiscale", partition=False),
    "all at random": hx.solver("random"),
}
compared = hx.compare(problem, partitions, 3, 600, 60, bound_time_limit_s=0, progress=False)
hx.plot.trajectories(compared, over="steps").figure

# %%
end_s = {row["solver"]: row["median_s"] for row in compared.summary()}
beside(
    "HexiScale, over a random partition",
    f"{hexiscale['random']['least']} to {hexiscale['random']['most']} ×",
    f"{end_s['phase 1 at random'] / end_s['both phases']:.2f} × with phase 1 at random, "
    f"{end_s['all at random'] / end_s['both phases']:.2f} × with all at random",
)

# %% [markdown]
# The order of the curves is as published. How large the distance is depends on how well a random partition is
# completed.
#
# ## HexiScale: the case study
#
# Eight GPUs, Llama-2 13B, and a network of 0.7 GB/s. The paper's batch is not known to us; 64 sequences are assumed
# ([the notebook on it](02_hexiscale_case_study.ipynb)).

# %%
case = hx.Problem(
    hx.cluster("hexiscale_case_study"), hx.model("llama2_13b"), hx.Workload(global_batch=64, seq_len=4096)
)
planned = found(case, "local_search", 3000)
even = found(case, "megatron", 300, constraints={"uneven_layers": False})
said = hexiscale["case_study"]
hx.plot.bars(
    {
        "Megatron": {"published": said["megatron_s"], "predicted": even.cost.step_time_s},
        "asymmetric": {"published": said["hexiscale_s"], "predicted": planned.cost.step_time_s},
    },
    unit="step time (s)",
).figure

# %%
beside(
    "HexiScale, case study, over Megatron",
    f"{said['megatron_s'] / said['hexiscale_s']:.2f} ×",
    f"{even.cost.step_time_s / planned.cost.step_time_s:.2f} ×",
)

# %% [markdown]
# ## HexiSeq: over the best even layout
#
# On its mixed testbed the paper measures 1.11 × over the best of Ring Attention, Ulysses and USP on average and 1.19 ×
# at most; in its simulations on three and four GPU types 1.36 × and 1.72 ×.

# %%
LONG = {
    "testbed": ("hexiseq_testbed", "gpt_7b", (16, 32, 64, 128)),
    "simulations": ("hexiseq_sim_1", "gpt_13b", (128, 256)),
}
over_even, bars = {}, {}
for name, (cluster, model, lengths) in LONG.items():
    for length in lengths:
        work = hx.Workload(global_batch=8, seq_len=1024 * length)
        long = hx.Problem(hx.cluster(cluster), hx.model(model), work, hx.Space(sequence=True))
        uneven = found(long, "hexiseq", 150)
        even_s = min(found(long, one, 150).objective for one in ("usp", "ulysses", "ring"))
        over_even.setdefault(name, []).append(even_s / uneven.objective)
    own, said = over_even[name], hexiseq[name]
    bars[f"{name}, mean"] = {"published": said["mean"], "predicted": geometric_mean(own)}
    bars[f"{name}, most"] = {"published": said["most"], "predicted": max(own)}
    beside(
        f"HexiSeq, {name}, mean and most",
        f"{said['mean']:.2f} × and {said['most']:.2f} ×",
        f"{geometric_mean(own):.2f} × and {max(own):.2f} ×",
    )
hx.plot.bars(bars, unit="throughput over the best even layout", reference=1.0).figure

# %% [markdown]
# This is where paper and prediction agree best. [Long contexts](07_long_context.ipynb) shows the layouts.
#
# ## HexiSeq: a mixed cluster against a homogeneous one
#
# The paper finds 48 H100 and 8 A100 within 0.5 % of the best even layout on 152 A100, which have nearly as many FLOPS.

# %%
work = hx.Workload(global_batch=8, seq_len=1024 * 128)
pair = {
    cluster: hx.Problem(hx.cluster(cluster), hx.model("gpt_13b"), work, hx.Space(sequence=True))
    for cluster in ("hexiseq_sim_4", "homogeneous_152_a100")
}
mixed = found(pair["hexiseq_sim_4"], "hexiseq", 150)
even_s = min(found(pair["homogeneous_152_a100"], one, 150).objective for one in ("usp", "ulysses", "ring"))
beside(
    "HexiSeq, 48 H100 + 8 A100 over 152 A100",
    f"within {100 * hexiseq['pairs']:.1f} %",
    f"{even_s / mixed.objective:.2f} × at 128K tokens",
)

# %% [markdown]
# This we do *not* reproduce. By efficiencies that were fitted to measured runs, an H100 is worth fewer A100 than their
# peaks say, so clusters of equal peaks are not equally fast. If every type were as efficient as an A100, the ratio
# would be 0.86 to 1.02 × ([long contexts](../../docs/results/long_context.md)).
#
# ## HexiSeq: how long scheduling takes
#
# Seconds depend on the machine, so they are not measured here. [Scheduling](../../docs/results/scheduling.md) states
# machine, limits and quality of the plans of ours.

# %%
beside(
    "HexiSeq, scheduling for 128 and 1,024 GPUs",
    " and ".join(f"{hexiseq['scheduling_s'][gpus]:g} s" for gpus in (128, 1024)),
    "0.9 s and 9.1 s (docs/results)",
)

# %% [markdown]
# ## All of them

# %%
hx.Frame.of(claims)

# %% [markdown]
# **What cannot be had.** Absolute TFLOPS and seconds of both papers, which need their GPUs; the convergence of training
# losses; and the curves of individual figures, of which only the ends stand in the text.
