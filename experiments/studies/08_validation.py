# %% [markdown]
# # Predictions beside published training runs
#
# How far are predicted step times and memory from what others measured?
#
# Errors are in percent of the source's own metric; bias is of step times, + where they are predicted too long; ρ is the
# rank correlation of the worst family, one model on one cluster, of eight rows or more. With `hexiopt validate` and
# `data=FILE.csv` the same tables are of runs of one's own, whose columns and words it reads as people write them
# (`experiments/validation/metric_names.py`); what is not priced yet it skips, in lines that say why
# (`experiments/validation/features.py`). Our own executor's runs on an H100 have
# [another page](executor.md#on-one-h100).

# %%
import csv
from collections.abc import Sequence

import pandas as pd

from experiments.reports.validation import Errors, validation_figure
from experiments.studies.frame.page import show
from experiments.studies.frame.settings import quick
from experiments.validation.predict import Case
from experiments.validation.runs import FAMILY, Runs, layer_errors
from experiments.validation.score import gpu_types
from experiments.validation.shipped import LEFT_OUT, RUNS
from hexiopt.numbers.constants import CALIBRATION
from hexiopt.reading import read_mapping
from hexiopt.study.jobs import provenance


# %%
def runs_of(name: str) -> Runs:
    """The runs of a file of `experiments/data`; a quick study takes every eighth."""
    return Runs.of(RUNS.with_name(name), every=8 if quick() else 1)


def table(lines: Sequence[Errors], first: str = "source", second: str = "GPU") -> pd.DataFrame:
    """The errors of groups as texts."""
    rows = [
        {
            first: line.name,
            second: line.gpu,
            "rows": str(line.num_rows),
            "mean": f"{line.mean_percent:.1f}",
            "median": f"{line.median_percent:.1f}",
            "90th": f"{line.p90_percent:.1f}",
            "bias": f"{line.bias_percent:+.1f}".replace("-", "−"),
            "ρ": "" if line.rho is None else f"{line.rho:.3f}",
        }
        for line in lines
    ]
    wide = pd.DataFrame(rows).set_index(first)
    return wide if (wide["ρ"] != "").any() else wide.drop(columns="ρ")


def predicted(runs: Runs) -> str:
    """How many runs are predicted, and why others are not, the most frequent reason first."""
    reasons = sorted(runs.skipped_lines.items(), key=lambda pair: -len(pair[1]))
    why = "; ".join(f"{reason} ({len(lines)})" for reason, lines in reasons)
    return f"{len(runs.priced)} of {len(runs.rows)} runs are predicted" + (f"; not: {why}." if why else ".")


def median_of(lines: Sequence[Errors], kind: str) -> float:
    """The median error of a line."""
    return next((line.median_percent for line in lines if kind in (line.name, line.gpu)), 0.0)


# %%
dense = runs_of(RUNS.name)
types, layers = dense.by_type(), layer_errors()
show(
    {"": table(dense.by_source())},
    [predicted(dense)],
    validation_figure(dense.predictions, "Predicted and measured step times of published runs"),
    caption="Predicted and measured step times of published runs",
)
show({"BF16 and FP16, by GPU type": table(types).set_index("GPU")} if types else {})
assert quick() or median_of(types, "h100 sxm") <= 4, "Runs on H100 are predicted within 4 % at the median."
assert quick() or median_of(types, "a100 sxm") <= 4, "Runs on A100 are predicted within 4 % at the median."
show({"One model on one cluster": table(dense.by_family())} if dense.by_family() else {})

# %% [markdown]
# What is far off: FP8 with scaled rows in torchtitan, whose kernels were then no faster than BF16 (the source says so),
# and its three runs with sequences of 131,072 tokens and more, predicted too fast; nanotron's two runs on 512 GPUs with
# one micro-batch, measured at 5 and 10 % of the peak; MT-NLG (llm-analysis).
#
# **AMP's mixed cluster** (V100 and T4, 21 rows). The aim was ρ ≥ 0.85. Two of the rows, TP 2 × 8 stages at micro-batch
# 1 and TP 4 × 4 stages at 2, took 3.8 and 3.9 s where the same layouts with larger micro-batches took 1.8 to 2.1 s.
# They alone have messages between V100 machines as small as 1 MB, 64 of them each way through an interface in a step,
# so that both lost about 30 ms a message, if that is the reason. No other row shows such a time: not 32 messages of 2
# MB there, nor 64 of 1 MB and 128 of 0.5 MB between T4 machines. A constant for it would have these two rows alone.

# %%
ODD = ((2, 8, 1), (4, 4, 2))  # TP, stages and micro-batch of the two


def is_in_order(case: Case) -> bool:
    """Whether a row is of AMP's mixed cluster, but not one of the two."""
    row = case.row
    return "V100" in row.gpu and (row.tp, row.pp, row.micro_batch) not in ODD


