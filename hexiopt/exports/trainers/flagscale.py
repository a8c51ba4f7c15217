"""FlagScale's heterogeneous training: meshes of pipeline stages with TP, EP and DP degrees of their own.

A mesh has `pp` stages of `dp` replicas with TP degree `tp`, of which `ep` devices in a row share experts; ranks of a
mesh stand together, in Megatron's order. All meshes get one device label, which keeps ranks in the order in which they
are started; a label for each would sort ranks by label (`flagscale/train/hetero/parallel_context.py`). Flags of
recompute are equal for all micro-batches of a stage.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import yaml

from hexiopt.exports.file_jobs import import_layout
from hexiopt.exports.formats import ImportContext, ImportedPlan, Program, Refuse, stage_name
from hexiopt.exports.layout import (
    NO_RECOMPUTE,
    UNIFORM_RECOMPUTE,
    BlockRecompute,
    JobLayout,
    LayoutStage,
    chain_of,
    check_tp,
    first_layers,
    group_recompute,
    note_lines,
    schedule_of,
    tied_notes,
    zero_stage,
)
from hexiopt.exports.shell.scripts import Words
from hexiopt.exports.trainer_schedules import TRAINER_SCHEDULES
from hexiopt.exports.trainers.megatron import (
    MegatronFormat,
    check_whole_experts,
    difference_notes,
    expert_arguments,
    read_precision,
    read_routing,
    words,
)
from hexiopt.exports.trainers.megatron_arguments import MegatronArguments
from hexiopt.exports.trainers.megatron_layers import read_recompute
from hexiopt.exports.trainers.megatron_model import Arguments, model_arguments, read_model, takes_tp
from hexiopt.plan.plan import Plan
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import JOINED
from hexiopt.reading import as_mapping, parse

TARGET = "FlagScale 0.8"
FILE, ARGUMENTS = "flagscale.yaml", "flagscale.sh"
_LABEL = "gpu"
_PER_STAGE = "_per_stage_micro_batch"
_EXPERT_TP = "expert_tensor_parallel_size"
_FREE = {"space.uneven_tp"}
_TAKEN = ("system", "model", "data")  # sections that become arguments
_RUNNER = ("experiment", "action", "defaults", "hydra")  # how a run is started
# What the meshes and stages are read by, and settings of messages between meshes, which cost what links do.
_HETEROGENEOUS = (
    "enable_hetero",
    "hetero_process_meshes",
    "hetero_pipeline_layer_split",
    "hetero_device_types",
    "hetero_current_device_type",
    f"{_EXPERT_TP}_per_process_mesh",
    *(f"recompute_{name}{_PER_STAGE}" for name in ("granularity", "method", "num_layers")),
)
Settings = dict[str, Any]  # by name; lists and true as FlagScale's files have them


def _needs_equal_ends(problem: Problem) -> bool:
    """Whether the first stage and the last hold the same embedding, and so need the same degrees."""
    return problem.model.tied_embeddings or bool(problem.model.extra_layers)


def _check(problem: Problem, chain: JobLayout, refuse: Refuse) -> None:
    """Check FlagScale's rules on degrees. Raises InputError."""
    check_tp(problem, chain, takes_tp, refuse)
    for s, stage in enumerate(chain.stages):
        if chain.micro_batch_size % stage.dp:
            what = f"{stage_name(0, s)} has {stage.dp} replicas for micro-batches of {chain.micro_batch_size}"
            refuse(what, "space.replicas=false")
    if problem.model.shares_experts and len({stage.expert_devices > 1 for stage in chain.stages}) > 1:
        refuse("some stages share experts among devices, others do not", "space.uneven_tp=false")
    if _needs_equal_ends(problem) and len({(s.tp, s.dp) for s in (chain.stages[0], chain.stages[-1])}) > 1:
        why = "tied embeddings" if problem.model.tied_embeddings else "layers for further tokens"
        what = f"{stage_name(0, len(chain.stages) - 1)} has other degrees than stage 0 with {why}"
        refuse(what, "space.uneven_tp=false space.replicas=false")


