# %% [markdown]
# # Your own sweep
#
# `hexiopt plan -m` plans for every combination of some values, and `hexiopt collect` makes one table of the jobs. This
# notebook compares solvers in such a table. Run it on yours, `python experiments/notebooks/your_sweep.py
# results.csv` (or results.parquet), or with `--quick`, which makes a small sweep first.

# %%
import subprocess
import sys
from pathlib import Path

import pandas as pd

from experiments.studies.frame.figures import framed, legend, relative_bars, save

OUT = Path("results") / "notebooks"
OUT.mkdir(parents=True, exist_ok=True)
SWEEP = ["cluster=small_mixed", "model=tiny", "solver=random,metis", "seed=0,1", "solver.max_steps=20"]
if "--quick" in sys.argv:
    folder = OUT / "sweep"
    verbs = [["plan", "-m", *SWEEP, f"hydra.sweep.dir={folder}"], ["collect", f"collect.folders=[{folder}]"]]
    for words in (verbs[0], [*verbs[1], f"hydra.run.dir={OUT}"]):
        subprocess.run([sys.executable, "-m", "experiments.cli", *words], check=True, stdout=subprocess.DEVNULL)
    table = OUT / "results.csv"
else:
    table = Path(sys.argv[1] if len(sys.argv) > 1 else "results.csv")
rows = pd.read_parquet(table) if table.suffix == ".parquet" else pd.read_csv(table)
print(f"{len(rows)} jobs, {(rows['exit_code'] == 0).sum()} with a plan")

# %% [markdown]
# The columns are the overridden keys and the predictions of each job's plan. `message` says why a job has no plan.

# %%
print(rows[["result.solver", "result.seed", "result.step_time_s", "message"]].fillna("").to_string(index=False))

# %% [markdown]
# One number per solver: the geometric mean of its step time over the best that any solver found with the same seed, so
# that all seeds weigh the same.

# %%
step_s = rows.pivot_table(index="result.seed", columns="result.solver", values="result.step_time_s")
over = step_s.div(step_s.min(axis=1), axis=0)
print((over.prod() ** (1 / over.count())).map("{:.3f} × the best plan".format).to_string())

# %%
figure, (ax,) = framed("Step time over the best of each seed", str(table), width=7.0, height=4.0)
relative_bars(ax, over.rename(index="seed {}".format))
ax.set_ylabel("step time (best = 1)")
legend(figure, ax, 4)
save(figure, OUT / "your_sweep.png")
print(OUT / "your_sweep.png")
