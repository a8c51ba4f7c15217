"""Our orders of random pipelines beside their optimal schedules, pipeline by pipeline and in all."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, product

import pandas as pd

from experiments.studies.orders.optimum import EFFORT, optimum
from experiments.studies.orders.pipelines import SmallPipeline, Ticks, clock_spans, clock_ticks
from hexiopt.schedules.depth import round_trip_depths
from solvers.completion.depths import best_depths

NAMES = {False: "whole", True: "split"}

DepthRule = Callable[[SmallPipeline, bool], float]
"""Of a pipeline, and of whether its backwards are split: its step, with the numbers in flight of a rule."""


def depths_that_fit(pipeline: SmallPipeline) -> list[Ticks]:
    """All numbers of micro-batches in flight [stages] that fit into memory and do not rise from stage to stage, so that
    none waits for ever."""
    ranges = [range(1, pipeline.most_depth(s) + 1) for s in range(pipeline.num_stages)]
    return [depths for depths in product(*ranges) if all(a >= b for a, b in pairwise(depths))]


def ticks_of_plans(pipeline: SmallPipeline, split: bool) -> float:
    """The step that searches give a plan: with the numbers of 1F1B, or with as many as they ask for and more, no fewer
    than these (`best_depths`)."""
    usual, waited = pipeline.usual_depths, zip(pipeline.forward, pipeline.backward, pipeline.weights, strict=True)
    seconds, late_s = [float(sum(ticks)) for ticks in waited], [float(w) * split for w in pipeline.weights]
    messages_s = [(float(a), float(b)) for a, b in zip(pipeline.ahead, pipeline.back, strict=True)]
    most = [pipeline.most_depth(s) for s in range(pipeline.num_stages)]

    def deeper(share: float) -> Ticks | None:
        wanted_depths = round_trip_depths(seconds, late_s, messages_s, pipeline.num_micro_batches, most, share)
        depths = tuple(map(max, wanted_depths, usual))
        return None if depths == usual else depths

    usual_ticks = clock_ticks(pipeline, split, usual)
    best = best_depths(deeper, lambda depths: clock_ticks(pipeline, split, depths), usual_ticks)
    return usual_ticks if best is None else clock_ticks(pipeline, split, best)


def least_ticks(pipeline: SmallPipeline, split: bool) -> float:
    """The step with the best of all numbers in flight."""
    return min(clock_ticks(pipeline, split, depths) for depths in depths_that_fit(pipeline))


RULES: Mapping[str, DepthRule] = {"1F1B's": clock_ticks, "those of plans": ticks_of_plans, "the best": least_ticks}


def compare(
    pipelines: Sequence[SmallPipeline], effort: float = EFFORT, rules: Mapping[str, DepthRule] = RULES
) -> pd.DataFrame:
    """Rows of each pipeline: with whole and with split backwards, with the depths of each of the `rules`.
    `ratio` is ours over the shortest schedule found, and `proved` whether none is shorter."""
    rows = []
    for number, pipeline in enumerate(pipelines):
        for split, backwards in NAMES.items():
            best = optimum(pipeline, split, clock_spans(pipeline, split), effort)
            for rule, ticks in rules.items():
                row = {"pipeline": number, "backwards": backwards, "in flight": rule}
                rows.append({**row, "ratio": ticks(pipeline, split) / best.ticks, "proved": best.is_proved})
    return pd.DataFrame(rows)


def summary(compared: pd.DataFrame) -> pd.DataFrame:
    """How near ours are to the optimum: numbers of pipelines, the mean and the worst, in per cent."""
    above = compared.assign(above=100 * (compared["ratio"] - 1)).groupby(["backwards", "in flight"], sort=False)
    shares = above["above"]
    counts = {f"within {most} %": shares.agg(lambda values, most=most: int((values <= most).sum())) for most in (2, 8)}
    figures = {"mean (%)": shares.mean().round(2), "worst (%)": shares.max().round(2), "proved": above["proved"].sum()}
    return pd.DataFrame({"pipelines": above.size(), **counts, **figures}).reset_index()
