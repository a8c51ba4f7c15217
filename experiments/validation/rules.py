"""The software of a measured run, and what follows from it where its row states nothing.

Frameworks are those of `hexiopt/numbers/frameworks.yaml`:
- `hexiopt` as the source: our own runtime, `hexiopt_flash` where the notes do not say cuDNN;
- Megatron's own FSDP, `megatron-fsdp` in the ZeRO column: `megatron_fsdp`;
- MaxText by its name in the source or the notes: `maxtext`;
- else `fsdp` in the ZeRO column: `torchtitan` where that is the source or the column says `fsdp2`, `torchtitan_async`
  where the notes have "async TP", `torchtitan_eager` where they do not have "compile"; else `fsdp`;
- transformers with peft, or ms-swift, which runs it: `transformers_peft`;
- InternEvo, nanotron and DeepSpeed by their names in the source or the notes;
- of models with experts Megatron by what runs overlap and fuse: `megatron_moe_2026_fused` where the notes say "EP
  overlap" and "full CUDA graph", and for Megatron-Bridge's performance recipes on Blackwell below 16 bits, which have
  both; `megatron_moe_2026_overlapped` with "EP overlap", and for these recipes on Hopper; `megatron_moe_2025` for other
  sources than NVIDIA's and for Megatron-Bridge's plain recipes on machines of eight; else `megatron_moe_2026`;
- else Megatron: `megatron_2025` for Megatron-Bridge and NeMo from version 25 on; `megatron_exposed` where the notes say
  "no overlap", `megatron_2022` where they say "sequence parallel on", `megatron_2021` in FP16 or with full recompute
  (selective recompute came with sequence parallelism), else `megatron`.
The precision is the column's, `FP8-CS` (current scaling) and `fp8 (not in table)` being FP8 with a scale for each
tensor; blank means BF16; it is FP32 where the column says that TF32 is unknown; rows of other precisions are not
predicted. DeepSpeed and Megatron of 2021 and 2022 materialise attention scores. Gradients take 4 bytes, but 2 where
`mp_mode` is PURE, in Megatron of 2021 and 2022, in InternEvo and in DeepSpeed. A blank recompute policy is `full` where
the notes say so, else open. Selective recompute in torchtitan covers all operators but attention and every second
matrix product, or every second layer; both are taken as full recompute of every second layer. Of models with experts
all but `full` is taken as none: what Megatron recomputes of them (norms, activations) hardly takes time.
"""

import re

from experiments.validation.rows import Row
from experiments.validation.shapes import has_experts
from hexiopt.errors import InputError
from hexiopt.numbers.gpus import PRECISIONS
from hexiopt.problem.workload import RECOMPUTE_POLICIES

TRANSFORMERS = "transformers_peft"
_OLD_MEGATRON = ("megatron_2021", "megatron_2022")
_HALF_SYNC = ("internevo", "deepspeed")


def framework_of(row: Row) -> str:
    """The framework of a run."""
    text, sharding = f"{row.source} {row.notes}".lower(), row.zero_stage_or_fsdp.lower()
    if row.source == "hexiopt":
        return "hexiopt" if "cudnn" in text else "hexiopt_flash"
    if "megatron-fsdp" in sharding or ("fsdp" in sharding and "megatron" in row.source.lower()):
        return "megatron_fsdp"
    if "maxtext" in text:
        return "maxtext"
    if "fsdp" in sharding:
        if "fsdp2" not in sharding and "torchtitan" not in text:
            return "fsdp"
        if not row.says("compile"):
            return "torchtitan_eager"
        return "torchtitan_async" if row.says("async TP", "asyncTP") else "torchtitan"
    if re.search(r"transformers|ms-swift", text):
        return TRANSFORMERS
    for name in ("internevo", "nanotron", "deepspeed"):
        if name in text:
            return name
    if has_experts(row):
        return _with_experts(row)
    if row.says("no overlap"):
        return "megatron_exposed"
    if row.says("sequence parallel on"):
        return "megatron_2022"
    if "megatron-bridge" in text or re.search(r"nemo ?2[5-9]\.", text):
        return "megatron_2025"
    return "megatron_2021" if precision_of(row) == "fp16" or row.recompute == "full" else "megatron"


def _with_experts(row: Row) -> str:
    """Megatron's framework for models with experts, by what was overlapped and fused in a run."""
    tuned = row.says("item=pretrain_performance", "item=pretrain_weak_scaling")
    hopper = not row.gpu.startswith(("B", "GB"))
    overlaps = row.says("EP overlap") and not row.says("EP overlap off")
    if (tuned and not hopper and precision_of(row) != "bf16") or (overlaps and row.says("full CUDA graph")):
        return "megatron_moe_2026_fused"
    if overlaps or (tuned and hopper):
        return "megatron_moe_2026_overlapped"
    plain = not row.source.startswith("NVIDIA") or (row.says("item=") and not tuned)
    return "megatron_moe_2025" if plain and hopper else "megatron_moe_2026"


def routing_of(row: Row) -> str:
    """How tokens of a run came to experts: `natural` where the notes say so, else `forced`, as in benchmarks."""
    return "natural" if row.says("natural") else "forced"


def precision_of(row: Row) -> str:
    """The precision of a run's matrix products. Raises InputError for one that is not modelled."""
    words = re.findall(r"[a-z0-9]+", row.precision.lower().split("(")[0])
    precision = "mxfp8" if "mx" in words else next((name for name in PRECISIONS if name in words), None)
    if precision is None and words:
        raise InputError(f"precision {row.precision!r} is not modelled; known: {', '.join(PRECISIONS)}")
    return precision or "bf16"


def stores_scores(row: Row) -> bool:
    """Whether attention is unfused."""
    return framework_of(row) in (*_OLD_MEGATRON, "deepspeed")


def gradient_bytes_of(row: Row) -> int:
    """Bytes per gradient element in gradient synchronisation."""
    return 2 if row.note("mp_mode") == "PURE" or framework_of(row) in (*_OLD_MEGATRON, *_HALF_SYNC) else 4


def policies_of(row: Row) -> tuple[str, ...]:
    """The recompute policies that the row leaves open."""
    if has_experts(row):  # what parts of a layer are recomputed beside, such as activations of experts, is not priced
        return ("full",) if row.recompute == "full" else ("none",)
    if row.recompute in RECOMPUTE_POLICIES:
        return (row.recompute,)
    return ("full",) if row.says("full-recompute", "counts full recompute") else RECOMPUTE_POLICIES


def recompute_of(row: Row, policy: str, num_layers: int) -> tuple[str, ...]:
    """The recompute policies of a stage of `num_layers` layers under `policy`: one for all, or one per layer."""
    if policy == "selective" and framework_of(row).startswith("torchtitan"):
        return tuple("none" if layer % 2 else "full" for layer in range(num_layers))
    return (policy,)
