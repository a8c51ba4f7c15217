"""The layout in a torchtitan configuration: a Python function of 0.3 or a command that changes one, or the TOML of
earlier versions."""

import re
import tomllib
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hexiopt.exports.expert_groups import expert_degree, with_expert_groups
from hexiopt.exports.file_jobs import FileJob, import_job, shard_within
from hexiopt.exports.formats import ImportContext, ImportedPlan
from hexiopt.exports.layout import NO_RECOMPUTE, BlockRecompute, Ranges
from hexiopt.exports.python_settings import is_python, python_settings
from hexiopt.exports.settings import FileSettings, flat
from hexiopt.exports.shell.scripts import Words, read_script
from hexiopt.exports.trainer_schedules import TRAINER_SCHEDULES
from hexiopt.exports.trainers.vocabularies.torchtitan import VOCABULARY
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.space import Recompute
from hexiopt.schedules.schedule import Schedule

_DEGREE = "parallel_degree"
_ENDS = ("first", "last")
_SPLIT = re.compile(r"layers\.\d{1,6}")
_CONVERTERS = {
    "float8": "fp8",
    "quantize.linear.float8": "fp8",
    "Float8LinearConverter": "fp8",
    "mx": "mxfp8",
    "quantize.linear.mx": "mxfp8",
    "MXFP8LinearConverter": "mxfp8",
    "NVFP4LinearConverter": "nvfp4",
}
_BY_OPERATOR = (
    "keeps the outputs of chosen operators, every second product of matrices among them, which is not modelled; state "
    "workload.recompute=none and then full, between which it lies"
)


class EveryRecompute(BlockRecompute):
    """`policy` for every layer of a stage whose number, from 1 on, `block` divides, and none for the others."""

    def of(self, ranges: Ranges) -> Recompute:
        """The policies of a stage."""
        assert self.block is not None
        count = sum(end - first for first, end in ranges)
        return tuple("none" if k % self.block else self.policy for k in range(1, count + 1))


def read_torchtitan(text: str, context: ImportContext) -> ImportedPlan:
    """The problem and the plan of a configuration. Raises InputError for settings that our plans cannot express."""
    model = context.require_model("torchtitan")
    settings, bases, world, passed = _settings(text, context)
    degrees = _degrees(settings, context)
    if world is not None and degrees.world not in (None, world):
        settings.fault("its degrees", f"are of {degrees.world} GPUs, and the command starts {world}; correct one")
    stages, sharded = degrees.stages, degrees.shard > 1
    schedule, *_ = TRAINER_SCHEDULES["torchtitan"]
    parts, reshard = [model.num_layers], False
    if stages > 1:
        schedule = _schedule(settings)
        parts = _parts(settings, model.num_layers, stages, schedule)
    size, count, batch = _batch(settings, degrees, len(parts))
    ep = _expert_degree(settings, degrees, model)
    recompute, priced = _recompute(settings, context, python=bases is not None)
    if sharded:
        policies = {"default": stages == 1, "always": True, "never": False}
        reshard = settings.word("parallelism.fsdp_reshard_after_forward", policies, "default")
        if schedule.chunked and len(parts) > stages:
            settings.fault("Interleaved1F1B", "is not modelled where parameters are sharded (FSDP); take 1F1B or GPipe")
    mixed = bases is not None or sharded or degrees.tp == stages == 1
    precision, assumed = _precision(settings, mixed)
    workload: dict[str, Any] = {
        "precision": precision,
        "seq_len": settings.whole("training.seq_len", 2048),
        "gradient_bytes": settings.word("training.mixed_precision_reduce", {"float32": 4}, "float32"),
    }
    if degrees.tp > 1:  # versions before 0.3 always have it
        key = "parallelism.enable_sequence_parallel"
        workload["sequence_parallel"] = bases is None or settings.flag(key, default=True)
    if model.shares_experts:
        balances = settings.name_in_use("debug.moe_force_load_balance", "training.debug_moe_force_load_balance")
        workload["routing"] = "forced" if settings.flag(balances, default=False) else "natural"
    model_names = [str(settings[key]) for key in ("model.name", "model.flavor", "model_spec.0") if key in settings]
    if "model_spec.0" in settings:
        settings.get("model_spec")  # the name of the function that the flavor is given to
    settings.refuse()
    notes = (
        *(f"{base}() is not in the file, and what it sets is not read" for base in bases or ()),
        *([f"the file's model is {' '.join(model_names)}, and {model.name} is priced"] if model_names else []),
        *priced,
        *assumed,
        *passed,
        *settings.notes(),
    )
    layout = import_job(
        context,
        FileJob(
            model,
            tp=degrees.tp,
            num_stages=stages,
            parts=parts,
            recompute=recompute,
            micro_batch_size=size,
            num_micro_batches=count,
            global_batch=batch,
            schedule=schedule,
            sharding=3 if reshard else 2 if sharded else 0,
            world=degrees.world or world,
            workload=workload,
            notes=notes,
        ),
    )
    layout = with_expert_groups(layout, degrees.tp, ep)
    return shard_within(layout, degrees.replicate) if degrees.replicate > 1 and sharded else layout


