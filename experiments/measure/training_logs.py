"""Step times in the logs of other trainers, as they print them: Megatron-LM and torchtitan."""

import re
from pathlib import Path

from hexiopt.errors import InputError
from hexiopt.reading import read_text

MAX_LOG_BYTES = 256 * 2**20
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# Megatron-LM, training_log: `iteration 10/ 100 | ... | elapsed time per iteration (ms): 1234.5 | ...`
_MEGATRON = re.compile(r"elapsed time per iteration \(ms\):\s*([0-9.]+)")
# torchtitan, MetricsProcessor.log: `step: 10  loss: 4.5  ...  tps: 1,234  tflops: ...`; tokens per second and device
_TORCHTITAN = re.compile(r"\bstep:\s*[0-9]+\b.*\btps:\s*([0-9,]+)")


def logged_step_times(path: Path, tokens: int, devices: int) -> list[float]:
    """Seconds of every step that a log states, of `tokens` tokens on that many `devices`. Raises InputError."""
    text = _COLOURS.sub("", read_text(path, max_bytes=MAX_LOG_BYTES))
    step_s = [float(number) / 1e3 for number in _MEGATRON.findall(text)]
    rates = [float(number.replace(",", "")) for number in _TORCHTITAN.findall(text)]
    step_s += [tokens / (rate * devices) for rate in rates if rate > 0]
    if not step_s:
        raise InputError(
            f"{path}: states no step; give a folder of hexiopt train, or a log of Megatron-LM ('elapsed time per "
            "iteration (ms)') or of torchtitan ('step: ... tps: ...')"
        )
    return step_s