for line in dense.errors(lambda case: ("without the two", gpu_types(case)), FAMILY, is_in_order):
    errors = f"{line.median_percent:.1f} % at the median, {line.mean_percent:.1f} % on average, ρ {line.rho:.2f}"
    show(claims=[f"Without the two: {errors}."])
    assert (line.rho or 0) >= 0.85, "AMP's mixed layouts but two are predicted in order."

# %% [markdown]
# ## Layers and memory
#
# Forward and backward of 2,343 layers that Zorse measured on twelve GPU types. A T4 is twice as fast in these bursts as
# in AMP's long runs, which the catalogue stands for (`t4_burst`).

# %%
show({"": table(layers, second="GPU, precision")})
assert quick() or median_of(layers, "all") <= 10, "Layers are predicted within 10 % at the median."

# %%
peaks = dense.of_peaks()
show(
    {"Peaks of memory": table(peaks, second="peak")} if peaks else {},
    notes="SimuMax's tensors are predicted low since in Megatron the largest weight gradient stands beside the rest in "
    "FP32; torchtitan's allocator held logits of long sequences in FP32, for the loss. What an allocator held is more "
    "than the 1 % that we reserve beyond tensors: a plan at 78.5 of 78.6 GiB is a plan nobody should run; leave 6 %. "
    "Bytes that our own runtime holds are predicted to the byte for weights, gradients and optimiser states, and of "
    "activations within 1 % (`pytest tests/experiments/lab tests/runtime/test_memory_use.py`).",
)

# %% [markdown]
# ## Runs that no constant was fitted to
#
# Fifteen more runs of torchtitan's documentation, in view of which the rules of how torchtitan works were made; seven
# steps of our own executor on one H100; and 27 of Megatron-LM's functional tests, 12 layers of width 512 on eight H100,
# whose steps are all host: priced by the 2 ms that a pass through a layer takes at least in Megatron, the most by which
# none of them is predicted too slow.

# %%
others = {name: runs_of(f"{name}_runs.csv") for name in ("held_out", "own_h100", "small_model")}
show({"": table([line for runs in others.values() for line in runs.by_source()])})
assert quick() or all(line.median_percent <= 6 for line in others["held_out"].by_source()), (
    "Held-out runs are within 6 %."
)

# %% [markdown]
# ## Constants
#
# `python -m experiments.calibrate`, or `hexiopt calibrate data=FILE.csv` with runs of your own, fits them to the runs
# above whose precision is stated and to 800 of the layers. They begin at others' measurements of operators and links,
# where there are any (`experiments/calibrate.py` has the sources), the rest at guesses, some of them made in view of
# the rows; a prior holds them there: one twice as large as it began weighs as a row that is 40 % off. Runs of one
# layout in several releases weigh together as one row, all layers of a GPU type and precision as five.

# %%
constants = read_mapping(CALIBRATION)["constants"]
show(
    {
        "": pd.DataFrame(
            {f"`{name}`": {key: str(fact) for key, fact in facts.items()} for name, facts in constants.items()}
        ).T.rename_axis("constant")
    }
)

# %% [markdown]
# The fit without each source in turn, from the constants in use (`python -m experiments.calibrate --leave-one-out`):
# the median errors of that source, with the interval that holds them in nine of ten resamples. Some starting values
# were chosen with the rows in view, so that these errors are not quite those of runs never seen. Sources help each
# other little where one has most rows of its kind. The share of the peak that attention reaches on H100 is measured,
# not fitted: at nine tenths of the 333 TFLOPS that FlashAttention-2 was measured at (Shah et al., arXiv 2407.08608,
# figure 5). With it free, torchtitan's three runs of 131,072 tokens and more would move it, and products would make up
# for it.

# %%
with LEFT_OUT.open(encoding="utf-8") as file:
    left_out = pd.DataFrame(csv.DictReader(file))
when = left_out[["date", "code"]].drop_duplicates()
show(
    {"": left_out.drop(columns=["date", "code"]).set_index("source")},
    [f"Fitted {row.date}; code {row.code}." for row in when.itertuples()],
)

# %% [markdown]
# ## Models with experts
#
# Published runs of models with experts (`hexiopt validate data=experiments/data/expert_runs.csv`), which are read as
# any other (`experiments/data/expert_models.yaml`): a group that shares experts is EP devices, each replica of TP
# devices in a machine. What parts of a layer a run recomputes beside whole layers is taken as nothing.

# %%
mixtures = runs_of("expert_runs.csv")


def maker(case: Case) -> str:
    """Hopper or Blackwell; another GPU's name."""
    kind = gpu_types(case)
    return next((name for name, gpus in _MAKERS.items() if kind.split()[0] in gpus), kind)


_MAKERS = {"H100, H800": ("h100", "h800"), "Blackwell": ("b200", "b300", "gb200", "gb300")}


def is_pretraining(case: Case) -> bool:
    """Whether a run is pretraining in Megatron on those GPUs: sources of fine-tuning count tokens of padding."""
    row = case.row
    return case.framework.startswith("megatron") and not row.says("sft", "lora") and maker(case) in _MAKERS


