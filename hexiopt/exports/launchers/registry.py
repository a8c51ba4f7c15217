"""The launchers whose files are written, by name."""

from hexiopt.exports.formats import Launcher
from hexiopt.exports.launchers import jobset, skypilot, slurm, torchrun

LAUNCHERS: dict[str, Launcher] = {
    module.LAUNCHER.name: module.LAUNCHER for module in (torchrun, slurm, jobset, skypilot)
}
