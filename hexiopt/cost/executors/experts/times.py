"""Seconds of the experts of a layer on a device that shares them with others: router, permutation, all-to-all, grouped
products.

A device routes its tokens, holds whole experts, and gets the copies of tokens that go to these: `expert_load` times the
mean of as many experts on the fullest device.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, log2
from typing import NamedTuple

from hexiopt.cost.executors.compute import OperatorTimes, gemm_backward_passes
from hexiopt.cost.executors.network_load import load_of
from hexiopt.cost.executors.tp_groups import TpGroup
from hexiopt.numbers import coefficients as c
from hexiopt.numbers.frameworks import Framework
from hexiopt.numbers.gpus import Gpu
from hexiopt.problem.kinds import Experts
from hexiopt.problem.network import Network
from hexiopt.problem.workload import Workload


def expert_load(workload: Workload, devices: int) -> float:
    """Copies of tokens that come to the fullest of `devices` that share experts, over the mean."""
    return 1.0 if workload.routing == "forced" else min(c.EXPERT_IMBALANCE, float(devices))


class ExpertSharing(NamedTuple):
    """What a device has of the experts of a stage: `devices` share them, which are so many `replicas` of all else and
    take `samples` of a micro-batch together. It has `held` whole ones of each layer; None: equal parts; `alone`: and
    nothing else of the stage; `by_columns`: the devices, one replica, divide each expert as an MLP is divided."""

    devices: int
    replicas: int
    samples: int
    held: int | None = None
    alone: bool = False
    by_columns: bool = False

    def count(self, part: Experts) -> int:
        """Whole experts on the device, or as many as its columns amount to."""
        return ceil(part.count / self.devices) if self.held is None else self.held

    def rows(self, part: Experts, workload: Workload) -> float:
        """Copies of tokens of a micro-batch that come to them, if the device is the fullest."""
        copies = expert_load(workload, self.devices) * (self.samples * workload.seq_len) * part.top_k
        return copies / self.devices if self.held is None else copies * self.held / part.count

    def on_device(self, part: Experts) -> tuple[Experts, "ExpertSharing"]:
        """What the device computes: experts, and how they are shared, as if whole ones were."""
        if not self.by_columns:
            return part, self
        return replace(part, ffn_size=ceil(part.ffn_size / self.devices)), ExpertSharing(1, 1, self.samples)


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


def uneven_exchange_s(
    part: Experts,
    workload: Workload,
    hidden_size: int,
    network: Network,
    shares: Sequence["DeviceShare"],
    to_machines: bool,
) -> float:
    """As `exchange_s`, among devices of any machines with any `shares` [devices] of tokens and experts: until the
    busiest port of a device and the busiest resource of the network have passed what goes through them."""
    if len(shares) == 1:
        return 0.0
    machines: dict[int, list[DeviceShare]] = {}
    for share in shares:
        machines.setdefault(share.machine, []).append(share)
    experts = {m: sum(share.experts for share in inside) for m, inside in machines.items()}
    tokens = {m: sum(share.tokens for share in inside) for m, inside in machines.items()}
    k, count, total = part.top_k, part.count, sum(tokens.values())
    copy_bytes = expert_load(workload, len(shares)) * part.width(hidden_size) * workload.element_bytes
    inside_s, transfers = 0.0, list[tuple[int, int, float]]()
    for m, inside in machines.items():
        # What comes from other machines arrives at a device of any rank, and goes on inside the machine.
        forwarded, from_others = 1 - 1 / len(inside), total - tokens[m]
        for at, share in enumerate(inside):
            received = share.experts / count * k * (tokens[m] - share.tokens + forwarded * from_others)
            passed_on = k * from_others * experts[m] / count * forwarded / len(inside)
            sent = share.tokens * k * (experts[m] - share.experts) / count + passed_on
            seconds = copy_bytes * max(sent, received) / (share.bandwidth * c.ALL_TO_ALL_OF_RING)
            inside_s = max(inside_s, seconds)
            for other, there in machines.items():
                if other != m and share.tokens and experts[other]:
                    part_there = experts[other] / count
                    copies = 1 - (1 - part_there) ** k if to_machines else k * part_there
                    sent_bytes = copy_bytes * share.tokens * copies
                    transfers.append((share.device, there[at % len(there)].device, sent_bytes))
    load_s, _ = load_of(network, transfers, receivers=True)
    return max(inside_s, max(load_s.values(), default=0.0)) + c.ALL_TO_ALL_S * log2(len(shares))


class DeviceShare(NamedTuple):
    """A device of a stage that shares its experts: its machine, the ring bandwidth of the stage's devices there in
    bytes/s, the tokens of a micro-batch that it routes, and the whole experts that it holds."""

    device: int
    machine: int
    bandwidth: float
    tokens: float
    experts: int


class ExpertTimes:
    """Forward and backward seconds of a layer's experts on one GPU type."""

    def __init__(self, gpu: Gpu, workload: Workload, framework: Framework, hidden_size: int) -> None:
        self._clock = OperatorTimes(gpu, workload.precision)
        self._permute_s_per_byte = 1.0 / (gpu.hbm_bytes_per_s * c.PERMUTE_SHARE)
        self._launch_s = gpu.efficiency.launch_s
        self._workload, self._framework, self._hidden = workload, framework, hidden_size

    def seconds(self, part: Experts, sharing: ExpertSharing, routed_tokens: float) -> tuple[float, float]:
        """Of all but all-to-alls and the router's product, on a device that routes `routed_tokens` of a micro-batch."""
        workload, framework = self._workload, self._framework
        rows, count = sharing.rows(part, workload), sharing.count(part)
        width, inward = part.width(self._hidden), 2 if part.gated else 1
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
        backward_s = (
            sum(products_s[: gemm_backward_passes(workload)])
            + c.MEMORY_BACKWARD_PASSES * (activation_s + router_s)
            + permute_s
        )
        return forward_s, backward_s

    def _grouped_s(self, count: int, rows: float, width_in: int, width_out: int, of_weights: bool) -> float:
        """Seconds of products of `rows` rows with the matrices of `count` experts in one kernel: tiles at the rate of
        large products, and what must pass the memory beside them; gradients `of_weights` are read and written."""
        if not count:
            return 0.0
        tiles = ceil(rows / count / c.TILE_ROWS) * c.TILE_ROWS
        flops = 2.0 * count * tiles * width_in * width_out
        weight_bytes = 2 * self._workload.states.gradient if of_weights else self._workload.element_bytes
        moved = count * width_in * width_out * weight_bytes
        moved += rows * (width_in + width_out) * self._workload.element_bytes
        return self._clock.gemm_s(flops) + self._clock.memory_s(moved)
