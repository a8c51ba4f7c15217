"""The targets' own parsers take what is written, and mean by it what the plan says; each skips where it is missing.

`pip install --no-deps` of the packages in tests/hexiopt/exports/parsers.txt makes all of them run.
"""

import importlib.util
import random
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from hexiopt.exports.formats import LaunchOptions, Program
from hexiopt.exports.launchers import jobset, skypilot
from hexiopt.exports.rank_table import rank_rows
from hexiopt.exports.shell.scripts import read_script
from hexiopt.exports.trainers.megatron import CORE
from hexiopt.exports.trainers.registry import TRAINERS
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from tests.hexiopt.exports.random_mixtures import chain_of_cells, mixture
from tests.hexiopt.exports.random_plans import draw_case

SEEDS = range(12)


def write_random(name: str, seed: int) -> tuple[Problem, Plan, Program]:
    """A random problem and plan, and the trainer's files of it."""
    problem, plan = draw_case(name, random.Random(f"parsers {name} {seed}"))
    return problem, plan, TRAINERS[name].write(problem, plan)


def written_mixture(seed: int) -> tuple[Problem, Plan, Program]:
    """A random problem with experts, a chain of it, and FlagScale's files."""
    rng = random.Random(f"parsers mixture {seed}")
    problem, plan = chain_of_cells(rng, mixture(rng, recurrent=False))
    return problem, plan, TRAINERS["flagscale"].write(problem, plan)


@contextmanager
def modules(**stand_ins: types.ModuleType) -> Iterator[None]:
    """Stand-ins for modules, for as long as the block runs."""
    names = {name.replace("__", "."): module for name, module in stand_ins.items()}
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update(names)
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_megatron_core_takes_the_layout_and_places_ranks_as_we_do() -> None:
    core = pytest.importorskip("megatron.core.transformer.transformer_config", reason="megatron-core is missing")
    state = pytest.importorskip("megatron.core.parallel_state")
    torch = pytest.importorskip("torch")
    for seed in SEEDS:
        problem, plan, program = write_random("megatron", seed)
        script = read_script(program.files["megatron.sh"], "megatron.sh", CORE)
        given = {name: [str(word) for word in words] for name, words in script.arguments.items()}
        tp, pp = (int(given[f"{kind}-model-parallel-size"][0]) for kind in ("tensor", "pipeline"))
        recompute = {
            key: given[f"recompute-{key}"][0] for key in ("granularity", "method") if f"recompute-{key}" in given
        }
        layers = given.get("recompute-num-layers")
        config = core.TransformerConfig(
            num_layers=problem.model.num_layers,
            hidden_size=problem.model.hidden_size,
            ffn_hidden_size=problem.model.ffn_size,
            num_attention_heads=problem.model.num_heads,
            num_query_groups=problem.model.num_kv_heads,
            tensor_model_parallel_size=tp,
            sequence_parallel="sequence-parallel" in given,
            pipeline_model_parallel_size=pp,
            pipeline_model_parallel_layout=given.get("pipeline-model-parallel-layout", [None])[0],
            pipeline_dtype=torch.bfloat16,
            recompute_num_layers=int(layers[0]) if layers else None,
            **{f"recompute_{key}": value for key, value in recompute.items()},
        )
        stages, chunks = plan.pipelines[0].stages, plan.pipelines[0].num_chunks
        if pp > 1:
            layout = config.pipeline_model_parallel_layout.layout
            counts = [[[str(kind).count("decoder") for kind in part] for part in stage_parts] for stage_parts in layout]
            assert [[sum(part) for part in stage_counts] for stage_counts in counts] == [
                [b - a for a, b in s.layers] for s in stages
            ]
            assert (config.virtual_pipeline_model_parallel_size or 1) == chunks
        order = "tp-cp-ep-pp-dp" if "use-tp-pp-dp-mapping" in given else "tp-cp-ep-dp-pp"
        dp = len(program.devices) // (tp * pp)
        ranks = state.RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=1, order=order)
        theirs = {tuple(program.devices[rank] for rank in group_ranks) for group_ranks in ranks.get_ranks("tp")}
        assert theirs == {stage.devices for pipeline in plan.pipelines for stage in pipeline.stages}
        heads = {tuple(program.devices[rank] for rank in group_ranks) for group_ranks in ranks.get_ranks("pp")}
        mine = {group for p in plan.pipelines for group in zip(*(stage.devices for stage in p.stages), strict=True)}
        assert heads == mine


