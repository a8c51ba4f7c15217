"""Weights gathered beside the next forwards: by how much these begin later, so that none of them waits."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hexiopt.cost.cost import PipelineCost
from hexiopt.cost.rings import RingTimes
from hexiopt.numbers.coefficients import BUCKET_PARAMS
from hexiopt.plan.holdings import Floats, Ints


class Forwards(NamedTuple):
    """Of the executor of each parameter copy [copies]: its pipeline; seconds from the pipeline's start after which its
    first forward begins at the earliest; and its `ForwardLayers`."""

    pipeline: Ints
    begin_s: Floats
    num_layers: Floats
    layer_s: Floats
    together: Floats


def forwards(pipelines: Sequence[PipelineCost]) -> Forwards:
    """The first forwards of a step, in the order of all parameter copies. Messages are left out of what goes before."""
    numbers, rows = list[int](), list[tuple[float, ...]]()
    for number, pipeline in enumerate(pipelines):
        begin_s = 0.0
        for stage in pipeline.stages:
            for executor in stage.executors:
                rows += [(begin_s, *executor.layers)] * len(executor.copies)
            begin_s += min([executor.chunk_s[0][0] for executor in stage.executors])
        numbers += [number] * (len(rows) - len(numbers))
    return Forwards(np.array(numbers), *np.array(rows, np.float64).T)


def late_starts(within: RingTimes, copy_of: Ints, optimizer_s: Floats, num_bytes: float, ahead: Forwards) -> Floats:
    """Seconds from the start of all optimisers, of `optimizer_s` [copies], to that of each copy's pipeline [copies], if
    no forward of it is to wait for weights.

    A ring gathers when the last of its members has stepped, those parameters first that forwards need first. While they
    come, a member waits for its first forward as it would anyway, and then runs it layer by layer. The first layer,
    with those recomputed together with it, needs its own parameters, those of the embedding, and at most a bucket
    beside them, in which a later layer begins; each other layer, one layer's more. As compute and gather both go on
    evenly, the first of them decides and the last that something comes for. Other rings' layers, and what is no layer,
    only come between. No pipeline ends later than one that begins then, as messages are taken to be as fast as without
    gathers beside them.
    """
    late_s, groups = np.zeros(ahead.pipeline[-1] + 1), within.groups
    np.maximum.at(late_s, ahead.pipeline, optimizer_s - ahead.begin_s)
    for holders, params, layer, embedding, whole_s in zip(
        groups.holders, groups.params, groups.layer, groups.embedding, within.ring_pass_s(num_bytes), strict=True
    ):
        at, ring_s = copy_of[holders], whole_s[:, None]
        layer = np.where(layer > 0.0, layer, params)[:, None]  # a head or a tied matrix alone comes whole
        share = (embedding[:, None] + layer * ahead.together[at] + BUCKET_PARAMS) / params[:, None]
        beside_s = np.clip((1.0 - share) * params[:, None] / layer, 0.0, ahead.num_layers[at]) * ahead.layer_s[at]
        lead_s = np.maximum(ring_s - beside_s, np.minimum(share, 1.0) * ring_s)
        start_s = optimizer_s[at].max(axis=1)[:, None]
        np.maximum.at(late_s, ahead.pipeline[at], start_s + lead_s - ahead.begin_s[at])
    return late_s[ahead.pipeline]