by_framework = mixtures.errors(lambda case: (case.framework, maker(case)), of=is_pretraining)
by_maker = mixtures.errors(lambda case: ("all", maker(case)), of=is_pretraining)
by_model = mixtures.errors(lambda case: (case.row.model_name, maker(case)), of=is_pretraining)
order = sorted(by_framework, key=lambda line: (line.name, line.gpu))
show(
    {
        "Pretraining, by framework (`hexiopt/numbers/frameworks.yaml`)": table([*order, *by_maker], "framework"),
        "By model": table(sorted(by_model, key=lambda line: (line.name, line.gpu)), "model"),
    },
    [predicted(mixtures)],
)
assert quick() or median_of(by_maker, "H100, H800") <= 11, (
    "Pretraining with experts is within 11 % at the median on H100."
)
assert quick() or median_of(by_maker, "Blackwell") <= 15, (
    "Pretraining with experts is within 15 % at the median on Blackwell."
)

# %% [markdown]
# Few numbers are of frameworks with experts. The fused one leaves 0.2 of all-to-alls and 0.2 of permutation, activation
# and casts, by tables of Megatron-Bridge that are not among these runs, as the 5 ms of the host for a pass through a
# layer in 2025. Overlap leaves 0.39 of all-to-alls by one pair of runs, without and with it (24.8 and 21.1 s, the first
# among these). All else is operators' measurements by SimuMax and the constants of dense models.
#
# What is far off: GB200 in BF16, too slow for Qwen3-235B, since products of Blackwell in BF16 have the share of the
# peak that SimuMax's B200 reaches, and attention of 128K tokens for the same reason; pipelines of 32 stages for 94
# layers with three ranges each, since a range of ours has at least a layer; gpt-oss, whose heads of 64 and sinks slow
# attention; Nemotron's recurrences and 22 of 512 experts, too fast; fine-tuning, where padding is counted.
# whitecircle/halo's trainer runs experts in a loop on the host, ours for it does not. Two runs of one layout took 12.4
# and 18.7 s (lines 51, 55).

# %%
STRATEGIES = (96, 95, 98, 99)  # lines of the file: Qwen3-235B on 256 H100
by_line = {run.line: run for run in mixtures.predictions if not run.reason}
if not quick():
    ranked = [by_line[line] for line in STRATEGIES]
    measured_s, predicted_s = ([getattr(run, f"{what}_step_s") for run in ranked] for what in ("measured", "predicted"))
    texts = [", ".join(f"{value:.1f}" for value in values) for values in (measured_s, predicted_s)]
    show(
        claims=[
            "Qwen3-235B on 256 H100 by four strategies, EP 32 with overlapped all-to-alls and without, EP 8 with 32 "
            f"stages, and TP 4: measured {texts[0]} s, predicted {texts[1]} s."
        ]
    )
    assert sorted(predicted_s) == predicted_s, "Strategies for experts are ranked as measured."

# %%
tests = runs_of("expert_memory_runs.csv")
show(
    {
        "Peaks of tensors of Megatron-LM's functional tests, 12 layers of width 512 with experts": table(
            tests.of_peaks()
        )
    },
    notes="Two thirds of such a peak are logits, which some of the tests keep in FP32. Four layers of DeepSeek-V2 and "
    "V3 in SimuMax, on eight B200, have tensors within 3 % (`tests/experiments/test_expert_runs.py`).",
)

# %% [markdown]
# ## Adapters
#
# Published runs mostly with adapters (`hexiopt validate data=experiments/data/lora_runs.csv`). Those predicted are of
# Qwen's repository: 16-bit matrices on one A100, rank 64, all targets, full recompute, and six of full training beside
# them. The trainer is a row of `hexiopt/numbers/frameworks.yaml` (`transformers_peft`) with one number from these runs:
# 1.56 ms, the host's time for a pass through a layer, from the 7 B model at 256 tokens. The rest is counted in the code
# of transformers and peft: what dropout and casts of adapters move, copies of logits, eager norms. No run on several
# cards, on consumer cards or with NF4 could be compared.

# %%
adapters = runs_of("lora_runs.csv")
show(
    {
        "": table(adapters.of_adapters(), "step time"),
        "Memory of the process": table([line for line in adapters.of_peaks() if "process" in line.gpu], second="peak"),
    },
    [
        predicted(adapters),
        *(f"Intervals of `hexiopt fit`: {line}." for runs in (dense, adapters) for line in runs.held_out_lines()),
    ],
)
assert quick() or all(line.median_percent <= 10 for line in adapters.of_adapters()), (
    "Adapters are within 10 % at the median."
)

# %%
measured = provenance()
show(
    claims=[
        f"Measured {measured['date']} on {measured['machine']}; code {measured['code'][:8]}.",
        "Where each run was published: `experiments/data/README.md`.",
    ]
)
