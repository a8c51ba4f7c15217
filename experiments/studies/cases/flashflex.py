"""The rows on which FlashFlex's released scheduler was run, and its formulas."""

from dataclasses import dataclass
from importlib.resources import as_file, files

from experiments.app.configurations import named_cluster, named_model
from hexiopt.own_packages import own_package
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.reading import read_mapping
from solvers.baselines.flashflex.pricer import FlashFlexPricer


@dataclass(frozen=True)
class FlashFlexRow:
    """One comparison: a setting of HexiScale's, a model, GB/s between machines, and the tokens/s of others."""

    setting: int
    model: str
    inter_gb_per_s: float
    flashflex_tokens_per_s: float
    annealer_tokens_per_s: float


def read_rows() -> tuple[FlashFlexRow, ...]:
    """The rows of `data/flashflex_rows.yaml`."""
    with as_file(files(own_package("experiments")).joinpath("data/flashflex_rows.yaml")) as file:
        return tuple(FlashFlexRow(**row) for row in read_mapping(file)["rows"])


def problem_of(row: FlashFlexRow) -> Problem:
    """The problem of a row: 256 sequences of 4,096 tokens, full recompute; no replicated stages, which
    FlashFlex's formulas cannot price."""
    return Problem(
        cluster=named_cluster(f"hexiscale_setting_{row.setting}", inter_gb_per_s=row.inter_gb_per_s),
        model=named_model(row.model),
        workload=Workload(recompute="full"),
        space=Space(replicas=False),
    )


def by_rule(problem: Problem) -> FlashFlexPricer:
    """FlashFlex's formulas under its micro-batch rule."""
    return FlashFlexPricer(problem, micro_batch_rule=True)


def judged(problem: Problem, plan: Plan) -> dict[str, float]:
    """What FlashFlex's formulas say of a plan: tokens/s and whether its memory accepts it (0 or 1), free and by
    rule."""
    free, ruled = FlashFlexPricer(problem).price(plan), by_rule(problem).price(plan)
    return {
        "formulas_tokens_per_s": free.tokens_per_s,
        "rule_tokens_per_s": ruled.tokens_per_s,
        "formulas_fit": float(free.fits),
        "rule_fits": float(ruled.fits),
    }
