"""Which devices price the same layouts alike."""

from collections.abc import Sequence

import numpy as np

from hexiopt.problem.problem import Problem


class Signatures:
    """Keys of lists of devices: equal for lists that price the same layouts alike, place by place."""

    def __init__(self, problem: Problem) -> None:
        cluster = problem.cluster
        kinds: dict[object, int] = {}
        number = np.array([kinds.setdefault(machine.kind, len(kinds)) for machine in cluster.machines])
        place = [
            i if machine.intra_links else machine.interface(i)
            for machine in cluster.machines
            for i in range(machine.num_gpus)
        ]
        self._machine_of = cluster.machine_of
        self._trait = number[cluster.machine_of] * (max(place) + 1) + np.array(place)
        self._unlike = bool(cluster.groups or cluster.links)  # machines of a kind are not alike to the network

    def of(self, devices: Sequence[int]) -> bytes:
        """The key."""
        own = np.array(devices, np.int64)
        if self._unlike:
            return own.tobytes()
        _, first, which = np.unique(self._machine_of[own], return_index=True, return_inverse=True)
        return np.concatenate([self._trait[own], first[which]]).tobytes()
