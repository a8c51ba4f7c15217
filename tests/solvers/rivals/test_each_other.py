"""A rival's answer that lies in another rival's space does not beat that other's own answer."""

import pytest

from solvers.registry import RIVALS
from tests.solvers.rivals import problems
from tests.solvers.rivals.test_rivals import TOLERANCE, answer, rival

pytestmark = pytest.mark.xdist_group("rivals")  # one process computes what they share

# FlashFlex partitions heuristically: what its search misses of its space is its own limit.
SEARCH_ALL = tuple(name for name in RIVALS if name != "flashflex")


@pytest.mark.parametrize("kind", problems.MIXED)
@pytest.mark.parametrize("name", SEARCH_ALL)
def test_no_other_answer_in_its_space_beats_it(name: str, kind: str) -> None:
    pytest.importorskip("pymetis")
    problem, own = problems.MIXED[kind](), answer(name, kind)
    for other in RIVALS:
        theirs = answer(other, kind)
        if theirs.plan is not None and rival(name).in_space(problem, theirs.plan) is None:
            assert own.objective <= (1 + TOLERANCE) * theirs.objective, other
