"""An agent whose ranks keep a pace: `python -m experiments.lab.emulate.agent PACES.json HOST:PORT`, further arguments
as of `runtime.launch.agent`."""

import sys
from functools import partial
from pathlib import Path

from experiments.lab.emulate.pace import hooks_of
from runtime.launch import agent

if __name__ == "__main__":
    sys.exit(agent.main(sys.argv[2:], partial(hooks_of, Path(sys.argv[1]))))
