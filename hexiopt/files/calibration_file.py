"""The file that `hexiopt calibrate run=...` writes and that `calibration:` of a cluster file names."""

import json
from collections.abc import Sequence
from typing import Any

from hexiopt.problem.factors import Calibration
from hexiopt.reading import Section


def calibration_from_section(section: Section) -> Calibration:
    """The calibration of a mapping in the file format. Raises InputError naming the key."""
    compute = section.section("compute", optional=True).values()
    between, inside = section.raw("between", 1.0), section.raw("inside", 1.0)
    source = section.text("source", default=None) or section.where
    section.finish()
    with section.building():
        return Calibration(compute, between, inside, source)


def calibration_to_dict(calibration: Calibration) -> dict[str, Any]:
    """The calibration as plain data, as `calibration_from_section` reads it."""
    return {
        "compute": dict(calibration.compute),
        "between": calibration.between,
        "inside": calibration.inside,
        "source": calibration.source,
    }


def calibration_text(calibration: Calibration, head: Sequence[str]) -> str:
    """The text of the file, with the lines of `head` as comments above."""
    lines = [f"# {line}" for line in head]
    lines += ["compute:  # speed of operators by GPU type, over the cost model's"]
    lines += [f"  {json.dumps(name)}: {factor:.4g}" for name, factor in calibration.compute.items()]
    lines += [
        f"between: {calibration.between:.4g}  # rate of links between machines, over the stated one",
        f"inside: {calibration.inside:.4g}  # rate of links inside machines, likewise",
        f"source: {json.dumps(calibration.source, ensure_ascii=False)}",
    ]
    return "\n".join(lines) + "\n"
