"""Measured times of single transformer layers on thirteen GPU types (Zorse), and their prediction.

`zorse_layer_latencies.json` sums the kernels of a layer under autocast from FP32 weights. So beside what
`layer_compute` predicts, a forward in FP16 casts each weight (reads 4 bytes, writes 2), and a backward casts each
gradient (reads 2, writes 4) and, in FP32 too, adds it to the one that is there (reads 8, writes 4). Launches are not in
the sums.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from experiments.validation.clusters import gpu_of
from experiments.validation.predict import tables
from experiments.validation.shipped import DATA
from hexiopt.cost.executors.compute import OperatorTimes, layer_compute
from hexiopt.numbers.gpus import catalogue
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.workload import Workload
from hexiopt.reading import read_mapping

_CAST_BYTES = 6
_SUM_BYTES = 12
_PRECISIONS = {"float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True)
class MeasuredLayer:
    """A measured layer on a type of the catalogue, at one micro-batch size; seconds of its forward and backward."""

    gpu: str
    model: ModelSpec
    workload: Workload
    micro_batch_size: int
    forward_s: float
    backward_s: float

    @property
    def seconds(self) -> float:
        """Forward and backward together."""
        return self.forward_s + self.backward_s


def measured_layers() -> Iterator[MeasuredLayer]:
    """The layers that Zorse measured, on types of the catalogue."""
    data = read_mapping(DATA / "zorse_layer_latencies.json")
    for series in data["series"]:
        if series["gpu"].startswith("Radeon"):
            continue  # erratic
        shape, length = data["models"][series["model"]], series["seq_len"]
        plain = shape["architecture"] == "gpt2"
        model = ModelSpec(
            name=series["model"],
            architecture=shape["architecture"],
            num_layers=1,
            hidden_size=shape["hidden"],
            num_heads=shape["heads"],
            num_kv_heads=shape["kv_heads"],
            head_dim=shape["hidden"] // shape["heads"],
            ffn_size=shape["ffn_hidden"],
            vocab_size=32_000,
            max_positions=length,
            attention_bias=plain,
            mlp_bias=plain,
        )
        workload = Workload(global_batch=1, seq_len=length, precision=_PRECISIONS[series["dtype"]])
        gpu = gpu_of(series["gpu"], None).name
        pairs = zip(series["forward_ms"], series["backward_ms"], strict=True)
        for size, (forward_ms, backward_ms) in enumerate(pairs, start=1):
            if forward_ms is not None and backward_ms is not None and catalogue()[gpu].peak_flops(workload.precision):
                yield MeasuredLayer(gpu, model, workload, size, forward_ms / 1e3, backward_ms / 1e3)


def fitted_layers() -> list[MeasuredLayer]:
    """The layers that constants are fitted on: those with a power of two of sequences."""
    return [layer for layer in measured_layers() if layer.micro_batch_size.bit_count() == 1]


def predicted_s(layer: MeasuredLayer, values: Mapping[str, float]) -> tuple[float, float]:
    """Forward and backward seconds of a layer with `values` of the fitted constants."""
    gpus, frameworks = tables(tuple(values.items()))
    gpu = gpus[layer.gpu]
    bare = replace(gpu, efficiency=replace(gpu.efficiency, launch_s=0.0))
    times = layer_compute(
        layer.model.layer, layer.workload, bare, 1, layer.micro_batch_size, frameworks["hexiopt_flash"]
    )
    params, casts = layer.model.layer_params, _CAST_BYTES if layer.workload.element_bytes == 2 else 0
    clock = OperatorTimes(bare, layer.workload.precision)
    # A T4 holds its clock in bursts, but not in the long runs that the catalogue stands for.
    speed = values["t4_burst"] if layer.gpu == "t4" and casts else 1.0
    return (
        times.forward_s / speed + clock.memory_s(params * casts),
        times.backward_s / speed + clock.memory_s(params * (casts + _SUM_BYTES)),
    )
