"""Shell scripts come to the arguments that bash itself gives the training run, or to what they leave open."""

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from hexiopt.errors import InputError
from hexiopt.exports.shell.scripts import Script, read_script
from hexiopt.exports.shell.values import Unknown

CORE = ("micro-batch-size",)


def read(text: str) -> Script:
    """The run in a script."""
    return read_script(text, "x.sh", CORE)


def values(text: str) -> dict[str, list[str]]:
    """The arguments of a run, all of them known."""
    arguments = read(text).arguments
    assert not any(isinstance(word, Unknown) for words in arguments.values() for word in words), arguments
    return {name: [str(word) for word in words] for name, words in arguments.items()}


def unknown(text: str, name: str) -> Unknown:
    """The value of an argument that the script leaves open."""
    [word] = read(text).arguments[name]
    assert isinstance(word, Unknown)
    return word


# ----------------------------------------------------------------------------- against bash itself


class RandomScript:
    """A random script of known values: assignments, arrays, conditions, cases, loops, functions, arithmetic."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.lines: list[str] = []
        self.texts = ["A", "B", "C"]
        self.arrays = ["L", "M"]

    def value(self) -> str:
        """An expression of the shell, quoted or not."""
        rng, name, array = self.rng, self.rng.choice(self.texts), self.rng.choice(self.arrays)
        return rng.choice(
            [
                str(rng.randint(0, 9)),
                f'"--x {rng.randint(0, 9)} ${name}"',
                "'--y $A'",
                f'"${{{name}:---d 1}} tail"',
                f"${{U{rng.randint(0, 9)}:-{rng.randint(0, 9)}}}",
                f"$(({rng.randint(1, 9)} * 3 + N))",
                f'"${{{array}[*]}}"',
                f"${{#{array}[@]}}",
                f'${{{name}:+"set"}}',
                '"a\\"b\\\\c"',
                f"pre${{{name}}}post" if rng.random() < 0.3 else f'"pre${{{name}}}post"',
            ]
        )

    def condition(self) -> str:
        """A condition on known values."""
        name, number = self.rng.choice(self.texts), self.rng.randint(0, 9)
        return self.rng.choice(
            [
                f'[ "${name}" = "{number}" ]',
                f"[[ ${name} == {number}* ]]",
                f"[ $N -lt {number} ]",
                f'[ -z "${name}" ]',
                f"[[ -n ${name} && $N -ge {number} ]]",
                f'[ "${name}" != "{number}" -a $N -eq {number} ]',
                f"(( N > {number} ))",
                f'! [ "$N" = {number} ]',
            ]
        )

    def statement(self, depth: int) -> list[str]:
        """One statement, indented by nothing."""
        rng, name, array = self.rng, self.rng.choice(self.texts), self.rng.choice(self.arrays)
        kind = rng.choice(["set", "set", "append", "self", "array", "more", "if", "case", "for", "and", "call"])
        if depth > 2 and kind in ("if", "case", "for"):
            kind = "append"
        if kind == "set":
            return [f"{rng.choice(['', 'export '])}{name}={self.value()}"]
        if kind == "append":
            return [f"{name}+={self.value()}"]
        if kind == "self":
            return [f'{name}="${name} --s {rng.randint(0, 9)}"']
        if kind == "array":
            return [f"{array}=(--k {self.value()} {self.value()} # a comment", "  --last)"]
        if kind == "more":
            return [f"{array}+=({self.value()})"]
        if kind == "and":
            return [f"{self.condition()} {rng.choice(['&&', '||'])} {name}={self.value()}"]
        if kind == "call":
            return [f"f {self.value()} {rng.randint(0, 9)}"]
        body, other = self.statement(depth + 1), self.statement(depth + 1)
        if kind == "if":
            middle = [f"elif {self.condition()}; then", *self.statement(depth + 1)] if rng.random() < 0.5 else []
            return [f"if {self.condition()}; then", *body, *middle, "else", *other, "fi"]
        if kind == "case":
            return [f'case "${name}" in', f"{rng.randint(0, 9)}|*1*)", *body, ";;", "*)", *other, ";;", "esac"]
        return [f"for i in {self.value()} b; do", f'{name}="${name} $i"', *body, "done"]

    def text(self) -> str:
        """The script."""
        start = ["A=1", 'B="--b 2"', "C=", f"N={self.rng.randint(0, 9)}", "L=(--l)", "M=()"]
        function = ["f() {", 'B="$B $1"', 'L+=("$2" $#)', "}"]
        body = [line for _ in range(self.rng.randint(1, 8)) for line in self.statement(0)]
        run = 'torchrun t.py --micro-batch-size 1 --a $A --bq "$B" --c $C --l "${L[@]}" --m ${M[*]} --n=$N'
        return "\n".join([*start, *function, *body, run]) + "\n"


def by_bash(text: str, tmp_path: Path) -> list[str]:
    """The words that bash gives the run."""
    script = tmp_path / "own.sh"
    script.write_text('torchrun() { printf "%s\\0" "$@"; }\nset -f\n' + text, encoding="utf-8")
    done = subprocess.run(
        ["bash", str(script)], capture_output=True, timeout=20, env={"PATH": os.environ["PATH"]}, check=False
    )
    return done.stdout.decode().split("\0")[:-1]


def as_arguments(words: list[str]) -> dict[str, list[str]]:
    """Words after the program as the reader has them."""
    script = read_script(
        "torchrun t.py " + " ".join("'" + word.replace("'", "'\\''") + "'" for word in words), "b", CORE
    )
    return {name: [str(word) for word in texts] for name, texts in script.arguments.items()}


@pytest.mark.skipif(shutil.which("bash") is None, reason="compares with bash")
def test_words_are_those_of_bash(tmp_path: Path) -> None:
    followed = 0
    for seed in range(300):
        text = RandomScript(random.Random(seed)).text()
        truth = as_arguments(by_bash(text, tmp_path)[1:])
        script = read(text)
        if any(isinstance(word, Unknown) for words in script.arguments.values() for word in words) or script.notes:
            continue  # it says that something is open
        followed += 1
        assert {name: list(map(str, words)) for name, words in script.arguments.items()} == truth, text
    assert followed > 200


# ----------------------------------------------------------------------------- what is open


BATCH = "--micro-batch-size 1"
RUN = f"torchrun t.py {BATCH} "


@pytest.mark.parametrize(
    ("text", "name", "shown", "why"),
    [
        ("if [ $X = 1 ]; then T=2; else T=4; fi\n" + RUN + "--t $T", "t", "2 or 4", r"[ $X = 1 ]"),
        ('[ "$F" = 1 ] && E="--fp8 on"\n' + RUN + "$E", "fp8", "on or absent", '[ "$F" = 1 ]'),
        ("case $M in a) L=1;; *) L=2;; esac\n" + RUN + "--l $L", "l", "1 or 2", "case $M in a"),
        (RUN + "--t $(nproc)", "t", "$(nproc)", "is the output of a command"),
        (RUN + "--t $T", "t", "$T", "is not set in the script"),
        (RUN + "--t $1", "t", "$1", "is an argument of the script itself"),
        (RUN + "--t $((2 * W))", "t", "$((2 * W))", "is not a known number"),
        ("while read T; do :; done\n" + RUN + "--t $T", "t", "$T", "is set by while read T"),
        ("read T < file\n" + RUN + "--t ${T}", "t", "$T", "is set by read T"),
        (RUN + "--t ${T%x}", "t", "${T%x}", "is not followed"),
    ],
)
def test_what_is_open_is_named_with_its_condition(text: str, name: str, shown: str, why: str) -> None:
    word = unknown(text, name)
    assert str(word) == shown
    assert why in word.why


def test_a_branch_that_changes_nothing_leaves_nothing_open() -> None:
    text = 'if [ -d "$CKPT" ]; then echo there; LOAD=1; else LOAD=0; fi\n' + RUN + "--t 2"
    assert values(text) == {"micro-batch-size": ["1"], "t": ["2"]}
    text = 'if [ -z "$DATA" ]; then echo usage; exit 1; fi\n[ -z "$TP" ] && TP=2\n' + RUN + "--t $TP"
    assert values(text)["t"] == ["2"]


@pytest.mark.parametrize(
    "text",
    [
        'srun bash -c "torchrun t.py --micro-batch-size 1 --t $T"',
        "bash <<EOF\ntorchrun t.py --micro-batch-size 1 --t $T\nEOF",
        'bash <<< "torchrun t.py --micro-batch-size 1 --t $T"',
        'CMD="torchrun t.py --micro-batch-size 1 --t $T"\neval $CMD',
        'CMD="torchrun t.py --micro-batch-size 1 --t $T"\nnohup $CMD > log 2>&1 &',
        'run() { torchrun t.py --micro-batch-size 1 "$@"; }\nrun --t $T',
        "for N in 1 2; do T=$N; done\ntorchrun t.py --micro-batch-size 1 --t $T | tee log",
        "X=1 torchrun t.py \\\n  --micro-batch-size 1 \\\n  --t $T",
        "(cd x && torchrun t.py --micro-batch-size 1 --t $T)",
    ],
)
def test_a_run_is_found_where_it_stands(text: str) -> None:
    assert values("T=2\n" + text) == {"micro-batch-size": ["1"], "t": ["2"]}


def test_words_that_may_hold_arguments_are_noted() -> None:
    assert "not read: $EXTRA, which is not set in the script" in read(RUN + "--t 1 $EXTRA").notes
    assert "not read: $@, which is an argument of the script itself" in read(RUN + '--t 1 "$@"').notes
    assert "not read: conf.sh, which the script takes in" in read("source conf.sh\n" + RUN).notes


@pytest.mark.parametrize(
    ("text", "world"),
    [
        ("torchrun --nnodes 2 --nproc-per-node 8 t.py --micro-batch-size 1", 16),
        ("torchrun --nproc_per_node=8 t.py --micro-batch-size 1", 8),
        ("N=4\npython -m torch.distributed.run --nnodes=$N --nproc_per_node=8 t.py --micro-batch-size 1", 32),
        ("#SBATCH --nodes=48\n#SBATCH --gres=gpu:8\nsrun python t.py --micro-batch-size 1", 384),
        ("#SBATCH -N 2 --ntasks-per-node=4\nsrun python t.py --micro-batch-size 1", 8),
        ("#SBATCH --nodes=2 --gpus-per-node=a100:4 # all\nsrun bash -c 'python t.py --micro-batch-size 1'", 8),
        (
            "#SBATCH -N3\n#SBATCH --gres=gpu:h100:8\ntorchrun --nnodes $SLURM_NNODES --nproc-per-node 8 t.py " + BATCH,
            24,
        ),
        ("#SBATCH --nodes=2\ntorchrun --nproc-per-node 8 t.py --micro-batch-size 1", 16),
        ("mpirun -np 12 python t.py --micro-batch-size 1", 12),
        ("torchrun t.py --micro-batch-size 1", None),
        ("torchrun --nnodes $N --nproc-per-node 8 t.py --micro-batch-size 1", None),
        ("torchrun --nnodes 1:4 --nproc-per-node 8 t.py --micro-batch-size 1", None),
    ],
)
def test_the_number_of_ranks(text: str, world: int | None) -> None:
    assert read(text).world == world


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        (RUN + "--t 1\n" + RUN + "--t 2", r"starts several runs \(torchrun t\.py and torchrun t\.py\)"),
        ("echo 'open\n", r"line \d+ is no shell"),
        ("echo hello", "has no argument --name value"),
        ("f() { f; }\nf\n" + RUN, "calls itself"),
        ("\n".join(f'[ $X{k} = 1 ] && Y="$Y {k}"' for k in range(9)) + "\n" + RUN + "$Y", "too many conditions"),
    ],
)
def test_what_cannot_be_followed_is_refused_in_one_line(text: str, refused: str) -> None:
    with pytest.raises(InputError, match=refused):
        read(text)


def test_lists_of_arguments_and_variables_alone_are_read() -> None:
    bare = read("# a list\n--micro-batch-size 1\n--layout Et|tL\n--t $T\n")
    assert list(map(str, bare.arguments["layout"])) == ["Et|tL"]
    assert isinstance(bare.arguments["t"][0], Unknown)
    held = read('MODEL="--micro-batch-size 2"\nPLAN="$MODEL --t 1"\n')
    assert list(map(str, held.arguments["micro-batch-size"])) == ["2"]
    assert any("MODEL, PLAN" in note for note in held.notes)
