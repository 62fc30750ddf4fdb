"""What a public docstring must say, as far as a program can tell: that it is there, errors, units, sources."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.scripts.test_house import LAYERS, ROOT

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

FAMILY = "EbbflowError"
QUANTITIES = re.compile(  # names of parameters that have a unit
    r"(.*_)?(timeout|interval|wait|duration|period|grace|deadline|delay|latency|patience|age|now|lead_time|lease"
    r"|price|cost|budget|bandwidth|memory|size)"
)
IN_NAME = re.compile(r"(.*_)?(s|seconds|hours|bytes|mib|gib|dollars|bits)")
UNIT = re.compile(
    r"(?<![\w.])(s|ms|min|h|seconds?|minutes?|hours?|days?|bytes?|[KMGT]i?B|bits?(/s)?|dollars?|\$(/h)?|"
    r"GPU-(s|h|seconds|hours)|node-(hours?|seconds?)|fraction|share|times|steps?|iterations?|unit)(?!\w)"
)
PLACE = re.compile(r"(?i)(\bsections?|\bequations?|\btheorems?|§)\s*\(?\d")
PAPER = re.compile(
    r"Source:|RFC|\b[A-Z]\w*[A-Z]\w* (19|20)\d\d\b|\bthesis\b|"  # or where and when it appeared: NSDI 2020
    r"\b(QOOP|Themis|Tiresias|Optimus|Pollux|SCAR|Litz|Shockwave|Gavel|Gandiva|SLAQ)\b"
)


@dataclass(frozen=True)
class Item:
    """A public class, function or method, and where it is."""

    path: str
    node: Documented
    owner: ast.ClassDef | None

    @property
    def doc(self) -> str:
        return ast.get_docstring(self.node) or ""

    @property
    def text(self) -> str:
        """Return its docstring; of a constructor, its class's with it."""
        constructs = self.owner is not None and self.node.name == "__init__"
        return self.doc + ((ast.get_docstring(self.owner) or "") if self.owner and constructs else "")

    @property
    def command(self) -> bool:
        """Tell whether its text is a command's help, which tests/flows/test_help.py reads."""
        if isinstance(self.node, ast.ClassDef) or not self.path.startswith("flows/"):
            return False
        said = [ast.unparse(one) for one in self.node.decorator_list]
        arguments = [*self.node.args.args, *self.node.args.kwonlyargs]
        said += [ast.unparse(one.annotation) for one in arguments if one.annotation is not None]
        return any(re.search(r"command|callback|with_options_of|typer\.", one) for one in said)

    def __str__(self) -> str:
        owner = f"{self.owner.name}." if self.owner else ""
        return f"{self.path}:{self.node.lineno} {owner}{self.node.name}"


@cache
def modules() -> dict[str, ast.Module]:
    """Return all modules of the layers by their paths."""
    paths = (path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py")))
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


@cache
def classes() -> dict[str, tuple[ast.ClassDef, ...]]:
    """Return all classes of the layers by their names."""
    found: dict[str, tuple[ast.ClassDef, ...]] = {}
    for tree in modules().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name] = (*found.get(node.name, ()), node)
    return found


def bases(node: ast.ClassDef) -> set[str]:
    """Return the names of a class's bases, and of theirs where they are ours."""
    found, left = set[str](), [node]
    while left:
        for base in left.pop().bases:
            name = ast.unparse(base).partition("[")[0].rpartition(".")[2]
            if name not in found:  # a class may be called as its base is
                found.add(name)
                left += classes().get(name, ())
    return found


def items() -> Iterator[Item]:
    """Return all public classes and functions of modules, the methods of public classes, and their constructors."""
    for path, tree in modules().items():
        for node in _named(tree.body):
            yield Item(path, node, None)
            if isinstance(node, ast.ClassDef):
                for inner in _named(node.body, "__init__"):
                    if isinstance(inner, Function):
                        yield Item(path, inner, node)


def _named(body: list[ast.stmt], *more: str) -> Iterator[Documented]:
    for node in body:
        if isinstance(node, Documented) and (not node.name.startswith("_") or node.name in more):
            yield node


@cache
def promised() -> frozenset[str]:
    """Return the methods that a protocol of ours documents: who implements them need not say it again."""
    protocols = (one for found in classes().values() for one in found if "Protocol" in bases(one))
    return frozenset(
        node.name for one in protocols for node in one.body
        if isinstance(node, Function) and ast.get_docstring(node)
    )  # fmt: skip


def must_say(item: Item) -> bool:
    """Tell whether a docstring must be there.

    A method needs none where its name and types say it all, in one statement, or where a base or protocol has it.
    """
    if item.command or item.node.name == "__init__":
        return False
    if item.owner is None or isinstance(item.node, ast.ClassDef):
        return True
    inherited = {
        node.name for base in bases(item.owner) for one in classes().get(base, ()) for node in one.body
        if isinstance(node, Function)
    }  # fmt: skip
    return len(item.node.body) > 1 and item.node.name not in promised() | inherited


