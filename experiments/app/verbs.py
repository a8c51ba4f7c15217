"""The verbs of the command line and what each does. The verb `x` is `run` in `experiments/x.py`.

`import` is a word of Python's, so its module has another name.
"""

from hexiopt.own_packages import own_package

VERBS = {
    "plan": "finds a plan and prints it; writes plan.json, plan.png, timeline.json, report.html",
    "compare": "runs compare.solvers=[...] on one problem; writes comparison.csv, comparison.png, plan.json",
    "fit": "says whether it fits, how fast, the longest context, the most layers; writes fit.json and plans",
    "page": "serves a page in your browser, for this machine alone, that plans for the cards you name",
    "whatif": "says what other machines and links would give and cost; writes whatif.csv, whatif.png",
    "price": "prices and checks the plan file plan=...; writes plan.json with a new prediction",
    "replan": "plans again after plan=... without lost=[...] or on a changed cluster; writes plan.json, replan.json",
    "train": "trains with plan=... or a plan found first; writes checkpoints, metrics.jsonl, timeline.json, loss.png",
    "emulate": "trains plans of emulate.solvers=[...] on an emulated cluster; writes emulation.csv, emulation.png",
    "export": "makes files of export.format=... for a plan, or a Hugging Face model of export.checkpoint=...",
    "import": "prices the layout file=... of another trainer format=..., and plans a better one; writes plan.json",
    "explain": "shows where every value of a plan's cost comes from, and what binds",
    "validate": "predicts the measured runs of data=FILE.csv; writes validation.csv, validation.png",
    "calibrate": "fits a cluster's factors to run=FOLDER, or the cost model's constants to data=FILE.csv",
    "profile": "measures this machine's GPUs and links, or its CPU; writes cluster.yaml, profile.json",
    "discover": "reads outputs of nvidia-smi, Slurm or Kubernetes, or a hostfile; writes cluster.yaml, unknowns null",
    "collect": "gathers the jobs of a sweep; writes results.csv (and results.parquet with pyarrow)",
}
_MODULES = {"import": "import_plan"}


def module_of(verb: str) -> str:
    """The name of a verb's module."""
    return f"{own_package('experiments')}.{_MODULES.get(verb, verb)}"
