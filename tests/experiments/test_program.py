"""The program: help, completion, exit codes, Ctrl-C and closed pipes."""

import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from shutil import which

import pytest

from experiments.app import common
from experiments.app.common import worst
from experiments.app.config import READS
from experiments.app.verbs import VERBS
from tests.conftest import ROOT, Ran, Run
from tests.experiments.command_line import QUICK, STEPS, TINY, in_process, interrupt_search, refusal
from tests.slow import slow_but


def test_help_and_version(hexiopt: Run) -> None:
    ran = hexiopt("--help")
    assert ran.code == 0
    assert all(verb in ran.out for verb in ("plan", "compare", "price", "explain", "collect"))
    assert hexiopt("--version").out.startswith("hexiopt ")
    assert hexiopt("plan", "--version").out.startswith("hexiopt ")
    ran = hexiopt("plan", "--help")
    assert ran.code == 0
    for word in ("hexiscale_setting_1", "llama2_7b", "portfolio", "time_limit_s"):
        assert word in ran.out
    for word in ("workload.seq_len=4096", "one of auto, none, selective, full", "Seconds spent on the lower bound"):
        assert word in ran.out
    assert "train.steps" not in ran.out, "only what the verb reads"
    ran = hexiopt("plan", "--cfg", "job", *QUICK)
    assert ran.code == 0
    assert "seed: 0" in ran.out


@pytest.mark.parametrize("verb", slow_but(("plan", "compare"), VERBS))
def test_help_of_a_verb_fits_and_names_keys_that_exist(verb: str, hexiopt: Run) -> None:
    ran = hexiopt(verb, "--help")
    assert ran.code == 0, ran.err
    keys = ran.out.partition("Any value can be overridden")[2]
    assert max(map(len, keys.splitlines())) <= 80
    assert all(f"  {key}" in keys for key in READS[verb])


