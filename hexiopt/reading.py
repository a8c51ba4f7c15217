"""Users' files and mappings, read as data: bounded in size, without tags, anchors, duplicates or NaN.

Every refusal is an `InputError` that names file and key.
"""

import dataclasses
import difflib
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import yaml

from hexiopt.checks import flag_in, is_number, is_whole, list_in, word_in
from hexiopt.checks import number_in as number_in  # public here too
from hexiopt.checks import whole_in as whole_in
from hexiopt.errors import MISSING, FieldError, InputError, did_you_mean, quoted
from hexiopt.ledger import Ledger
from hexiopt.units import GB, MICROSECOND

MAX_FILE_BYTES = 2**20
MAX_DEPTH = 64
_MOST_NULLS = 12  # that one line names
_REQUIRED: Any = object()
_MOST_SCALED = 1e200  # larger numbers are out of any range in any unit
Keys = Mapping[str, tuple[str, ...]]  # of fields, the keys that state them
NO_KEYS: Keys = MappingProxyType({})
# How a key of a file ends whose field is in SI units, how the field ends, and the file's unit.
_UNITS = (("_gb_per_s", "_bytes_per_s", GB), ("_us", "_s", MICROSECOND))


class _PlainLoader(yaml.SafeLoader):
    """Plain YAML data: no tags, no anchors, no duplicate keys, and `1e9` is a number as in YAML 1.2."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            self._refuse(event, "anchors and aliases are not read; write the values out")
        if getattr(event, "tag", None) is not None:
            self._refuse(event, f"the tag {event.tag!r} is not read; files are plain data, remove it")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self._refuse(event, f"nested deeper than {MAX_DEPTH} levels; flatten the file")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} appears twice; keep one", problem_mark=key.start_mark
                )
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
        return super().construct_mapping(node, deep)

    def _refuse(self, event: Any, problem: str) -> NoReturn:
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


_PlainLoader.yaml_implicit_resolvers = {
    first: [
        (tag, regexp)
        for tag, regexp in resolvers
        if tag not in ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# Without numbers to the base of 60, as YAML 1.2.
_PlainLoader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"^[-+]?(?:0b[0-1_]+|0[0-7_]+|0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$"),
    list("-+0123456789"),
)
_PlainLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
        r"|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))$|^\.(?:nan|NaN|NAN)$"
    ),
    list("-+0123456789."),
)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise ValueError(f"the key {key!r} appears twice; keep one")
        out[key] = value
    return out


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number of JSON; write a finite value")


def parse(text: str, where: str, *, as_json: bool, non_finite: bool = False) -> Any:
    """The plain data in `text`; with `non_finite` also the numbers that Python writes as NaN and Infinity.

    Raises InputError naming `where` for whatever is not plain data.
    """
    try:
        if as_json:
            return json.loads(text, object_pairs_hook=_unique, parse_constant=float if non_finite else _no_constant)
        return yaml.load(text, Loader=_PlainLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise InputError(f"{where}{line}: {error.problem or error.context or 'malformed YAML'}") from None
    except RecursionError:
        raise InputError(f"{where}: nested too deeply; flatten the file") from None
    except (yaml.YAMLError, ValueError) as error:
        kind = "JSON" if as_json else "YAML"
        raise InputError(f"{where}: malformed {kind}: {str(error).splitlines()[0]}; correct the file") from None


def sha256_of(data: Any) -> str:
    """SHA-256 of plain data as UTF-8 JSON with sorted keys and no spaces."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def read_text(path: Path, *, max_bytes: int = MAX_FILE_BYTES) -> str:
    """The UTF-8 text of a regular file of at most `max_bytes` bytes. Raises InputError otherwise."""
    try:
        if not path.is_file():
            reason = "is not a regular file" if path.exists() else "does not exist"
            raise InputError(f"{path}: the file {reason}; check the path")
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{str(path)!r}: cannot be read ({error}); check path and permissions") from None
    if len(raw) > max_bytes:
        raise InputError(f"{path}: larger than {max_bytes / 2**20:g} MiB, the most that is read; shorten it")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path}: not UTF-8 text; save it as UTF-8") from None


def read_mapping(path: str | Path, *, max_bytes: int = MAX_FILE_BYTES, non_finite: bool = False) -> dict[str, Any]:
    """The mapping in a `.json`, `.yaml` or `.yml` file; `non_finite` as in `parse`. Raises InputError otherwise."""
    path = Path(path)
    text = read_text(path, max_bytes=max_bytes)
    return as_mapping(parse(text, str(path), as_json=path.suffix == ".json", non_finite=non_finite), str(path))


def as_mapping(data: Any, where: str) -> dict[str, Any]:
    """`data` as a mapping with text keys. Raises InputError naming `where` otherwise."""
    if not isinstance(data, Mapping):
        raise InputError(f"{where}: {quoted(data)} is not a mapping of keys to values; write {{key: value}}")
    for key in data:
        if not isinstance(key, str):
            raise InputError(f"{where}: the key {quoted(key)} is not text; quote it")
    return dict(data)