@pytest.mark.slow
def test_flagscale_takes_the_meshes() -> None:
    torch = pytest.importorskip("torch")
    source = _file_of("flag-scale", "flagscale/train/arguments.py")
    context = types.ModuleType("flagscale.train.hetero.parallel_context")
    context.RankMapper = object  # type: ignore[attr-defined]
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    with modules(flagscale__train__hetero__parallel_context=context):
        arguments_module = _load_module(source, "flagscale_arguments")
    for _, plan, program in [write_random("flagscale", seed) for seed in SEEDS] + [
        written_mixture(seed) for seed in SEEDS
    ]:
        data = yaml.safe_load(program.files["flagscale.yaml"])
        system = {**data["system"], **data["system"].pop("hetero"), **data["system"].pop("recompute", {})}
        defaults = dict.fromkeys(
            f"recompute_{kind}_per_stage_micro_batch" for kind in ("granularity", "method", "num_layers")
        )
        given = {
            **defaults,
            "expert_tensor_parallel_size_per_process_mesh": None,
            "standalone_embedding_stage": False,
            "mtp_num_layers": None,
            "num_layers_per_virtual_pipeline_stage": None,
            "virtual_pipeline_model_parallel_size": None,
            "untie_embeddings_and_output_weights": False,
            "recompute_granularity": None,
            "recompute_method": None,
            **system,
            **data["model"],
        }
        assert len(program.devices) == len(plan.devices())
        starts = [0]
        for tp, _, _, dp, pp in zip(*(iter(given["hetero_process_meshes"]),) * 5, strict=True):
            starts.append(starts[-1] + tp * dp * pp)
        assert starts.pop() == len(program.devices)
        for rank in starts:
            torch.distributed.init_process_group(
                "fake", store=fake.FakeStore(), rank=rank, world_size=len(program.devices)
            )
            try:
                arguments = SimpleNamespace(**{key: list(v) if isinstance(v, list) else v for key, v in given.items()})
                mapper = SimpleNamespace(to_logical_ranks=lambda ranks: ranks)
                parsed = arguments_module.FSTrainArguments(arguments, rank_mapper=mapper)
                parsed.pre_validate_args()
                parsed.post_validate_args()
            finally:
                torch.distributed.destroy_process_group()
            device = program.devices[rank]
            [stage] = [s for p in plan.pipelines for s in p.stages if device in s.devices]
            assert arguments.tensor_model_parallel_size == len(stage.parallelism.parameter_copies[0])
            if "num_experts" in data["model"]:
                assert arguments.expert_model_parallel_size == len(stage.parallelism.executors[0])
                assert arguments.expert_tensor_parallel_size == 1


def test_torchtitan_has_every_field_and_takes_the_degrees() -> None:
    configs = pytest.importorskip("torchtitan.config.configs", reason="torchtitan is missing")
    dims = pytest.importorskip("torchtitan.distributed.parallel_dims")
    registry = types.ModuleType("torchtitan.models.llama3.config_registry")
    registry.llama3_8b = lambda: SimpleNamespace(  # type: ignore[attr-defined]
        parallelism=configs.ParallelismConfig(), training=configs.TrainingConfig()
    )
    for seed in SEEDS:
        problem, _, program = write_random("torchtitan", seed)
        names: dict[str, Any] = {}
        parents = {"torchtitan__models": types.ModuleType("m"), "torchtitan__models__llama3": types.ModuleType("l")}
        with modules(**parents, torchtitan__models__llama3__config_registry=registry):
            exec(compile(program.files["hexiopt_plan.py"], "plan", "exec"), names)
            config = names["plan"]()
        dims.ParallelDims.from_config(config.parallelism, world_size=len(program.devices))
        modules_of = config.parallelism.module_fqns_per_model_part
        if modules_of is not None:
            flat = [name for part in modules_of for name in part]
            layers = [f"layers.{k}" for k in range(problem.model.num_layers)]
            assert flat == ["tok_embeddings", *layers, "norm", "lm_head"]


