"""Which card next: what one more of each card on sale gives, and what tokens cost then."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hexiopt.errors import InputError
from hexiopt.files.price_list import PriceList
from hexiopt.numbers.gpus import Gpu
from hexiopt.problem.problem import Problem
from hexiopt.report.facts import price_per_hour
from hexiopt.report.style import amount
from hexiopt.solving import Budget
from hexiopt.solving.referee import Refereed
from hexiopt.study.alternatives import with_prices
from hexiopt.study.fitting.cures import with_card
from hexiopt.study.solution import PlacedPlan

_MOST = 3


@dataclass(frozen=True)
class Offer:
    """One card more, the plan with it (None: none was found), and the plan without it (None: nothing fitted)."""

    gpu: Gpu
    plan: PlacedPlan | None
    before: PlacedPlan | None
    source: str

    @property
    def price(self) -> float | None:
        """The price of 10¹² tokens by the plan; None where a machine that it uses has no price."""
        return None if self.plan is None else trillion_tokens(self.plan)

    def __str__(self) -> str:
        return f"+ {self.gpu.name}: {self._gain()}{self._money()}"

    def _gain(self) -> str:
        if self.plan is None:
            return "does not fit either"
        rate = self.plan.cost.tokens_per_s
        if self.before is None:
            return f"fits, {rate:,.0f} tokens/s"
        return f"{rate:,.0f} tokens/s ({rate / self.before.cost.tokens_per_s - 1:+.0%})"

    def _money(self) -> str:
        if self.price is None:
            return ""
        now = None if self.before is None else trillion_tokens(self.before)
        today = "" if now is None else f", {amount(now)} now"
        return f", {amount(self.price)} a trillion tokens{today} (prices {self.source or 'of your list'})"

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        rate = None if self.plan is None else self.plan.cost.tokens_per_s
        return {"gpu": self.gpu.name, "tokens_per_s": rate, "price_per_trillion_tokens": self.price}


def trillion_tokens(plan: PlacedPlan) -> float | None:
    """The price of 10¹² tokens on the machines that a plan uses; None where one of them has none."""
    price, unpriced = price_per_hour(plan.problem, plan)
    return None if price is None or unpriced else price / 3600 / plan.cost.tokens_per_s * 1e12


def offers(
    problem: Problem, plan: PlacedPlan | None, prices: PriceList, solver: Refereed, budget: Budget, seed: int = 0
) -> tuple[Offer, ...]:
    """The three best of the cards on sale, by the price of tokens and then by speed. Each is planned by `solver` from
    the plan without it, which must be priced by `prices` too. Raises InputError where none is on sale."""
    if not prices.on_sale:
        raise InputError("offers: no card is on sale; state gpu_purchase or gpu_price_per_hour in the list")
    return tuple(sorted(_plans(problem, plan, prices, solver, budget, seed), key=_rank)[:_MOST])


def _plans(
    problem: Problem, plan: PlacedPlan | None, prices: PriceList, solver: Refereed, budget: Budget, seed: int
) -> Iterator[Offer]:
    for gpu in prices.on_sale:
        changed = with_card(problem, gpu)
        if changed is None or gpu.peak_flops(problem.workload.precision) is None:
            continue
        priced = with_prices(changed, prices)
        result = solver.solve(priced, budget, seed=seed, start=plan)
        judge = solver.judge(priced)
        after = None if result.plan is None else PlacedPlan.of(priced, result.plan, {}, judge, result.cost)
        yield Offer(gpu, after, plan, prices.source)


def _rank(offer: Offer) -> tuple[bool, float, float]:
    rate = 0.0 if offer.plan is None else offer.plan.cost.tokens_per_s
    return (offer.plan is None, float("inf") if offer.price is None else offer.price, -rate)
