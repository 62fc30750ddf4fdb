"""What is bad of a value or of a file, whatever command reads it."""

import os
import random
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

Place = Callable[[Path], None]
"""Makes a bad file at a path."""

NOT_NUMBERS = ("nan", "inf", "-inf", "1e309", "", " ", "abc", "0x10", "1,5", "NaN", "1e400", "--")
HUGE = "1" + "0" * 40
DOUBTFUL = ("-1", "0", "1_0", "١٢", "+1", "-0.0", "1e-320", "1e300")
NOT_WHOLE = ("1.5", HUGE, f"-{HUGE}", "1e3")
CONTROL = ("a\x00b", "a\x1b[31mb", "a\nb", "\udcff", "a\x7fb")
LONG = "x" * 5000
NAMES = ("a b/../c", "../up", ".", "..", "/etc", "a/b", "-x", "\N{PILE OF POO}", " ", "a" * 300, "a;b", "*")

_META: dict[str, tuple[str, ...]] = {
    "SECONDS": (),
    "LIST": (
        "cores=1e309",
        "cores=nan",
        "cores=-1",
        "memory=1e309GiB",
        "memory=infGiB",
        "hazard=inf",
        "nodes=1e30",
        "x=1",
    ),
    "NODES": (
        "local:0x1",
        "local:99999x1",
        "local:1x-1",
        "local:nanx1",
        "here",
        "aws:",
        "local:١x1",
        "local:1e3x1",
    ),
    "FAULT": (
        "20s",
        "nan:kill:x",
        "1e309s:kill:gpu",
        "-1s:kill:gpu",
        "20s:burn:gpu",
        "20s:notice:gpu:infs",
        "s:kill:gpu",
        "3s:resize:0",
        "3s:resize:99999999999999999999",
        "3s:add:99999999999999999999",
    ),
    "NAME=VALUE": ("x", "=1", " =1"),
    "MODULE:NAME": ("x", ":", "os:", ":system", "a b:c", "os.path"),
    "RATE[,REPAIR]": ("nan", "inf", "-1", "1e309", "1,2,3", "a", "0.1,-1", "0.1,inf"),
    "SHARE[,FACTOR]": ("nan", "2", "-1", "1e309", "a", "0.1,-1", "0.1,inf"),
    "WHEN": ("nand", "infd", "-1d", "1e309d", "yesterday", "2026-99-99", "٣d"),
    "MOMENT": ("nan", "25:00", "-1h", "yesterday", "2026-99-99", "99999999999999999999d"),
    "SIZE|FILE": ("0x1", "1x0", "nanx4", "here.yaml", "x", "999999999x1", "-1x2"),
    "FILE|NAME,...": ("", ",", "philly:nan", "philly:-1", "nothing.csv", "pollux-9"),
    "NAME,...": (",", "no-such-policy"),
    "URL": ("mysql://x/y", "postgresql://", "sqlite://", "://", "ftp://x"),
    "WHERE": ("moon", "aws:nothing.json", "spark://", "local:a b", "spark://x:nan"),
    "PORT": ("-1", "65536", "nan", "0x50"),
}
"""What is bad of texts with a shape of their own, by metavar."""


def values_of(parameter: Any, kind: object) -> Iterator[tuple[str, str, bool]]:
    """Yield bad values for a parameter: the value, what it is, and whether it is bad whatever the parameter means."""
    if kind in (int, float):
        for text in NOT_NUMBERS:
            yield text, "not a number", True
        for text in NOT_WHOLE if kind is int else ():
            yield text, "not a whole number", True
        for text in DOUBTFUL:
            yield text, "a doubtful number", False
        return
    if isinstance(kind, type) and issubclass(kind, Enum):
        for text in ("", "no-such-word", "1e309", *CONTROL[:2]):
            yield text, "no such word", True
        return
    for text in CONTROL:
        yield text, "a control character", True
    for text in ("", "  "):
        yield text, "an empty text", True
    yield LONG, "a long text", parameter.metavar not in ("SQL|FILE", "ARGS")
    for text in _META.get(parameter.metavar or "", ()):
        yield text, "a text of another shape", False
    if parameter.metavar in (None, "NAME", "ID", "NODE", "POOL", "APP"):
        for text in NAMES:
            yield text, "a strange name", False


# --- files --------------------------------------------------------------------------------------------------


def _writes(content: bytes) -> Place:
    return lambda path: path.write_bytes(content)  # type: ignore[return-value]


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**31)  # sparse


def _bomb() -> bytes:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    return "\n".join(lines).encode()


RANDOM = random.Random(5).randbytes(3000)
BROKEN: dict[str, Place] = {
    "missing": lambda path: None,
    "a directory": lambda path: path.mkdir(),
    "a named pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a loop of links": _loop,
    "random bytes": _writes(RANDOM),
    "0xff": _writes(b"\xff\xff\xff"),
    "too large": _large,
    "a NUL": _writes(b"\0"),
}
"""Files that are bad whatever they are for."""
ODD: dict[str, Place] = {
    "empty": _writes(b""),
    "deep lists": _writes(b"[" * 100_000),
    "deep tables": _writes(b'{"a":' * 100_000),
    "deep TOML": _writes(b"a = " + b"[" * 50_000),
    "many aliases": _writes(_bomb()),
    "an alias of itself": _writes(b"a: &a [*a]\n"),
    "a key twice": _writes(b"a: 1\na: 2\n"),
    "a JSON key twice": _writes(b'{"a": 1, "a": 2}'),
    "NaN": _writes(b'{"a": NaN}'),
    "a huge number": _writes(b'{"a": 1e999, "b": ' + b"9" * 5000 + b"}"),
    "a list": _writes(b"[1, 2]\n"),
    "a text": _writes(b"hello\n"),
    "a tag": _writes(b"a: !!python/object/apply:os.system [id]\n"),
    "TOML of nan": _writes(b"[quotas]\ndollars_per_hour = nan\n"),
}
"""Files that are bad for nearly everything."""

Mutate = Callable[[random.Random, bytes], bytes]


def _half(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def _flip(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def _without_line(rng: random.Random, data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    del lines[rng.randrange(len(lines))]
    return b"".join(lines)


def _line_twice(rng: random.Random, data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    return b"".join([*lines[: at + 1], lines[at], *lines[at + 1 :]])


def _swap(rng: random.Random, data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[one], lines[other] = lines[other], lines[one]
    return b"".join(lines)


def _other_value(rng: random.Random, data: bytes) -> bytes:
    """Put something else in place of a word or number."""
    import re

    found = list(re.finditer(rb"[A-Za-z0-9_.]+", data))
    if not found:
        return data + b"?"
    word = rng.choice(found)
    new = rng.choice(
        [b"-1", b"nan", b"1e309", b"[]", b"{}", b"null", b'""', b"true", b"\xff", b"9" * 400, b"'"]
    )
    return data[: word.start()] + new + data[word.end() :]


MUTATIONS: dict[str, Mutate] = {
    "cut": _half,
    "a flipped bit": _flip,
    "a line less": _without_line,
    "a line twice": _line_twice,
    "lines swapped": _swap,
    "another value": _other_value,
}
