"""Recompute layer by layer: as few layers of a stage as memory asks for recompute what their backward needs.

A stage's bytes are linear in the layers of each policy, but for the working set of the layer being recomputed, of which
the largest counts (`hexiopt/cost/executors/activations.py`). So of n layers with policies l, lean, and r, rich, as many
as fit are rich.
"""

from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np

from hexiopt.plan.token_layout import Floats, Ints

_EXACT = 1e-9  # of the limit, for rounding


class Mixtures:
    """The best policies of stages of 1 to `most` layers.

    `layer_s` gives a layer's seconds, `bytes_of` the bytes of a stage on each device [devices], by its policies;
    `beside_s` is what a stage takes without layers. `mixed`: whether its layers may differ.
    """

    def __init__(
        self,
        policies: Sequence[str],
        layer_s: Callable[[str], float],
        bytes_of: Callable[[tuple[str, ...]], Floats],
        limit_bytes: Floats,
        beside_s: float,
        most: int,
        *,
        mixed: bool,
    ) -> None:
        self._policies = policies
        count = np.arange(1, most + 1)
        rows = []
        for policy in policies:
            # From two layers on linear under ZeRO-3 too, which holds two of them whole.
            two, three = (bytes_of((policy,) * n) for n in (2, 3))
            rows.append((layer_s(policy), two - 2 * (three - two), three - two))
        limit = limit_bytes * (1.0 + _EXACT)
        self.seconds: Floats = np.full(most, np.inf)
        self._lean, self._rich, self._num_rich = (np.zeros(most, np.int64) for _ in range(3))
        for k, (seconds, base, each) in enumerate(rows):
            fits = count <= ((limit - base) / each).min()
            self._offer(np.where(fits, count * seconds, np.inf) + beside_s, k, k, count)
        for rich, lean in combinations(range(len(rows)), 2) if mixed else ():
            (rich_s, one_base, more), (lean_s, other_base, less) = rows[rich], rows[lean]
            if rich_s >= lean_s or (more <= less).any():
                continue
            room = limit - np.maximum(one_base, other_base) - count[:, None] * less
            number = np.minimum(np.floor((room / (more - less)).min(axis=1)), count - 1).astype(np.int64)
            some_s = number * rich_s + (count - number) * lean_s + beside_s
            self._offer(np.where(number > 0, some_s, np.inf), lean, rich, number)

    def _offer(self, seconds: Floats, lean: int, rich: int, number: Ints) -> None:
        better = seconds < self.seconds
        self.seconds = np.where(better, seconds, self.seconds)
        self._lean = np.where(better, lean, self._lean)
        self._rich = np.where(better, rich, self._rich)
        self._num_rich = np.where(better, number, self._num_rich)

    def policies(self, num_layers: int) -> tuple[str, ...]:
        """The policies of a stage of so many layers that fit: one, or one for each."""
        at = num_layers - 1
        rich, lean = self._policies[self._rich[at]], self._policies[self._lean[at]]
        number = int(self._num_rich[at])
        return (rich,) if number == num_layers else (lean,) * (num_layers - number) + (rich,) * number
