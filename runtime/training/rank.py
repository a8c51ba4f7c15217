"""One process of a run, from its first step to its last, and the events that it reports to its parent."""

import hashlib
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from math import isfinite

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from hexiopt.errors import InputError
from hexiopt.exports.trainable import untrainable
from hexiopt.files.plan_file import PlanFile
from hexiopt.files.problem_file import problem_sha256
from hexiopt.problem.cluster import Cluster
from runtime.data.ahead import BatchesAhead
from runtime.data.batches import Batches
from runtime.device import check_async_tp, gpu_peak_bytes, steps_ahead, take_attention, take_device
from runtime.events import Event
from runtime.network import join_world
from runtime.parallel.hooks import NO_HOOKS, Hooks
from runtime.state.checkpoint import Checkpoint, CheckpointProgress
from runtime.state.saving import CheckpointWriter
from runtime.state.weights import DTYPES
from runtime.training.beginning import trained_model, value_source
from runtime.training.settings import TrainingRun
from runtime.training.trace import StepTrace
from runtime.training.trainee import StepOutcome, Trainee
from runtime.training.validation import Validation


class NotFinite(Exception):  # noqa: N818
    """The loss is no number: training cannot go on."""


def run_rank(
    run: TrainingRun,
    plan_file: PlanFile,
    rank: int,
    gpu: int,
    store: Store,
    tell: Callable[[Event], None],
    must_stop: Callable[[], bool] | None = None,
    hooks: Hooks = NO_HOOKS,
) -> bool:
    """Train. `tell` receives every step, and the reason if training ends before its last step, unless it was asked to
    stop; returns whether it did not.

    `gpu` is the number of its GPU on its machine, `store` one that all ranks of the run share. Once `must_stop` of
    any rank says so, all write a checkpoint after the same step and end.
    """
    try:
        interface = hooks.join()
        world_size, timeout_s = len(plan_file.plan.devices()), run.settings.timeout_s
        device = take_device(run.device, gpu, world_size)
        take_attention(run.settings.attention, device)
        if run.settings.async_tp:
            check_async_tp(device)
        store.set_timeout(timedelta(seconds=timeout_s))
        _agree_on_device(store, run.device, rank, world_size)
        join_world(device, rank, world_size, timeout_s, store=store, interface=interface)
        _train(run, plan_file, rank, device, hooks, tell, must_stop or (lambda: False))
        tell({"event": "done"})
        dist.destroy_process_group()
        return True
    except (NotFinite, InputError) as error:
        tell({"event": "stopped", "reason": str(error)})
    except BaseException:
        tell({"event": "error", "reason": traceback.format_exc()})
    return False


def _agree_on_device(store: Store, device: str, rank: int, world_size: int) -> None:
    """Raise InputError on every rank where some compute on GPUs and others on CPUs: no backend joins them."""
    store.set(f"device/{rank}", device)
    by_rank = [value.decode() for value in store.multi_get([f"device/{other}" for other in range(world_size)])]
    store.set(f"read/{rank}", "")
    if rank == 0:  # which may hold the store
        store.wait([f"read/{other}" for other in range(world_size)])
    if len(set(by_rank)) > 1:
        cpu, cuda = by_rank.index("cpu"), by_rank.index("cuda")
        raise InputError(
            f"train.device: rank {cpu} computes on a CPU, rank {cuda} on a GPU; all must do the same: "
            "state train.device=cpu, or cuda, on every machine"
        )


def _agree(run: TrainingRun, plan_file: PlanFile, read: Sequence[Batches], device: torch.device) -> None:
    """Raise InputError on every rank where the ranks were started with different inputs."""
    facts = {
        "plan": repr((problem_sha256(plan_file.problem), plan_file.plan)),
        "settings": repr((run.settings, run.resume, run.weights, run.adapter, run.float64)),
        "checkpoints' folder (hydra.run.dir)": str(run.checkpoints),
        "corpus": repr([(batches.num_windows, batches.sequences(0, 1).tolist()) for batches in read]),
    }
    digests = [int.from_bytes(hashlib.sha256(fact.encode()).digest()[:7], "little") for fact in facts.values()]
    mine = torch.tensor(digests, dtype=torch.int64, device=device)
    every = mine.new_empty(dist.get_world_size() * len(digests))
    dist.all_gather_single(every, mine)
    for rank, theirs in enumerate(every.view(-1, len(digests)).tolist()):
        for fact, a, b in zip(facts, every[: len(digests)].tolist(), theirs, strict=True):
            if a != b:
                raise InputError(f"the {fact} of rank {rank} is another than rank 0's; give all processes the same")


