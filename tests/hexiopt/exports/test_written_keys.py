"""Every key that an exporter writes, the importer reads: nothing of it is "not read", and none can go in silence."""

import ast
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import yaml

from hexiopt.errors import InputError
from hexiopt.exports.formats import ImportContext, ImportedPlan
from hexiopt.exports.trainers.registry import TRAINERS
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from tests.hexiopt.exports.random_plans import drawn
from tests.hexiopt.exports.test_round_trips import READ, STATES_MODEL

# Keys that say what the file says elsewhere too, or what is nowhere priced.
SAID_TWICE: Mapping[str, set[str]] = {
    "megatron": {"data-path"},  # of the comment at the head
    "megatron_bridge": {"virtual_pipeline_model_parallel_size", "use_distributed_optimizer"},
    "flagscale": {
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "enable_hetero",
        "hetero_device_types",
        "hetero_current_device_type",
        "recompute_method",
        "recompute_num_layers",
        "recompute_granularity_per_stage_micro_batch",
        "recompute_num_layers_per_stage_micro_batch",
        "recompute_method_per_stage_micro_batch",
    },
    "torchtitan": {"disable_cuda_graphs"},
    "flashflex": {"hexiopt.target", "hexiopt.notes"},
    "galvatron": {"hexiopt.target", "hexiopt.notes"},
    "deepspeed": {"hexiopt.target", "hexiopt.notes", "hexiopt.parts", "train_batch_size"},
    "accelerate": {
        "compute_environment",
        "num_processes",
        "num_machines",
        "machine_rank",
        "fsdp_state_dict_type",
        "fsdp_transformer_layer_cls_to_wrap",
    },
}
# Values that the trainer takes where a key is absent, of keys by the end of their name.
BY_DEFAULT = {
    ("size", "1"),
    ("num-layers", "1"),
    ("num_layers", "1"),
    ("method", "uniform"),
    ("type", "learned_absolute"),
    ("modules", "core_attn"),
    ("modules", "[core_attn]"),
    ("optimizer", "False"),
    ("parallel", "False"),
    ("parallel", "True"),
    ("per_stage_micro_batch", "[]"),
    ("bf16", "true"),
    ("vsp", "0"),
}


def is_default(key: str, value: str) -> bool:
    """Whether a value says what the key's absence says."""
    zeros = {"use_sp", "tp_consecutive_flags"}  # lists by layer
    return any(key.endswith(end) and value == own for end, own in BY_DEFAULT) or key in zeros


def nested(data: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of all values of nested mappings."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from nested(value, (*path, key))
        else:
            yield (*path, key)


def without(data: Any, path: tuple[str, ...]) -> Any:
    """Nested mappings without the value at a path."""
    if len(path) == 1:
        return {key: value for key, value in data.items() if key != path[0]}
    return {key: without(value, path[1:]) if key == path[0] else value for key, value in data.items()}


Dropped = Iterator[tuple[str, str, str]]  # a key, its value as text, and the file without it


def shell(text: str) -> Dropped:
    """The arguments of a script."""
    for match in re.finditer(r" ?--([a-z][\w-]*)((?: (?!--)[^\s\"']+)*)", text):
        yield match[1], match[2].strip(), text[: match.start()] + text[match.end() :]


def lines(text: str) -> Dropped:
    """The overrides of a text."""
    every = text.splitlines()
    for k, line in enumerate(every):
        if not line.startswith("#"):
            key, _, value = line.partition("=")
            yield key, value, "\n".join(every[:k] + every[k + 1 :])


def document(load: Callable[[str], Any], dump: Callable[[Any], str]) -> Callable[[str], Dropped]:
    """The values of a document, which keeps its comments."""

    def dropped(text: str) -> Dropped:
        head = "".join(line + "\n" for line in text.splitlines() if line.startswith("#"))
        data = load(text)
        for path in nested(data):
            value: Any = data
            for key in path:
                value = value[key]
            yield ".".join(path), str(value), head + dump(without(data, path))

    return dropped


def python(text: str) -> Dropped:
    """The assignments of a module."""
    tree = ast.parse(text)
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.FunctionDef))]
    for body in bodies:
        for k, node in enumerate(list(body)):
            if isinstance(node, ast.Assign) and not isinstance(node.value, ast.Call):
                del body[k]
                key = ast.unparse(node.targets[0]).partition(".")[2] or "RECOMPUTE"
                yield key, ast.unparse(node.value), ast.unparse(tree)
                body.insert(k, node)


JSON, YAML = document(json.loads, json.dumps), document(yaml.safe_load, lambda data: str(yaml.safe_dump(data)))
DROPPED = {
    "megatron": shell,
    "megatron_bridge": lines,
    "flagscale": YAML,
    "torchtitan": python,
    "flashflex": JSON,
    "galvatron": JSON,
    "deepspeed": JSON,
    "accelerate": YAML,
}


@pytest.mark.parametrize("name", READ)
def test_no_written_key_goes_in_silence(name: str) -> None:
    """Without it the answer is another, or a note appears, or the file is refused."""
    for seed in range(6):
        problem, plan = drawn(name, random.Random(f"keys {name} {seed}"))
        trainer = TRAINERS[name]
        read = trainer.read
        model = problem.model.replace(norm_eps=2e-5, max_positions=4096, vocab_size=32003)
        model = model.replace(rope_theta=5e5) if model.gated_mlp else model
        problem = problem.__class__(problem.cluster, model, problem.workload, problem.space)
        program = trainer.write(problem, plan)
        context = ImportContext(
            name,
            problem.cluster,
            program.devices,
            None if name in STATES_MODEL else model,
            Workload(global_batch=97 * problem.workload.global_batch, seq_len=2048),
            Space(),
            table=True,
        )

        def answer(text: str, read: Any = read, context: ImportContext = context) -> Any:
            try:
                found: ImportedPlan = read(text, context)
            except InputError:
                return "refused"
            return found.plan, found.problem.workload, found.problem.model, found.notes

        text = next(iter(program.files.values()))
        whole = answer(text)
        assert whole != "refused", (seed, text)
        # Of one shard, Accelerate says that it does not matter when it is gathered.
        unread = [n for n in whole[-1] if n.startswith("not read:") and "fsdp_reshard_after_forward" not in n]
        assert not unread, (seed, whole[-1])
        keys = list(DROPPED[name](text))
        assert len(keys) > 5
        for key, value, rest in keys:
            if {key, key.rpartition(".")[2]} & SAID_TWICE[name] or is_default(key, value):
                continue
            assert answer(rest) != whole, (seed, key)
