"""The same steps by stock parts of torch and by ours, in turns on this machine: `python -m experiments.stock`."""

import argparse
import sys
import time
from collections.abc import Sequence

from experiments.stock import host, pipelines, tensor_parallel
from experiments.stock.turns import take_turns


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all comparisons and print them."""
    parser = argparse.ArgumentParser(prog="python -m experiments.stock", description=__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="the first one is not counted")
    parser.add_argument("--steps", type=int, default=10, help="of each way in each round")
    options = parser.parse_args(arguments)
    for name, size, ways_of, clock in (
        ("host", host.SIZE, host.ways_of, host.CLOCK),
        ("pipelines", pipelines.SIZE, pipelines.ways_of, time.perf_counter),
        ("tensor parallel", tensor_parallel.SIZE, tensor_parallel.ways_of, time.perf_counter),
    ):
        comparison = take_turns(size, ways_of, options.rounds, options.steps, clock)
        print(name)
        for way, seconds in comparison.step_s.items():
            print(f"  {way:8s} {1e3 * seconds:7.1f} ms a step, first loss {comparison.first_loss[way]:.5f}")
        print(f"  ratio    {comparison.ratio:7.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