@pytest.mark.filterwarnings("ignore")
def test_deepspeed_takes_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    config = pytest.importorskip("deepspeed.runtime.config", reason="deepspeed is missing")
    topology = pytest.importorskip("deepspeed.runtime.pipe.topology")
    monkeypatch.setattr(config.dist, "get_rank", lambda *_: 0)
    for seed in SEEDS:
        problem, plan, program = write_random("deepspeed", seed)
        data = yaml.safe_load(program.files["deepspeed.json"])
        dp = len(plan.pipelines)
        mpu = SimpleNamespace(get_data_parallel_world_size=lambda dp=dp: dp)
        parsed = config.DeepSpeedConfig(data, mpu)
        assert parsed.train_batch_size == problem.workload.global_batch
        assert parsed.zero_config.stage == plan.sharding.stage
        section = data["hexiopt"]
        grid = topology.PipeModelDataParallelTopology(section["pipe"], section["model"], dp)
        for p, pipeline in enumerate(plan.pipelines):
            for s, stage in enumerate(pipeline.stages):
                ranks = [grid.get_rank(pipe=s, data=p, model=t) for t in range(stage.tp)]
                assert [program.devices[rank] for rank in ranks] == list(stage.devices)
        assert section["parts"][0] == 0
        assert section["parts"][-1] == problem.model.num_layers + 2


@pytest.mark.filterwarnings("ignore")
def test_accelerate_takes_the_template(tmp_path: Path) -> None:
    read = pytest.importorskip("accelerate.commands.config.config_args", reason="accelerate is missing")
    utils = pytest.importorskip("accelerate.utils")
    for seed in SEEDS:
        _, plan, program = write_random("accelerate", seed)
        path = tmp_path / "accelerate.yaml"
        path.write_text(program.files["accelerate.yaml"])
        parsed = read.load_config_from_file(str(path))
        alias = {"transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap", "version": "fsdp_version"}
        fields = set(utils.FullyShardedDataParallelPlugin.__dataclass_fields__)
        assert {alias.get(k, k) for k in (key.removeprefix("fsdp_") for key in parsed.fsdp_config)} <= fields
        sizes = {key.removeprefix("parallelism_config_"): v for key, v in parsed.parallelism_config.items()}
        fields = set(utils.ParallelismConfig.__dataclass_fields__)
        assert set(sizes) <= fields
        assert sizes["dp_shard_size"] * sizes["tp_size"] == len(plan.devices())


def test_jobset_passes_its_strict_schema() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is missing")
    schema = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is missing")
    for seed in SEEDS:
        problem, plan, program = write_random("flagscale", seed)
        rows = rank_rows(problem.cluster, plan, program.devices)
        options = LaunchOptions(folder="/plan")
        data = yaml.safe_load(jobset.LAUNCHER.write(problem.cluster, rows, program, options).files[jobset.FILE])
        parsed = models.JobsetV1alpha2JobSet.from_dict(data).to_dict()
        for ours, theirs in zip(data["spec"]["replicatedJobs"], parsed["spec"]["replicatedJobs"], strict=True):
            assert {key: ours[key] for key in ("name", "replicas")} == {
                key: theirs[key] for key in ("name", "replicas")
            }
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": ours["name"]}, **ours["template"]}
            schema.validate(job, "1.34", strict=True)
            assert _lost_paths(ours["template"], theirs["template"]) == []


def _lost_paths(ours: Any, theirs: Any, where: str = "") -> list[str]:
    """The paths that a model has dropped."""
    if isinstance(ours, dict):
        return [
            path
            for key, value in ours.items()
            for path in (_lost_paths(value, theirs[key], f"{where}.{key}") if key in theirs else [f"{where}.{key}"])
        ]
    if isinstance(ours, list):
        return [
            p for k, (a, b) in enumerate(zip(ours, theirs, strict=True)) for p in _lost_paths(a, b, f"{where}[{k}]")
        ]
    return []


def test_skypilot_passes_its_schemas() -> None:
    schemas = pytest.importorskip("sky.utils.schemas", reason="skypilot is missing")
    validate = pytest.importorskip("jsonschema").validate
    checked = 0
    for seed in SEEDS:
        problem, plan, program = write_random("flashflex", seed)
        sorted_program = Program(tuple(sorted(plan.devices())), program.command, program.files, program.setup)
        rows = rank_rows(problem.cluster, plan, sorted_program.devices)
        text = skypilot.LAUNCHER.write(problem.cluster, rows, sorted_program, LaunchOptions(folder="/plan")).files[
            skypilot.FILE
        ]
        for task in yaml.safe_load_all(text):
            if "run" in task:
                validate(task, schemas.get_task_schema())
                validate(task["resources"], schemas.get_resources_schema())
                checked += 1
    assert checked >= len(SEEDS)


def _file_of(package: str, end: str) -> Path:
    """A file of an installed package, which may not be importable as a whole."""
    try:
        listed = files(package) or []
    except PackageNotFoundError:
        pytest.skip(f"{package} is missing")
    return next(Path(str(path.locate())) for path in listed if str(path).endswith(end))


def _load_module(path: Path, name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
