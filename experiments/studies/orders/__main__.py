"""Measures our orders on random pipelines: `python -m experiments.studies.orders --pipelines 200`, two minutes."""

import argparse
import sys
from collections.abc import Sequence

from experiments.studies.orders.comparison import compare, summary
from experiments.studies.orders.optimum import EFFORT
from experiments.studies.orders.pipelines import sample


def main(argv: Sequence[str] | None = None) -> int:
    """Print how near our orders are to the optimum."""
    parser = argparse.ArgumentParser(prog="python -m experiments.studies.orders", description=__doc__)
    parser.add_argument("--pipelines", type=int, default=200, metavar="N", help="how many (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (default 0)")
    parser.add_argument("--effort", type=float, default=EFFORT, help="of CP-SAT, in its deterministic time, for each")
    options = parser.parse_args(argv)
    if options.pipelines < 1:
        print(f"hexiopt: --pipelines: {options.pipelines} is out of range; state 1 or more", file=sys.stderr)
        return 2
    print(summary(compare(sample(options.pipelines, options.seed), options.effort)).to_string(index=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
