"""Programs inside texts import names that are there: they run in processes of their own, where no linter looks."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
IMPORT = re.compile(r"\s*from (ebbflow[\w.]*) import (\w+(?:, \w+)*)$")
MADE_UP = (TESTS / "docs", TESTS / "flows" / "test_face.py")  # whose texts are wrong on purpose


def imports() -> Iterator[tuple[Path, str, str]]:
    """Yield the file, the module and the name of every import in a text of the tests."""
    for path in sorted(TESTS.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if any(map(path.is_relative_to, MADE_UP)) or not re.search(
            r"""["';\\n]\s*from ebbflow|"{3}\n(.*\n)*?from ebbflow""", text
        ):
            continue
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and "from ebbflow" in node.value
            ):
                for line in re.split(r"[;\n]", node.value):
                    if match := IMPORT.match(line):
                        yield from ((path, match[1], name) for name in match[2].split(", "))


def test_what_a_program_imports_is_there() -> None:
    missing, seen = [], 0
    for path, module, name in imports():
        seen += 1
        found = importlib.import_module(module)
        if not hasattr(found, name) and not Path(f"{found.__path__[0]}/{name}.py").exists():
            missing.append(f"{path.relative_to(TESTS)} imports {name} from {module}")
    assert seen > 30
    assert missing == []