def nulls(value: Any, where: str = "") -> Iterator[str]:
    """The path of each null in plain data from `where` on, such as `.a[0].b`."""
    if value is None:
        yield where
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from nulls(inner, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from nulls(inner, f"{where}[{i}]")


class Section:
    """One mapping of a user's input, taken key by key; `finish()` refuses what was not taken.

    `where` names the mapping in errors, such as `my.yaml: machines[0]`.
    """

    def __init__(self, data: Any, where: str) -> None:
        self.where = where
        self._data = data if isinstance(data, Ledger) else as_mapping(data, where)  # a ledger remembers what is read
        self._read_keys: set[str] = set()
        self._possible_keys: set[str] = set()  # keys that the mapping may have: what has been taken, or looked for

    def __contains__(self, key: str) -> bool:
        self._possible_keys.add(key)
        return key in self._data

    def at(self, key: str | int) -> str:
        """The name of `key` in errors."""
        if isinstance(key, int):
            return f"{self.where}[{key}]"
        return f"{self.where}{'.' if ': ' in self.where else ': '}{key}"

    def keys(self) -> list[str]:
        """All keys, in the order of the file."""
        return list(self._data)

    def values(self) -> dict[str, Any]:
        """All keys with their raw values; all count as read."""
        self._read_keys.update(self._data)
        return dict(self._data)

    @contextmanager
    def building(self, keys: Keys = NO_KEYS, name: Callable[[int], str] = str) -> Iterator[None]:
        """Put errors of the block, which constructs an object from the values, into the file's words: see `refusal`."""
        try:
            yield
        except FieldError as error:
            raise self.refusal(error, keys, name) from None
        except InputError as error:
            raise InputError(f"{self.where}: {error}") from None

    def refusal(self, error: FieldError, keys: Keys = NO_KEYS, name: Callable[[int], str] = str) -> InputError:
        """`error` in the file's words: the key that states the field, the value as the file has it, bounds in its unit.

        `keys` has the keys of fields that the file calls by other names, for list items as `links[*].source`; the first
        key that the file has counts. Other keys differ from the field by their unit at most. `name` names devices.
        """
        index = next(iter(re.findall(r"\[[0-9]+\]", error.field)), "[*]")
        field = error.field.replace(index, "[*]")
        ending, of_field, unit = next((row for row in _UNITS if field.endswith(row[1])), ("", "", 1.0))
        by_unit = field.removesuffix(of_field) + ending
        paths = [path.replace("[*]", index) for path in keys.get(field, (by_unit, field))]
        path = next((path for path in paths if self._at_path(path) is not MISSING), paths[0])
        raw = self._at_path(path)
        value = list(error.value) if isinstance(error.value, tuple) else error.value
        value = value if path == error.field or raw is MISSING else raw
        unit = unit if path.endswith(ending) else 1.0
        return InputError(error.line(self.at(path), value, unit if error.form == 1.0 else name))

    def _at_path(self, path: str) -> Any:
        """The raw value under a path such as `links[0].to`; MISSING where there is none."""
        value: Any = self._data
        for step in re.findall(r"[^.\[\]]+", path):
            try:
                value = value[int(step) if isinstance(value, list | tuple) else step]
            except (KeyError, IndexError, TypeError, ValueError):
                return MISSING
        return value

    def fail(self, key: str, rule: str) -> NoReturn:
        """Refuse the value of `key` for breaking `rule` (which ends in the remedy)."""
        raise InputError(f"{self.at(key)}: {quoted(self._data.get(key))} {rule}")

    def raw(self, key: str, default: Any = _REQUIRED) -> Any:
        """The raw value of `key`. Raises InputError for a missing key without a default, and for null."""
        self._read_keys.add(key)
        self._possible_keys.add(key)
        if key not in self._data:
            if default is _REQUIRED:
                self.refuse_missing(key)
            return default
        value = self._data[key]
        if value is None and default is not None:
            self._refuse_unknown(self.at(key), "")
        return value

    def refuse_missing(self, key: str, remedy: str = "state it") -> NoReturn:
        """Refuse the lack of `key`, or a key that seems to be a misspelling of it. Raises InputError."""
        for name in self._data:
            if name not in self._read_keys and _misspelt(name, key):
                raise InputError(f"{self.at(name)}: unknown key; did you mean {key}?")
        raise InputError(f"{self.at(key)}: is missing; {remedy}")

    def refuse_null(self, whose: str) -> None:
        """Refuse the first null in this mapping, at any depth; `whose` value it is. Raises InputError."""
        for key, value in self._data.items():
            for inner in nulls(value):
                self._refuse_unknown(self.at(key) + inner, f" for {whose}")

    def refuse_nulls(self, *keys: str) -> None:
        """Refuse all nulls under `keys` together, if there are several; a single one is left to its reader.

        Raises InputError.
        """
        paths = [f"{key}{path}" for key in keys if key in self._data for path in nulls(self._data[key])]
        if len(paths) > 1:
            times_by_path = Counter(re.sub(r"\[[0-9]+\]", "[*]", path) for path in paths)
            names = [path if number == 1 else f"{path} ({number:,} times)" for path, number in times_by_path.items()]
            rule = "values are unknown (null); state them, or measure them with 'hexiopt profile'"
            more = f" and {len(names) - _MOST_NULLS:,} more" if len(names) > _MOST_NULLS else ""
            raise InputError(f"{self.where}: {len(paths):,} {rule}: {', '.join(names[:_MOST_NULLS])}{more}")

    def _refuse_unknown(self, where: str, whose: str) -> NoReturn:
        rule = f"is unknown (null){whose}; state it, or measure it with 'hexiopt profile'"
        raise InputError(f"{where}: {rule}")

    def si(self, key: str, default: Any = _REQUIRED) -> Any:
        """The number under a key in SI units, by the unit that ends the key; `default`, in SI units, if it is absent.

        The constructor that gets the value checks it, so that other values pass unchanged. A number that is infinite in
        SI units becomes NaN, which every constructor refuses.
        """
        value = self.raw(key, default)
        if key not in self._data or not is_number(value):
            return value
        if abs(value) < _MOST_SCALED:
            return value * next(unit for ending, _, unit in _UNITS if key.endswith(ending))
        return value if is_whole(value) or math.isfinite(value) else math.nan

    def fields(self, kind: type, names: Iterable[str] | None = None) -> dict[str, Any]:
        """The raw values of the keys that are fields of the data class `kind`, or of `names` among them."""
        defaults = {field.name: field.default for field in dataclasses.fields(kind)}
        wanted = defaults if names is None else names
        return {name: value for name in wanted if (value := self.raw(name, defaults[name])) is not defaults[name]}

    def _check(self, key: str, default: Any, check: Callable[..., Any], **rule: Any) -> Any:
        value = self.raw(key, default)
        if value is default and (key not in self._data or value is None):
            return value
        return check(value, self.at(key), **rule)

    def number(
        self,
        key: str,
        *,
        above: float | None = None,
        at_least: float | None = None,
        at_most: float,
        default: Any = _REQUIRED,
    ) -> Any:
        """A finite number within the given range (float), or `default` where the key is absent."""
        return self._check(key, default, number_in, above=above, at_least=at_least, at_most=at_most)

    def integer(self, key: str, *, at_least: int, at_most: int, default: Any = _REQUIRED) -> Any:
        """A whole number within the given range (int), or `default` where the key is absent."""
        return self._check(key, default, whole_in, at_least=at_least, at_most=at_most)

    def text(self, key: str, *, choices: Iterable[str] | None = None, default: Any = _REQUIRED) -> Any:
        """Text, one of `choices` where given, or `default` where the key is absent."""
        return self._check(key, default, word_in, choices=choices)

    def flag(self, key: str, default: Any = _REQUIRED) -> Any:
        """true or false, or `default` where the key is absent."""
        return self._check(key, default, flag_in)

    def section(self, key: str, *, optional: bool = False) -> "Section":
        """The mapping under `key`; an empty one where it is absent and `optional`."""
        return Section(self.raw(key, {} if optional else _REQUIRED), self.at(key))

    def items(self, key: str, *, optional: bool = False) -> list[Any]:
        """The list under `key`; an empty one where it is absent and `optional`."""
        return list_in(self.raw(key, [] if optional else _REQUIRED), self.at(key))

    def sections(self, key: str, *, optional: bool = False) -> list["Section"]:
        """The mappings of the list under `key`."""
        items = self.items(key, optional=optional)
        return [Section(item, f"{self.at(key)}[{i}]") for i, item in enumerate(items)]

    def valid_items(self, key: str, check: Callable[[Any], bool], rule: str, *, optional: bool = False) -> list[Any]:
        """The list under `key`, every item of which passes `check`; `rule` ends the message about one that does not."""
        values = self.items(key, optional=optional)
        for i, value in enumerate(values):
            if not check(value):
                raise InputError(f"{self.at(key)}[{i}]: {quoted(value)} {rule}")
        return values

    def finish(self) -> None:
        """Refuse keys that were not read. Raises InputError that names the first and its likely meaning."""
        for key in self._data:
            if key not in self._read_keys:
                raise InputError(f"{self.at(key)}: unknown key; {did_you_mean(key, self._possible_keys)}")


def word(value: Any) -> str:
    """A value as it is written on the command line."""
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def _misspelt(word: str, key: str) -> bool:
    """Whether `word` is `key` with a wrong letter or two, or without its last words.

    The threshold lies above the likeness of any two different keys of a file (0.87, of nic_bandwidth_gb_per_s and
    intra_bandwidth_gb_per_s).
    """
    least = 0.88 if len(key) > 5 else 0.8
    shortened = len(word) > 3 and key.startswith(word)
    return shortened or difflib.SequenceMatcher(None, word, key).ratio() >= least
