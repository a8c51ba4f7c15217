"""The script that starts each machine's part of a run."""

import subprocess
from pathlib import Path

from hexiopt.readers.plan_file import PlanFile
from runtime.launch.launch_file import launch_script, machines_of
from tests.runtime.launch.test_faults import problem, wide


def test_each_machine_runs_its_own_command(tmp_path: Path) -> None:
    names = machines_of(PlanFile(problem(), wide(), {}))
    assert len(names) > 1
    script = tmp_path / "launch.sh"
    script.write_text(launch_script({name: ["echo", f"it's {name}", "$HOME"] for name in names}))
    for name in names:
        assert subprocess.run(["sh", script, name], capture_output=True, text=True).stdout == f"it's {name} $HOME\n"
    done = subprocess.run(["sh", script, "elsewhere"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"launch.sh: no machine 'elsewhere'; name one of {', '.join(names)}\n"
