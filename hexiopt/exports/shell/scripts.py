"""The arguments of the training run that a shell script starts, and on how many GPUs."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hexiopt.errors import InputError
from hexiopt.exports.shell.evaluation import Evaluation, Path
from hexiopt.exports.shell.values import Node, Unknown, Unknowns, Value, is_open

Words = list[str | Unknown]
_ARGUMENT = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?\Z", re.DOTALL)
_SBATCH = re.compile(r"^\s*#SBATCH\s+(.*)$", re.MULTILINE)
_OPTION = re.compile(r"(--[a-z-]+|-[A-Za-z])(?:[ =]\s*|(?<=-[A-Za-z]))(\S+)")
_BLANK = re.compile(r"<[A-Za-z][^<>|&;$\n]*>")
_TORCHRUN = """
nnodes nproc-per-node node-rank master-addr master-port rdzv-backend rdzv-endpoint rdzv-id rdzv-conf max-restarts
standalone local-addr log-dir local-ranks-filter redirects tee role start-method monitor-interval run-path no-python
module use-env num-nodes num-gpus hostfile
"""
LAUNCH = frozenset(_TORCHRUN.split())
"""Arguments of launchers: torchrun, `torch.distributed.run` and `deepspeed`."""


@dataclass(frozen=True)
class Script:
    """The values of each argument by its name without dashes (the last ones if stated twice), the number of ranks if
    stated, and notes on what was not read."""

    arguments: Mapping[str, Words]
    world: int | None = None
    notes: tuple[str, ...] = ()


def read_script(text: str, where: str, core: Iterable[str]) -> Script:
    """The training run of a script, or of a bare list of arguments: the command that has arguments in `core`.

    Raises InputError if the text is no script, and unless there is exactly one such command.
    """
    unknowns = Unknowns()
    if (bare := _bare_list(text, unknowns, where)) is not None:
        values, notes, _ = _read(bare, unknowns)
        return Script(values, notes=tuple(notes))
    slurm = _slurm(text)
    evaluation = Evaluation(lambda source: _tree(source, where), unknowns, where)
    try:
        paths = evaluation.script(text, [Path(_slurm_variables(slurm))])
    except RecursionError:
        raise InputError(f"{where}: is nested too deeply; write the command out") from None
    names = frozenset(core)
    paths = [_join_lines(path) for path in paths]
    runs = [(path, [words for words in path.commands if names & _argument_names(words)]) for path in paths]
    runs = [(path, commands) for path, commands in runs if commands]
    if not runs:
        return _of_variables(paths, unknowns, where)
    likely = min(path.unlikely for path, _ in runs)
    runs = [(path, commands) for path, commands in runs if path.unlikely == likely]
    for _, commands in runs:
        if any(_split(words)[1] != _split(commands[0])[1] for words in commands[1:]):
            programs = " and ".join(
                " ".join(map(unknowns.source_text, _split(words)[0][-2:])) for words in commands[:2]
            )
            raise InputError(f"{where}: starts several runs ({programs}); keep the one that is meant")
    runs_read = [(path, *_read(commands[0], unknowns)) for path, commands in runs]
    notes = list(dict.fromkeys(note for path, _, passed, _ in runs_read for note in (*path.notes, *passed)))
    arguments = _agreement([(path, values) for path, values, _, _ in runs_read])
    worlds = {_world(launcher, slurm) for *_, launcher in runs_read}
    return Script(arguments, worlds.pop() if len(worlds) == 1 else None, tuple(notes))


def _tree(text: str, where: str) -> Node:
    """The syntax tree. Placeholders such as <path> are words."""
    from tree_sitter import Language, Parser
    from tree_sitter_bash import language

    parser = Parser(Language(language()))
    root = parser.parse(text.encode() + b"\n").root_node
    if root.has_error:
        root = parser.parse(_BLANK.sub("unspecified", text).encode() + b"\n").root_node
    if root.has_error:
        line = _error_line(root)
        raise InputError(f"{where}: line {line} is no shell that is understood; correct its quotes and brackets")
    return root


def _error_line(node: Node) -> int:
    while not node.is_missing and node.type != "ERROR":
        inner = next((child for child in node.children if child.has_error or child.is_missing), None)
        if inner is None:
            break
        node = inner
    return int(node.start_point[0]) + 1


def _join_lines(path: Path) -> Path:
    """Join commands that begin with an argument to the command before them, with a note."""
    commands: list[tuple[str, ...]] = []
    for words in path.commands:
        if words[0].startswith("--") and commands:
            commands[-1] += words
        else:
            commands.append(words)
    note = "lines that begin with an argument are taken as part of the command before them, though no \\ ends its line"
    return (
        path
        if len(commands) == len(path.commands)
        else replace(path, commands=tuple(commands), notes=(*path.notes, note))
    )


def _bare_list(text: str, unknowns: Unknowns, where: str) -> list[str] | None:
    """The words of a text that begins with an argument, which no shell expands; None for other texts."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if not lines or not lines[0].lstrip().startswith("--"):
        return None
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise InputError(f"{where}: is no list of arguments ({error}); correct its quotes") from None
    return [unknowns.mark(word, "is not set in the list") if "$" in word else word for word in words]


