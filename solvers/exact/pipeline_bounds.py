"""Lower bounds on when the replicas of a pipeline end: what must run in sequence, whatever else waits."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hexiopt.plan.messages import sample_overlaps
from hexiopt.schedules.schedule import Schedule, StagePosition, forwards_before_backward


@dataclass(frozen=True, slots=True)
class ReplicaWork:
    """A replica's work on a micro-batch: samples, and (forward, backward) seconds of the first layer range and of
    all.
    """

    samples: int
    first_s: tuple[float, float]
    all_s: tuple[float, float]


def ends_lower_bound_s(
    schedule: Schedule,
    stages: Sequence[Sequence[ReplicaWork]],
    sends_s: Sequence[Sequence[tuple[float, float]]],
    num_chunks: int,
    num_micro_batches: int,
) -> list[float]:
    """Seconds from the start of the step for each replica, stage by stage.

    A replica begins when the first micro-batch's samples have arrived, and runs all of its operations. With one layer
    range per stage, its backwards begin when that micro-batch comes back: under GPipe after all forwards of the last
    stage, under 1F1B after the first. By then a stage has run as many forwards as there are stages from it to the last
    (`forwards_before_backward`). The last micro-batch goes back through the stages before. `sends_s[i]` are the
    messages from stage i to the next and back, for every pair of replicas that `sample_overlaps` gives.
    """
    p, m = len(stages), num_micro_batches
    meet = [
        list(sample_overlaps([part.samples for part in a], [part.samples for part in b])) for a, b in pairwise(stages)
    ]
    come = [[0.0] * len(stage) for stage in stages]
    for s, pairs in enumerate(meet):
        for (a, b, _), (ahead_s, _) in zip(pairs, sends_s[s], strict=True):
            come[s + 1][b] = max(come[s + 1][b], come[s][a] + stages[s][a].first_s[0] + ahead_s)
    # Forwards of each stage before its first backward, where stages have one layer range.
    before = [forwards_before_backward(schedule, StagePosition(s, p, m)) for s in range(p)]
    back = [at + before[-1] * part.first_s[0] for at, part in zip(come[-1], stages[-1], strict=True)]
    ends: list[list[float]] = []
    after = [0.0] * len(stages[-1])  # when the last backward behind has come
    for s in range(p - 1, -1, -1):
        if s < p - 1:
            behind_back, behind_ends = back, ends[-1]
            back, after = [0.0] * len(stages[s]), [0.0] * len(stages[s])
            for (a, b, _), (_, back_s) in zip(meet[s], sends_s[s], strict=True):
                back[a] = max(back[a], behind_back[b] + stages[s + 1][b].first_s[1] + back_s)
                after[a] = max(after[a], behind_ends[b] + back_s)
        left = m - before[s]
        own = []
        for r, part in enumerate(stages[s]):
            forward_s, backward_s = part.all_s
            end = come[s][r] + m * (forward_s + backward_s)
            if num_chunks == 1:
                end = max(end, back[r] + m * backward_s + left * forward_s)
            own.append(max(end, after[r] + part.first_s[1]))
        ends.append(own)
    return [end for own in reversed(ends) for end in own]
