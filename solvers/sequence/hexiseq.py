"""`hexiseq`: asymmetric sequence parallelism (arXiv 2605.07569), with the degrees beside it searched too.

The paper takes data and pipeline parallelism as given and lays one sequence out over the devices of a stage; here all
shapes of pipelines of such stages are tried, and the layouts of each are found as in the paper (`layouts.py`).
"""

import random
from dataclasses import dataclass

from hexiopt.errors import InputError
from hexiopt.plan.token_layout import ORDERS
from hexiopt.solving import Capabilities
from solvers.core.search import Search
from solvers.frame.solver import SearchSolver
from solvers.sequence.layout_evaluator import LayoutFreedoms
from solvers.sequence.planning import SequencePlanner, search_shapes


@dataclass(frozen=True)
class HexiSeq(SearchSolver):
    """`uneven_tokens`, `uneven_heads` and `uneven_groups` take their freedom away where False; `order` of the shards is
    `contiguous`, `zigzag` or the `best` of both. A step is a plan priced.

    Raises InputError for an order that is none of these.
    """

    uneven_tokens: bool = True
    uneven_heads: bool = True
    uneven_groups: bool = True
    order: str = "best"

    name = "hexiseq"
    capabilities = Capabilities(sequence="only")

    def __post_init__(self) -> None:
        if self.order not in (*ORDERS, "best"):
            raise InputError(f"solver.order: {self.order!r} is not one of {', '.join(ORDERS)} and best")

    def search(self, run: Search, rng: random.Random) -> None:
        """Shapes by hand, layouts for them, then moves."""
        planner = SequencePlanner(run, self._freedoms())
        search_shapes(planner, planner.sequence_starts(), rng)

    def _freedoms(self) -> LayoutFreedoms:
        orders = ("zigzag", "contiguous") if self.order == "best" else (self.order,)
        return LayoutFreedoms(self.uneven_tokens, self.uneven_heads, self.uneven_groups, orders)
