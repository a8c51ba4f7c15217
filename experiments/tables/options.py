"""What a run of the tables is asked for: budgets, seeds, network, which settings and sizes, and where to write."""

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from experiments.tables.settings import NUMBERS, QUICK, SETTINGS, Setting
from hexiopt.errors import InputError


@dataclass(frozen=True)
class Budgets:
    """Seconds of a search, by what it is for."""

    ours_s: float = 20.0  # portfolio, wherever one plan is compared
    rival_s: float = 10.0  # a rival, and any planner on a homogeneous cluster
    bound_s: float = 40.0  # a lower bound
    convergence_s: float = 6.0  # each solver and seed of `convergence`
    ablation_s: float = 10.0  # portfolio, each variant of `ablation`
    scaling_s: float = 20.0  # each solver of `scaling` on 1,024 GPUs, in proportion elsewhere: a sixth to five times
    sequence_s: float = 5.0  # each search of ours in the tables on long contexts,
    sequence_baseline_s: float = 30.0  # and of their baselines, which need it to end their search
    joint_s: float = 20.0  # each search of `joint`

    def scaled(self, factor: float) -> "Budgets":
        """All of them times `factor`."""
        return Budgets(**{field.name: getattr(self, field.name) * factor for field in fields(self)})


SIZES = (16, 64, 256, 1024, 10_240)
_QUICK_SIZES = (16, 32)
_QUICK, _QUICK_SEEDS = Budgets(0.25, 0.25, 0.1, 0.25, 0.2, 1.5, 0.3, 0.5, 0.5), 2


@dataclass(frozen=True)
class Options:
    """The command line of every table."""

    budgets: Budgets = Budgets()
    seeds: int = 5
    settings: tuple[Setting, ...] = SETTINGS
    sizes: tuple[int, ...] = SIZES
    inter_gb_per_s: float | None = None
    quick: bool = False
    any_code: bool = False
    publish: bool = False
    out: Path = Path("results")
    words: tuple[str, ...] = ()  # as given on the command line

    def command(self, module: str) -> str:
        """The command that makes the table of `module` again."""
        return shlex.join(["python", "-m", module, *self.words])


def parse(description: str | None, argv: Sequence[str]) -> Options:
    """The options of a command line. Raises InputError for values out of range, SystemExit as argparse does."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Budgets()
    for field in fields(Budgets):
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(
            flag, type=float, default=None, metavar="S", help=f"(default {getattr(default, field.name):g})"
        )
    parser.add_argument("--scale", type=float, default=1.0, help="a factor of all these seconds (default 1)")
    parser.add_argument("--seeds", type=int, default=None, help="of convergence (default 5)")
    parser.add_argument("--settings", nargs="+", choices=NUMBERS, default=None, help="of HexiScale (default all)")
    parser.add_argument("--sizes", nargs="+", type=int, default=None, metavar="GPUS", help="of scaling")
    parser.add_argument(
        "--inter-gb-per-s",
        "--inter_gb_per_s",
        type=float,
        default=None,
        metavar="GB/S",
        help="between machines, in place of the settings' 5",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a tiny setting in seconds: shows the tables, claims nothing"
    )
    parser.add_argument("--any-code", action="store_true", help="also take what earlier versions of the code measured")
    parser.add_argument("--publish", action="store_true", help="also into docs/results.md and docs/")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder (default results)")
    given = parser.parse_args(argv)
    if given.quick and given.publish:
        raise InputError("--publish: does not go with --quick, which measures nothing worth printing; leave one out")
    return Options(
        budgets=_budgets(given),
        seeds=_at_least_one("--seeds", given.seeds or (_QUICK_SEEDS if given.quick else 5)),
        settings=_settings(given),
        sizes=_sizes(given),
        inter_gb_per_s=given.inter_gb_per_s,
        quick=given.quick,
        any_code=given.any_code,
        publish=given.publish,
        out=given.out,
        words=tuple(argv),
    )


def _budgets(given: argparse.Namespace) -> Budgets:
    stated = {field.name: getattr(given, field.name) for field in fields(Budgets)}
    base = _QUICK if given.quick else Budgets()
    budgets = replace(base, **{name: value for name, value in stated.items() if value is not None}).scaled(given.scale)
    for field in fields(budgets):
        value = getattr(budgets, field.name)
        if not 0.0 < value < 1e6:
            raise InputError(f"--{field.name.replace('_', '-')}: {value:g} is not a time limit; state seconds above 0")
    return budgets


def _settings(given: argparse.Namespace) -> tuple[Setting, ...]:
    if given.settings is None:
        return QUICK if given.quick else SETTINGS
    return tuple(setting for setting in SETTINGS if setting.number in given.settings)


def _sizes(given: argparse.Namespace) -> tuple[int, ...]:
    sizes = tuple(given.sizes or (_QUICK_SIZES if given.quick else SIZES))
    for size in sizes:
        if size < 8 or size % 8:
            raise InputError(f"--sizes: {size} is no number of GPUs in machines of eight; state a multiple of 8")
    return tuple(sorted(set(sizes)))


def _at_least_one(flag: str, value: int) -> int:
    if value < 1:
        raise InputError(f"{flag}: {value} is out of range; state 1 or more")
    return value