def _system(problem: Problem, chain: JobLayout, zero: int, refuse: Refuse) -> Settings:
    first = chain.stages[0]
    meshes: list[int] = []
    shares = problem.model.shares_experts
    for (tp, dp, ep), run in groupby(chain.stages, key=lambda stage: (stage.tp, stage.dp, stage.expert_devices)):
        meshes += [tp, 1, ep if shares else 1, dp, len(list(run))]
    settings: Settings = {
        "tensor_model_parallel_size": first.tp,
        "pipeline_model_parallel_size": len(chain.stages),
        "sequence_parallel": problem.workload.sequence_parallel and any(stage.tp > 1 for stage in chain.stages),
        "use_distributed_optimizer": bool(zero),
        **({problem.workload.precision: True} if problem.workload.precision != "fp32" else {}),
        "enable_hetero": True,
        "hetero_process_meshes": meshes,
        "hetero_pipeline_layer_split": [stage.num_layers for stage in chain.stages],
        "hetero_device_types": [_LABEL] * (len(meshes) // 5),
        "hetero_current_device_type": _LABEL,
    }
    if shares:
        arguments = expert_arguments(problem, chain.stages)
        settings |= {key.replace("-", "_"): int(texts[0]) if texts else True for key, texts in arguments.items()}
        settings[f"{_EXPERT_TP}_per_process_mesh"] = [1] * (len(meshes) // 5)
    return settings | _recompute(chain, refuse)


def _recompute(chain: JobLayout, refuse: Refuse) -> Settings:
    """Megatron's setting if one serves all stages, else FlagScale's setting for each stage."""
    policies = [policies for stage in chain.stages for policies in stage.policies()]
    every = {policy for stage_policies in policies for policy in stage_policies}
    if every == {"none"}:
        return {}
    if every == {"selective"}:
        return {"recompute_granularity": "selective"}
    if every == {"full"}:
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if JOINED in every:
        together = group_recompute(chain, refuse).together
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": together}
    counts = []
    for s, stage_policies in enumerate(policies):
        count = first_layers(stage_policies)
        if count is None:
            policies_in_words = " and ".join(sorted(set(stage_policies)))
            refuse(
                f"{stage_name(0, s)} has recompute {policies_in_words}, not full of its first layers", UNIFORM_RECOMPUTE
            )
        counts.append(count)
    number = chain.num_micro_batches

    def rows(values: Sequence[int]) -> list[str]:
        return [str([len(list(run)), number, value]) for value, run in groupby(values)]

    return {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": max(counts),
        f"recompute_granularity{_PER_STAGE}": rows([int(count > 0) for count in counts]),
        f"recompute_method{_PER_STAGE}": rows([1] * len(counts)),
        f"recompute_num_layers{_PER_STAGE}": rows(counts),
    }


def _model(problem: Problem, chain: JobLayout) -> Settings:
    values: Settings = {
        name.replace("-", "_"): _plain(texts[0]) if texts else True
        for name, texts in model_arguments(problem.model, problem.workload.seq_len).items()
    }
    return values | {"micro_batch_size": chain.samples, "global_batch_size": chain.global_batch}


def _plain(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _nest(system: Settings) -> Settings:
    hetero = {key: value for key, value in system.items() if "hetero" in key}
    recompute = {key: value for key, value in system.items() if key.startswith("recompute")}
    plain = {key: value for key, value in system.items() if key not in hetero and key not in recompute}
    return plain | {"hetero": hetero} | ({"recompute": recompute} if recompute else {})


def _arguments(settings: Settings) -> Arguments:
    """The arguments that FlagScale's runner makes of a file's keys."""
    arguments: Arguments = {}
    for key, value in settings.items():
        if value is not False:
            values = value if isinstance(value, list) else [] if value is True else [value]
            arguments[key.replace("_", "-")] = [
                str(item).replace(" ", "") if "[" in str(item) else str(item) for item in values
            ]
    return arguments


# ----------------------------------------------------------------------------- reading


def _degree_notes(arguments: MegatronArguments, chain: JobLayout, tp: int) -> list[str]:
    """Notes on degrees that differ from those of the meshes, which prevail."""
    of_meshes = {"tensor-model-parallel-size": tp, "pipeline-model-parallel-size": chain.num_stages}
    wrong = [
        arguments.label(name)
        for name, degree in of_meshes.items()
        if arguments.whole(name, degree, noted=False) != degree
    ]
    return [f"{' and '.join(wrong)}: not that of the meshes, which is taken"] if wrong else []


def _words(value: Any) -> Words:
    """A value of YAML as the words of an argument, as FlagScale's runner makes them."""
    values = value if isinstance(value, list) else [] if value is True else [value]
    return [str(int(v)) if isinstance(v, float) and v == int(v) and abs(v) >= 1 else str(v) for v in values]


def _flat(data: Mapping[str, Any], context: ImportContext) -> tuple[Settings, list[str]]:
    """The keys of all levels of `system`, `model` and `data` together, as FlagScale's runner reads them; and the
    sections that are not read.

    Raises InputError where two levels state different values of a key.
    """
    settings: Settings = {}

    def take(values: Mapping[str, Any], path: str) -> None:
        for key, value in values.items():
            if isinstance(value, Mapping):
                take(value, f"{path}{key}.")
            elif settings.setdefault(key, value) != value:
                context.fail(f"{path}{key}: is {value!r}, and {settings[key]!r} in another section; state it once")

    nested = data.get("train")
    for section in _TAKEN:
        part = data.get(section, nested.get(section) if isinstance(nested, Mapping) else None)
        if isinstance(part, Mapping):
            take(part, f"{section}.")
    if not settings:
        take({key: value for key, value in data.items() if key not in _RUNNER}, "")
        return settings, []
    return settings, [key for key in data if key not in (*_TAKEN, *_RUNNER, "train")]


def _world(data: Mapping[str, Any]) -> int | None:
    """The number of ranks that the runner starts; None unless it states nodes and processes per node."""
    experiment = data.get("experiment")
    runner = experiment.get("runner") if isinstance(experiment, Mapping) else None
    if not isinstance(runner, Mapping):
        return None
    nodes, per_node = runner.get("nnodes"), runner.get("nproc_per_node")
    return nodes * per_node if type(nodes) is int and type(per_node) is int else None


def _chain(settings: Settings, arguments: MegatronArguments, model: ModelSpec, context: ImportContext) -> JobLayout:
    split, meshes = _numbers(settings, "hetero_pipeline_layer_split", context), _meshes(settings, context)
    _check_experts(settings, arguments, meshes, model)
    stages, num_layers = sum(pp for *_, pp in meshes), model.num_layers
    if len(split) != stages or sum(split) != num_layers:
        context.fail(
            f"hetero_pipeline_layer_split has {len(split)} stages with {sum(split)} layers; the meshes have {stages} "
            f"stages, and the model {num_layers} layers"
        )
    ranks, _ = context.ranks_of(sum(tp * dp * pp for tp, _, dp, pp in meshes))
    size = arguments.whole("micro-batch-size", 1) * meshes[0][2]
    batch = arguments.whole("global-batch-size", size)
    if not size or batch % size or any(size % dp for *_, dp, _ in meshes):
        context.fail(f"micro-batches of {size} sequences do not divide global_batch_size {batch}, or replicas them")
    recompute = _stage_recompute(settings, arguments, stages, context)
    chain, rank, layer = [], 0, 0
    degrees = [(tp, ep, dp) for tp, ep, dp, pp in meshes for _ in range(pp)]
    for (tp, ep, dp), count, stage_recompute in zip(degrees, split, recompute, strict=True):
        replicas = tuple(ranks[rank + r * tp : rank + (r + 1) * tp] for r in range(dp))
        layers = ((layer, layer + count),)
        chain.append(LayoutStage(replicas, layers, stage_recompute.of(layers), ep // tp if model.shares_experts else 0))
        rank, layer = rank + tp * dp, layer + count
    return JobLayout(tuple(chain), batch // size, size)


def _check_experts(
    settings: Settings, arguments: MegatronArguments, meshes: Sequence[tuple[int, int, int, int]], model: ModelSpec
) -> None:
    """Raise InputError where devices of a mesh share experts in a way that is not modelled."""
    by_mesh = settings.get(f"{_EXPERT_TP}_per_process_mesh")
    arguments.get("expert-model-parallel-size")  # meshes have their own
    everywhere = arguments.whole("expert-tensor-parallel-size", 0)
    if not model.shares_experts:
        if any(ep > 1 for _, ep, _, _ in meshes):
            arguments.fail("hetero-process-meshes", f"share experts, which {model.name} has not; take EP 1")
        return
    for k, (tp, ep, dp, _) in enumerate(meshes):
        columns = by_mesh[k] if isinstance(by_mesh, list) and k < len(by_mesh) else everywhere or tp
        check_whole_experts(arguments, int(columns))
        if ep % tp or dp % (ep // tp):
            what = f"mesh {k} has EP {ep}, no multiple of TP {tp} that divides its {tp * dp} devices"
            arguments.fail("hetero-process-meshes", f"{what}; correct one of them")


def _meshes(settings: Settings, context: ImportContext) -> list[tuple[int, int, int, int]]:
    """TP, EP, DP and PP of each mesh."""
    numbers = _numbers(settings, "hetero_process_meshes", context)
    if len(numbers) % 5:
        context.fail("hetero_process_meshes: is not a list of five numbers a mesh; write tp, cp, ep, dp, pp of each")
    meshes = []
    for k in range(0, len(numbers), 5):
        tp, cp, ep, dp, pp = numbers[k : k + 5]
        if cp != 1:
            context.fail(f"hetero_process_meshes: mesh {k // 5} has CP {cp}, which is not modelled here; take 1")
        meshes.append((tp, ep, dp, pp))
    if settings.get("enable_hetero") is not True:
        context.fail("enable_hetero: is not true, so that the meshes are not used; set it, or give format=megatron")
    labels = settings.get("hetero_device_types")
    if not isinstance(labels, list) or len(labels) != len(meshes):
        context.fail(f"hetero_device_types: does not have a label for each of {len(meshes)} meshes; state it")
    if [label for label, _ in groupby(labels)] != list(dict.fromkeys(labels)):
        context.fail(
            "hetero_device_types: a label returns after another, which mixes meshes up; put like ones together"
        )
    return meshes


def _numbers(settings: Settings, key: str, context: ImportContext) -> list[int]:
    values = settings.get(key)
    if not isinstance(values, list) or not values or any(type(v) is not int or v < 1 for v in values):
        context.fail(f"{key}: is not a list of whole numbers from 1; state it, as heterogeneous training has it")
    return list(values)


def _stage_recompute(
    settings: Settings, arguments: MegatronArguments, stages: int, context: ImportContext
) -> list[BlockRecompute]:
    """The recompute of each stage, by FlagScale's settings for each stage or else by Megatron's."""
    names = ("granularity", "method", "num_layers")
    rows = {name: settings.get(f"recompute_{name}{_PER_STAGE}") for name in names}
    used = [f"recompute_{name}{_PER_STAGE}" for name, values in rows.items() if values is not None]
    if used and settings.get("recompute_granularity") != "full":
        context.fail(f"{used[0]}: is not used without recompute_granularity full; state it, or leave this out")
    if not used:
        return [read_recompute(arguments)] * stages
    count = arguments.whole("recompute-num-layers", 1)
    block = arguments.word("recompute-method", "uniform", ("uniform", "block")) == "block"

    def stage_values(name: str, default: int) -> list[int]:
        key = f"recompute_{name}{_PER_STAGE}"
        if rows[name] is None:
            arguments.by_default(key, default)
        return [default] * stages if rows[name] is None else _by_stage(rows[name], stages, key, context)

    policies = []
    choices = zip(
        stage_values("granularity", 1),
        stage_values("method", int(block)),
        stage_values("num_layers", count),
        strict=True,
    )
    for on, by_block, layers in choices:
        grouped = BlockRecompute("full", layers) if by_block else BlockRecompute("full", together=layers)
        policies.append(grouped if on else NO_RECOMPUTE)
    return policies


def _by_stage(rows: Any, stages: int, key: str, context: ImportContext) -> list[int]:
    """The value of each stage, which must be the same for all its micro-batches."""
    by_stage: list[int] = []
    for row in rows if isinstance(rows, list) else [rows]:
        numbers = parse(row, f"{context.where}: {key}", as_json=True) if isinstance(row, str) else row
        whole = isinstance(numbers, list) and len(numbers) > 2 and all(type(n) is int for n in numbers)
        if not whole or len(set(numbers[2::2])) != 1:
            context.fail(f"{key}: {row!r} has no one value for all micro-batches; write [stages, micro-batches, value]")
        by_stage += [numbers[2]] * min(numbers[0], stages)
    if len(by_stage) != stages:
        context.fail(f"{key}: has {len(by_stage)} stages of {stages}; state every stage")
    return by_stage


class FlagScaleFormat(MegatronFormat):
    """FlagScale's heterogeneous training, whose arguments are Megatron-LM's."""

    name = "flagscale"
    target = TARGET
    expresses = (
        "one chain: TP, replicas of equal samples, those that share experts, layers and full recompute of first layers "
        "or groups by stage"
    )
    schedules = TRAINER_SCHEDULES["flagscale"]

    def unsuitable_kinds(self, problem: Problem) -> str | None:
        """As of Megatron-LM's GPT model; blocks by a pattern, and recurrences, are of other programs."""
        if any(kind.recurrent is not None for kind in problem.model.layers):
            return f"has no recurrences, as {problem.model.name} has; export plans of a model without"
        return super().unsuitable_kinds(problem)

    def preset(self, problem: Problem) -> Mapping[str, tuple[Any, ...]]:
        """TP degrees may differ between stages, unless both ends hold the embedding."""
        preset = super().preset(problem)
        return {key: value for key, value in preset.items() if key not in _FREE or _needs_equal_ends(problem)}

    def write(self, problem: Problem, plan: Plan) -> Program:
        refuse = self.refuse
        schedule_of(plan, self.schedules, refuse)
        chain, zero = chain_of(plan, refuse), zero_stage(plan, (1, 0), refuse)
        self.check_precision(problem)
        _check(problem, chain, refuse)
        system, model = _system(problem, chain, zero, refuse), _model(problem, chain)
        settings = {**system, **model}
        differences = difference_notes(problem, max(chain.stages[0].tp, chain.stages[-1].tp))
        notes = (*chain.cell_notes(), *differences, *tied_notes(problem, plan))
        header = [
            f"# For {TARGET}, heterogeneous training. Rank r runs on the GPU of row r of ranks.tsv: "
            "start ranks in that",
            "# order (a static rendezvous), by FlagScale's runner or by the launch files beside.",
            *note_lines(notes),
        ]
        document = {"system": _nest(system), "model": model}
        text = "\n".join(header) + "\n" + yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=100)
        script = [*header, "set -f", f"PLAN='{words(_arguments(settings))}'"]
        return Program(
            chain.stage_major(),
            '"${FLAGSCALE:-.}/flagscale/train/train_gpt.py" $PLAN',
            {FILE: text, ARGUMENTS: "\n".join(script) + "\n"},
            setup=f'. "$HERE/{ARGUMENTS}"',
            environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
            notes=notes,
        )

    def read(self, text: str, context: ImportContext) -> ImportedPlan:
        data = as_mapping(parse(text, context.where, as_json=False), context.where)
        settings, sections = _flat(data, context)
        arguments = MegatronArguments(
            context,
            {
                key.replace("_", "-"): _words(value)
                for key, value in settings.items()
                if value is not False and value is not None
            },
            lambda name: name.replace("-", "_"),
            (key.replace("_", "-") for key in _HETEROGENEOUS),
        )
        tp = int(_numbers(settings, "hetero_process_meshes", context)[0])
        model, notes = read_model(arguments, context, tp)
        chain = _chain(settings, arguments, model, context)
        ranks = sum(len(replica) for stage in chain.stages for replica in stage.replicas)
        world = _world(data)
        if world not in (None, ranks):
            context.fail(f"experiment.runner: starts {world} GPUs, and its meshes have {ranks}; correct one of them")
        precision, gradient_bytes = read_precision(arguments, context)
        workload = {
            "global_batch": chain.global_batch,
            "seq_len": arguments.whole("seq-length", context.workload.seq_len),
            "precision": precision,
            "gradient_bytes": gradient_bytes,
            "sequence_parallel": arguments.flag("sequence-parallel") or all(stage.tp == 1 for stage in chain.stages),
            **read_routing(arguments, model),
        }
        zero = int(arguments.flag("use-distributed-optimizer"))
        arguments.get("recompute-granularity")  # stages may have their own
        notes += _degree_notes(arguments, chain, tp)
        notes += [f"not read: {', '.join(sections)}"] if sections else []
        [schedule] = self.schedules
        layout = import_layout(context, model, chain, schedule, zero, workload, notes)
        return replace(layout, notes=(*layout.notes, *arguments.notes()))


TRAINER = FlagScaleFormat()
