"""Our orders of random pipelines beside their optimal schedules, pipeline by pipeline and in all."""

from collections.abc import Sequence
from itertools import pairwise, product

import pandas as pd

from experiments.studies.orders.optimum import EFFORT, optimum
from experiments.studies.orders.pipelines import SmallPipeline, Ticks, clock_spans, clock_ticks

USUAL, DEEP = "1F1B's", "the best"
NAMES = {False: "whole", True: "split"}


def depths_that_fit(pipeline: SmallPipeline) -> list[Ticks]:
    """All numbers of micro-batches in flight [stages] that fit into memory and do not rise from stage to stage, so that
    none waits for ever."""
    ranges = [range(1, pipeline.most_depth(s) + 1) for s in range(pipeline.num_stages)]
    return [depths for depths in product(*ranges) if all(a >= b for a, b in pairwise(depths))]


def compare(pipelines: Sequence[SmallPipeline], effort: float = EFFORT) -> pd.DataFrame:
    """Rows of each pipeline: with whole and with split backwards, with 1F1B's micro-batches in flight and with the best
    numbers of them. `ratio` is ours over the shortest schedule found, and `proved` whether none is shorter."""
    rows = []
    for number, pipeline in enumerate(pipelines):
        for split, backwards in NAMES.items():
            spans = clock_spans(pipeline, split)
            best = optimum(pipeline, split, spans, effort)
            ticks = {
                USUAL: clock_ticks(pipeline, split),
                DEEP: min(clock_ticks(pipeline, split, depths) for depths in depths_that_fit(pipeline)),
            }
            for depth, ours in ticks.items():
                row = {"pipeline": number, "backwards": backwards, "in flight": depth}
                rows.append({**row, "ratio": ours / best.ticks, "proved": best.is_proved})
    return pd.DataFrame(rows)


def summary(compared: pd.DataFrame) -> pd.DataFrame:
    """How near ours are to the optimum: numbers of pipelines, the mean and the worst, in per cent."""
    above = compared.assign(above=100 * (compared["ratio"] - 1)).groupby(["backwards", "in flight"], sort=False)
    counted = {
        f"within {most} %": above["above"].agg(lambda own, most=most: int((own <= most).sum())) for most in (2, 8)
    }
    figures = {"mean (%)": above["above"].mean().round(2), "worst (%)": above["above"].max().round(2)}
    return pd.DataFrame(
        {"pipelines": above.size(), **counted, **figures, "proved": above["proved"].sum()}
    ).reset_index()
