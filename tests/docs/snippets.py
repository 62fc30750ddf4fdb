"""The fenced blocks of the documentation, and what can be said of them without running them."""

import ast
import contextlib
import io
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from ebbflow.planners.errors import OptionError
from tests.docs.sources import Callable_, callable_of, find, method_of, modules_of

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[a-z]*)(?P<info>[^\n]*)\n(?P<text>.*?)^(?P=indent)```\s*$", re.M | re.S
)
_TITLE = re.compile(r'title="([^"]+)"')
_MISSING = re.compile(r"there is no module (\w+)")
_OUTSIDE = (  # programs that a reader has, whose own options are not ours to check
    ". [ apt-get aws cat cd cp curl done du echo export git grep head jq kill ls mkdir mv pg_dump pg_restore pgrep "
    "psql python python3 rm sed sleep sqlite3 systemctl tail terraform test touch torchrun unset wait wc"
)
_BEFORE = ("do", "if", "then", "until", "while")  # words of the shell that another command follows


@dataclass(frozen=True)
class Snippet:
    """One fenced block."""

    page: str  # relative to the repository
    line: int  # of its first line
    language: str
    text: str
    title: str = ""  # the file that the page has the reader save it as

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """Return every page of the documentation whose snippets count."""
    made = ROOT / "docs" / "reference" / "cli.md"  # from the help of commands, which tests of their own check
    found = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page != made]
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *found]


@cache
def snippets() -> tuple[Snippet, ...]:
    """Return all fenced blocks with a language, in order."""
    found = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        for match in _FENCE.finditer(text):
            if not match["language"]:
                continue
            indent = len(match["indent"])
            lines = [line[indent:] for line in match["text"].splitlines()]
            line = text.count("\n", 0, match.start("text")) + 1
            where = page.relative_to(ROOT).as_posix()
            title = _TITLE.search(match["info"])
            content = "\n".join(lines) + "\n"
            found.append(Snippet(where, line, match["language"], content, title[1] if title else ""))
    return tuple(found)


def problems(snippet: Snippet) -> list[str]:
    """Return what is wrong with a snippet as far as can be told without running it."""
    checks = {
        "python": _python,
        "sh": _shell,
        "bash": _shell,
        "yaml": _yaml,
        "toml": _toml,
        "json": _json,
        "sql": _sql,
        "hcl": lambda text: [],  # terraform's own tests check the modules and what examples say of them
        "text": lambda text: [],
        "diff": _diff,
    }
    if snippet.language not in checks:
        return [f"nothing is known of the language {snippet.language!r}"]
    found = checks[snippet.language](snippet.text)
    page = (ROOT / snippet.page).read_text(encoding="utf-8") if (ROOT / snippet.page).is_file() else ""
    # a module that the page has the reader save
    return [one for one in found if not ((m := _MISSING.fullmatch(one)) and f"`{m[1]}.py`" in page)]


# --- Python -------------------------------------------------------------------------------------------------


def _python(text: str) -> list[str]:
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        return [f"is no Python: {error}"]
    wrong: list[str] = []
    names: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            wrong += [f"there is no module {n.name}" for n in node.names if not _there(n.name)]
        elif isinstance(node, ast.ImportFrom) and node.module:
            if not _there(node.module):
                wrong.append(f"there is no module {node.module}")
                continue
            for one in node.names:
                names[one.asname or one.name] = (node.module, one.name)
    for module, name in names.values():
        if module.startswith("ebbflow") and find(ROOT, module, name) is None:
            wrong.append(f"{module} has no {name}")
    wrong += [said for call in _calls(tree) for said in _call(call, names, _values(tree))]
    return wrong


def _there(module: str) -> bool:
    if module.partition(".")[0] == "ebbflow":
        return module in modules_of(ROOT) or any(m.startswith(module + ".") for m in modules_of(ROOT))
    if module.partition(".")[0] == "airflow":
        return True  # lives in an environment of its own; make airflow runs what uses it
    return find_spec(module.partition(".")[0]) is not None


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _values(tree: ast.AST) -> dict[str, ast.Call]:
    """Return what simple names are made by: ``job = ElasticJob(...)``, ``with ElasticRun.start() as run``."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            found |= {t.id: node.value for t in node.targets if isinstance(t, ast.Name)}
        elif (
            isinstance(node, ast.withitem)
            and isinstance(node.context_expr, ast.Call)
            and isinstance(node.optional_vars, ast.Name)
        ):
            found[node.optional_vars.id] = node.context_expr
    return found


def _call(call: ast.Call, names: dict[str, tuple[str, str]], values: dict[str, ast.Call]) -> list[str]:
    taken = _target(call.func, names, values)
    return taken.wrong(call) if taken is not None else []


def _target(
    func: ast.expr, names: dict[str, tuple[str, str]], values: dict[str, ast.Call]
) -> Callable_ | None:
    """Return what a call's function takes, where it is one of ours."""
    if isinstance(func, ast.Name) and func.id in names and names[func.id][0].startswith("ebbflow"):
        found = find(ROOT, *names[func.id])
        return callable_of(found) if isinstance(found, ast.AST) else None
    if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name):
        owner = func.value.id
        if owner in values:  # a method of what one of ours has made
            made = values[owner].func
            owner = made.id if isinstance(made, ast.Name) else getattr(getattr(made, "value", None), "id", "")
        if owner in names and names[owner][0].startswith("ebbflow"):
            found = find(ROOT, *names[owner])
            return method_of(found, func.attr) if isinstance(found, ast.AST) else None
    return None


# --- diffs --------------------------------------------------------------------------------------------------


def _diff(text: str) -> list[str]:
    """Check the Python that a diff leads to; what goes before the change is left out."""
    lines = text.splitlines()
    wrong = [f"{line!r} begins with none of '+', '-', ' '" for line in lines if line and line[0] not in "+- "]
    return wrong or _python("\n".join(line[1:] for line in lines if not line.startswith("-")) + "\n")


# --- shell --------------------------------------------------------------------------------------------------


def commands(text: str) -> list[list[str]]:
    """Return the commands of a shell snippet as words; comments, here-documents and redirections left out."""
    text = re.sub(r"<<-?\s*'?(\w+)'?(?P<rest>[^\n]*)\n.*?^\s*\1\s*$", r"\g<rest>", text, flags=re.M | re.S)
    text = text.replace("\\\n", " ")
    found = []
    for line in text.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>")
        lexer.whitespace_split = True
        words: list[str] = []
        skip = False
        for word in lexer:
            if set(word) <= set("&|;"):
                found.append(words)
                words = []
            elif set(word) <= set("<>&0123456789") and set(word) & set("<>"):
                skip = True
                words = words[:-1] if words[-1:] == ["2"] else words  # of 2> FILE, 2>&1
            elif skip:
                skip = False
            else:
                words.append(word)
        found.append(words)
    return [_bare(words) for words in found if _bare(words)]


def _bare(words: list[str]) -> list[str]:
    """Return a command without assignments, words of the shell and ``timeout`` before it."""
    while words and (re.fullmatch(r"[A-Za-z_]\w*=.*", words[0], re.S) or words[0] in _BEFORE):
        words = words[1:]
    if words[:1] == ["timeout"]:  # --signal SIGNAL SECONDS
        words = words[4:] if words[1].startswith("--") else words[2:]
    return words


def _shell(text: str) -> list[str]:
    try:
        lines = commands(text)
    except ValueError as error:
        return [f"is no shell: {error}"]
    return [said for words in lines for said in _command(words)]


def _command(words: list[str]) -> list[str]:
    program, *rest = words
    if program == "ebbflow":
        return ebbflow_problems(rest)
    if program == "make":
        return [f"there is no make {t}" for t in rest if "=" not in t and t not in _targets()]
    if program == "pip" and rest[:1] == ["install"]:
        return _pip(rest[1:])
    if program == "prefect":
        return []  # Prefect's own tests check Prefect's own options
    if program == "airflow":
        return []
    if program.startswith(("scripts/", "./scripts/")):
        return [] if (ROOT / program).is_file() else [f"there is no {program}"]
    return [] if program in _OUTSIDE.split() else [f"nothing is known of the program {program!r}"]


@cache
def _targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))


def _pip(words: list[str]) -> list[str]:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wrong = []
    for word in words:
        if re.match(r"ebbflow\b", word):
            wrong.append("ebbflow is somebody else's package; ours is prefect-ebbflow")
        match = re.match(r"(?:prefect-ebbflow|\.)\[([\w,]+)\]", word)
        if match:
            wrong += [f"there is no extra {e}" for e in match[1].split(",") if e not in extras]
    return wrong


def ebbflow_problems(words: list[str]) -> list[str]:
    """Return what the real command line says against these arguments; its commands are left out, so nothing runs."""
    from typer.exceptions import Abort, Exit, TyperException

    from ebbflow.flows.runs import option_checks as commands

    said = io.StringIO()
    try:
        with (
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
            # what a page's paths name need not be there
            mock.patch.object(commands, "place_problem", return_value=""),
        ):
            _idle_command_line().main(list(words), prog_name="ebbflow", standalone_mode=False)
    except TyperException as error:
        return [f"ebbflow {shlex.join(words)}: {error.format_message() or 'names no command'}"]
    except OptionError as error:
        return [f"ebbflow {shlex.join(words)}: {error}"]
    except (Abort, Exit):
        return []  # --help
    return []


@cache
def _idle_command_line() -> Any:
    """Return the command line of ebbflow, whose commands do nothing."""
    from typer.main import get_command

    from ebbflow.flows.cli import app

    def calm(command: Any) -> None:
        command.callback = None
        for inner in getattr(command, "commands", {}).values():
            calm(inner)

    top = get_command(app)
    calm(top)
    return top


# --- data ---------------------------------------------------------------------------------------------------


def _yaml(text: str) -> list[str]:
    try:
        list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        return [f"is no YAML: {error}"]
    return []


def _toml(text: str) -> list[str]:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        return [f"is no TOML: {error}"]
    return []


def _json(text: str) -> list[str]:
    try:
        json.loads(text)
    except ValueError as error:
        return [f"is no JSON: {error}"]
    return []


def _sql(text: str) -> list[str]:
    import sqlglot
    from sqlglot.errors import SqlglotError

    try:
        sqlglot.parse(text, read="spark")
    except SqlglotError as error:
        return [f"is no SQL: {error}"]
    return []
