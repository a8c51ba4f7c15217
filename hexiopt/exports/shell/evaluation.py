"""The commands that a shell script would run, with their words expanded; nothing is run.

Statements are followed in order. If a condition is not known, both branches are: each `Path` is one way through the
script, with the conditions that it assumes. Paths that reach the same state are merged.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hexiopt.errors import InputError
from hexiopt.exports.shell.values import LIKELY, MAYBE, NO, UNLIKELY, YES, Node, Scope, Unknowns, Value, matches

MOST_PATHS, MOST_NESTED, MOST_TURNS = 128, 12, 100
_SHELLS = ("bash", "sh", "zsh", "/bin/bash", "/bin/sh", "/usr/bin/bash", "/usr/bin/sh")
_RUNNERS = {*_SHELLS, "srun", "ssh", "pdsh", "clush", "mpirun", "mpiexec", "sudo", "docker", "podman", "singularity"}
_RUNNERS |= {"apptainer", "enroot", "kubectl", "nohup", "timeout", "time", "env", "exec", "sbatch", "tmux"}
_QUIET = ("echo", "printf", "cat", "logger", "tee", "true", "false", ":", "[", "test", "cd", "mkdir", "module")
_SETTERS = ("read", "mapfile", "readarray", "getopts", "let")


@dataclass(frozen=True)
class Path:
    """One way through a script.

    It has set `variables` and `functions`, reached `commands` (each a tuple of words), and `assumed` conditions with
    their outcomes, of which `unlikely` counts the unlikely ones. `end` says what ended it: the script or a function.
    """

    variables: Mapping[str, Value]
    functions: Mapping[str, Node] = field(default_factory=dict)
    commands: tuple[tuple[str, ...], ...] = ()
    assumed: tuple[tuple[str, bool], ...] = ()
    notes: tuple[str, ...] = ()
    unlikely: int = 0
    end: str = ""

    def state(self) -> tuple[Any, ...]:
        """All that affects the rest of the script."""
        return dict(self.variables), dict(self.functions), self.commands, self.unlikely, self.end


def merge(paths: Iterable[Path], where: str) -> list[Path]:
    """Merge paths that are in the same state. Raises InputError if too many remain."""
    result: list[Path] = []
    for path in paths:
        same = next((k for k, other in enumerate(result) if other.state() == path.state()), None)
        if same is None:
            result.append(path)
        else:
            common = tuple(a for a in result[same].assumed if a in path.assumed)
            result[same] = replace(result[same], assumed=common)
    if len(result) > MOST_PATHS:
        conditions = list(dict.fromkeys(text for path in result for text, _ in path.assumed))
        raise InputError(
            f"{where}: has too many conditions that it does not decide, such as {conditions[0]}; "
            "set the variables that they ask for in the script"
        )
    return result


class Evaluation:
    """Follows the statements of a script called `where` in messages."""

    def __init__(self, parse: Callable[[str], Node], unknowns: Unknowns, where: str) -> None:
        self._parse = parse
        self._unknowns = unknowns
        self._where = where
        self._nested = 0

    def script(self, text: str, paths: Sequence[Path]) -> list[Path]:
        """Follow a script from each of `paths`; returns where they end."""
        self._nested += 1
        if self._nested > MOST_NESTED:
            raise InputError(f"{self._where}: calls itself more than {MOST_NESTED} times over; write the command out")
        result = self._all(self._parse(text).children, paths)
        self._nested -= 1
        return result

    def _all(self, nodes: Sequence[Node], paths: Sequence[Path]) -> list[Path]:
        result = list(paths)
        for node in nodes:
            if node.is_named and node.type != "comment":
                result = merge((q for p in result for q in ([p] if p.end else self._step(node, p))), self._where)
        return result

    def _step(self, node: Node, path: Path) -> list[Path]:
        """Follow one statement; returns the paths after it."""
        kind = node.type
        if kind == "variable_assignment":
            return [self._assign(node, path)]
        if kind in ("declaration_command", "variable_assignments"):
            return self._all([c for c in node.children if c.type == "variable_assignment"], [path])
        if kind == "unset_command":
            names = {child.text.decode() for child in node.children}
            return [replace(path, variables={k: v for k, v in path.variables.items() if k not in names})]
        if kind == "command":
            return self._command(node, path, ())
        if kind == "redirected_statement":
            return self._redirect(node, path)
        if kind in ("if_statement", "elif_clause"):
            return self._if(node, path)
        if kind == "case_statement":
            return self._case(node, path)
        if kind == "list":
            return self._list(node, path)
        if kind in ("for_statement", "c_style_for_statement", "while_statement"):
            return self._loop(node, path)
        if kind == "function_definition":
            name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
            return [replace(path, functions={**path.functions, name.text.decode(): body})]
        if kind == "subshell":
            ends = self._all(node.children, [path])
            return [replace(q, variables=path.variables, functions=path.functions, end="") for q in ends]
        if kind == "compound_statement" and node.text.startswith(b"(("):
            return [self._forget([n.text.decode() for n in _all_of(node, "variable_name")], node, path)]
        if kind == "negated_command" or kind == "test_command":
            return [path]
        return self._all(node.children, [path])  # groups, pipelines, bodies and clauses

    # ------------------------------------------------------------------------- variables

    def _assign(self, node: Node, path: Path) -> Path:
        scope, name = Scope(self._unknowns, path.variables), node.child_by_field_name("name")
        value = node.child_by_field_name("value")
        if name.type == "subscript":
            return self._forget([name.child_by_field_name("name").text.decode()], node, path)
        key, adds = name.text.decode(), any(child.type == "+=" for child in node.children)
        before = path.variables.get(key)
        new: Value = "" if value is None else scope.text(value) if value.type != "array" else self._array(value, scope)
        if adds and before is not None:
            if isinstance(before, tuple):
                new = (
                    (*before, *new) if isinstance(new, tuple) else (before[0] + new, *before[1:]) if before else (new,)
                )
            else:
                new = (before, *new) if isinstance(new, tuple) else before + new
        return replace(path, variables={**scope.variables, key: new})

    def _array(self, node: Node, scope: Scope) -> tuple[str, ...]:
        inner = [child for child in node.children if child.is_named and child.type != "comment"]
        return tuple(word for child in inner for word in scope.words(child))

    def _forget(self, names: Iterable[str], node: Node, path: Path) -> Path:
        """`path` with the variables `names` unknown, because `node` sets them in a way that is not followed."""
        line = node.text.decode().splitlines()[0]
        marks = {name: self._unknowns.mark(f"${name}", f"is set by {line}, which is not followed") for name in names}
        return replace(path, variables={**path.variables, **marks})

    # ------------------------------------------------------------------------- branches

    def _branches(self, text: str, verdict: int, path: Path) -> list[tuple[bool, Path]]:
        """The outcomes of a condition to follow, each with its path, the likely outcome first."""
        if verdict in (YES, NO):
            return [(verdict == YES, path)]
        branches = []
        for outcome in (True, False) if verdict >= MAYBE else (False, True):
            unlikely = (verdict == LIKELY and not outcome) or (verdict == UNLIKELY and outcome)
            assumed = (*path.assumed, (text, outcome))
            branches.append((outcome, replace(path, assumed=assumed, unlikely=path.unlikely + unlikely)))
        return branches

    def _verdict(self, node: Node, path: Path) -> int:
        scope = Scope(self._unknowns, path.variables)
        if node.type == "negated_command":
            return YES - self._verdict(node.children[-1], path)
        if node.type == "list":
            left, operator, right = node.children[:3]
            pick = min if operator.type == "&&" else max
            return pick(self._verdict(left, path), self._verdict(right, path))
        if node.type == "test_command" or (node.type == "compound_statement" and node.text.startswith(b"((")):
            return scope.test(node)
        words = node.text.decode().split()
        return YES if words in (["true"], [":"]) else NO if words == ["false"] else MAYBE

    def _if(self, node: Node, path: Path) -> list[Path]:
        children = [child for child in node.children if child.type != "comment"]
        then = next(k for k, child in enumerate(children) if child.type == "then")
        conditions = [child for child in children[1:then] if child.is_named]
        body = [c for c in children[then + 1 :] if c.type not in ("elif_clause", "else_clause")]
        others = [c for c in children[then + 1 :] if c.type in ("elif_clause", "else_clause")]
        result: list[Path] = []
        text = " ".join(conditions[-1].text.decode().split())
        for outcome, branch in self._branches(text, self._verdict(conditions[-1], path), path):
            if outcome:
                result += self._all(body, [branch])
            elif node.type == "elif_clause":
                result.append(replace(branch, end="else"))
            else:
                result += self._otherwise(others, branch)
        return result

    def _otherwise(self, clauses: Sequence[Node], path: Path) -> list[Path]:
        """Follow the clauses after a condition that does not hold; returns the paths after them."""
        result, undecided = list[Path](), [path]
        for clause in clauses:
            ends = [q for p in undecided for q in self._step(clause, p)]
            undecided = [replace(q, end="") for q in ends if q.end == "else"]
            result += [q for q in ends if q.end != "else"]
            if clause.type == "else_clause":
                return result
        return result + undecided

    def _case(self, node: Node, path: Path) -> list[Path]:
        scope, subject = Scope(self._unknowns, path.variables), node.child_by_field_name("value")
        text, undecided, result = scope.text(subject), [path], list[Path]()
        for item in (child for child in node.children if child.type == "case_item"):
            end = next(k for k, child in enumerate(item.children) if child.type == ")")
            patterns = [scope.text(child) for child in item.children[:end] if child.is_named]
            if "*" in patterns:
                verdict = YES
            elif self._unknowns.first(text + "".join(patterns)) is not None:
                verdict = MAYBE
            else:
                verdict = YES if any(matches(text, pattern) for pattern in patterns) else NO
            condition = f"case {subject.text.decode()} in {'|'.join(patterns)}"
            branches = [branch for p in undecided for branch in self._branches(condition, verdict, p)]
            result += self._all(item.children[end + 1 :], [branch for outcome, branch in branches if outcome])
            undecided = [branch for outcome, branch in branches if not outcome]
        return result + undecided

    def _list(self, node: Node, path: Path) -> list[Path]:
        """`a && b` and `a || b`: if `a` is a command rather than a test, it is taken to succeed."""
        left, operator, right = node.children[:3]
        verdict = self._verdict(left, path)
        tests = left.type in ("test_command", "negated_command", "list") or verdict != MAYBE
        if not tests or (left.type == "list" and _all_of(left, "command")):
            after = self._all([left], [path])
            ends = right.text.decode().split()[0] in ("exit", "return")
            return self._all([right], after) if operator.type == "&&" and not ends else after
        result: list[Path] = []
        text = " ".join(left.text.decode().split())
        for outcome, branch in self._branches(text, verdict, path):
            runs = outcome == (operator.type == "&&")
            inner = self._step(left, branch) if left.type == "list" else [branch]
            result += self._all([right], inner) if runs else inner
        return result

    def _loop(self, node: Node, path: Path) -> list[Path]:
        body = node.child_by_field_name("body")
        scope = Scope(self._unknowns, path.variables)
        if node.type == "for_statement":
            name = node.child_by_field_name("variable").text.decode()
            words = [word for child in node.children_by_field_name("value") for word in scope.words(child)]
            if self._unknowns.first("".join(words)) is None and len(words) <= MOST_TURNS:
                result = [path]
                for word in words:
                    turns = [replace(p, variables={**p.variables, name: word}) for p in result]
                    result = self._all([body], turns)
                return result
        elif node.type == "while_statement":
            conditions = node.children_by_field_name("condition")
            text = conditions[0].text.decode()
            if any(word in text for word in ("$#", "$1", "$@", "getopts", "${1")):
                note = f"arguments of the script itself are not read: {' '.join(text.split())}"
                return [replace(path, notes=(*path.notes, note))]
            verdict = self._verdict(conditions[0], path)
            if verdict in (YES, NO) and not node.text.startswith(b"until"):
                return self._all([body], [path]) if verdict == YES else [path]
        ends = self._all([*node.children_by_field_name("condition"), body], [path])
        names = {key for end in ends for key in end.variables if end.variables[key] != path.variables.get(key)}
        path = replace(path, commands=ends[0].commands if ends else path.commands)
        return [self._forget(sorted(names), node, path)]

    # ------------------------------------------------------------------------- commands

    def _redirect(self, node: Node, path: Path) -> list[Path]:
        """A command whose input is a here-document (`<<EOF`) or a here-string (`<<<`)."""
        inputs = []
        for redirect in node.children_by_field_name("redirect"):
            if redirect.type == "heredoc_redirect":
                inputs += [child.text.decode() for child in redirect.children if child.type == "heredoc_body"]
        body = node.child_by_field_name("body")
        if body is None or body.type != "command" or not inputs:
            return [path] if body is None else self._step(body, path)
        return self._command(body, path, inputs)

    def _command(self, node: Node, path: Path, inputs: Sequence[str]) -> list[Path]:
        scope = Scope(self._unknowns, path.variables)
        before = dict(scope.variables)
        for child in node.children:  # variables before a command are its own
            if child.type == "variable_assignment":
                scope.variables = dict(self._assign(child, replace(path, variables=scope.variables)).variables)
        scope.variables = {**before, **{k: v for k, v in scope.variables.items() if k not in before}}
        words: list[str] = []
        inputs = list(inputs)
        for child in node.children:
            if child.type == "command_name":
                words += [word for inner in child.children for word in scope.words(inner)]
            elif child.type == "herestring_redirect":
                inputs.append(scope.text(child.children[-1]))
            elif child.is_named and not child.type.endswith(("_redirect", "_assignment")):
                words += scope.words(child)
        path = replace(path, variables={**before, **{k: v for k, v in scope.variables.items() if k in before}})
        return self._run(words, inputs, node, path) if words else [path]

    def _run(self, words: list[str], inputs: Sequence[str], node: Node, path: Path) -> list[Path]:
        name = words[0]
        if name in ("exit", "return"):
            return [replace(path, end="return" if name == "return" and "@" in path.variables else "exit")]
        if name in path.functions:
            return self._call(path.functions[name], words, path)
        if name in ("source", "."):
            note = f"not read: {self._unknowns.source_text(' '.join(words[1:2]))}, which the script takes in"
            return [replace(path, notes=(*path.notes, note))]
        if name in _SETTERS:
            names = [word.partition("=")[0] for word in words[1:] if word.partition("=")[0].isidentifier()]
            return [self._forget(names, node, path)]
        if name == "shift":
            rest = path.variables.get("@", ())[1:]
            return (
                [replace(path, variables={**path.variables, **_arguments(rest)})] if "@" in path.variables else [path]
            )
        if name == "eval":
            return self.script(" ".join(words[1:]), [path])
        if name in _QUIET:
            return [path]
        program = name.rpartition("/")[2]
        if program in _RUNNERS or name in _RUNNERS:
            position = next((k for k, word in enumerate(words) if k and " " in word.strip() and "--" in word), None)
            scripts = [words[position]] if position is not None else [] if len(words) > 2 else list(inputs)
            if scripts:
                return self._inside(words[: position or len(words)], scripts, path)
        return [replace(path, commands=(*path.commands, tuple(words)))]

    def _inside(self, runner: list[str], scripts: Sequence[str], path: Path) -> list[Path]:
        """Scripts that a command runs elsewhere; the runner's words precede those of their commands."""
        result = []
        for end in self.script("\n".join(scripts), [replace(path, commands=())]):
            commands = tuple((*runner, *words) for words in end.commands)
            result.append(replace(end, variables=path.variables, commands=(*path.commands, *commands), end=""))
        return result

    def _call(self, body: Node, words: Sequence[str], path: Path) -> list[Path]:
        self._nested += 1
        if self._nested > MOST_NESTED:
            raise InputError(f"{self._where}: {words[0]} calls itself; write the command out")
        outer = {key: value for key, value in path.variables.items() if key.isdecimal() or key in "@#"}
        ends = self._all([body], [replace(path, variables={**path.variables, **_arguments(words[1:])})])
        self._nested -= 1
        result = []
        for end in ends:
            after = {key: value for key, value in end.variables.items() if not key.isdecimal() and key not in "@#"}
            result.append(replace(end, variables={**after, **outer}, end="" if end.end == "return" else end.end))
        return result


def _arguments(words: Sequence[str] | Value) -> dict[str, Value]:
    """The variables that hold the arguments of a function."""
    numbered: dict[str, Value] = {str(k + 1): word for k, word in enumerate(words)}
    return {**numbered, "@": tuple(words), "#": str(len(words))}


def _all_of(node: Node, kind: str) -> list[Node]:
    """All nodes of a kind below one."""
    inner = [result for child in node.children for result in _all_of(child, kind)]
    return [node, *inner] if node.type == kind else inner
