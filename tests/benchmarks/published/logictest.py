"""Reads the statements of a sqllogictest file as DuckDB writes them: loops are expanded, others' parts skipped."""

import re
from collections.abc import Iterator, Mapping

_TURNS = 12  # of a loop
_HERE = frozenset({
    "allow_unsigned_extensions", "block_size", "core_functions", "exact_vector_size", "icu", "json", "longdouble",
    "no_alternative_verify", "no_extension_autoloading", "no_latest_storage", "no_vector_verification",
    "noforcestorage", "no_force_storage", "notmingw", "notwindows", "parquet", "ram", "skip_reload", "strinline",
    "vector_size", "64bit", "vacuum_rebuild_indexes",
})  # fmt: skip
_SIGNED = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT")
_UNSIGNED = ("UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT", "UHUGEINT")
_LISTS = {
    "<signed>": _SIGNED,
    "<unsigned>": _UNSIGNED,
    "<integral>": (*_SIGNED, *_UNSIGNED),
    "<numeric>": (*_SIGNED, *_UNSIGNED, "FLOAT", "DOUBLE"),
    "<alltypes>": (*_SIGNED, *_UNSIGNED, "FLOAT", "DOUBLE", "BOOLEAN", "INTERVAL", "VARCHAR"),
    "<compression>": ("none",),
}
_LOOPS = ("loop", "foreach", "concurrentloop", "concurrentforeach")


class _SkippedError(Exception):
    """Why a file is not read."""


def steps_of(text: str) -> tuple[list[tuple[str, int]], str]:
    """Return the statements of a file with their lines, and why it is skipped, if it is."""
    lines = list(enumerate(text.splitlines(), 1))
    try:
        return list(_statements(lines, {})), ""
    except _SkippedError as reason:
        return [], str(reason)


def _statements(lines: list[tuple[int, str]], values: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    at, left_out, silent = 0, False, False
    while at < len(lines):
        number, line = lines[at]
        words = line.split()
        at += 1
        if not words or line.startswith("#"):
            continue
        word = words[0]
        if word in _LOOPS:
            end = _end(lines, at)
            for one in _turns(words, values):
                if not silent:
                    yield from _statements(lines[at:end], {**values, **one})
            at = end + 1
        elif word == "mode":
            silent = words[1] == "skip" if words[1] in ("skip", "unskip") else silent
        elif word in ("skipif", "onlyif"):
            left_out |= _left_out(word, words[1], values)
        elif word in ("require", "require-env", "unzip"):
            if word != "require" or words[1].lower() not in _HERE:
                raise _SkippedError(f"{word} {words[1].lower() if word == 'require' else ''}".strip())
        elif word in ("statement", "query"):
            end = at
            while end < len(lines) and lines[end][1].strip() and lines[end][1].strip() != "----":
                end += 1
            sql = _put("\n".join(line for _, line in lines[at:end]), values).strip()
            begins = number + 1
            while end < len(lines) and lines[end][1].strip():
                end += 1
            at = end
            if not (left_out or silent) and sql and "${" not in sql:
                yield sql, begins
            left_out = False


def _end(lines: list[tuple[int, str]], at: int) -> int:
    depth = 1
    for place in range(at, len(lines)):
        word = (lines[place][1].split() or [""])[0]
        depth += (word in _LOOPS) - (word == "endloop")
        if depth == 0:
            return place
    return len(lines)


def _turns(words: list[str], values: Mapping[str, str]) -> list[dict[str, str]]:
    name = words[1]
    given = [_put(word, values) for word in words[2:]]
    if words[0].endswith("foreach"):
        items: list[str] = []
        for word in given:
            if word.startswith("!"):
                items = [one for one in items if one.lower() != word[1:].lower()]
            elif word.startswith("<") and word.endswith(">"):
                if word.lower() not in _LISTS:
                    raise _SkippedError("a list of values that is not known")
                items += _LISTS[word.lower()]
            else:
                items.append(word)
        names = name.split(",")
        return [dict(zip(names, one.split(","), strict=False)) for one in items]
    try:
        first, beyond = int(given[0]), int(given[1])
    except (IndexError, ValueError):
        raise _SkippedError("a loop without numbers") from None
    return [{name: str(turn)} for turn in range(first, min(beyond, first + _TURNS))]


def _left_out(word: str, condition: str, values: Mapping[str, str]) -> bool:
    found = re.fullmatch(r"(\w+)(=|<|>|<=|>=|<>)(.+)", condition)
    if found is None or found[1] not in values:
        return (condition == "duckdb") == (word == "skipif")
    met = values[found[1]] == found[3] if found[2] == "=" else values[found[1]] != found[3]
    return met == (word == "skipif")


def _put(text: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        text = text.replace("${" + name + "}", value).replace("{" + name + "}", value)
    return text
