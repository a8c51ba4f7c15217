"""The least time of a stage of n layers where memory allows it, every layer with a recompute policy of its own.

Forward times do not depend on the policy, backward times do; so of all mixes of policies that fit, the one with the
shortest backward is the best in any schedule.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hexiopt.calibration import coefficients as c
from hexiopt.cost.executors.memory import Shards
from hexiopt.cost.executors.sites import Site
from hexiopt.cost.model import CostModel
from hexiopt.schedules.in_flight import holding

Floats = NDArray[np.float64]
_ROUNDING = 1e-9  # of a memory limit


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds by number of layers, 0 to all: forward, forward and backward (infinite where nothing fits)."""

    forward_s: Floats
    both_s: Floats


class StageTable:
    """Stage times of a cost model, kept. `shards` as in `hexiopt.cost.memory`."""

    def __init__(self, model: CostModel) -> None:
        self._model = model
        self._layers = model.problem.model.num_layers
        self._found: dict[tuple[object, ...], StageTimes] = {}

    def times(self, site: Site, samples: int, first: bool, last: bool, held: int, shards: Shards) -> StageTimes:
        """Times of a stage that holds `held` micro-batches of `samples` sequences in flight."""
        key = (site, samples, first, last, held, shards)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._times(site, samples, first, last, held, shards)
        return found

    def _times(self, site: Site, samples: int, first: bool, last: bool, held: int, shards: Shards) -> StageTimes:
        model, counts = self._model, np.arange(self._layers + 1)
        memory, policies = model.memory_model(site, samples), model.policies()
        fastest = min(policies, key=lambda policy: model.layer_s(site, samples, policy)[1])
        forward_s = np.array([model.stage_s(site, int(n), first, last, samples, fastest)[0] for n in counts])
        backward_s = np.array([model.stage_s(site, int(n), first, last, samples, fastest)[1] for n in counts])
        working = {policy: memory.recompute_working_set_bytes(policy, last) for policy in policies}
        room = site.gpu.usable_memory_bytes * (1 + _ROUNDING) - np.array(
            [memory.stage(int(n), first, last, fastest, holding(held), shards).total for n in counts]
        )
        # What is kept of activations counts once, and once more for what the allocator loses.
        factor = 1 + c.FRAGMENTATION
        room += factor * working[fastest]
        saved = {
            policy: factor * held * (memory.layer_activation_bytes(fastest) - memory.layer_activation_bytes(policy))
            for policy in policies
        }
        slower = {
            policy: model.layer_s(site, samples, policy)[1] - model.layer_s(site, samples, fastest)[1]
            for policy in policies
        }
        others = [policy for policy in policies if policy != fastest]
        extra = np.where(room >= factor * working[fastest], 0.0, np.inf)
        for lean in others:
            # `num_lean` layers with one policy, and as few as needed of the others with another (or with none).
            num_lean = np.arange(self._layers + 1)[None, :]
            for second in [None, *[policy for policy in others if policy != lean]]:
                held_back = max(working[policy] for policy in (fastest, lean, second) if policy is not None)
                missing = factor * held_back - room[:, None] - saved[lean] * num_lean
                if second is None:
                    cost = np.where((missing <= 0) & (num_lean <= counts[:, None]), slower[lean] * num_lean, np.inf)
                else:
                    if saved[second] <= 0:
                        continue
                    num_second = np.maximum(np.ceil(missing / saved[second]), 0)
                    fits = num_second + num_lean <= counts[:, None]
                    cost = np.where(fits, slower[lean] * num_lean + slower[second] * num_second, np.inf)
                extra = np.minimum(extra, cost.min(axis=1))
        return StageTimes(forward_s, forward_s + backward_s + extra)
