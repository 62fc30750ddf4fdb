"""Errors in a process's log: where each begins, what it says, and the frame that raised it."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

KEPT_LINES = 200  # of a log that are looked at
_MESSAGE_LINES = 12  # of an exception's text
_FRAME_BEFORE = 6  # lines above a bare error in which its frame may stand

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_RANK = re.compile(
    r"^\s*\[(?:rank|default)?\d+\]:\s?"
)  # how torch marks an uncaught exception, and tee'd output
_HEADER = re.compile(r"Traceback \(most recent call last\):")
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line \d+(?:, in (?P<function>\S+))?')
_NATIVE_FRAME = re.compile(r"^(?:frame )?#\d+:? (?P<function>[\w:~<>]+)")
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?::|$)")
_INSTALLED = re.compile(r"[/\\](site-packages|dist-packages|lib[/\\]python3[.\d]*)[/\\]|<frozen ")
_CHAINED = re.compile(r"^(?:During handling of the above|The above exception was)")


@dataclass(frozen=True, slots=True)
class LoggedError:
    """One error of a log."""

    text: str  # the exception's own text, or the line; never the frames
    line: str  # its first line
    frame: str = ""  # "file:function" of the innermost frame, "" where none is shown
    traceback: bool = False
    frames: tuple[str, ...] = ()  # all of a traceback's, the innermost last
    own: str = ""  # the innermost frame outside of installed packages


def tail(text: str, lines: int = KEPT_LINES) -> list[str]:
    """Return the last ``lines`` lines, without colors and without the rank that torch puts before them."""
    found = text.replace("\r", "\n").splitlines()[-lines:]
    return [_RANK.sub("", _ANSI.sub("", line)).rstrip() for line in found]


def errors(lines: Sequence[str]) -> Iterator[LoggedError]:
    """Yield every traceback and every line outside of them, in order; which of these are errors the rules tell."""
    at = 0
    while at < len(lines):
        if _HEADER.search(lines[at]):
            found, at = _traceback(lines, at + 1)
            if found is not None:
                yield found
        else:
            end = _native_end(lines, at)
            if lines[at]:
                yield LoggedError("\n".join(lines[at:end]), lines[at], _frame_above(lines, at))
            at = end


def _traceback(lines: Sequence[str], at: int) -> tuple[LoggedError | None, int]:
    """Read on after a header; return the error, ``None`` where the log ends within it, and where to continue."""
    frames: list[str] = []
    own = ""
    while at < len(lines) and (not lines[at] or lines[at][0].isspace()):
        if found := _frame(lines[at]):
            frames.append(found)
            own = own if _INSTALLED.search(lines[at]) else found
        at += 1
    if at == len(lines) or not _EXCEPTION.match(lines[at]):
        return None, at
    first, message = lines[at], [lines[at]]
    at += 1
    while at < len(lines) and len(message) < _MESSAGE_LINES and lines[at]:
        if _HEADER.search(lines[at]) or _CHAINED.match(lines[at]):
            break
        message.append(lines[at])
        at += 1
    top = frames[-1] if frames else ""
    return LoggedError("\n".join(message), first, top, traceback=True, frames=tuple(frames), own=own), at


def _native_end(lines: Sequence[str], at: int) -> int:
    """Return where a line ends: with what a C++ exception says, for one that was not caught."""
    end = at + 1
    if lines[at].startswith("terminate called after throwing"):
        while end < min(len(lines), at + _MESSAGE_LINES) and lines[end][:1].isspace():
            end += 1
    return end


def _frame(line: str) -> str:
    found = _FRAME.match(line)
    if found is None:
        return ""
    name = found["file"].replace("\\", "/").rpartition("/")[2]
    return f"{name}:{found['function'] or ''}"


def _frame_above(lines: Sequence[str], at: int) -> str:
    """Return the frame of an error without a traceback: a syntax error's is above it, a native one's below."""
    for above in reversed(lines[max(at - _FRAME_BEFORE, 0) : at]):
        if found := _frame(above):
            return found
    for below in lines[at + 1 : at + 1 + _FRAME_BEFORE]:
        if (found_below := _FRAME.match(below)) or (native := _NATIVE_FRAME.match(below)):
            return _frame(below) if found_below else native["function"]  # type: ignore[index]
    return ""


_VARIABLE = (
    (re.compile(r"0x[0-9a-fA-F]+"), "#"),
    (re.compile(r"(?:[A-Za-z]:)?(?:[\w.~-]*/)+[\w.~-]+"), "/"),
    (re.compile(r"\[[\d, ]+\]"), "[#]"),
    (re.compile(r"\d+(?:\.\d+)?"), "#"),
    (re.compile(r"\s+"), " "),
)


def normalized(text: str) -> str:
    """Return ``text`` without what differs from run to run: addresses, paths, shapes, numbers.

    >>> normalized("can't open /tmp/a1/x.bin at 0x7f2e after 12.5 s")
    "can't open / at # after # s"
    """
    for pattern, instead in _VARIABLE:
        text = pattern.sub(instead, text)
    return text.strip()
