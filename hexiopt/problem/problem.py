"""The problem: a cluster, a model, a workload, and the plan space over them; immutable, checked once."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path

from hexiopt.errors import InputError, quoted
from hexiopt.numbers.gpus import outside_products
from hexiopt.numbers.optimizers import OPTIMIZERS
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.lora import OF_COLUMNS, Lora
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.parameters import Parameters, adapted_matrices
from hexiopt.problem.space import Space, default_schedule, schedules
from hexiopt.problem.workload import AUTO, Workload
from hexiopt.schedules.registry import SPLIT_SCHEDULES
from hexiopt.schedules.schedule import Schedule
from hexiopt.value import Value


@dataclass(frozen=True, repr=False)
class Problem(Value):
    """Place one training step of `model` under `workload` on `cluster`, within `space`.

    The GPUs of `cluster` get the memory headroom of `space`, so that every reader of their memory obeys it.
    Raises InputError for parts of another class, and where parts are inconsistent: an excluded name that does not
    exist, a GPU type without the workload's precision, sequence layouts without sequence parallelism of TP groups, more
    stages than layers, more pipelines than sequences or devices.
    """

    cluster: Cluster
    model: ModelSpec
    workload: Workload = field(default_factory=Workload)
    space: Space = field(default_factory=Space)

    def __post_init__(self) -> None:
        parts = {"cluster": Cluster, "model": ModelSpec, "workload": Workload, "space": Space}
        for name, kind in parts.items():
            if not isinstance(part := getattr(self, name), kind):
                constructor = f"{name}(...)" if name in ("cluster", "model") else f"{kind.__name__}(...)"
                raise InputError(
                    f"problem: {name}: {quoted(part)} is not a {kind.__name__}; give hexiopt.{constructor}"
                )
        precision, space = self.workload.precision, self.space
        object.__setattr__(self, "cluster", self.cluster.with_memory_headroom(space.memory_headroom))
        usable = self.usable_devices
        if not usable:
            raise InputError("constraints: exclude: leaves no device; exclude fewer machines")
        for m in dict.fromkeys(self.cluster.machine_of[list(usable)].tolist()):
            machine = self.cluster.machines[m]
            needed = (precision, outside_products(precision))
            lacking = next((name for name in needed if machine.gpu.peak_flops(name) is None), None)
            if lacking is not None:
                others = " or ".join(p for p in ("fp16", "fp32") if machine.gpu.peak_flops(p) is not None)
                raise InputError(
                    f"workload: precision: {lacking} is not supported by {machine.gpu.name} "
                    f"(machine {machine.name}); choose workload.precision={others}, or leave it out with "
                    f"'constraints.exclude=[{machine.spec_name}]'"
                )
        if self.workload.seq_len > self.model.max_positions and self.model.learned_positions:
            raise InputError(
                f"workload: seq_len: {self.workload.seq_len} is more than the {self.model.max_positions} positions "
                f"that {self.model.name} has learned; choose workload.seq_len={self.model.max_positions}"
            )
        if space.sequence and not self.workload.sequence_parallel:
            raise InputError(
                "space: sequence: sequence layouts come from an executor that divides norms and residuals along the "
                "sequence too; choose workload.sequence_parallel=true, or space.sequence=false"
            )
        self._check_training()
        self._check_layers()
        stages = space.num_stages or 1
        if stages > self.model.num_layers:
            raise InputError(
                f"constraints: num_stages: {stages} is more than the {self.model.num_layers} layers of "
                f"{self.model.name}; every stage needs a layer, so choose at most {self.model.num_layers}"
            )
        pipelines = space.num_pipelines or 1
        if pipelines > self.workload.global_batch:
            raise InputError(
                f"constraints: num_pipelines: {pipelines} is more than the {self.workload.global_batch} sequences "
                f"of the global batch; every pipeline needs one, so choose at most {self.workload.global_batch}"
            )
        if pipelines * stages > len(usable):
            bounds = (("num_pipelines", space.num_pipelines), ("num_stages", space.num_stages))
            lifted = " ".join(f"constraints.{name}=null" for name, value in bounds if value is not None)
            raise InputError(
                f"constraints: {pipelines} pipelines of {stages} stages need {pipelines * stages} devices, the "
                f"cluster has {len(usable)} to use; ask for fewer, or for any number: {lifted}"
            )

    def _check_training(self) -> None:
        """Refuse what is not modelled beside adapters, and tensor parallelism of matrices that the optimizer needs
        whole."""
        workload, space = self.workload, self.space
        if workload.adapters is not None:
            self._check_adapters(workload.adapters)
            for name in ("sequence", "split_backward"):
                if getattr(space, name):
                    raise InputError(
                        f"space: {name}: true is not modelled with workload.training=lora; choose space.{name}=false"
                    )
            if any(schedule.splits for schedule in self.schedules):
                raise InputError(
                    f"workload: schedule: {workload.schedule} puts off gradients of weights, which adapters hardly "
                    f"have; choose workload.schedule={AUTO} with workload.training=lora"
                )
        if workload.whole_matrices and space.max_tp != 1:
            raise InputError(
                f"workload: optimizer: {workload.optimizer} needs whole matrices, which tensor parallelism cuts; "
                "choose constraints.max_tp=1, or another optimizer"
            )

    def _check_adapters(self, lora: Lora) -> None:
        """Refuse adapters of no matrix, and of models of which more is frozen than is modelled."""
        model = self.model
        if not any(adapted_matrices(model, kind, lora) for kind in model.kinds):
            raise InputError(
                f"workload: lora.targets: {model.name} has no matrix {', '.join(lora.matrices)}; choose "
                f"workload.lora.targets=all"
            )
        if any(kind.experts for kind in model.kinds) and OF_COLUMNS & set(lora.matrices):
            raise InputError(
                f"workload: lora.targets: {' and '.join(sorted(OF_COLUMNS & set(lora.matrices)))} would be those of "
                f"experts too, whose adapters are not modelled, in {model.name}; choose workload.lora.targets=attention"
            )
        if model.extra_layers:
            raise InputError(
                f"workload: training: {self.workload.training} is not modelled for layers that predict further tokens, "
                f"as those of {model.name}; choose workload.training=full, or a model without"
            )
        others = [kind.recurrent or kind.experts or (kind.attention and kind.attention.kv_rank) for kind in model.kinds]
        if lora.frozen_storage.element_bytes is not None and any(others):
            raise InputError(
                f"workload: lora.storage: {lora.storage} is not modelled for experts, recurrences and latent "
                f"attention, as those of {model.name}; choose workload.lora.storage=16bit"
            )

    def _check_layers(self) -> None:
        """Refuse what is not modelled of layers of several kinds, and of experts."""
        if not self.model.layers:
            return
        cures = {"sequence": "space.sequence=false", "split_backward": "space.split_backward=false"}
        for name, cure in cures.items():
            if getattr(self.space, name):
                raise InputError(
                    f"space: {name}: true is not modelled for the layers of {self.model.name}; choose {cure}"
                )
        if any(schedule.splits for schedule in self.schedules):
            raise InputError(
                f"workload: schedule: {self.workload.schedule} is not modelled for the layers of {self.model.name}; "
                f"choose workload.schedule={AUTO}"
            )
        if OPTIMIZERS[self.workload.optimizer].products:
            raise InputError(
                f"workload: optimizer: {self.workload.optimizer} is not modelled for the layers of {self.model.name}; "
                "choose another optimizer"
            )

    @cached_property
    def parameters(self) -> Parameters:
        """Which parameters are trained, and their bytes."""
        return Parameters(self.model, self.workload)

    def __repr__(self) -> str:
        work, space = self.workload, "" if self.space == Space() else f", {self.space}"
        batch = f"{work.global_batch:,} × {work.seq_len:,} tokens in {work.precision}"
        return f"Problem({self.model.name} on {self.cluster.name}: {self.cluster.num_devices:,} GPUs, {batch}{space})"

    def save(self, path: str | Path) -> None:
        """Write a problem file for `hexiopt.load_problem` and for planners outside (docs/files.md), atomically.

        Raises InputError where it cannot be written.
        """
        import_module("hexiopt.files.instance_file").write_problem(Path(path), self)  # no law depends on files

    def mfu(self, step_s: float, num_devices: int | None = None) -> float:
        """Model FLOPs utilisation of a step of `step_s` seconds (PaLM, arXiv 2204.02311, appendix B).

        It is the FLOPs that training takes (`Parameters.flops_per_token`), without recomputation, over the peak of the
        cluster, or of `num_devices` devices at the mean peak.
        """
        flops = self.workload.tokens * self.parameters.flops_per_token
        peak = self.cluster.total_peak_flops(self.workload.precision)
        share = 1.0 if num_devices is None else num_devices / self.cluster.num_devices
        return flops / (step_s * peak * share)

    @cached_property
    def schedules(self) -> tuple[Schedule, ...]:
        """The schedules that a plan may have."""
        more = SPLIT_SCHEDULES if self.space.split_backward and self.workload.schedule == AUTO else ()
        return schedules(self.workload) + more

    @cached_property
    def default_schedule(self) -> Schedule:
        """The schedule that searches begin with, for pipelines whose stages hold one layer range each: as
        `default_schedule`, but split where it may be."""
        first = default_schedule(self.workload)
        return next((late for late in self.schedules if late.splits and late.whole() == first), first)

    @property
    def plans_in_words(self) -> str:
        """Its plans as bounds and gaps name them: what is proved of these may be false of others."""
        *names, last = map(str, self.schedules)
        depth = ", with any number of micro-batches in flight" if self.space.depth else ""
        return f"plans under {', '.join(names)} and {last}{depth}" if names else f"plans under {last}{depth}"

    @cached_property
    def usable_devices(self) -> tuple[int, ...]:
        """The devices that a plan may use, ascending: all except the excluded ones."""
        if not self.space.exclude:
            return tuple(range(self.cluster.num_devices))
        out: set[int] = set()
        for name in self.space.exclude:
            out.update(self.cluster.devices_named(name, where="constraints: exclude"))
        return tuple(d for d in range(self.cluster.num_devices) if d not in out)

    @cached_property
    def usable_by_machine(self) -> Mapping[int, tuple[int, ...]]:
        """The usable devices of each machine that has any, both ascending, by the machine's index."""
        by_machine: dict[int, list[int]] = {}
        for device, machine in zip(
            self.usable_devices, self.cluster.machine_of[list(self.usable_devices)].tolist(), strict=True
        ):
            by_machine.setdefault(machine, []).append(device)
        return {machine: tuple(devices) for machine, devices in by_machine.items()}
