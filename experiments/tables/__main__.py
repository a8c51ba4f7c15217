"""All tables one after the other, sharing their searches: `python -m experiments.tables` (about an hour, two cores).

    python -m experiments.tables --publish            # also into docs/results.md, as `make results` does
    python -m experiments.tables --quick              # tiny settings, in seconds

What is measured is kept in OUT/searches; after an interruption, or a change of one solver, only the rest runs.
"""

import sys

from experiments.tables import ablation, convergence, homogeneous, rivals, scaling
from experiments.tables.frame import run_tables
from experiments.tables.long_context import joint, layouts, pairs, scheduling, simulations, testbed

PIPELINES = (homogeneous.TABLE, rivals.TABLE, convergence.TABLE, scaling.TABLE, ablation.TABLE)
LONG_CONTEXT = tuple(module.TABLE for module in (testbed, simulations, pairs, scheduling, layouts, joint))

if __name__ == "__main__":
    sys.exit(run_tables((*PIPELINES, *LONG_CONTEXT), __doc__, sys.argv[1:]))