def _argument_names(words: Sequence[str]) -> set[str]:
    return {m[1].replace("_", "-") for word in words if (m := _ARGUMENT.match(word))}


def _split(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The launcher's words of a command, up to its program, and the words after it."""
    for k, word in enumerate(words):
        if word.endswith(".py") and not word.startswith("-"):
            return words[: k + 1], words[k + 1 :]
        if word == "-m" and k + 1 < len(words) and not words[k + 1].startswith(("torch.distributed", "deepspeed")):
            return words[: k + 2], words[k + 2 :]
    return (), words


def _read(words: Sequence[str], unknowns: Unknowns) -> tuple[dict[str, Words], list[str], Sequence[str]]:
    """The arguments of a command, notes, and the launcher's words."""
    launcher, rest = _split(words)
    result: dict[str, Words] = {}
    passed: list[Unknown] = []
    name = None
    for word in rest:
        unknown = unknowns.word(word)
        if match := _ARGUMENT.match(word):
            name = match[1].replace("_", "-")
            result[name] = [] if match[2] is None else [unknowns.word(_bare(match[2]))]
        elif is_open(word) and isinstance(unknown, Unknown) and (name is None or result[name]):
            passed.append(unknown)
        elif name is not None:
            result[name].append(unknown if isinstance(unknown, Unknown) else _bare(unknown))
    notes = [f"not read: {word}, which {word.why}" for word in dict.fromkeys(passed)]
    if not launcher:
        launcher, result = words, {key: value for key, value in result.items() if key not in LAUNCH}
    return result, notes, launcher


def _bare(word: str) -> str:
    """A word without quotes that an expansion left around it."""
    return word[1:-1] if len(word) > 1 and word[0] == word[-1] and word[0] in "'\"" else word


def _agreement(read: Sequence[tuple[Path, Mapping[str, Words]]]) -> dict[str, Words]:
    """The arguments on which all paths agree; others are `Unknown`, because of the condition that divides the paths."""
    names = dict.fromkeys(name for _, values in read for name in values)
    result: dict[str, Words] = {}
    for name in names:
        values_by_path = [values.get(name) for _, values in read]
        if all(words == values_by_path[0] for words in values_by_path):
            result[name] = read[0][1][name]
            continue
        texts = dict.fromkeys(
            "absent" if words is None else " ".join(map(str, words)) or "stated" for words in values_by_path
        )
        why = f"depends on {_dividing(read, name)}, which the script does not decide"
        result[name] = [Unknown(" or ".join(texts), why, undecided=True)]
    return result


def _dividing(read: Sequence[tuple[Path, Mapping[str, Words]]], name: str) -> str:
    """The condition on which the value of an argument depends."""
    for text in dict.fromkeys(text for path, _ in read for text, _ in path.assumed):
        sides: dict[bool, list[Words | None]] = {True: [], False: []}
        for path, values in read:
            for condition, outcome in path.assumed:
                if condition == text:
                    sides[outcome].append(values.get(name))
        if sides[True] and sides[False] and sides[True] != sides[False]:
            return text
    return "a condition"


def _of_variables(paths: Sequence[Path], unknowns: Unknowns, where: str) -> Script:
    """The arguments in the variables of a script without a training command, as for another script to source."""
    values = [value for path in paths[:1] for value in path.variables.values()]
    words = [word for value in values for word in (value.split() if isinstance(value, str) else value)]
    result, notes, _ = _read(words, unknowns)
    if not result or not any(word.startswith("--") for word in words):
        raise InputError(f"{where}: has no argument --name value; give the script or the arguments of a training run")
    used = [name for name, value in paths[0].variables.items() if "--" in "".join(value)]
    notes.append(f"no command of a training run is there: the arguments are those of {', '.join(used)}")
    return Script(result, None, tuple(notes))


# ----------------------------------------------------------------------------- on how many GPUs


def _slurm(text: str) -> dict[str, str]:
    """The options of `#SBATCH` lines by their long names."""
    short = {"-N": "--nodes", "-n": "--ntasks", "-G": "--gpus"}
    pairs = [pair for line in _SBATCH.findall(text) for pair in _OPTION.findall(line.split(" #")[0])]
    return {short.get(name, name): value.strip("\"'") for name, value in pairs}


def _count(text: str | None) -> int | None:
    """The number in a text such as `8`, `gpu:8` or `gpu:a100:8`; None for others, such as `1:4`."""
    match = re.fullmatch(r"(?:[A-Za-z][\w.-]*:){0,2}(\d{1,6})(?:\(.*\))?", text or "")
    return int(match[1]) if match else None


def _per_node(options: Mapping[str, str]) -> int | None:
    """GPUs of a node by Slurm's options."""
    gpus = _count(options.get("--gpus-per-node")) or _count(options.get("--gres"))
    total, nodes = _count(options.get("--gpus")), _count(options.get("--nodes"))
    return gpus or (total // nodes if total and nodes else _count(options.get("--ntasks-per-node")))


def _slurm_variables(options: Mapping[str, str]) -> dict[str, Value]:
    """The variables that Slurm sets, given its options."""
    nodes, tasks = _count(options.get("--nodes")), _count(options.get("--ntasks-per-node"))
    values = {
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_GPUS_PER_NODE": _count(options.get("--gpus-per-node")),
        "SLURM_GPUS_ON_NODE": _per_node(
            {k: v for k, v in options.items() if "gpu" in v or "gpu" in k or k == "--nodes"}
        ),
        "SLURM_NTASKS_PER_NODE": tasks,
        "SLURM_NTASKS": _count(options.get("--ntasks")) or (nodes * tasks if nodes and tasks else None),
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def _world(launcher: Sequence[str], slurm: Mapping[str, str]) -> int | None:
    """The number of ranks that a launcher's words and Slurm's options state; None if they do not."""
    result: dict[str, str] = dict(slurm)
    names_given: set[str] = set()
    names = {"-N": "--nodes", "-n": "--ntasks", "-np": "--ntasks", "--num-nodes": "--nnodes"}
    names |= {"--num-gpus": "--nproc-per-node"}
    for word, after in zip(launcher, [*launcher[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        name = names.get(name.replace("_", "-"), name.replace("_", "-"))
        if name in (
            "--nodes",
            "--ntasks",
            "--ntasks-per-node",
            "--gpus-per-node",
            "--gres",
            "--nnodes",
            "--nproc-per-node",
        ):
            result[name] = value if equals else after
            names_given.add(name)
    if {"--nnodes", "--nproc-per-node"} & names_given:
        nodes = result.get("--nnodes", slurm.get("--nodes", "1"))
        per_node = _count(result["--nproc-per-node"]) if "--nproc-per-node" in names_given else _per_node(result)
        return _ranks(_count(nodes), per_node)
    if any(word.rpartition("/")[2] in ("mpirun", "mpiexec") for word in launcher):
        return _count(result.get("--ntasks"))
    if "--ntasks" in result and "--nodes" not in result:
        return _count(result["--ntasks"])
    return _ranks(_count(result.get("--nodes")), _per_node(result))


def _ranks(nodes: int | None, per_node: int | None) -> int | None:
    """The number of ranks on all nodes; None if either number is unknown."""
    return nodes * per_node if nodes and per_node else None
