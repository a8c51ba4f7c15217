"""The palette of all reports, and the formats of numbers and devices."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from hexiopt.cost.executors.memory import MEMORY_PARTS
from hexiopt.numbers import coefficients as c
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.nodelist import compress
from hexiopt.problem.space import Space
from hexiopt.units import GIB

# Hues of Paul Tol's colour-blind-safe schemes (https://personal.sron.nl/~pault/), ordered so that neighbours contrast.
PIPELINE_HUES = (
    *("#4477AA", "#DD7744", "#44AA99", "#AA4499", "#CCAA44"),
    *("#882255", "#55A555", "#6FB7DD", "#CC6677", "#888833"),
)
INK, MUTED, FAINT, PAPER = "#1F2933", "#616E7C", "#D5DAE0", "#FFFFFF"
SYNC_COLOUR, OPTIMIZER_COLOUR = "#B8C0CA", "#5F6C7B"

# Model states in greys and blues, memory that grows with the micro-batch in warm colours.
_MEMORY = (
    ("weights", "#33475B"),
    ("gradients", "#5B7A99"),
    ("master weights", "#8FA9C1"),
    ("optimizer states", "#C2D1DF"),
    ("activations", "#E6A75A"),
    ("logits", "#C8553D"),
    ("buffers", "#9C6F9E"),
    ("communicators", "#7C9A86"),
    ("reserve", "#DAD7CF"),
)
MEMORY_LABELS = {part: label for part, (label, _) in zip(MEMORY_PARTS, _MEMORY, strict=True)}
MEMORY_COLOURS = {part: colour for part, (_, colour) in zip(MEMORY_PARTS, _MEMORY, strict=True)}

_LIGHTEST = 0.5


def mix(colour: str, other: str, share: float) -> str:
    """`colour` with a `share` of `other` in it; both as #RRGGBB."""
    channels = (round(int(colour[k : k + 2], 16) * (1 - share) + int(other[k : k + 2], 16) * share) for k in (1, 3, 5))
    return "#" + "".join(f"{channel:02X}" for channel in channels)


def stage_colour(pipeline: int, stage: int, num_stages: int) -> str:
    """The pipeline's hue, lighter from stage to stage."""
    hue = PIPELINE_HUES[pipeline % len(PIPELINE_HUES)]
    return mix(hue, PAPER, _LIGHTEST * stage / max(1, num_stages - 1))


def operation_colour(pipeline: int, stage: int, num_stages: int, kind: str) -> str:
    """The colour of a forward, the stage's colour lightened; of a backward, one nearer to the pipeline's hue; or of
    gradients of weights, darker."""
    colour = stage_colour(pipeline, stage, num_stages)
    if kind == "forward":
        return mix(colour, PAPER, 0.5)
    return mix(colour, INK, 0.35) if kind == "weights" else mix(colour, stage_colour(pipeline, 0, 1), 0.45)


def ink_on(colour: str) -> str:
    """The colour of legible text on `colour`: white where WCAG's contrast of large text is kept, else dark."""
    return PAPER if (1.05 / (_luminance(colour) + 0.05)) >= 3.0 else INK


def _luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it, from 0 (black) to 1 (white)."""
    channels = (int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def seconds_scale(value: float) -> tuple[float, int, str]:
    """The format of a duration: its unit in seconds, the digits after the point, and the unit's name."""
    if value >= 0.9995:  # so that no duration is written as 1,000 ms
        return 1.0, 1 if value >= 100 else 2, "s"
    unit_s, unit = (1e-3, "ms") if value >= 0.9995e-3 else (1e-6, "µs")
    number = float(f"{value / unit_s:.3g}")
    return unit_s, 0 if number >= 100 else 1 if number >= 10 else 2, unit


def seconds(value: float) -> str:
    """A duration with its unit, in at most four significant digits."""
    unit_s, decimals, unit = seconds_scale(value)
    if unit == "s":
        return f"{value:,.{decimals}f} s"
    return f"{value / unit_s:.3g} {unit}" if value else "0 s"


