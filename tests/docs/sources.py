"""The project's own modules, read and not imported: what they import, what they define, what their functions take."""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDERS = ("flows", "tasks", "planners", "infra")
FACE = "ebbflow.flows.face"  # is the package ebbflow itself


def modules_of(root: Path) -> list[str]:
    """Return the names of all modules of the project."""
    return sorted(_names(root))


def texts(root: Path) -> dict[str, str]:
    """Return the text of each module, by its name."""
    return {name: path.read_text(encoding="utf-8") for name, path in sorted(_names(root).items())}


@cache
def _names(root: Path) -> dict[str, Path]:
    found = {}
    for folder in FOLDERS:
        for path in (root / folder).rglob("*.py"):
            if "migrations" in path.parts:
                continue
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(("ebbflow", *(parts[:-1] if parts[-1] == "__init__" else parts)))
            found["ebbflow" if name == FACE else name] = path
    return found


@cache
def tree(root: Path, module: str) -> ast.Module:
    """Return a module's syntax tree."""
    return ast.parse(_names(root)[module].read_text(encoding="utf-8"))


@cache
def imports(root: Path, module: str) -> tuple[str, ...]:
    """Return the modules that a module imports, functions' own imports too."""
    known = _names(root)
    found: set[str] = set()
    for node in _statements(tree(root, module)):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inner = {f"{node.module}.{one.name}" for one in node.names}
            found |= (inner & set(known)) or {node.module}
    return tuple(sorted(found))


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Walk through ``node`` without what is for type checkers only."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            continue
        yield child
        yield from _statements(child)


def reachable(root: Path, start: Iterable[str]) -> set[str]:
    """Return the project's modules that ``start`` import, directly or not, themselves among them."""
    known = _names(root)
    seen: set[str] = set()
    waiting = list(start)
    while waiting:
        module = waiting.pop()
        if module in seen or module not in known:
            continue
        seen.add(module)
        parts = module.split(".")
        waiting += [
            ".".join(parts[:n]) for n in range(2, len(parts))
        ]  # a module's packages are imported first
        waiting += [name for name in imports(root, module) if name.startswith("ebbflow.")]
    return seen


# --- names and what can be called ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Callable_:
    """What a function or class can be called with."""

    name: str
    positional: tuple[str, ...]  # in order
    named: frozenset[str]
    required: frozenset[str]
    most: int | None  # positional arguments; None: as many as one likes
    open: bool  # whether any keyword will do

    def wrong(self, call: ast.Call) -> list[str]:
        """Return what does not fit of a call, in words."""
        if any(isinstance(one, ast.Starred) for one in call.args) or any(
            k.arg is None for k in call.keywords
        ):
            return []
        said = []
        if self.most is not None and len(call.args) > self.most:
            said.append(f"{self.name} takes {self.most} positional arguments; got {len(call.args)}")
        names = {k.arg for k in call.keywords if k.arg}
        if not self.open and (unknown := names - self.named):
            said.append(f"{self.name} has no argument {', '.join(sorted(unknown))}")
        given = names | set(self.positional[: len(call.args)])
        if missing := self.required - given:
            said.append(f"{self.name} needs {', '.join(sorted(missing))}")
        return said


def find(root: Path, module: str, name: str) -> ast.AST | str | None:
    """Return where ``name`` of ``module`` is defined, following re-exports; a module's name; ``None``: nowhere."""
    known = _names(root)
    if f"{module}.{name}" in known:
        return f"{module}.{name}"
    if module not in known:
        return None
    for node in ast.walk(tree(root, module)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == name for t in node.targets
        ):
            return node
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
            return node
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("ebbflow"):
            for one in node.names:
                if (one.asname or one.name) == name:
                    return find(root, node.module, one.name)
    return None


def callable_of(found: ast.AST) -> Callable_ | None:
    """Return what a definition can be called with; ``None`` where that is not plain to see."""
    if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        return _function(found.name, found.args, 0)
    if not isinstance(found, ast.ClassDef):
        return None
    for node in found.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return _function(found.name, node.args, 1)
    if any("dataclass" in ast.unparse(d) for d in found.decorator_list) and not found.bases:
        return _dataclass(found)
    return None


def method_of(found: ast.AST, name: str) -> Callable_ | None:
    """Return what a method of a class takes, ``self`` left out; ``None`` where it is not seen there."""
    if isinstance(found, ast.ClassDef):
        for node in found.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                static = any(ast.unparse(d) == "staticmethod" for d in node.decorator_list)
                return _function(f"{found.name}.{name}", node.args, 0 if static else 1)
    return None


def _function(name: str, arguments: ast.arguments, skip: int) -> Callable_:
    positional = [a.arg for a in [*arguments.posonlyargs, *arguments.args]]
    required = positional[: len(positional) - len(arguments.defaults)][skip:]
    positional = positional[skip:]
    named = {*positional, *(a.arg for a in arguments.kwonlyargs)}
    missing = {a.arg for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is None}
    return Callable_(
        name,
        tuple(positional),
        frozenset(named),
        frozenset({*required, *missing}),
        None if arguments.vararg else len(positional),
        arguments.kwarg is not None,
    )


def _dataclass(found: ast.ClassDef) -> Callable_:
    names, required = [], []
    for node in found.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if "ClassVar" in ast.unparse(node.annotation):
                continue
            names.append(node.target.id)
            if node.value is None:
                required.append(node.target.id)
    keywords_only = any("kw_only=True" in ast.unparse(d) for d in found.decorator_list)
    most = 0 if keywords_only else len(names)
    return Callable_(found.name, tuple(names), frozenset(names), frozenset(required), most, False)
