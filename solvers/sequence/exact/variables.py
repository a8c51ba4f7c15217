"""The variables of the CP-SAT model of one skeleton: quanta and heads of its devices, and times in integer units.

The unit is 2^-40 of the limit asked about. Seconds are rounded down, so that no time exceeds the true one.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from ortools.sat.python import cp_model

from hexiopt.plan.token_layout import Floats, kv_heads_of, members, ring_holders, uneven_kv_copies
from solvers.sequence.exact.layout_skeletons import LayoutSkeleton, alike
from solvers.sequence.exact.quanta_grid import QuantaGrid

_UNITS = 2**40
Sum = cp_model.LinearExpr | int


class Variables:
    """The variables for a `skeleton` that takes less than `limit_s` seconds; `heads` fixes the heads where given.

    A *place* is the position of a device in the skeleton, counted group by group; `places[g]` are those of group g.
    `rings`, `kv_heads` and `copies` [places] are meaningful only where the heads are fixed.
    """

    def __init__(self, grid: QuantaGrid, skeleton: LayoutSkeleton, limit_s: float, heads: Sequence[int] | None) -> None:
        self.grid, self.skeleton = grid, skeleton
        self.unit_s, self.limit = limit_s / _UNITS, _UNITS - 1
        self.spec, self.devices = grid.problem.model, skeleton.devices
        self.gpus = [grid.gpu(d) for d in self.devices]
        self.group_of = [g for g, own in enumerate(skeleton.groups) for _ in own]
        self.places = [[k for k, of in enumerate(self.group_of) if of == g] for g in range(len(skeleton.groups))]
        self.fixed = None if heads is None else tuple(heads)
        self.model = cp_model.CpModel()
        self._products: dict[tuple[int, int], cp_model.IntVar] = {}
        own = members(skeleton.layout([1] * len(self.devices), heads or self.any_heads()))
        self.rings = ring_holders(own, self.spec.num_heads, self.spec.num_kv_heads)
        self.kv_heads = kv_heads_of(own, self.spec.num_heads, self.spec.num_kv_heads)
        self.copies = uneven_kv_copies(own, self.kv_heads, self.spec.num_heads, self.spec.num_kv_heads)

        # Step 1, variables: quanta and heads of every device, quanta of every group.
        many = grid.resolution
        self.quanta = [self.model.new_int_var(1, many, f"quanta_{d}") for d in self.devices]
        self.group_quanta = [self.model.new_int_var(len(own), many, f"group_{g}") for g, own in enumerate(self.places)]
        self.heads = (
            None if heads else [self.model.new_int_var(1, self.spec.num_heads, f"heads_{d}") for d in self.devices]
        )

        # Step 2, constraints. Devices have the quanta of their group, groups all there are, their devices all heads.
        for g, places in enumerate(self.places):
            self.model.add(self.group_quanta[g] == sum(self.quanta[k] for k in places))
            if self.heads is not None:
                self.model.add(sum(self.heads[k] for k in places) == self.spec.num_heads)
        self.model.add(sum(self.group_quanta) == many)

    def order_equals(self, states: Mapping[int, float]) -> None:
        """Break symmetry: of interchangeable devices in a group with equal bytes of states, the first have most
        quanta.
        """
        for places in self.places:
            for a, b in pairwise(places):
                if alike(self.grid.problem, *(self.devices[k] for k in (a, b))) and (
                    states[self.devices[a]] == states[self.devices[b]]
                ):
                    self.model.add(self.quanta[a] >= self.quanta[b])

    def refute(self, variables: Sequence[cp_model.IntVar], values: Sequence[int]) -> None:
        """Exclude this combination of values."""
        differ = []
        for variable, value in zip(variables, values, strict=True):
            literal = self.model.new_bool_var("")
            self.model.add(variable != value).only_enforce_if(literal)
            differ.append(literal)
        self.model.add_bool_or(differ)

    def any_heads(self) -> list[int]:
        """Any legal heads, for what does not depend on them."""
        return [n for own in self.skeleton.groups for n in [*[1] * (len(own) - 1), self.spec.num_heads - len(own) + 1]]

    def units(self, seconds: float) -> int:
        """Whole units, rounded down."""
        return int(seconds / self.unit_s)

    def time(self) -> cp_model.IntVar:
        """A time within the limit."""
        return self.model.new_int_var(0, self.limit, "")

    def product(self, a: cp_model.IntVar, b: cp_model.IntVar, most: int) -> cp_model.IntVar:
        """Of two variables, at most `most`."""
        key = (min(a.index, b.index), max(a.index, b.index))
        found = self._products.get(key)
        if found is None:
            found = self._products[key] = self.model.new_int_var(1, most, "")
            self.model.add_multiplication_equality(found, [a, b])
        return found

    def times_heads(
        self, amount: cp_model.IntVar, most: int, k: int, of_head: float, of_kv: float, whole: Callable[[float], int]
    ) -> Sum:
        """`amount` times the coefficients of the query heads and key-value heads of place k, in integers."""
        if self.fixed is not None:
            return whole(of_head * self.fixed[k] + of_kv * int(self.kv_heads[k])) * amount
        assert self.heads is not None
        return whole(of_head + of_kv * self.spec.num_kv_heads / self.spec.num_heads) * self.product(
            amount, self.heads[k], most * self.spec.num_heads
        )

    def table(self, k: int, seconds: Floats) -> cp_model.IntVar:
        """Seconds by the quanta of place k."""
        found = self.time()
        self.model.add_element(self.quanta[k], [min(self.units(s), self.limit + 1) for s in seconds.tolist()], found)
        return found

    def largest(self, times: Sequence[Sum]) -> cp_model.IntVar:
        """A time not before any of `times`."""
        found = self.time()
        for time in times:
            self.model.add(found >= time)
        return found
