"""Completion of partitions: of the ways to split layers, the one that is priced best."""

from collections import Counter
from dataclasses import replace

from hexiopt.cost.pricer import PlanPricer
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from solvers.completion.completer import PlanCompleter
from solvers.completion.pricing import price_plan
from tests.solvers import problems
from tests.solvers.completion.test_pipeline_timer import walk


def test_with_slack_or_without_what_is_priced_best() -> None:
    """Pipelines that wait for messages have either; each is the better one for some partitions."""
    cluster = problems.cluster(("a", "fast", 4), ("b", "fast", 4), ("c", "slow", 4), network_gb_per_s=0.3)
    workload = Workload(16, 512, schedule="1f1b")
    problem = Problem(cluster, replace(problems.TINY, num_layers=24), workload, problems.SMALL_SPACE)
    pricer = PlanPricer(problem)
    completer, wins = PlanCompleter(pricer), Counter[str]()
    for seed in range(120):
        partition = walk(problem, seed, 30)
        completed = completer.allowed(partition) and completer.complete(partition)
        if not completed or completed.waiting is None:
            continue
        tight = completer._complete(*completed.waiting, tight=True)
        assert tight
        prices = completer.price(completed), price_plan(pricer, completed.plan), price_plan(pricer, tight.plan)
        priced, with_slack, without = [priced_plan.cost.objective for priced_plan in prices if priced_plan]
        assert priced == min(with_slack, without)
        wins["with"] += with_slack < without
        wins["without"] += without < with_slack
    assert min(wins["with"], wins["without"]) > 0
