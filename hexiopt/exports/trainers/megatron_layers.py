"""How arguments of Megatron-LM divide layers over stages, and which of them they recompute."""

from functools import partial

from hexiopt.exports.layout import NO_RECOMPUTE, BlockRecompute
from hexiopt.exports.trainers.megatron_arguments import MegatronArguments
from hexiopt.exports.trainers.megatron_kinds.reading import PATTERNS, layers_of_blocks, pattern_of
from hexiopt.exports.trainers.pipeline_layout import read_layout
from hexiopt.problem.model import ModelSpec

_FIRST, _LAST = "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"
_EMBEDDING, _LOSS = "account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split"
_LAYOUT, _METHOD = "pipeline-model-parallel-layout", "pp-partition-method"
_PER_CHUNK, _CHUNKS = "num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank"
_BY_TYPE = ("type:transformer", "type:transformer|embedding")


def read_parts(arguments: MegatronArguments, model: ModelSpec, stages: int) -> list[int]:
    """The number of layers of every virtual stage, in the order of the model.

    It follows `get_num_layers_to_build` of `megatron/core/transformer/transformer_block.py`, or DeepSpeed's partition
    of Megatron-DeepSpeed's list of layers. Raises InputError, naming the argument, where stages do not divide layers.
    """
    layers = model.num_layers
    if (pattern := pattern_of(arguments)) is not None:
        name = next(name for name in PATTERNS if name in arguments)
        parts = layers_of_blocks(model, pattern[0], stages, partial(arguments.fail, name))
        _check_chunks(arguments, len(parts) // stages)
        return parts
    if _LAYOUT in arguments:
        text = "".join(arguments.words(_LAYOUT))
        where = f"{arguments.where}: {arguments.label(_LAYOUT)}"
        parts = read_layout(text, where, len(model.extra_layers))
        if len(parts) % stages or sum(parts) != layers:
            arguments.fail(
                _LAYOUT,
                f"has {len(parts)} parts with {sum(parts)} layers, for {stages} stages and {layers} layers; make parts "
                "a multiple of the stages, and layers the model's",
            )
        _check_chunks(arguments, len(parts) // stages)
        return parts
    if stages == 1:
        return [layers]
    if "deepspeed" in arguments:
        return _by_type(arguments, model, stages)
    embedding, loss = arguments.flag(_EMBEDDING), arguments.flag(_LOSS)
    chosen = [name for name, on in ((_EMBEDDING, embedding), (_LOSS, loss)) if on]
    first, last = arguments.whole(_FIRST, 0), arguments.whole(_LAST, 0)
    if first or last:
        if chosen:
            arguments.fail(
                chosen[0], f"does not go with {arguments.label(_FIRST if first else _LAST)}; keep one of them"
            )
        return _chunk(arguments, _between(arguments, layers, stages, first, last))
    total = layers + len(chosen)
    if total % stages:
        with_ends = f" and {' and '.join(map(arguments.label, chosen))}" if chosen else ""
        arguments.fail("pipeline-model-parallel-size", f"{stages} stages do not divide {layers} layers{with_ends}")
    parts = _chunk(arguments, [total // stages] * stages)
    parts[0] -= embedding
    parts[-1] -= loss
    if 0 in parts:
        arguments.fail(chosen[0], "leaves a stage without layers, which is not modelled; give it one")
    return parts


def _check_chunks(arguments: MegatronArguments, number: int) -> None:
    if (chunks := arguments.whole(_CHUNKS, number, noted=False)) != number:
        arguments.fail(_CHUNKS, f"{chunks} is not the layout's {number}; correct one of them")


def _between(arguments: MegatronArguments, layers: int, stages: int, first: int, last: int) -> list[int]:
    """The number of layers of each stage, given those of the first and the last stage."""
    middle = stages - bool(first) - bool(last)
    rest = layers - first - last
    if rest < middle or (rest % middle if middle else rest):
        arguments.fail(
            _FIRST if first else _LAST,
            f"leaves {rest} layers, which {middle} stages do not divide; correct the layers of the ends",
        )
    share = rest // middle if middle else 0
    return [first or share, *[share] * (stages - 2), last or share]


def _chunk(arguments: MegatronArguments, stages: list[int]) -> list[int]:
    """The number of layers of every virtual stage, if each stage is cut into equal chunks."""
    per, chunks = arguments.whole(_PER_CHUNK, 0), arguments.whole(_CHUNKS, 0) or 1
    if per:
        if stages[0] % per:
            arguments.fail(_PER_CHUNK, f"{per} layers do not divide the {stages[0]} of a stage; correct one of them")
        chunks = stages[0] // per
    name = _PER_CHUNK if per else _CHUNKS
    if any(count % chunks for count in stages):
        arguments.fail(
            name, f"{chunks} chunks do not divide stages of {' + '.join(map(str, stages))} layers; change one"
        )
    return [count // chunks for _ in range(chunks) for count in stages]


def _by_type(arguments: MegatronArguments, model: ModelSpec, stages: int) -> list[int]:
    """Megatron-DeepSpeed's layers: equally many of the types named, embeddings counted where they are.

    The list has an embedding at its beginning, and a tied one at its end (`partition_balanced` of
    `deepspeed/runtime/utils.py`, over weights of 1 for layers whose type is named).
    """
    method = arguments.word(_METHOD, _BY_TYPE[0]).lower()
    if method not in _BY_TYPE:
        arguments.fail(_METHOD, f"{method!r} is not read; state {' or '.join(_BY_TYPE)}")
    ends = (1, int(model.tied_embeddings)) if method == _BY_TYPE[1] else (0, 0)
    total = model.num_layers + sum(ends)
    if total % stages:
        counted = f" and {sum(ends)} embeddings" if any(ends) else ""
        arguments.fail(_METHOD, f"{stages} stages do not divide {model.num_layers} layers{counted} equally")
    parts = [total // stages] * stages
    parts[0] -= ends[0]
    parts[-1] -= ends[1]
    return parts


def read_recompute(arguments: MegatronArguments) -> BlockRecompute:
    """The layers that are recomputed, by current or earlier arguments. Raises InputError for modules other than
    attention's core, unless the user states what to price in their place."""
    granularity = arguments.word("recompute-granularity", "none", ("none", "full", "selective"))
    method, count = "recompute-method", "recompute-num-layers"
    if arguments.flag("checkpoint-activations"):
        granularity, count = "full", "checkpoint-num-layers"
    if "activations-checkpoint-method" in arguments:
        granularity, method, count = "full", "activations-checkpoint-method", "activations-checkpoint-num-layers"
    if arguments.flag("recompute-activations"):
        if granularity == "full":
            arguments.fail("recompute-activations", "makes the recompute selective, which is stated as full; keep one")
        granularity = "selective"
    if granularity == "selective":
        modules = arguments.words("recompute-modules") if "recompute-modules" in arguments else ["core_attn"]
        others = [module for module in modules if module != "core_attn"]
        if others and not arguments.states_recompute:
            arguments.fail(
                "recompute-modules",
                f"{' '.join(others)}: is not modelled; say what to price in its place by workload.recompute=none, "
                "selective or full",
            )
        return BlockRecompute("selective" if modules else "none")
    if granularity == "none":
        return NO_RECOMPUTE
    choice, layers = arguments.word(method, "uniform", ("uniform", "block")), arguments.whole(count, 1)
    if choice == "block":
        return BlockRecompute("full", layers)
    return BlockRecompute("full", together=layers)
