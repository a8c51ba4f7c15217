"""A `device_map` of transformers and Accelerate: the module names of a model, each with the GPU that holds it.

One process computes a micro-batch's layers one after another, on whichever GPU has them, so the layers stand as in the
plan and nothing of its schedule runs. Names are those of transformers 5.23 (`models/*/modeling_*.py`, `ForCausalLM`).
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from hexiopt.errors import InputError
from hexiopt.exports.formats import EVEN, Program, Trainer, stage_name
from hexiopt.exports.layout import layout_of, schedule_of, uniform_policy
from hexiopt.exports.trainer_schedules import TRAINER_SCHEDULES
from hexiopt.files.models.execution import TRAINED, execution_of
from hexiopt.plan.plan import Plan
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.problem import Problem

FILE, README = "device_map.json", "device_map.md"
_FINAL_NORMS = {"bamba": "final_layernorm", "nemotron_h": "norm_f"}
_EMBEDDINGS = {"nemotron_h": "embeddings"}
_ROTATIONS = dict.fromkeys(("granite_swa", "granitemoe_swa"), ("rotary_emb", "rotary_embs"))
_NO_OVERLAP = "layers run one after another, without overlap: the step is slower than that of the plan's pipeline"


class DeviceMapFormat(Trainer):
    """A map of modules to GPUs, for `from_pretrained(device_map=...)`."""

    name = "device_map"
    target = "transformers 5.23 with Accelerate 1.15"
    expresses = "one pipeline of single GPUs in one machine, whose layers run one after another; one recompute policy"
    schedules = TRAINER_SCHEDULES["device_map"]
    choices = EVEN | {
        "constraints.num_pipelines": (1,),
        "constraints.max_tp": (1,),
        "workload.recompute": ("full", "none"),
    }
    stated_training: ClassVar[Mapping[str, str]] = {}
    can_read = False
    is_launched = False
    optional_sequence_parallelism = True

    def takes_tp(self, problem: Problem, tp: int) -> bool:
        return tp == 1

    def unsuitable(self, problem: Problem) -> str | None:
        if execution_of(problem.model) is not None:
            return None
        return f"model {problem.model.name}: names of modules are known of {', '.join(TRAINED)}; take one"

    def unsuitable_kinds(self, problem: Problem) -> str | None:
        return None

    def preset(self, problem: Problem) -> Mapping[str, tuple[Any, ...]]:
        cluster = problem.cluster
        if others := _others(cluster, problem.usable_devices):
            raise InputError(
                f"space.preset: {self.name} is for one machine; leave the others out by "
                f"constraints.exclude=[{','.join(others)}]"
            )
        return super().preset(problem)

    def write(self, problem: Problem, plan: Plan) -> Program:
        refuse, cluster = self.refuse, problem.cluster
        if len(plan.pipelines) > 1:
            refuse(f"it has {len(plan.pipelines)} pipelines", "constraints.num_pipelines=1")
        pipeline = plan.pipelines[0]
        for s, stage in enumerate(pipeline.stages):
            if len(stage.devices) > 1:
                refuse(f"{stage_name(0, s)} has {len(stage.devices)} GPUs", "constraints.max_tp=1")
        devices = tuple(stage.devices[0] for stage in pipeline.stages)
        if others := _others(cluster, devices):
            raise InputError(
                f"export.format: {self.name} is for one machine, and the plan is on several; plan again with "
                f"constraints.exclude=[{','.join(others)}]"
            )
        schedule_of(plan, self.schedules, refuse)
        policy = uniform_policy(layout_of(plan, refuse), refuse)
        self.check_precision(problem)
        inside = _inside(cluster, cluster.computer_of(devices[0]))
        index = {device: inside.index(device) for device in devices}
        layers = {
            layer: index[device]
            for device, stage in zip(devices, pipeline.stages, strict=True)
            for first, end in stage.layers
            for layer in range(first, end)
        }
        document = dict(_modules(problem, layers))
        notes = (
            _NO_OVERLAP,
            *_of_head(problem, layers),
            f"GPUs are numbered {', '.join(f'{k} {cluster.gpu_of(device).name}' for k, device in enumerate(inside))}: "
            "check that CUDA has them in this order, or set CUDA_VISIBLE_DEVICES",
            "the batch is your script's: give its TrainingArguments per_device_train_batch_size="
            f"{pipeline.micro_batch_size} gradient_accumulation_steps={pipeline.num_micro_batches} "
            f"gradient_checkpointing={policy == 'full'}",
            *_of_training(problem),
        )
        files = {FILE: f"{json.dumps(document, indent=1)}\n", README: _readme(problem, notes)}
        return Program(devices, '"${TRAIN:-train.py}"', files, notes=notes)


def _modules(problem: Problem, layers: Mapping[int, int]) -> Iterator[tuple[str, int]]:
    """The modules of a model in their order, with their GPUs, of which `layers` has those of layers."""
    model, execution = problem.model, execution_of(problem.model)
    assert execution is not None, "`unsuitable` has refused it"
    first, last = layers[0], layers[model.num_layers - 1]
    yield f"model.{_EMBEDDINGS.get(execution.type, 'embed_tokens')}", first
    if execution.rotation is not None or execution.window_rotation is not None:
        yield from ((f"model.{name}", first) for name in _ROTATIONS.get(execution.type, ("rotary_emb",)))
    for layer in range(model.num_layers):
        yield f"model.layers.{layer}", layers[layer]
    yield f"model.{_FINAL_NORMS.get(execution.type, 'norm')}", last
    yield "lm_head", first if model.tied_embeddings else last


def _of_head(problem: Problem, layers: Mapping[int, int]) -> Iterator[str]:
    first, last = layers[0], layers[problem.model.num_layers - 1]
    if problem.model.tied_embeddings and first != last:
        yield (
            f"embedding and LM head are one matrix: the head and its logits are on GPU {first}, where the plan was "
            f"priced with them on GPU {last}"
        )


def _of_training(problem: Problem) -> Iterator[str]:
    """What the script has to do beside, of the workload."""
    workload = problem.workload
    if workload.adapters is not None:
        storage = "" if workload.lora.storage == "16bit" else f"load the weights in {workload.lora.storage}, and "
        yield f"{storage}add adapters of rank {workload.lora.rank} to {workload.lora.targets} when they are loaded"
    yield f"the optimizer is your script's, where the plan was priced with {workload.optimizer}"


def _inside(cluster: Cluster, computer: str) -> list[int]:
    """The devices of a computer, in the order of the cluster."""
    return [device for device in range(cluster.num_devices) if cluster.computer_of(device) == computer]


def _others(cluster: Cluster, devices: Any) -> list[str]:
    """The machines of `devices` outside the computer of the first of them."""
    computer = cluster.computer_of(devices[0])
    outside = (device for device in devices if cluster.computer_of(device) != computer)
    return list(dict.fromkeys(cluster.machines[int(cluster.machine_of[device])].name for device in outside))


def _readme(problem: Problem, notes: tuple[str, ...]) -> str:
    lines = [
        f"# {problem.model.name} for {DeviceMapFormat.target}",
        "",
        *[f"- {note[0].upper()}{note[1:]}." for note in notes],
        "",
        "```python",
        "import json",
        "from transformers import AutoModelForCausalLM",
        f'model = AutoModelForCausalLM.from_pretrained(NAME, device_map=json.load(open("{FILE}")))',
        "```",
    ]
    return "\n".join(lines) + "\n"


TRAINER = DeviceMapFormat()
