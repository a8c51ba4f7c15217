"""`hexiseq`: asymmetric sequence parallelism (arXiv 2605.07569), extended by a search over the other degrees.

The paper takes data and pipeline parallelism as given and distributes a sequence over the devices of a stage. Here all
shapes of pipelines of such stages are searched, and the layouts of each shape are found as in the paper
(`layout_search.py`).
"""

import random
from dataclasses import dataclass

from hexiopt.errors import InputError
from hexiopt.plan.parallelism import ORDERS
from hexiopt.solving import Capabilities
from solvers.core.search import Search
from solvers.frame.solver import SearchSolver
from solvers.sequence.layout_evaluator import LayoutFreedoms
from solvers.sequence.planning import SequencePlanner, search_shapes


@dataclass(frozen=True)
class HexiSeq(SearchSolver):
    """HexiSeq: uneven sequence layouts, with pipelines and data parallelism.

    `uneven_tokens`, `uneven_heads` and `uneven_groups` allow uneven layouts; False removes that freedom. `order` of
    the tokens is `contiguous`, `zigzag`, or the `best` of both. A step is one plan priced.

    Raises InputError for any other order.
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
        """Rule-based shapes, layouts for them, then annealing."""
        planner = SequencePlanner(run, self._freedoms())
        search_shapes(planner, planner.sequence_starts(), rng)

    def _freedoms(self) -> LayoutFreedoms:
        orders = ("zigzag", "contiguous") if self.order == "best" else (self.order,)
        return LayoutFreedoms(self.uneven_tokens, self.uneven_heads, self.uneven_groups, orders)
