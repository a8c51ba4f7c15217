"""What a process of a run does, whoever started it: meets the others, learns what it is to train, and trains.

Started by our agent, it asks the head for that, under the name of its device. torchrun starts it as
`torchrun ... -m runtime.launch.worker RUN.json [--machine NAME]`.
"""

import argparse
import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from hexiopt.errors import InputError
from hexiopt.files.plan_file import PlanFile, plan_file_from_section, read_plan
from hexiopt.reading import Section
from runtime.device import usable_gpu
from runtime.events import Event
from runtime.launch.admission import admit_machine, admit_ranks
from runtime.launch.meeting import MeetingClient, TrainingFailedError
from runtime.launch.torchrun import VARIABLES, torchrun_place
from runtime.launch.vitals import Vitals
from runtime.mapping.layout import layout_of
from runtime.parallel.hooks import Hooks
from runtime.state.checkpoint import finished_checkpoints
from runtime.training.rank import run_rank
from runtime.training.settings import TrainingRun

TOLD = 3  # exit code of a process that has said itself what went wrong
_POLL_S = 0.05
_IDLE_S = 3600.0
_PR_SET_PDEATHSIG = 1

HooksOf = Callable[[int], Hooks]  # of a rank


@dataclass(frozen=True)
class Seats:
    """The devices of a machine, a process each: `names` in the cluster, numbers of `gpus` here, `cpu` or `cuda`, and
    the folder of the machine's own files."""

    names: tuple[str, ...]
    gpus: tuple[int, ...]
    device: str
    folder: Path


def die_with_parent() -> None:
    """End this process when its parent ends, however: torch starts its workers in sessions of their own, so that those
    of a killed agent would live on and hold their GPUs."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def work(address: str, seats: Seats, hooks_of: HooksOf) -> None:
    """Take part in a round of the run whose meeting place is at `address`. Does not return: what ends it is its agent,
    for an agent whose processes have all ended leaves the run. `hooks_of` makes those of a rank."""
    die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the agent's handlers wait for Python to run
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it ends it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    local = int(os.environ["LOCAL_RANK"])
    name, gpu = seats.names[local], seats.gpus[local]
    about: Event = {"device": name, "pid": os.getpid(), "round": None}
    try:
        meeting = MeetingClient(address)
        try:
            _take_part(meeting, seats, name, gpu, about, hooks_of)
        except BaseException:
            meeting.tell({**about, "event": "error", "reason": traceback.format_exc()})
    finally:
        # At once: after a failed collective, taking communicators down may wait for a peer that is gone.
        os._exit(TOLD)


def _take_part(meeting: MeetingClient, seats: Seats, name: str, gpu: int, about: Event, hooks_of: HooksOf) -> None:
    vitals = Vitals(seats.folder)
    is_unusable = seats.device == "cuda" and not usable_gpu(gpu)
    if is_unusable:
        meeting.tell({"event": "note", "reason": f"{name}: GPU {gpu} of this machine cannot be used; it stays out"})
    # Names decide who is which rank: torch sorts machines by address, and numbers the processes as they come.
    store, names = meet("" if is_unusable else name)
    if os.environ["RANK"] == "0":
        store.set("answer", json.dumps(meeting.ask({"event": "came", "names": [device for device in names if device]})))
    while not store.check(["answer"]):  # planning again, or waiting for a machine, takes as long as it takes
        time.sleep(_POLL_S)
    answer = json.loads(store.get("answer"))
    about["round"] = answer["round"]
    rank = None if is_unusable else answer["ranks"].get(name)
    if rank is None:
        _idle()
    about["rank"] = rank
    run, plan_file = assignment(answer)
    run = replace(run, device=seats.device)
    vitals.limit(run.settings.silence_s, run.settings.timeout_s)

    def tell(event: Event) -> None:
        if event["event"] == "step":
            vitals.step_ended(event["seconds"])
        else:
            vitals.note_progress()
        if event["event"] != "waiting" and (rank == 0 or event["event"] not in ("step", "validation", "checkpoint")):
            meeting.tell({**event, **about})

    must_stop = meeting.must_stop if rank == 0 else None  # of all ranks, one asks the head
    if run_rank(run, plan_file, rank, gpu, PrefixStore("train", store), tell, must_stop, hooks_of(rank)):
        _idle()  # until the head has heard of all


def assignment(answer: Event) -> tuple[TrainingRun, PlanFile]:
    """The run and the plan file of the head's answer. Raises InputError where they are of another version."""
    return TrainingRun.of(answer["run"]), plan_file_from_section(Section(answer["plan"], "the run's plan"))


