"""The least time of a stage of n layers that fits in memory, where every layer may have its own recompute policy.

Forward times do not depend on the policy, backward times do. So of all combinations of policies that fit, the one with
the shortest backward is best under every schedule.
"""

from dataclasses import dataclass

import numpy as np

from hexiopt.cost.executors.memory import StateSharding
from hexiopt.cost.executors.tp_groups import TpGroup
from hexiopt.cost.pricer import PlanPricer
from hexiopt.memo import Memo
from hexiopt.numbers import coefficients as c
from hexiopt.plan.token_layout import Floats
from hexiopt.schedules.in_flight import holding

_ROUNDING = 1e-9  # of a memory limit


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds by number of layers, 0 to all: forward, forward and backward (infinite where nothing fits)."""

    forward_s: Floats
    both_s: Floats


class StageTable:
    """Stage times under a cost model, cached; `shards` as in `hexiopt.cost.executors.memory`."""

    def __init__(self, model: PlanPricer) -> None:
        self._model = model
        self._layers = model.problem.model.num_layers
        self._found: Memo[tuple[TpGroup, int, bool, bool, int, StateSharding], StageTimes] = Memo(
            lambda key: self._times(*key)
        )

    def times(
        self, tp_group: TpGroup, samples: int, first: bool, last: bool, held: int, shards: StateSharding
    ) -> StageTimes:
        """Times of a stage that holds `held` micro-batches of `samples` sequences in flight."""
        return self._found[tp_group, samples, first, last, held, shards]

    def _times(
        self, tp_group: TpGroup, samples: int, first: bool, last: bool, held: int, shards: StateSharding
    ) -> StageTimes:
        model, counts = self._model, np.arange(self._layers + 1)
        memory, policies = model.stages.memory_model(tp_group, samples), model.policies()
        fastest = min(policies, key=lambda policy: model.stages.layer_s(tp_group, samples, policy)[1])
        forward_s = np.array([model.stage_s(tp_group, int(n), first, last, samples, fastest)[0] for n in counts])
        backward_s = np.array([model.stage_s(tp_group, int(n), first, last, samples, fastest)[1] for n in counts])
        working = {policy: memory.recompute_working_set_bytes(policy, last) for policy in policies}
        free_bytes = tp_group.gpu.usable_memory_bytes * (1 + _ROUNDING) - np.array(
            [memory.stage(int(n), first, last, fastest, holding(held), shards).total for n in counts]
        )
        # Stored activations count once, plus the allocator's fragmentation.
        factor = 1 + c.FRAGMENTATION
        free_bytes += factor * working[fastest]
        saved = {
            policy: factor * held * (memory.layer_activation_bytes(fastest) - memory.layer_activation_bytes(policy))
            for policy in policies
        }
        slower = {
            policy: model.stages.layer_s(tp_group, samples, policy)[1]
            - model.stages.layer_s(tp_group, samples, fastest)[1]
            for policy in policies
        }
        others = [policy for policy in policies if policy != fastest]
        extra = np.where(free_bytes >= factor * working[fastest], 0.0, np.inf)
        for smaller in others:
            # `num_smaller` layers have one policy, and as few of the others as needed have a second one (or none).
            num_smaller = np.arange(self._layers + 1)[None, :]
            for second in [None, *[policy for policy in others if policy != smaller]]:
                held_back = max(working[policy] for policy in (fastest, smaller, second) if policy is not None)
                missing = factor * held_back - free_bytes[:, None] - saved[smaller] * num_smaller
                if second is None:
                    cost = np.where(
                        (missing <= 0) & (num_smaller <= counts[:, None]), slower[smaller] * num_smaller, np.inf
                    )
                else:
                    if saved[second] <= 0:
                        continue
                    num_second = np.maximum(np.ceil(missing / saved[second]), 0)
                    fits = num_second + num_smaller <= counts[:, None]
                    cost = np.where(fits, slower[smaller] * num_smaller + slower[second] * num_second, np.inf)
                extra = np.minimum(extra, cost.min(axis=1))
        return StageTimes(forward_s, forward_s + backward_s + extra)
