"""What a run trains, with which values it begins, and what its checkpoints come to."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hexiopt.errors import InputError
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from runtime.mapping.adapters import Adapters, with_adapters
from runtime.mapping.model_parts import whole_parts
from runtime.mapping.parts import ParameterPart
from runtime.state.adapter_files import PeftAdapter, weights_beside
from runtime.state.checkpoint import BaseWeights, Checkpoint, TrainedModel
from runtime.state.slices import WEIGHT
from runtime.state.weights import HuggingFaceWeights
from runtime.training.settings import TrainingRun
from runtime.training.trainee import initial_values

ValueSource = Callable[[ParameterPart], Tensor]


def trained_model(run: TrainingRun, problem: Problem) -> TrainedModel:
    """What the checkpoints of a run are of. Raises InputError where its weights cannot be read."""
    model, workload, base = problem.model, problem.workload, BaseWeights()
    adapters = Adapters.of(workload, run.settings.lora_alpha)
    if adapters is not None and run.weights is not None:
        base = BaseWeights(str(run.weights), HuggingFaceWeights(run.weights, model).sha256)
    return TrainedModel(model, workload.optimizer, adapters, base)


def value_source(run: TrainingRun, trained: TrainedModel) -> ValueSource:
    """The first values of each part: read where the run states weights or an adapter, else drawn. Raises
    InputError."""
    base = _base_values(run.weights, trained, run.settings.seed)
    if trained.adapters is None:
        return base
    adapter = (
        partial(initial_values, run.settings.seed) if run.adapter is None else PeftAdapter(run.adapter, trained).read
    )
    return lambda part: (adapter if part.trained else base)(part)


def _base_values(weights: Path | None, trained: TrainedModel, seed: int) -> ValueSource:
    return partial(initial_values, seed) if weights is None else HuggingFaceWeights(weights, trained.model).read


def exported_weights(path: Path, weights: Path | None = None) -> tuple[ModelSpec, Iterator[tuple[str, Tensor]]]:
    """The model of a checkpoint, and its whole parameters by name, one at a time: adapters are merged into what stands
    beside them, which `weights` has, or what the checkpoint says.

    Raises InputError where the checkpoint is damaged, or the weights are others than those that it was trained beside.
    """
    checkpoint = Checkpoint(path)
    checkpoint.check()
    trained, model = checkpoint.trained, checkpoint.model
    if trained.adapters is None:
        if weights is not None:
            raise InputError(f"export.weights: {weights} goes with checkpoints of adapters only; leave it out")
        return model, ((part.name, checkpoint.read(WEIGHT, part)) for part in whole_parts(model))
    weights = weights_beside(path, trained, weights, "export.weights")
    return model, _merge(checkpoint, trained.adapters, _base_values(weights, trained, checkpoint.progress.seed))


def _merge(checkpoint: Checkpoint, adapters: Adapters, base: ValueSource) -> Iterator[tuple[str, Tensor]]:
    """W + scale · B A of each matrix with an adapter, in FP32 or better."""
    for part in whole_parts(checkpoint.model):
        _, *matrices = with_adapters([part], adapters)
        weight = base(part)
        if matrices:
            down, up = (checkpoint.read(WEIGHT, matrix) for matrix in matrices)
            weight = torch.addmm(weight.to(up.dtype), up, down, alpha=adapters.scale)
        yield part.name, weight
