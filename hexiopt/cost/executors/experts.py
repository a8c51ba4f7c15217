"""Seconds of the experts of a layer on a device that shares them with others: router, permutation, all-to-all, grouped
products.

Each of `devices` routes an equal share of the tokens, holds an equal share of the experts whole, and gets the copies of
tokens that go to these: `expert_load` times the mean on the fullest device.
"""

from dataclasses import replace
from math import ceil, log2
from typing import NamedTuple

from hexiopt.cost.executors.compute import OperatorTimes
from hexiopt.cost.executors.tp_groups import TpGroup
from hexiopt.numbers import coefficients as c
from hexiopt.numbers.frameworks import Framework
from hexiopt.numbers.gpus import Gpu
from hexiopt.problem.kinds import Experts
from hexiopt.problem.workload import Workload


class ExpertSharing(NamedTuple):
    """How the devices of a group divide the experts of a layer: each has some of them whole, so that the group may be
    several `replicas` of all else; or each a part of every expert, `by_columns` as an MLP is divided."""

    replicas: int = 1
    by_columns: bool = False

    def on_device(self, part: Experts, degree: int) -> tuple[Experts, int]:
        """Experts, and the number of devices that share them whole, of which a device holds and computes as much as of
        `part` in a group whose replicas have TP `degree`."""
        devices = degree * self.replicas
        return (replace(part, ffn_size=ceil(part.ffn_size / devices)), 1) if self.by_columns else (part, devices)


ALONE = ExpertSharing()
"""One replica has all experts whole."""


def expert_load(workload: Workload, devices: int) -> float:
    """Copies of tokens that come to the fullest of `devices` that share experts, over the mean."""
    return 1.0 if workload.routing == "forced" else min(c.EXPERT_IMBALANCE, float(devices))


def expert_rows(part: Experts, workload: Workload, devices: int, micro_batch_size: int) -> float:
    """Copies of tokens of a micro-batch that come to the fullest of `devices`."""
    tokens = micro_batch_size * workload.seq_len
    return expert_load(workload, devices) * tokens * part.top_k / devices


def copies_across(part: Experts, machines: int, to_machines: bool) -> float:
    """Copies of a token that leave its machine, of `machines` that share experts equally, where the experts that a
    token goes to are drawn at random: one for each expert elsewhere, or one for each other machine with such an expert
    where copies go `to_machines`, which forward them (DeepEP, github.com/deepseek-ai/DeepEP)."""
    elsewhere = 1 - 1 / machines
    if not to_machines:
        return part.top_k * elsewhere
    return machines * (1 - elsewhere**part.top_k) * elsewhere


def exchange_s(
    part: Experts, workload: Workload, hidden_size: int, group: TpGroup, micro_batch_size: int, to_machines: bool
) -> float:
    """Seconds of one all-to-all that brings copies of tokens to experts, or back, among the devices of `group`:
    through links inside machines and, at the same time, between machines; `to_machines` as of `copies_across`.

    Every copy goes through a link inside a machine but those for the device itself.
    """
    if group.tp == 1:
        return 0.0
    load, inside = expert_load(workload, group.tp), group.tp / group.machines
    token_bytes = part.width(hidden_size) * workload.element_bytes
    sent_bytes = load * micro_batch_size * workload.seq_len / group.tp * token_bytes
    inside_s = sent_bytes * part.top_k * (1 - 1 / inside) / (group.bandwidth * c.ALL_TO_ALL_OF_RING)
    across_s = sent_bytes * copies_across(part, group.machines, to_machines) / group.across_bandwidth
    return max(inside_s, across_s) + c.ALL_TO_ALL_S * log2(group.tp)


class ExpertTimes:
    """Forward and backward seconds of a layer's experts on one GPU type."""

    def __init__(self, gpu: Gpu, workload: Workload, framework: Framework, hidden_size: int) -> None:
        self._clock = OperatorTimes(gpu, workload.precision)
        self._permute_s_per_byte = 1.0 / (gpu.hbm_bytes_per_s * c.PERMUTE_SHARE)
        self._launch_s = gpu.efficiency.launch_s
        self._workload, self._framework, self._hidden = workload, framework, hidden_size

    def seconds(self, part: Experts, devices: int, micro_batch_size: int) -> tuple[float, float]:
        """Of all but all-to-alls and the router's product, for a micro-batch of `micro_batch_size` sequences."""
        workload, framework = self._workload, self._framework
        routed_tokens = float(micro_batch_size * workload.seq_len) / devices
        rows = expert_rows(part, workload, devices, micro_batch_size)
        width, inward = part.width(self._hidden), 2 if part.gated else 1
        count = ceil(part.count / devices)
        shapes = ((width, inward * part.ffn_size), (part.ffn_size, width))
        products_s = [
            sum(self._grouped_s(count, rows, *shape, weights) for shape in shapes) for weights in (False, True)
        ]
        cast = rows * (width + part.ffn_size) * framework.cast_bytes.get(workload.precision, 0.0)
        moved = framework.memory_traffic * rows * (inward + 1) * part.ffn_size * workload.element_bytes
        passes = framework.expert_passes
        activation_s = passes * self._clock.memory_s(moved + cast, 2)
        permute_s = passes * (2 * routed_tokens + 4 * rows) * width * workload.element_bytes * self._permute_s_per_byte
        permute_s += c.PERMUTE_KERNELS * self._launch_s
        router_s = self._clock.memory_s(routed_tokens * part.count * c.ROUTER_SCORE_BYTES, c.ROUTER_KERNELS)
        forward_s = products_s[False] + activation_s + permute_s + router_s
        backward_s = sum(products_s) + c.MEMORY_BACKWARD_PASSES * (activation_s + router_s) + permute_s
        return forward_s, backward_s

    def _grouped_s(self, count: int, rows: float, width_in: int, width_out: int, of_weights: bool) -> float:
        """Seconds of products of `rows` rows with the matrices of `count` experts in one kernel: tiles at the rate of
        large products, and what must pass the memory beside them; gradients `of_weights` are read and written."""
        tiles = ceil(rows / count / c.TILE_ROWS) * c.TILE_ROWS
        flops = 2.0 * count * tiles * width_in * width_out
        weight_bytes = 2 * self._workload.states.gradient if of_weights else self._workload.element_bytes
        moved = count * width_in * width_out * weight_bytes
        moved += rows * (width_in + width_out) * self._workload.element_bytes
        return self._clock.gemm_s(flops) + self._clock.memory_s(moved)
