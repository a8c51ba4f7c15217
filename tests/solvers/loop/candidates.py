"""What every candidate must keep."""

from typing import Any

import numpy as np

from solvers.compiled.tables import Tables


def check_devices(tables: Tables, state: Any) -> None:
    """Raise AssertionError where devices are used twice, outside their machine, or neither used nor free."""
    used = np.zeros(len(state.free), np.int64)
    for p in range(int(state.plan[0]["num_pipelines"])):
        count = int(state.pipelines[p]["num_stages"])
        assert 1 <= count <= state.stages.shape[1]
        assert 0 <= state.pipelines[p]["size"] < len(tables.sizes)
        for s in range(count):
            m, mask = int(state.stages[p, s]["machine"]), int(state.stages[p, s]["mask"])
            assert mask > 0
            assert used[m] & mask == 0
            used[m] |= mask
    assert (used & state.free == 0).all()
    assert (used | state.free == tables.machines["usable"]).all()