@dataclass(frozen=True)
class _Degrees:
    """`world` is None where the file leaves the degree of sharding to the number of GPUs."""

    tp: int
    stages: int
    replicate: int
    shard: int
    world: int | None

    @property
    def pipelines(self) -> int:
        return self.replicate * self.shard


def _degrees(settings: FileSettings, context: ImportContext) -> _Degrees:
    tp = settings.whole(_name_in_use(settings, "tensor_parallel_degree", "parallelism", "training"), 1)
    stages = settings.whole(
        _name_in_use(settings, "pipeline_parallel_degree", "parallelism", "experimental", "training"), 1
    )
    replicate = settings.whole(_name_in_use(settings, "data_parallel_replicate_degree", "parallelism", "training"), 1)
    earlier = "training.data_parallel_degree"
    names = ("parallelism.data_parallel_shard_degree", "training.data_parallel_shard_degree", earlier)
    shard = settings.whole(name := settings.name_in_use(*names), -1)
    world, count = None, len(context.devices)
    if shard > 0:
        world = tp * stages * replicate * shard
    else:
        settings.require(
            count % (tp * stages * replicate) == 0,
            "its degrees",
            f"TP {tp} times PP {stages} times {replicate} replicas do not divide {count} GPUs; give ranks=ranks.tsv, "
            "or the cluster that it runs on",
        )
        shard = count // (tp * stages * replicate)
    if name == earlier and settings.word("training.data_parallel_type", {"fsdp": False, "ddp": True}, "fsdp"):
        replicate, shard = shard, 1
    return _Degrees(tp, stages, replicate, shard, world)


def _expert_degree(settings: FileSettings, degrees: _Degrees, model: ModelSpec) -> int:
    key = _name_in_use(settings, "expert_parallel_degree", "parallelism", "experimental")
    if not model.shares_experts and key not in settings:
        return 1
    ep = settings.whole(key, 1)
    return expert_degree(settings, key, model, ep=ep, tp=degrees.tp, shard=degrees.shard)


def _batch(settings: FileSettings, degrees: _Degrees, num_parts: int) -> tuple[int, int, int | None]:
    """Sequences of a micro-batch, micro-batches of a pipeline, and sequences of a step if stated."""
    local = settings.whole(settings.name_in_use("training.local_batch_size", "training.batch_size"), 8)
    batch = settings.whole("training.global_batch_size", -1)
    if degrees.stages == 1:  # the rest of the batch is accumulated
        return local, 1, None if batch == -1 else batch
    whole = local * degrees.pipelines
    if batch not in (-1, whole):
        settings.refuse_value(
            "training.global_batch_size",
            f"is not {local} sequences of each of {degrees.pipelines} pipelines, which drain after each; price one "
            f"part, with training.global_batch_size = {whole}",
        )
    size = _micro_batch_size(settings, degrees.stages, num_parts, local)
    return size, local // size, None


def _name_in_use(settings: FileSettings, name: str, *tables: str) -> str:
    return settings.name_in_use(*(f"{table}.{name}" for table in tables))


