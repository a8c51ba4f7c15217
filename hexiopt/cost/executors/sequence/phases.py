"""The phases of a layer on the devices of a sequence stage, and when devices end them.

A phase is compute, of every device independently; an all-to-all inside each group, which begins when all devices of the
group are ready and ends for all with its last message; or steps of the sub-rings. In a step a device computes on the
keys it has while it sends them and receives those of its next step, in messages that begin when both ends have begun
the step (of two buffers, the one that the last step freed receives). The step of a device ends when its compute, its
sends and its receives have ended.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hexiopt.plan.token_layout import Floats, Ints, Members, RingHolders


@dataclass(frozen=True)
class Work:
    """Compute of each device, in seconds [devices]."""

    seconds: Floats


@dataclass(frozen=True)
class Exchange:
    """An all-to-all in every group: seconds of each message [pairs of `SequencePeers`]."""

    message_s: Floats


@dataclass(frozen=True)
class RingSteps:
    """Steps of the rings: seconds of compute [steps, classes], and of messages from each group to the next [steps,
    kinds], -inf where there is none; the class of a device [devices], and the kind of a message [groups · rings]."""

    compute_s: Floats
    message_s: Floats
    device_class: Ints
    message_kind: Ints


Phase = Work | Exchange | RingSteps


@dataclass(frozen=True)
class SequencePeers:
    """The pairs that exchange messages: places among the members [pairs] in all-to-alls, sorted by group; sub-rings."""

    senders: Ints
    receivers: Ints
    rings: RingHolders

    @classmethod
    def of(cls, members: Members, rings: RingHolders) -> "SequencePeers":
        """All ordered pairs inside the groups, and the rings."""
        ends = np.append(members.starts[1:], len(members.device))
        size = (ends - members.starts)[members.group]
        senders = np.repeat(np.arange(len(size)), size - 1)
        first = np.repeat(np.cumsum(size - 1) - (size - 1), size - 1)
        receivers = members.starts[members.group[senders]] + np.arange(len(senders)) - first
        return cls(senders, receivers + (receivers >= senders), rings)


def ends_s(members: Members, peers: SequencePeers, phases: Iterable[Phase]) -> Floats:
    """Seconds from the start, which all devices share, to the end of `phases` on each device [devices]."""
    now = np.zeros(len(members.device))
    groups = members.group[peers.senders]
    firsts = np.flatnonzero(np.diff(groups, prepend=-1))
    several = groups[firsts]
    for phase in phases:
        if isinstance(phase, Work):
            now = now + phase.seconds
        elif isinstance(phase, RingSteps):
            now = _after_steps(now, peers.rings, phase)
        elif len(several):
            ready = np.maximum.reduceat(now, members.starts)
            ready[several] += np.maximum.reduceat(phase.message_s, firsts)
            alone = np.ones(len(members.starts), bool)
            alone[several] = False
            now = np.where(alone[members.group], now, ready[members.group])
    return now


def _after_steps(now: Floats, rings: RingHolders, steps: RingSteps) -> Floats:
    count = rings.place.shape[1]
    place = rings.place.ravel()
    at = np.arange(len(place))
    after, before = (at + count) % len(place), (at - count) % len(place)
    for compute_s, message_s in zip(steps.compute_s, steps.message_s, strict=True):
        ended = now + compute_s[steps.device_class]
        if message_s.max() > 0.0:
            begun = now[place]
            came = np.maximum(begun, begun[after]) + message_s[steps.message_kind]
            both = np.maximum(came, came[before])
            np.maximum(ended, np.maximum.reduceat(both, rings.starts), out=ended)
        now = ended
    return now
