"""The script that starts each machine's part of a run."""

import subprocess
from pathlib import Path

from hexiopt.readers.plan_file import PlanFile
from runtime.launch.launch_file import launch_commands, launch_script, machines_of
from tests.runtime.launch.test_faults import problem, wide


def test_commands_repeat_what_the_user_stated_of_the_training() -> None:
    plan_file = PlanFile(problem(), wide(), {})
    overrides = ["train.steps=7", "train.machine=old", "train.master=x:1", "seed=3", "model=tiny", "plan=p.json"]
    commands = launch_commands(plan_file, Path("/p.json"), overrides, None, Path("/out"))
    names = machines_of(plan_file)
    assert list(commands) == names
    for name, words in commands.items():
        first = ["hexiopt", "train", "plan=/p.json", "train.steps=7", "seed=3", f"train.machine={name}"]
        assert words == [*first, f"train.master={names[0]}:29500", "hydra.run.dir=/out"]
    stated = launch_commands(plan_file, Path("/p.json"), [], "10.0.0.1:5000", Path("/out"))
    assert all("train.master=10.0.0.1:5000" in words for words in stated.values())


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