def _settings(text: str, context: ImportContext) -> tuple[FileSettings, list[str] | None, int | None, tuple[str, ...]]:
    """The settings of a TOML file and None, or of a Python configuration or a command and the outside functions that it
    changes; the number of ranks that a command states, and notes on it."""
    bases: list[str] | None = None
    world, notes = None, tuple[str, ...]()
    try:
        data = dict(flat(tomllib.loads(text)))
    except (tomllib.TOMLDecodeError, RecursionError):
        if has_dotted_arguments(text) and not is_python(text):
            data, world, notes = dotted_settings(text, context.where)
            function, module = data.pop("config", None), data.pop("module", None)
            if function is None:
                context.fail(
                    "names no configuration by --config; import the file that the command changes, with its values"
                )
            bases = [".".join(str(name) for name in (module, function) if name is not None)]
        else:
            data, bases = python_settings(text, context.where)
    settings = FileSettings(context, data, VOCABULARY)
    if not any(name.startswith(("parallelism.", "training.")) for name in settings):
        context.fail(f"assigns no ..._{_DEGREE}; give the configuration of a torchtitan run")
    return settings, bases, world, notes


def _schedule(settings: FileSettings) -> Schedule:
    names = {word: schedule for schedule, word in TRAINER_SCHEDULES["torchtitan"].items() if not schedule.splits}
    names["interleaved_1f1b"] = names["Interleaved1F1B"]
    key = _name_in_use(settings, "pipeline_parallel_schedule", "parallelism", "experimental", "training")
    return settings.word(key, names, "1F1B")


