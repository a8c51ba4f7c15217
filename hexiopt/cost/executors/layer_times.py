"""Seconds of a layer, and what recompute adds to them."""

from dataclasses import dataclass, replace

from hexiopt.problem.workload import JOINED


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of one layer for one micro-batch, TP collectives included: of its forward, of its backward, of its full
    recompute, and of attention alone; and the seconds of the host for a pass."""

    forward_s: float
    backward_s: float
    recompute_s: float
    attention_s: float
    host_s: float = 0.0

    def with_experts(self, forward_s: float, backward_s: float) -> "LayerTimes":
        """The same layer with the seconds of its experts, all-to-alls included; a full recompute repeats both."""
        return replace(
            self,
            forward_s=self.forward_s + forward_s,
            backward_s=self.backward_s + backward_s,
            recompute_s=self.recompute_s + forward_s,
        )

    def under(self, policy: str) -> tuple[float, float]:
        """Forward and backward seconds under a recompute policy."""
        # Of layers recomputed together only the last may stop early; the sum is the same for any of them.
        again_s = {"none": 0.0, "selective": self.attention_s, "full": self.recompute_s, JOINED: self.forward_s}
        host_s = self.host_s * (2 if policy in ("full", JOINED) else 1)  # another pass
        return max(self.forward_s, self.host_s), max(self.backward_s + again_s[policy], host_s)
