"""The values of expressions in a shell script, by the variables that the script sets; nothing is run.

A text may contain unknown values, such as the output of a command: each is one character of a private range, whose
meaning `Unknowns` has. Texts are expanded from the nodes of tree-sitter-bash.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Node = Any  # tree_sitter.Node
Value = str | tuple[str, ...]
_FIRST, _OPEN, _END = 0xF0000, 0x100000, 0x10FFFE  # planes 15 and 16 are for private use
_BLANKS = re.compile(r"^(?:\s|\\\n)+")
_COUNTED = re.compile(r"[\s\d+*/%()<>=!&|^~-]*\Z")
_OPERATORS = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}
_ARITHMETIC: Mapping[type, Any] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: int(a / b),
    ast.FloorDiv: lambda a, b: int(a / b),
    ast.Mod: lambda a, b: a - b * int(a / b),
    ast.Eq: lambda a, b: int(a == b),
    ast.NotEq: lambda a, b: int(a != b),
    ast.Lt: lambda a, b: int(a < b),
    ast.LtE: lambda a, b: int(a <= b),
    ast.Gt: lambda a, b: int(a > b),
    ast.GtE: lambda a, b: int(a >= b),
}


@dataclass(frozen=True)
class Unknown:
    """A value that a script does not state: its `text` there, and `why` it is unknown.

    An `undecided` value is one of several, depending on a condition.
    """

    text: str
    why: str
    undecided: bool = False

    def __str__(self) -> str:
        return self.text


@dataclass
class Unknowns:
    """The unknown values that the characters of the private range stand for.

    A character of the second half is a whole word without quotes, which may expand to several arguments, or to none.
    """

    of: list[Unknown] = field(default_factory=list)

    def mark(self, text: str, why: str) -> str:
        """The character that stands for a value."""
        unknown = Unknown(text, why)
        if unknown not in self.of:
            self.of.append(unknown)
        return chr(_FIRST + self.of.index(unknown))

    def first(self, text: str) -> Unknown | None:
        """The first unknown value in a text."""
        codes = (ord(character) for character in text)
        return next((self.of[(code - _FIRST) % (_OPEN - _FIRST)] for code in codes if code >= _FIRST), None)

    def source_text(self, text: str) -> str:
        """A text as it stands in the script."""
        return "".join(c if ord(c) < _FIRST else self.of[(ord(c) - _FIRST) % (_OPEN - _FIRST)].text for c in text)

    def word(self, text: str) -> str | Unknown:
        """A word of a command, as text, or as an `Unknown` if it contains one."""
        unknown = self.first(text)
        return text if unknown is None else Unknown(self.source_text(text), unknown.why)


def is_open(word: str) -> bool:
    """Whether a word may expand to several arguments, or to none."""
    return len(word) == 1 and ord(word) >= _OPEN


class Scope:
    """The variables that a script has set, by name: texts, or arrays of texts.

    `1`, `2`, ... and `@` are the arguments of a function; outside of functions they are unknown.
    """

    def __init__(self, unknowns: Unknowns, variables: Mapping[str, Value]) -> None:
        self.unknowns = unknowns
        self.variables = dict(variables)

    # ------------------------------------------------------------------------- words

    def words(self, node: Node) -> list[str]:
        """The words to which a node expands in a command; text without quotes is split as the shell does."""
        if node.type == "expansion" or node.type == "simple_expansion":
            texts = self._expansion(node)
            pieces = [word for text in ([texts] if isinstance(texts, str) else texts) for word in text.split()]
            return [chr(ord(w) - _FIRST + _OPEN) if len(w) == 1 and _FIRST <= ord(w) < _OPEN else w for w in pieces]
        if node.type == "command_substitution":
            return [chr(ord(self.text(node)) - _FIRST + _OPEN)]
        if node.type == "string" and (value := self._lone_array(node)) is not None:
            return list(value)
        if node.type == "concatenation":
            return self._join(node)
        return [self.text(node)]

    def _join(self, node: Node) -> list[str]:
        """The words of adjacent parts: values without quotes are split, and their ends join their neighbours."""
        result = [""]
        for child in node.children:
            whole = child.type in ("expansion", "simple_expansion")
            value = self._expansion(child) if whole else self.text(child)
            text = value if isinstance(value, str) else " ".join(value)
            parts = re.split(r"\s+", text) if whole else [text]
            result[-1] += parts[0]
            result += parts[1:]
        return [word for word in result if word]

    def _lone_array(self, node: Node) -> tuple[str, ...] | None:
        """The elements of an array that is all of a string, each a word; None for other strings."""
        inner = [child for child in node.children if child.type != '"']
        if len(inner) != 1 or inner[0].type not in ("expansion", "simple_expansion"):
            return None
        value = self._expansion(inner[0])
        if isinstance(value, str) and inner[0].text in (b"$@", b"${@}"):
            return (chr(ord(value) - _FIRST + _OPEN),)
        return value if isinstance(value, tuple) and b"*" not in inner[0].text else None

    # ------------------------------------------------------------------------- texts

    def text(self, node: Node) -> str:
        """The text of a node, without splitting."""
        kind, source = node.type, node.text.decode()
        if kind == "raw_string":
            return str(source[1:-1])
        if kind == "ansi_c_string":
            return str(source[2:-1].replace("\\n", "\n").replace("\\t", "\t"))
        if kind in ("string", "translated_string"):
            return self._string(node)
        if kind == "concatenation":
            return "".join(self.text(child) for child in node.children)
        if kind in ("expansion", "simple_expansion"):
            value = self._expansion(node)
            return value if isinstance(value, str) else " ".join(value)
        if kind == "arithmetic_expansion":
            number = self.number(source.removeprefix("$((").removesuffix("))").removeprefix("$[").removesuffix("]"))
            return str(number) if number is not None else self.unknowns.mark(source, "is not a known number")
        if kind in ("command_substitution", "process_substitution"):
            return self.unknowns.mark(source, "is the output of a command, which is not run")
        return re.sub(r"\\(.)", r"\1", source, flags=re.DOTALL)

    def _string(self, node: Node) -> str:
        """The text between double quotes, with the spaces between its parts."""
        result, at, source = "", node.start_byte + 1, bytes(node.text)
        for child in node.children:
            if child.type == '"':
                continue
            result += source[at - node.start_byte : child.start_byte - node.start_byte].decode()
            if child.type == "string_content":
                result += re.sub(r'\\(["\\$`\n])', lambda m: "" if m[1] == "\n" else m[1], child.text.decode())
            else:
                blanks = _BLANKS.match(child.text.decode())
                result += ("" if blanks is None else blanks[0].replace("\\\n", "")) + self.text(child)
            at = child.end_byte
        return result + source[at - node.start_byte : len(source) - 1].decode()

    def _expansion(self, node: Node) -> Value:
        """The value of `$X` or `${...}`."""
        source: str = _BLANKS.sub("", node.text.decode())  # tree-sitter may count blanks before it
        inner = source[2:-1] if source.startswith("${") else source[1:]
        match = re.match(r"(#?)(\w+|[@*#?$!-])(\[[^\]]*\])?(.*)\Z", inner, re.DOTALL)
        if match is None:
            return self.unknowns.mark(source, "is not followed")
        count, name, index, rest = match.groups()
        value = self._element(name, index)
        if rest:
            return self._modify(node, source, name, value, rest)
        if value is None:
            return self._unset(source, name)
        if count:
            return str(len(value))
        return value

    def _element(self, name: str, index: str | None) -> Value | None:
        """The value of a variable, or of its element at `index`; an array without an index is its first element."""
        value = self.variables.get("@" if name == "*" else name)
        if not isinstance(value, tuple) or name in "@*":
            return value
        if index in ("[@]", "[*]"):
            return value
        number = self.number(index[1:-1]) if index else 0
        return value[number] if number is not None and number < len(value) else ""

    def _modify(self, node: Node, source: str, name: str, value: Value | None, rest: str) -> Value:
        """The value of `${X:-word}` and the like. A variable that the script does not set counts as unset."""
        operator = next((o for o in (":-", ":=", ":+", ":?", "-", "=", "+", "?") if rest.startswith(o)), None)
        first = self.unknowns.first(value if isinstance(value, str) else " ".join(value or ()))
        if operator is None or first is not None:
            return self.unknowns.mark(source, "is not followed" if first is None else f"has {first}, which {first.why}")
        absent = value is None or (not value and operator.startswith(":"))
        after = [child for child in node.children if child.type == operator]
        words = node.children[node.children.index(after[0]) + 1 : -1] if after else []
        other = "".join(self.text(child) for child in words)
        if operator.endswith("+"):
            return "" if absent else other
        if not absent:
            return value or ""
        if operator.endswith("?"):
            return self._unset(source, name)
        if operator.endswith("="):
            self.variables[name] = other
        return other

    def _unset(self, source: str, name: str) -> str:
        if name.isdecimal() or name in "@*#":
            return self.unknowns.mark(source, "is an argument of the script itself")
        if name.startswith("SLURM_"):
            return self.unknowns.mark(source, "is set by Slurm")
        return self.unknowns.mark(source, "is not set in the script" if name.isidentifier() else "is not known")

    # ------------------------------------------------------------------------- numbers and conditions

    def number(self, source: str) -> int | None:
        """The value of an arithmetic expression, if it is known."""
        text = re.sub(r"\$\{(\w+)\}|\$?([A-Za-z_]\w*)", lambda m: str(self.variables.get(m[1] or m[2], "?")), source)
        if not _COUNTED.match(text) or len(text) > 200:
            return None
        try:
            return _number(ast.parse(text.strip(), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, OverflowError):
            return None

    def test(self, node: Node) -> int:
        """Whether `[ ... ]`, `[[ ... ]]` or `(( ... ))` holds, as a verdict."""
        if node.type == "compound_statement":
            number = self.number(node.text.decode().removeprefix("((").removesuffix("))"))
            return MAYBE if number is None else YES if number else NO
        tokens = list(_tokens(node))
        try:
            verdict = self._either(tokens)
        except IndexError:
            return MAYBE
        return MAYBE if tokens else verdict

    def _either(self, tokens: list[Node | str]) -> int:
        return self._joint(tokens, ("||", "-o"), max, lambda left: self._joint(left, ("&&", "-a"), min, self._single))

    def _joint(
        self,
        tokens: list[Node | str],
        operators: tuple[str, str],
        pick: Callable[[int, int], int],
        part: Callable[[list[Node | str]], int],
    ) -> int:
        """The verdict of parts that operators join; they are removed from `tokens`."""
        verdict = part(tokens)
        while tokens and tokens[0] in operators:
            tokens.pop(0)
            verdict = pick(verdict, part(tokens))
        return verdict

    def _single(self, tokens: list[Node | str]) -> int:
        first = tokens.pop(0)
        if first == "!":
            return YES - self._single(tokens)
        if first == "(":
            verdict = self._either(tokens)
            tokens.pop(0)
            return verdict
        if isinstance(first, str):
            operand = tokens.pop(0)
            return self._empty(operand, first) if first in ("-z", "-n") and not isinstance(operand, str) else MAYBE
        if tokens and isinstance(tokens[0], str) and tokens[0] not in ("&&", "||", "-a", "-o", ")"):
            operator, right = tokens.pop(0), tokens.pop(0)
            return MAYBE if isinstance(right, str) else self._compare(first, str(operator), right)
        return self._empty(first, "-n")

    def _empty(self, node: Node, operator: str) -> int:
        """Whether a text is empty. A variable that the script does not set likely is."""
        text = self.text(node)
        unknown = self.unknowns.first(text)
        if unknown is not None:
            lone = len(text) == 1 and unknown.why == "is not set in the script"
            verdict = LIKELY if lone else MAYBE
        else:
            verdict = NO if text else YES
        return verdict if operator == "-z" else YES - verdict

    def _compare(self, left: Node, operator: str, right: Node) -> int:
        a, b = self.text(left), self.text(right)
        if self.unknowns.first(a + b) is not None:
            return MAYBE
        if operator in ("=", "==", "!="):
            pattern = right.type in ("word", "extglob_pattern", "regex", "concatenation")
            equal = matches(a, b) if pattern else a == b
            return YES if equal == (operator != "!=") else NO
        numbers = self.number(a or "0"), self.number(b or "0")
        if operator in _OPERATORS and None not in numbers:
            return YES if self.number(f"({a or 0}) {_OPERATORS[operator]} ({b or 0})") else NO
        return MAYBE


NO, UNLIKELY, MAYBE, LIKELY, YES = range(5)
"""Verdicts of conditions: both branches are followed if the answer is not known, the likely one first."""


def matches(text: str, pattern: str) -> bool:
    """Whether a text matches a pattern of the shell."""
    parts = (".*" if c == "*" else "." if c == "?" else c if c in "[]" else re.escape(c) for c in pattern)
    try:
        return re.fullmatch("".join(parts), text, re.DOTALL) is not None
    except re.error:
        return text == pattern


def _tokens(node: Node) -> Iterator[Node | str]:
    """The operands and operators of a test in order, without its nesting, so that -a and -o bind equally."""
    for child in node.children:
        if child.type in ("binary_expression", "unary_expression", "negation_expression", "parenthesized_expression"):
            yield from _tokens(child)
        elif child.type == "test_operator" or (not child.is_named and child.type not in ("[", "]", "[[", "]]")):
            yield child.text.decode()
        elif child.is_named:
            yield child


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return int(_ARITHMETIC[type(node.op)](_number(node.left), _number(node.right)))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _ARITHMETIC:
        return int(_ARITHMETIC[type(node.ops[0])](_number(node.left), _number(node.comparators[0])))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    raise ValueError("not a whole number")
