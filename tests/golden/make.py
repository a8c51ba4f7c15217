"""Golden files brought up to date: `python -m tests.golden.make [prices] [plans] [bad_input]`, all by default.

Inputs stay as they are; files with errors are added by hand, with an empty message.
"""

import sys
from typing import Any

from tests.golden import files, outcome


def prices(golden: Any) -> None:
    """Price every plan anew, by a model of its own."""
    for entry, plan_outcome in zip(golden["plans"], files.prices(golden, fresh=True), strict=True):
        entry["outcome"] = plan_outcome


def plans(golden: Any) -> None:
    """Run every solver anew."""
    golden["solvers"] = {solver: files.plans(golden, solver) for solver in golden["solvers"]}


def bad_input(golden: Any) -> None:
    """Read every file anew."""
    for entry in golden:
        entry["message"] = outcome.message(entry["kind"], entry["text"])


GOLDEN = {
    "prices": (files.PRICES, prices),
    "plans": (files.PLANS, plans),
    "bad_input": (files.BAD_INPUT, bad_input),
}

if __name__ == "__main__":
    for name in sys.argv[1:] or GOLDEN:
        files.rewrite(*GOLDEN[name])
