# %% [markdown]
# # Training exactly as planned
#
# A plan with unlike pipelines and uneven stages is only worth something if a runtime can execute it, and if training
# with it learns the same as training without. This notebook plans a tiny Llama for five unequal GPUs, trains with that
# plan on the processes of this machine's CPU, and compares: losses with those of plain data parallelism, and the
# measured timeline with the predicted one.

# %%
import subprocess
import sys
from pathlib import Path

import hexiopt as hx

problem = hx.Problem(
    hx.cluster("small_mixed"),
    hx.model("tiny").replace(num_layers=6),
    hx.Workload(global_batch=16, seq_len=64, precision="fp32", optimizer_sharding=0),
    hx.Space(max_micro_batch_size=2),
)
FIVE = {"num_pipelines": 2, "max_tp": 1, "replicas": False, "exclude": ("old:3",)}  # five GPUs in two pipelines
result = hx.solve(problem, max_steps=400, time_limit_s=600, constraints=FIVE)
result.plan.save("unequal.json")
result.plan.stages()

# %% [markdown]
# For comparison, a plan that needs no planner: plain data parallelism on the two RTX 4090, each with the whole model.

# %%
plain = hx.solve(
    problem,
    max_steps=50,
    time_limit_s=600,
    constraints={"exclude": ("old",), "num_pipelines": 2, "num_stages": 1, "max_tp": 1},
)
plain.plan.save("plain.json")
plain.plan.stages()

# %% [markdown]
# ## Training
#
# `hexiopt train` starts a process per GPU of the plan. On a machine without GPUs these are CPU processes that talk
# over gloo; the program is the same. Both runs begin with the same weights and read the same data, the sources of
# Python's standard library.


# %%
def train(name: str) -> hx.TrainedRun:
    """Train with the plan `name`.json, and read the run back."""
    words = [f"plan={name}.json", "train.steps=20", "train.force=true", f"hydra.run.dir={name}"]
    subprocess.run([sys.executable, "-m", "hexiopt", "train", *words], check=True, capture_output=True)
    return hx.read_training(Path(name))


runs = {name: train(name) for name in ("unequal", "plain")}
runs["unequal"]

# %% [markdown]
# ## The same losses
#
# The data of a step depends only on the seed and the number of the step, and gradients are summed over unlike
# pipelines with the weights of their micro-batches. So both runs learn the same, up to the rounding of FP32 sums in
# another order:

# %%
pairs = list(zip(runs["unequal"].steps["loss"], runs["plain"].steps["loss"], strict=True))
rows = [
    {"step": step, "unequal plan": ours, "data parallelism": theirs, "difference": abs(ours - theirs)}
    for step, (ours, theirs) in enumerate(pairs, start=1)
    if step in (1, 2, 5, 10, 15, 20)
]
hx.Frame.of(rows, title="Loss in nats per token")

# %%
largest = max(abs(ours - theirs) / theirs for ours, theirs in pairs)
print(f"{len(pairs)} steps, largest relative difference of losses below 0.1 %: {largest < 1e-3}")

# %% [markdown]
# ## Predicted beside measured
#
# The upper panel is what the cost model predicts for two RTX 4090 and three RTX 3090. The lower one was measured here,
# with every GPU a process on a few shared cores. The clocks differ by a factor of many hundreds, but the *order* of
# operations is what the plan asks for: that of its schedule, stage by stage, in a pipeline of two stages and one of
# three.

# %%
runs["unequal"].plot()

# %% [markdown]
# The measured durations say nothing about GPUs. With `train.profile=` and what `hexiopt profile` measured of this
# machine, the prediction is for its processes instead, and seconds can be compared; `make demo` ends so. To check step
# times without a cluster, `hexiopt emulate` paces every process to the relative speed of its GPU and shapes the links
# between them; see [training](../../docs/training.md). How well predictions meet *published* runs on real GPUs is on
# the page [validation](../../docs/results/validation.md).
