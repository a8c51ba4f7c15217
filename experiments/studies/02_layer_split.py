# %% [markdown]
# # Uneven layers for Megatron-LM
#
# What does an uneven layer split gain for Megatron-LM as it is? On homogeneous and on mixed clusters, the portfolio
# plans within what Megatron-LM expresses (`space.preset=megatron`): once with equal layers in all stages, which is what
# Megatron-LM does by default, and once with any, which `--pipeline-model-parallel-layout` takes.
#
# Stages of equal layers may differ by one layer here, where the layers do not divide; Megatron-LM's default refuses
# then.

# %%
from dataclasses import replace

import pandas as pd

from experiments.app.configurations import named_cluster, named_model
from experiments.studies.frame.figures import framed, legend, row_bars
from experiments.studies.frame.page import conditions, show
from experiments.studies.frame.planners import OURS
from experiments.studies.frame.rows import credited, grid
from experiments.studies.frame.search import measured
from experiments.studies.frame.settings import quick
from experiments.studies.frame.words import change, span
from hexiopt.exports.presets import restrict
from hexiopt.exports.trainers.registry import TRAINERS
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload

_STEPS, _QUICK_STEPS = 1000, 20
_LIMIT_S = 600.0  # never reached: the steps bind
EQUAL, FREE = "equal layers", "any layers"
INSIDE = {EQUAL: [EQUAL], FREE: [EQUAL, FREE]}
MODELS = ("llama2_7b", "llama3_8b", "llama2_13b")
_SMALL = 0.0005


def clusters() -> dict[str, Cluster]:
    """Five homogeneous and five mixed clusters by their name in tables; a small one if `quick()`."""
    if quick():
        return {"small, mixed": named_cluster("small_mixed")}
    made = {
        "16 × A800 PCIe": named_cluster("homogeneous_2x8_a800_pcie"),
        "32 × A800 PCIe": named_cluster("homogeneous_4x8_a800_pcie"),
        "32 × H100 SXM": Cluster.of({"h100_80gb_sxm": 32}, 50.0, name="h100"),
        "32 × A100 SXM": Cluster.of({"a100_80gb_sxm": 32}, 25.0, name="a100"),
        "32 × RTX 4090": Cluster.of({"rtx_4090": 32}, 12.5, name="rtx_4090"),
    }
    mixed = (
        "hexiscale_setting_1",
        "hexiscale_setting_2",
        "hexiscale_setting_3",
        "hexiscale_case_study",
        "hexiseq_testbed",
    )
    return made | {f"{name}, mixed": named_cluster(name) for name in mixed}


# %%
specs = []
for name, cluster in clusters().items():
    for model in ("tiny",) if quick() else MODELS:
        workload = Workload(32, 512) if quick() else Workload()
        problem = restrict(Problem(cluster, named_model(model), workload), TRAINERS["megatron"])
        for split in (EQUAL, FREE):
            space = problem.space.replace(uneven_layers=split == FREE)
            labels = {"cluster": name, "model": model, "setting": f"{name} · {model}", "split": split}
            own = OURS.search(problem.replace(space=space), _LIMIT_S, labels)
            specs.append(replace(own, max_steps=_QUICK_STEPS if quick() else _STEPS))
rows = measured(specs)


# %%
def claims(gain: pd.DataFrame) -> list[str]:
    """The gains on homogeneous and on mixed clusters, and where there is none."""
    mixed = gain.index.str.endswith("mixed")
    said = []
    for kind, own in (("homogeneous", gain[~mixed]), ("mixed", gain[mixed])):
        values = own.stack().dropna()
        if len(values):
            without = int((values <= _SMALL).sum())
            where = f"in {without} of {len(values)} cases it gains nothing" if without else "it gains in each case"
            gains = f"{span(values, '.1%')}, {values.mean():.1%} on average"
            said.append(f"On {kind} clusters an uneven split gains {gains}; {where}.")
    return said


# %%
best = credited(grid(rows, "split", "setting"), INSIDE)
gain = (best.loc[EQUAL] / best.loc[FREE] - 1).rename("gain")
about = rows.drop_duplicates("setting").set_index("setting")[["cluster", "model"]]
table = about.join(gain).pivot(index="cluster", columns="model", values="gain")
table = table.reindex(index=about["cluster"].unique(), columns=about["model"].unique())
figure, (ax,) = framed(
    "What an uneven layer split gains for Megatron-LM",
    f"Throughput over that of equal layers within space.preset=megatron, by our cost model; {_STEPS:,} steps each",
    height=7.5,
    width=9.5,
)
row_bars(ax, table)
ax.set_xlabel("more throughput (%)")
legend(figure, ax, 3)
shown = (table + 1).map(change).replace("", "no plan").rename_axis("cluster")
show({"More throughput than with equal layers": shown}, claims(table), figure)

# %%
assert (table.stack() >= -1e-9).all(), "Any layers hold equal ones."
assert quick() or table[table.index.str.endswith("mixed")].mean(axis=None) > 0.2, (
    "Uneven layers gain on mixed clusters."
)

# %% [markdown]
# The step time of the best plan of equal layers over that of the best of any, less 1. A plan of equal layers is one of
# any layers too, so that the latter is credited with the better of both searches. H100, A100 and RTX 4090 clusters: 8
# GPUs a machine; 50, 25 and 12.5 GB/s a machine.

# %%
conditions(specs, rows)
