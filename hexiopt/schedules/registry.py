"""All schedules by name. A new one is a file beside this one and a row here."""

from hexiopt.errors import InputError, did_you_mean, quoted
from hexiopt.schedules.gpipe import GPipe
from hexiopt.schedules.interleaved import Interleaved
from hexiopt.schedules.one_f_one_b import OneFOneB
from hexiopt.schedules.schedule import Schedule
from hexiopt.schedules.zero_bubble import InterleavedZeroBubble, ZeroBubble

GPIPE, ONE_F_ONE_B, INTERLEAVED = GPipe(), OneFOneB(), Interleaved()
DEFAULT_SCHEDULE: Schedule = ONE_F_ONE_B  # of plans that state none; searches begin with it
SCHEDULES: tuple[Schedule, ...] = (GPIPE, ONE_F_ONE_B, INTERLEAVED)  # of problems that leave the schedule open
SPLIT_SCHEDULES: tuple[Schedule, ...] = (ZeroBubble(), InterleavedZeroBubble())  # of plans and problems that name them
_BY_NAME = {schedule.name: schedule for schedule in (*SCHEDULES, *SPLIT_SCHEDULES)}


def schedule_names() -> tuple[str, ...]:
    """The names of all schedules, as files and workloads state them."""
    return tuple(_BY_NAME)


def schedule_by_name(name: str, where: str = "schedule") -> Schedule:
    """The schedule of that name, which `where` states. Raises InputError where there is none."""
    schedule = _BY_NAME.get(name)
    if schedule is None:
        raise InputError(f"{where}: {quoted(name)} is not known; {did_you_mean(str(name), schedule_names())}")
    return schedule
