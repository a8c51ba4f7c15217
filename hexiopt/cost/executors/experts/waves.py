"""Waves: two halves of a micro-batch that alternate in the layers of a stage whose devices share experts. While copies
of tokens of one travel, or experts elsewhere compute them, devices compute the other (Wu et al., HeterMoE, arXiv
2504.03871, call it zebra parallelism)."""

from collections.abc import Sequence
from typing import NamedTuple

_LAYERS, _SETTLED = 12, 4  # layers that are followed, and after which each lasts as long as another


class WaveTimes(NamedTuple):
    """Seconds of a layer for both waves: of the first that a stage runs, and of each further one."""

    first_s: float
    further_s: float


class WavePhases(NamedTuple):
    """Seconds of one wave in a layer: what mixes tokens and dense parts, by device (0 of those with experts alone), its
    experts, by device, and one all-to-all."""

    apart_s: Sequence[float]
    experts_s: Sequence[float]
    exchange_s: float


def wave_times(phases: WavePhases) -> WaveTimes:
    """The times of two waves, each of these `phases`.

    Every device runs both waves' tokens, then both waves' experts, layer by layer; the network passes both waves'
    copies to experts, then both back. A phase begins once the one before has ended on all devices and the device, or
    the network, is free. Of the backward, which goes the other way, the times are the same.
    """
    free_s, network_s, ready_s = [0.0] * len(phases.apart_s), 0.0, [0.0, 0.0]
    ends_s = []
    for _ in range(_LAYERS):
        for seconds in (phases.apart_s, phases.experts_s):
            for wave in (0, 1):
                for k, phase_s in enumerate(seconds):
                    free_s[k] = max(free_s[k], ready_s[wave]) + phase_s if phase_s else free_s[k]
                ready_s[wave] = max(end_s for end_s, phase_s in zip(free_s, seconds, strict=True) if phase_s)
            for wave in (0, 1):
                network_s = ready_s[wave] = max(network_s, ready_s[wave]) + phases.exchange_s
        ends_s.append(max(ready_s))
    return WaveTimes(ends_s[0], (ends_s[-1] - ends_s[_SETTLED - 1]) / (_LAYERS - _SETTLED))
