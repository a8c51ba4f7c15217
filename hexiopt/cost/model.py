"""The older place of `PlanPricer`."""

from hexiopt.cost.pricer import PlanPricer as PlanPricer
