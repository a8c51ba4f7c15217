"""Plans in the files of other systems, and back."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from hexiopt.errors import InputError
from hexiopt.exports.exporting import Exported, export_files, read_layout, trainer_of, write_program
from hexiopt.exports.formats import LaunchOptions
from hexiopt.files.plan_file import write_text
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.study.solution import PlacedPlan


def export(
    plan: PlacedPlan,
    format: str,
    folder: str | Path,
    trainer: str | None = None,
    *,
    master: str | None = None,
    job: str = "plan",
    image: str = "pytorch/pytorch:latest",
    minutes: int | None = None,
    gpu_names: Mapping[str, str] = MappingProxyType({}),
    remote_folder: str | None = None,
) -> Exported:
    """Write a plan into `folder` in the files of another system, with `plan.json` and the rank table.

    `format` is a launcher (`torchrun`, `slurm`, `jobset`, `skypilot`), which starts the processes of `trainer` (by
    default our executor); a trainer alone (`megatron`, `flagscale`, `torchtitan`, ...); or `ranks`, the rank table. The
    other arguments are a launcher's: `master` is the host:port where ranks meet, `job` and `image` are names of the job
    and the container, `minutes` is the time limit (None: the scheduler's own), `gpu_names` has the scheduler's names of
    GPU types, and `remote_folder` is the path of `folder` on the machines, where it is another there. The result has
    the files, the command to type, and what differs from the plan. Raises InputError where the format cannot express
    the plan; the message names the switch under which it can.
    """
    program = write_program(plan.problem, plan, trainer_of(format, trainer))
    where = Path(folder)
    options = LaunchOptions(remote_folder or str(where.absolute()), job, master, image, minutes, gpu_names)
    result = export_files(plan.problem, plan, format, program, options)
    try:
        where.mkdir(parents=True, exist_ok=True)
        for name, text in result.files.items():
            write_text(where / name, text)
    except OSError as error:
        raise InputError(f"{where}: cannot be written ({error.strerror}); choose another folder") from None
    plan.save(where / "plan.json")
    return result


def import_plan(
    format: str,
    file: str | Path,
    cluster: Cluster,
    model: ModelSpec | None = None,
    workload: Workload | None = None,
    *,
    ranks: str | Path | None = None,
    space: Space | None = None,
    precedence: frozenset[str] = frozenset(),
) -> PlacedPlan:
    """The layout in the `file` of another trainer (`megatron`, `flagscale`, `torchtitan`, ...), as a plan on `cluster`.

    `model` is needed where the file does not state it; `workload` has what the file does not state, and its values
    other than the defaults, and those named in `precedence`, go before the file's. `ranks` is a rank table, with the
    GPU of each rank; without it, ranks are the cluster's GPUs in order, but for those that `space` excludes.
    `solver["notes"]` of the plan says what was read, left out or assumed. Raises InputError.
    """
    table = None if ranks is None else str(ranks)
    layout = read_layout(
        format, Path(file), cluster, model, workload or Workload(), space or Space(), table, precedence
    )
    made_by = {"name": f"{format} (imported)", "notes": list(layout.notes)}
    return PlacedPlan.of(layout.problem, layout.plan, made_by)