def meet(name: str) -> tuple[Store, list[str]]:
    """The store of this round of processes, and the names by which all have come, in the order of torch's ranks."""
    store: Store = next(rendezvous("env://"))[0]
    came, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store.set(f"name/{came}", name)
    return store, [value.decode() for value in store.multi_get([f"name/{other}" for other in range(count)])]


def _idle() -> NoReturn:
    while True:
        time.sleep(_IDLE_S)


def train_as_torchrun(
    run: TrainingRun, plan_file: PlanFile, wanted_device: str, force: bool, machine: str | None = None
) -> float:
    """Train one rank of a plan; rank 0 prints its events. Returns the last loss, NaN without a step.

    Which rank is told by the name of its device where its `machine` is given, else by torchrun's own number. A process
    that torchrun has started again goes on from the last checkpoint. Raises InputError where the processes do not match
    the plan or the machine cannot carry them, TrainingFailedError.
    """
    place, devices = torchrun_place(), layout_of(plan_file.plan, plan_file.problem.model).devices
    if place is None:
        missing = next(name for name in VARIABLES if name not in os.environ)
        raise InputError(f"train.launch=torchrun: {missing} is not set; start it by torchrun")
    if place.size != len(devices):
        raise InputError(
            f"train.launch=torchrun: {place.size} processes for {len(devices)} devices of the plan; "
            "set --nnodes and --nproc-per-node to them, or take train.launch=machine"
        )
    names = [plan_file.problem.cluster.device_name(device) for device in devices]
    device_name, here = "", list[str]()
    if machine is not None:
        here = [name for name in names if name.rpartition(":")[0] == machine]
        if len(here) != place.num_local:
            raise InputError(
                f"train.machine: {machine!r} has {len(here)} devices of the plan, and torchrun has started "
                f"{place.num_local} processes; set --nproc-per-node to the first, or name the machine that this is"
            )
        device_name = here[place.local]
    store, came = meet(device_name)
    if any(came) and sorted(came) != sorted(names):
        raise InputError("train.machine: is not each machine of the plan once; name them all, or none")
    rank = names.index(device_name) if device_name else place.rank
    local_ranks = sorted(
        names.index(name) if name else came_as
        for came_as, name in enumerate(came)
        if place.rank - place.local <= came_as < place.rank - place.local + place.num_local
    )
    if machine is None:
        gpu, (device, fallback) = place.local, admit_ranks(plan_file, local_ranks, wanted_device, force)
    else:  # devices that the plan leaves out do not shift the others' GPUs
        gpus = [int(name.rpartition(":")[2]) for name in here]
        gpu, (device, fallback) = gpus[place.local], admit_machine(plan_file, machine, gpus, wanted_device, force)
    if fallback is not None and place.local == 0:
        print(fallback, file=sys.stderr)
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0 and (
        written := finished_checkpoints(run.checkpoints)
    ):
        run = replace(run, resume=written[-1])
    losses = [float("nan")]

    def tell(event: Event) -> None:
        if event["event"] in ("error", "stopped"):
            raise TrainingFailedError(event["reason"].strip().splitlines()[-1])
        if event["event"] == "step":
            losses.append(event["loss"])
        if rank == 0 and event["event"] != "waiting":
            print(json.dumps(event), flush=True)

    run_rank(replace(run, device=device), plan_file, rank, gpu, PrefixStore("train", store), tell)
    return losses[-1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train one rank of a run file under torchrun; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m runtime.launch.worker", description=__doc__)
    parser.add_argument("run", type=Path, help="run.json, as `hexiopt train` writes it")
    parser.add_argument("--machine", metavar="NAME", help="as in the cluster file (default: torchrun's order)")
    options = parser.parse_args(arguments)
    try:
        run = TrainingRun.read(options.run)
        train_as_torchrun(run, read_plan(run.plan), run.device, False, options.machine)
    except InputError as error:
        print(f"hexiopt: {error}", file=sys.stderr)
        return 2
    except TrainingFailedError as error:
        print(f"hexiopt: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