class _Reports:
    """Tells of steps in their order, but not of the last `ahead`, whose outcome the device may not have yet: all ranks
    tell of the same steps, and so hear at the same one that any of them `stops`."""

    def __init__(self, trainee: Trainee, cluster: Cluster, ahead: int, tell: Callable[[Event], None]) -> None:
        self._trainee, self._cluster, self._ahead, self._tell = trainee, cluster, ahead, tell
        self._under_way = deque[tuple[int, StepOutcome]]()
        self.stops = False

    def add(self, step: int, outcome: StepOutcome, *, is_last: bool) -> None:
        """A step has been enqueued; of the last one before a pause, and those before it, is told at once."""
        self._under_way.append((step, outcome))
        self.finish(0 if is_last else self._ahead)

    def finish(self, left: int = 0) -> None:
        """Tell of all steps but the last `left`."""
        while len(self._under_way) > left:
            self._report(*self._under_way.popleft())

    def _report(self, step: int, outcome: StepOutcome) -> None:
        loss, norm = outcome.read()
        if not isfinite(loss) or not isfinite(norm):
            what = f"the loss is {loss}" if not isfinite(loss) else f"the norm of the gradients is {norm}"
            name_of, devices = self._cluster.device_name, self._trainee.layout.devices
            where = ", ".join(f"rank {r} ({name_of(devices[r])})" for r in self._trainee.blame(outcome))
            raise NotFinite(f"step {step}: {what}{' on ' if where else ''}{where}")
        self._tell({"event": "step", "step": step, "loss": loss, "norm": norm, "seconds": outcome.seconds})
        self.stops = self.stops or outcome.stops


def _train(
    run: TrainingRun,
    plan_file: PlanFile,
    rank: int,
    device: torch.device,
    hooks: Hooks,
    tell: Callable[[Event], None],
    must_stop: Callable[[], bool],
) -> None:
    settings, problem = run.settings, plan_file.problem
    workload, model = problem.workload, problem.model
    masks = settings.separator is not None
    if cannot := untrainable(model, workload, plan_file.plan, document_masking=masks):
        raise InputError(cannot)  # one that the head has made after a fault
    dtype = torch.float64 if run.float64 else DTYPES[workload.precision]
    trained = trained_model(run, problem)
    times = hooks.times(problem, plan_file.plan) if rank == 0 else None
    initial = value_source(run, trained)
    trainee = Trainee(problem, plan_file.plan, settings, dtype, device, initial, hooks=hooks, times=times)
    batches, held_out = run.batches(workload.seq_len), run.validation_batches(workload.seq_len)
    _agree(run, plan_file, [batches, *([held_out] if held_out else [])], device)
    writer = CheckpointWriter(run.checkpoints, trained, settings.keep_checkpoints, trainee.optimizer.states())
    step = seen = 0
    if run.resume is not None:
        checkpoint = Checkpoint(run.resume)
        step, seen = checkpoint.progress.step, checkpoint.progress.sequences
        trainee.optimizer.load(checkpoint.fill, step)
    tell({"event": "ready", "step": step, "device_type": device.type})

    def waiting() -> None:
        tell({"event": "waiting"})

    sequences = BatchesAhead(batches.sequences, workload.global_batch, device)
    borders = BatchesAhead(batches.borders, workload.global_batch, device)
    reports = _Reports(trainee, problem.cluster, steps_ahead(device), tell)
    validation = None if held_out is None else Validation(trainee, held_out, workload.global_batch, device, settings)
    trace = StepTrace(trainee.pipeline, device, step, settings.trace_steps, run.checkpoints.parent / "trace")
    if validation is not None:  # layers are compiled without a backward in it, before messages have their short limit
        loss = validation.loss(waiting)
        if step == 0:
            tell({"event": "validation", "step": step, "loss": loss})
    while step < settings.steps and not reports.stops:
        trace.begin(step)
        of_documents, stops = borders.after(seen) if masks else None, must_stop()
        outcome = trainee.begin_step(sequences.after(seen), settings.lr(step), of_documents, stops=stops)
        step, seen = step + 1, seen + workload.global_batch
        is_saved = step == settings.steps or step % settings.checkpoint_every == 0
        is_validated = validation is not None and validation.is_due(step)
        reports.add(step, outcome, is_last=is_saved or is_validated or trace.ends(step))
        if reports.stops:
            reports.finish()
            is_saved, is_validated = True, False
        if trace.ends(step):
            trainee.finish()  # gloo breaks down where a gather that the trace has seen begin ends after it
            tell({"event": "trace", "path": str(trace.write(step, rank))})
        if validation is not None and is_validated:
            tell({"event": "validation", "step": step, "loss": validation.loss(waiting)})
        if is_saved:
            progress = CheckpointProgress(
                run.run, step, seen, workload.seq_len, settings.seed, settings.validation_share
            )
            writer.save(progress, trainee.optimizer.states(), waiting)
        _tell_written(writer, tell)
    trainee.finish()
    sequences.close()
    borders.close()
    writer.finish(waiting)
    _tell_written(writer, tell)
    timed = [
        (span.operation.kind.value, span.operation.chunk, span.operation.micro_batch, span.began_s, span.ended_s)
        for span in trainee.pipeline.timeline()
    ]
    executor = trainee.layout.executor_of[rank]
    at = {"pipeline": executor.pipeline, "stage": executor.stage, "replica": executor.replica}
    tell({"event": "timeline", **at, "operations": timed, "peak_bytes": gpu_peak_bytes(device)})


def _tell_written(writer: CheckpointWriter, tell: Callable[[Event], None]) -> None:
    for step in writer.written_steps():
        tell({"event": "checkpoint", "step": step})
