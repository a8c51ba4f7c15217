"""Which rule steps a parameter, and what it keeps of it: of each optimizer that torch has, and that is trained with."""

from runtime.mapping.parts import ParameterPart, layer_of

ADAMW, SGD, MOMENTUM, ADAFACTOR, MUON = "adamw", "sgd", "momentum", "adafactor", "muon"
RULES = {ADAMW: ADAMW, "adamw_bf16": ADAMW, SGD: SGD, MOMENTUM: MOMENTUM, ADAFACTOR: ADAFACTOR, MUON: MUON}
"""The rule of matrices of layers, by optimizer."""
_ROW_MEANS, _COLUMN_MEANS = "row_var", "col_var"
_MOMENTS = {ADAMW: ("exp_avg", "exp_avg_sq"), SGD: (), MOMENTUM: ("momentum_buffer",), MUON: ("momentum_buffer",)}


def rule_of(optimizer: str, part: ParameterPart) -> str:
    """The rule that steps a parameter. Muon leaves what is no matrix of a layer to AdamW."""
    rule = RULES[optimizer]
    return ADAMW if rule == MUON and not (part.decays and layer_of(part.name) is not None) else rule


def moments_of(optimizer: str, part: ParameterPart) -> tuple[str, ...]:
    """What is kept of a parameter, by torch's names."""
    rule = rule_of(optimizer, part)
    if rule == ADAFACTOR:
        return (_ROW_MEANS, _COLUMN_MEANS) if part.decays else ("variance",)
    return _MOMENTS[rule]


def is_whole(kind: str) -> bool:
    """Whether what is kept is of whole matrices, and not an element for each of theirs."""
    return kind in (_ROW_MEANS, _COLUMN_MEANS)


def moment_shape(kind: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of what is kept of a parameter of that `shape`."""
    if kind == _ROW_MEANS:
        return (*shape[:-1], 1)
    return (*shape[:-2], 1, shape[-1]) if kind == _COLUMN_MEANS else shape