def _parts(settings: FileSettings, num_layers: int, stages: int, schedule: Schedule) -> list[int]:
    """The number of layers of each virtual stage: stated by module or split point, or as torchtitan divides them.

    torchtitan counts the embedding, and the norm with the head, as layers, divides all of them evenly, and gives the
    remainder to the first stages (`torchtitan/distributed/pipeline_parallel.py`).
    """
    if (parts := _read_parts(settings, num_layers)) is not None:
        return parts
    ends = [settings.whole(f"parallelism.pipeline_parallel_{end}_stage_less_layers", 1, at_least=0) for end in _ENDS]
    key = _name_in_use(settings, "pipeline_parallel_layers_per_stage", "parallelism", "experimental")
    count = stages * (2 if schedule.chunked else 1)
    if key not in settings and schedule.chunked:
        settings.by_default(key, f"that of {count} stages")
    if key in settings:
        count = -(-(num_layers + sum(ends)) // settings.whole(key))
    share, rest = divmod(num_layers + sum(ends), count)
    parts = [share + (k < rest) for k in range(count)]
    parts[0] -= ends[0]
    parts[-1] -= ends[1]
    return parts


def _read_parts(settings: FileSettings, num_layers: int) -> list[int] | None:
    key = "parallelism.module_fqns_per_model_part"
    if settings.get(key) is not None:
        modules = settings[key]
        if not isinstance(modules, list) or not all(isinstance(part, list) for part in modules):
            settings.fault(key, "is not a list of lists of modules; write them out")
            return None
        layers = [[str(name) for name in part if str(name).startswith("layers.")] for part in modules]
        if [name for part in layers for name in part] != [f"layers.{k}" for k in range(num_layers)]:
            settings.fault(
                key, f"does not list layers.0 to layers.{num_layers - 1} in order, which the model has; correct it"
            )
        return list(map(len, layers))
    key = _name_in_use(settings, "pipeline_parallel_split_points", "parallelism", "experimental", "training")
    points = settings.get(key)
    if not points:
        return None
    names = points.split(",") if isinstance(points, str) else points if isinstance(points, list) else []
    layers_at = [int(str(name)[7:]) if _SPLIT.fullmatch(str(name)) else -1 for name in names]
    bounds = [0, *layers_at, num_layers]
    if not layers_at or any(b <= a for a, b in pairwise(bounds)):
        settings.refuse_value(key, f"are not layers of the model's {num_layers} in order; write them as layers.8")
    return [b - a for a, b in pairwise(bounds)]


def _micro_batch_size(settings: FileSettings, stages: int, num_parts: int, local: int) -> int:
    """Sequences of a micro-batch. Earlier versions state the number of micro-batches, by default that of stages."""
    key = _name_in_use(settings, "pipeline_parallel_microbatches", "parallelism", "experimental", "training")
    current = "parallelism.pipeline_parallel_microbatch_size"
    earlier = "parallelism.pipeline_parallel_degree" not in settings
    if key in settings or (earlier and current not in settings):
        count = settings.whole(key, max(stages, num_parts))
        size = local // count
    else:
        key, size = current, settings.whole(current, 1)
        count = local // size
    if size * count != local:
        settings.fault(key, f"does not divide the {local} sequences of a pipeline; correct one of them")
    return max(1, size)


def _recompute(settings: FileSettings, context: ImportContext, python: bool) -> tuple[BlockRecompute, list[str]]:
    """The recompute policy and notes; recompute by operator is replaced by the user's choice."""
    key, mode, option = (
        "activation_checkpoint",
        "activation_checkpoint.mode",
        "activation_checkpoint.selective_ac_option",
    )
    if key in settings or (python and mode not in settings):
        policies = {"FullAC": "full", "None": "none", "SelectiveAC": "op"}
        policy, what = settings.word(key, policies, "SelectiveAC"), f"{key} {settings.get(key, 'by default')}"
    else:
        policy = settings.word(mode, {"none": "none", "full": "full", "selective": "selective"}, "selective")
        what = mode
        if policy == "selective":
            chosen = settings.get(option, "2")
            if option not in settings:
                settings.by_default(option, "2")
            what = f"{option} {chosen}"
            if str(chosen).isdecimal():
                return (EveryRecompute("full", int(chosen)) if int(chosen) > 1 else BlockRecompute("full")), []
            policy = "op"
    if policy != "op":
        return BlockRecompute(policy), []
    choice = context.workload.recompute if "recompute" in context.stated_keys else "auto"
    if choice == "auto":
        settings.fault(what, _BY_OPERATOR)
        return NO_RECOMPUTE, []
    return BlockRecompute(choice), [f"{what} is by operator, for which workload.recompute={choice} is priced"]


def _precision(settings: FileSettings, mixed: bool) -> tuple[str, list[str]]:
    """The precision and notes; `mixed` says whether the version can train the layout in mixed precision."""
    words = {"bfloat16": "bf16", "float32": "fp32"}
    precision, notes = settings.word("training.mixed_precision_param", words, "bfloat16"), list[str]()
    if precision == "bf16" and not mixed:
        precision = "fp32"
        notes.append("torchtitan before 0.3 trains in float32 where TP or PP is used and no parameter is sharded")
    converters: list[str] = []
    for key in ("model.converters", "model_spec.converters", "model_converters.converters"):
        value = settings.get(key) or []
        converters += map(str, value if isinstance(value, list) else [value])
    for key in ("float8.enable_float8_linear", "training.enable_float8_linear", "training.enable_fp8_linear"):
        converters += ["float8"] * (key in settings and settings.flag(key, default=False))
    converters += ["float8"] * (settings.get("training.fp8_linear") == "dynamic")
    kinds = {_CONVERTERS.get(converter, converter) for converter in converters}
    if len(kinds) > 1 or not kinds <= {"fp8", "mxfp8", "nvfp4"} or (kinds and precision != "bf16"):
        also = "" if precision == "bf16" else f" in {precision}"
        settings.fault(
            f"converters {', '.join(converters)}{also}", "are not modelled; take float8 or mx alone, in bfloat16"
        )
    return (kinds.pop() if kinds else precision), notes


_DOTTED = re.compile(r"(?<!\S)--([A-Za-z]\w*\.[\w.-]+)")
_WORDS = {"true": True, "false": False, "none": None}


def has_dotted_arguments(text: str) -> bool:
    """Whether arguments such as `--training.seq_len` stand in a text."""
    return _DOTTED.search(text) is not None


def dotted_settings(text: str, where: str) -> tuple[dict[str, Any], int | None, tuple[str, ...]]:
    """The arguments of the command in a script that has dotted ones, the number of ranks if stated, and notes.

    Names have underscores. An argument without a value is true or, where its last part begins with `no_`, false.
    Raises InputError as `read_script` does.
    """
    script = read_script(text, where, {name.replace("_", "-") for name in _DOTTED.findall(text)})
    settings: dict[str, Any] = {}
    for argument, words in script.arguments.items():
        *tables, name = argument.replace("-", "_").split(".")
        off = not words and name.startswith("no_")
        settings[".".join([*tables, name.removeprefix("no_") if off else name])] = (
            not off if not words else _value(words)
        )
    return settings, script.world, script.notes


def _value(words: Words) -> Any:
    values = [_literal(str(word)) for word in words]
    return values[0] if len(values) == 1 else values


def _literal(word: str) -> Any:
    for read in (int, float):
        try:
            return read(word)
        except ValueError:
            continue
    return _WORDS.get(word.lower(), word)
