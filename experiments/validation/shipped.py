"""The measurements that ship with hexiopt: published runs, and the profiles that their authors published."""

from functools import cache
from pathlib import Path

from experiments.validation.cases import Measurements
from hexiopt.files.link_files import sailor_network
from hexiopt.files.profile_files import read_profile

DATA = Path(__file__).parent.parent / "data"
RUNS = DATA / "measured_training_throughput.csv"
EXPERT_RUNS = DATA / "expert_runs.csv"  # models with experts; few constants of frameworks were fitted to these
LEFT_OUT = DATA / "left_out_errors.csv"  # of fits without each source, by `python -m experiments.calibrate`
HELD_OUT = DATA / "held_out_runs.csv"  # no constant was fitted to these


@cache
def shipped_measurements() -> Measurements:
    """Sailor's layer profiles and network fits."""
    return Measurements(
        read_profile(DATA / "sailor" / "layer_profiles.json"), sailor_network(DATA / "sailor" / "network.json")
    )