@cache
def family() -> frozenset[str]:
    """Return the names of our errors."""
    return frozenset(
        name
        for name, found in classes().items()
        if name == FAMILY or any(FAMILY in bases(one) for one in found)
    )


def raised(node: ast.AST, caught: bool = False) -> Iterator[str]:
    """Return the errors of our family that a function's own body raises and that no handler around them may catch."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        inside = caught or (isinstance(node, ast.Try) and bool(node.handlers) and inner in node.body)
        if isinstance(inner, ast.Raise) and inner.exc is not None and not inside:
            error = inner.exc.func if isinstance(inner.exc, ast.Call) else inner.exc
            name = ast.unparse(error).rpartition(".")[2]
            if name in family():
                yield name
        yield from raised(inner, inside)


def unsaid_errors(item: Item) -> set[str]:
    """Return the errors that a function raises itself and of which its docstring names neither them nor a base."""
    if isinstance(item.node, ast.ClassDef) or item.command or not item.text:
        return set()

    def named(name: str) -> bool:
        over = {name}.union(*(bases(one) for one in classes()[name])) & family()
        return any(re.search(rf"\b{one}\b", item.text) for one in over)

    return {name for name in raised(item.node) if not named(name)}


def types(item: Item) -> dict[str, str]:
    """Return the types of what a function takes, or of a class's fields and what its constructor takes."""
    functions = [item.node]
    found: dict[str, str] = {}
    if isinstance(item.node, ast.ClassDef):
        functions = [one for one in item.node.body if isinstance(one, Function) and one.name == "__init__"]
        fields = (one for one in item.node.body if isinstance(one, ast.AnnAssign))
        found = {ast.unparse(one.target): ast.unparse(one.annotation) for one in fields}
    for function in functions:
        assert isinstance(function, Function)
        for one in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs):
            found[one.arg] = ast.unparse(one.annotation) if one.annotation is not None else ""
    return found


def without_unit(item: Item) -> list[str]:
    """Return the numbers of a section of parameters whose names mean a quantity and that have no unit."""
    if "Args:" not in item.doc:
        return []
    entries = re.findall(r"^ {4}(\w+):(.*(?:\n {5,}.*)*)", item.doc.partition("Args:")[2], re.M)
    known = types(item)
    return [
        name for name, text in entries
        if re.fullmatch(r"float( \| None)?", known.get(name, "")) and QUANTITIES.fullmatch(name)
        and not IN_NAME.fullmatch(name) and not UNIT.search(text)
    ]  # fmt: skip


@pytest.mark.parametrize("layer", LAYERS)
def test_what_is_public_has_a_docstring(layer: str) -> None:
    silent = [path for path, tree in modules().items() if tree.body and not ast.get_docstring(tree)]
    assert [path for path in silent if path.startswith(f"{layer}/")] == []
    assert [str(one) for one in items() if one.path.startswith(layer) and must_say(one) and not one.doc] == []


@pytest.mark.parametrize("layer", LAYERS)
def test_a_docstring_names_the_errors_that_the_function_itself_raises(layer: str) -> None:
    found = {
        str(one): errors for one in items() if one.path.startswith(layer) and (errors := unsaid_errors(one))
    }
    assert found == {}


def test_a_quantity_among_the_parameters_has_a_unit() -> None:
    assert {str(one): names for one in items() if (names := without_unit(one))} == {}


def test_who_cites_a_place_in_a_paper_names_the_paper() -> None:
    texts = {path: ast.get_docstring(tree) or "" for path, tree in modules().items()}
    rooms = {path: texts.get(str(Path(path).with_name("__init__.py")), "") for path in texts}
    found = [
        path for path, text in texts.items() if PLACE.search(text) and not PAPER.search(text + rooms[path])
    ]
    found += [
        str(one) for one in items()
        if PLACE.search(one.doc) and not PAPER.search(one.doc + texts[one.path] + rooms[one.path])
    ]  # fmt: skip
    assert found == []


def test_the_rules_find_what_breaks_them() -> None:
    source = (
        "class A:\n"
        "    def fetch_all(self, wait: float) -> None:\n"
        '        """Do it.\n\n        Args:\n            wait: for the end.\n        """\n'
        "        try:\n"
        "            raise LedgerError('caught')\n"
        "        except LedgerError:\n"
        "            raise OptionError('not caught')\n"
    )
    owner = ast.parse(source).body[0]
    assert isinstance(owner, ast.ClassDef)
    item = Item("tasks/a.py", next(_named(owner.body)), owner)
    assert unsaid_errors(item) == {"OptionError"}
    assert without_unit(item) == ["wait"]
    assert must_say(item)