def milliseconds(value: float) -> str:
    """The number of milliseconds, with one digit after the point below a second."""
    return f"{value * 1e3:,.0f}" if value >= 1 else f"{value * 1e3:.1f}"


def gib(value: float) -> str:
    """The number of GiB."""
    return f"{value / GIB:.1f}"


def rate(bytes_per_s: float) -> str:
    """The number of GB/s, in at most four significant digits."""
    return f"{bytes_per_s / 1e9:.4g}"


def amount(money: float) -> str:
    """A sum of money, in whole units from a thousand on and three significant digits below one."""
    return f"{money:,.0f}" if money >= 1000 else f"{money:.2f}" if money >= 1 else f"{money:.3g}"


def percent(share: float) -> str:
    """A share in percent; one decimal below ten."""
    return f"{share:.0%}" if share >= 0.0995 or share == 0 else f"{share:.1%}"


def memory_words(space: Space) -> str:
    """A note on what reports count as memory besides tensors (see `transient`), and on a headroom."""
    reserve = f"communicators and a reserve of {c.FRAGMENTATION:.0%} of transient memory"
    if not space.memory_headroom:
        return f"with {reserve}"
    free = f"{100 * space.memory_headroom:g}% of usable memory free"
    return f"with {reserve}; its limit leaves {free} (constraints.memory_headroom)"


def small_percent(share: float) -> str:
    """A share in percent, with two significant digits below 1 %, such as the MFU of a plan for GPUs on a CPU."""
    return f"{share:.1%}" if share >= 0.01 else f"{100 * share:.2g}%"


def count(number: int, noun: str) -> str:
    """`1 stage`, `2 stages`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def clip(text: str, limit: int) -> str:
    """`text`, truncated with an ellipsis to at most `limit` characters."""
    return text if len(text) <= limit else text[: max(0, limit - 1)] + "…"


def device_ranges(cluster: Cluster, devices: Iterable[int]) -> list[str]:
    """Devices as ranges by machine, with equal machines in Slurm's notation: `b:0-3`, `d-[0-2]:0,2`."""
    machines, machine_of, index_of = cluster.machines, cluster.machine_of, cluster.index_in_machine
    parts: list[tuple[int, str]] = []
    for machine, members in groupby(sorted(devices), key=lambda device: int(machine_of[device])):
        indices = [int(index_of[device]) for device in members]
        parts.append((machine, ",".join(index_ranges(indices))))
    return [
        f"{name}:{indices}"
        for (indices, _), same in groupby(parts, key=lambda part: (part[1], machines[part[0]].kind))
        for name in compress(machines[machine].name for machine, _ in same)
    ]


def index_ranges(indices: Sequence[int]) -> list[str]:
    """Ascending numbers, consecutive ones as ranges: `0-3`, `6`."""
    runs = groupby(enumerate(indices), key=lambda at: at[1] - at[0])
    whole = [[index for _, index in run] for _, run in runs]
    return [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in whole]


def place(cluster: Cluster, devices: Sequence[int]) -> str:
    """Devices and their types, `b:0-3 (rtx_3090)`; a type that begins the machine's name is omitted."""
    ranges = device_ranges(cluster, devices)
    gpus = gpu_names(cluster, devices)
    evident = all(name.startswith(gpus) for name in ranges)
    return ", ".join(ranges) + ("" if evident else f" ({gpus})")


def gpu_names(cluster: Cluster, devices: Iterable[int]) -> str:
    """The types of devices, joined by +."""
    return " + ".join(dict.fromkeys(cluster.gpu_of(device).name for device in devices))


def join_names(names: Sequence[str], limit: int) -> str:
    """Join the first `limit` names by commas, and append the number of others."""
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest:,} more" if rest > 0 else "")