def test_shell_completion(hexiopt: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "complete -o nospace" in hexiopt("plan", "-sc", "install=bash").out
    for line, completed in {
        "hexiopt pr": ["price", "profile"],
        "hexiopt wh": ["whatif"],
        "hexiopt plan model=llama3": ["model=llama3_70b", "model=llama3_8b"],
        "hexiopt plan solver.ti": ["solver.time_limit_s="],
    }.items():
        monkeypatch.setenv("COMP_LINE", line)
        assert hexiopt("-sc", "query=bash").out.split() == completed


def test_help_starts_without_hydra(tmp_path: Path) -> None:
    code = "import sys; from experiments.app.cli import main; main(['--help']); assert 'hydra' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def test_the_process_exits_with_the_code(tmp_path: Path) -> None:
    process = in_process("plan", "cluster=nope", "model=tiny", cwd=tmp_path)
    out, err = process.communicate(timeout=600)
    refusal(Ran(process.returncode, out, err))
    assert list(tmp_path.iterdir()) == []
    verb = subprocess.run(
        [sys.executable, "-m", "experiments.price"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert "plan: is missing" in refusal(Ran(verb.returncode, verb.stdout, verb.stderr))


def test_ctrl_c_keeps_the_best_plan_so_far(tmp_path: Path) -> None:
    ran = interrupt_search("plan", "report=false", "hydra.run.dir=out", cwd=tmp_path)
    assert (ran.code, ran.err) == (130, "hexiopt: interrupted; the best plan so far is kept\n")
    assert (tmp_path / "out" / "plan.json").is_file()


@pytest.mark.slow
def test_ctrl_c_ends_a_sweep(tmp_path: Path) -> None:
    ran = interrupt_search("plan", "-m", "seed=0,1", "hydra.sweep.dir=sweep", cwd=tmp_path)
    again = "the same command with sweep.resume=true hydra.sweep.dir=sweep runs the others"
    assert (ran.code, ran.err) == (130, f"hexiopt: interrupted: 0 of 2 jobs are done in sweep; {again}\n")
    (status,) = tmp_path.rglob("status.json")
    assert json.loads(status.read_text())["exit_code"] == 130
    assert (status.parent / "plan.json").is_file(), "the best plan of the job that was running"


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    process = in_process("explain", *STEPS, cwd=tmp_path)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    assert process.wait(timeout=600) == 0, err
    assert err == ""


@pytest.mark.slow
def test_closed_standard_streams_are_no_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hexiopt", "plan", *TINY, "report=false", "hydra.run.dir=out"]
    closed = ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", *command]
    ran = subprocess.run(closed, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=600)
    assert ran.returncode == 0
    assert json.loads((tmp_path / "out" / "plan.json").read_text())["pipelines"]


def test_worst_code_of_a_sweep() -> None:
    assert worst([0, 3, 0]) == 3
    assert worst([3, 2, 0]) == 2
    assert worst([3, 2, 1, 0]) == 1
    assert worst([]) == 0


def test_interrupt_outside_the_main_thread_is_left_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    with common.interrupt.caught():
        pass
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("name", slow_but(("solvers",), ("experiments", "solvers")))
def test_an_own_folder_is_one_line_with_python_m_and_nothing_to_the_program(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    message = (
        f"hexiopt: {tmp_path / name}: hides hexiopt's own package {name!r}; rename it, or run from another folder\n"
    )
    module = in_own_folder([sys.executable, "-m", "hexiopt", "--version"], tmp_path)
    assert (module.returncode, module.stderr, module.stdout) == (2, message, "")
    script = program(tmp_path)
    started = in_own_folder([script, "--version"], tmp_path)
    assert (started.returncode, started.stderr) == (0, ""), "scripts do not look for modules in the current folder"
    assert started.stdout.startswith("hexiopt ")


def program(folder: Path) -> str:
    """The program as an installation makes it, of its entry point."""
    entry = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["hexiopt"]
    module, _, function = entry.partition(":")
    path = folder / "bin" / "hexiopt"
    path.parent.mkdir()
    path.write_text(f"#!{sys.executable}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    path.chmod(0o755)
    return str(path)


def in_own_folder(command: list[str], cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | env
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_completion_in_a_shell(tmp_path: Path) -> None:
    """Bash itself completes a key of a verb after what `-sc install=bash` prints has been evaluated."""
    if which("bash") is None:
        pytest.skip("bash is not installed")
    folder = Path(program(tmp_path)).parent
    asked = "hexiopt whatif whatif.pri"
    typed = f'COMP_LINE="{asked}" COMP_POINT={len(asked)} COMP_WORDS=({asked}) COMP_CWORD=2'
    lines = [
        'eval "$(hexiopt plan -sc install=bash)"',
        typed.replace(" COMP_", "; COMP_"),
        "hydra_bash_completion",
        'echo "${COMPREPLY[@]}"',
        "complete -p hexiopt",
    ]
    ran = in_own_folder(["bash", "-c", "\n".join(lines)], tmp_path, PATH=f"{folder}{os.pathsep}{os.environ['PATH']}")
    completed, registered = ran.stdout.splitlines()[-2:]
    assert completed == "whatif.prices=", ran.stderr
    assert "hydra_bash_completion" in registered


@pytest.mark.parametrize("name", slow_but(("conf",), ("solvers", "conf")))
def test_a_folder_that_hides_our_package_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    message = f"{tmp_path / name}: hides hexiopt's own package {name!r}; rename it, or run from another folder"
    python = "import hexiopt; hexiopt.cluster('small_mixed'); hexiopt.solver('random')"
    program = "import sys; from experiments.app.cli import main; sys.exit(main(['plan']))"
    for code, last in ((python, f"hexiopt.errors.InputError: {message}"), (program, f"hexiopt: {message}")):
        ran = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
            capture_output=True,
            text=True,
        )
        assert ran.stderr.splitlines()[-1] == last
