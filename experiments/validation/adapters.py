"""Adapters of a measured run, from its notes: `LoRA` or `QLoRA`, `rank=16`, `targets=q,v`, `quant=bnb-nf4`,
`adapter_bytes=2`."""

from experiments.validation.rows import Row
from experiments.validation.shapes import InexpressibleError
from hexiopt.problem.lora import TARGETS, Lora

_STORAGES = {"none": "16bit", "bnb-nf4": "nf4", "bnb-4bit": "nf4", "bnb-nf4-dq": "nf4_double", "bnb-int8": "int8"}
_MLP = ("gate", "up", "down")


def adapters_of(row: Row) -> Lora | None:
    """The adapters that a row states; None where it states none, or not enough of them.

    Raises InexpressibleError where they are not modelled, or where sequences of mixed lengths were trained, whose mean
    no row states.
    """
    rank, targets = row.note("rank"), row.note("targets")
    if not row.says("lora") or rank is None or targets is None:
        return None
    if row.says("mixed lengths", "mean length below"):
        raise InexpressibleError("adapters with sequences of mixed lengths")
    quant = row.note("quant") or "none"
    if quant not in _STORAGES:
        raise InexpressibleError(f"adapters beside weights quantised by {quant}")
    if "zero2" in row.zero_stage_or_fsdp or "zero3" in row.zero_stage_or_fsdp or "fsdp" in row.zero_stage_or_fsdp:
        raise InexpressibleError("adapters with states sharded by ZeRO-2 or ZeRO-3")
    names = [part for name in targets.split(",") for part in (_MLP if name == "mlp" else (name,))]
    several = any(name in TARGETS for name in names)
    return Lora(
        rank=int(rank),
        targets=tuple(names) if several else targets,
        storage=_STORAGES[quant],
        adapter_bytes=int(row.note("adapter_bytes") or 4),
    )
