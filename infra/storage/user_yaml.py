"""YAML files that a user names, read strictly; see ``user_files``."""

from typing import Any

import yaml

from ebbflow.infra.storage.user_files import AnyPath, ErrorKind, read_text
from ebbflow.planners.errors import OptionError

MAX_DEPTH = 40  # of lists and tables in each other
MAX_VALUES = 200_000  # of a YAML file, with all that its aliases stand for


def read_yaml(path: AnyPath, *, error: ErrorKind = OptionError) -> Any:
    """Return what a YAML file holds, ``None`` for an empty one.

    Tags, keys given twice, aliases that stand for what they are a part of, and more than ``MAX_VALUES`` values, with
    all that aliases stand for, are refused. Raises the exception of ``error``.
    """
    text = read_text(path, error=error)
    loader = None
    try:
        loader = BoundedLoader(text)
        root = loader.get_single_node()
        if root is None:
            return None
        _check_nodes(root)
        return loader.construct_document(root)
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise error(f"{path} is not YAML: {problem.problem or problem.context}{where}") from problem
    except TooDeepError as problem:
        raise error(f"{path} is not YAML that can be used: line {problem.line}: {problem}") from None
    except (yaml.YAMLError, ValueError, TypeError, OverflowError) as problem:
        raise error(f"{path} is not YAML: {' '.join(str(problem).split()):.200}") from problem
    finally:
        if loader is not None:
            loader.dispose()


class TooDeepError(Exception):
    """Values nested more deeply than ``MAX_DEPTH``; ``line`` is where."""

    def __init__(self, line: int) -> None:
        super().__init__("values are nested too deeply")
        self.line = line


class BoundedLoader(yaml.SafeLoader):  # type: ignore[misc]
    """Composes a document of bounded depth; the parser itself would take ever longer with each level."""

    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """See ``yaml.composer.Composer``."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise TooDeepError(self.peek_event().start_mark.line + 1)
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


def _check_nodes(root: yaml.Node) -> None:
    """Raise ``yaml.MarkedYAMLError`` for what a document may not hold."""
    count = 0

    def look(node: yaml.Node, above: tuple[int, ...]) -> None:
        nonlocal count
        count += 1
        if count > MAX_VALUES:
            raise _at(node, f"a file has at most {MAX_VALUES:,} values, with all that aliases stand for")
        if id(node) in above:
            raise _at(node, "an alias must not stand for what it is a part of")
        inside = (*above, id(node))
        if isinstance(node, yaml.MappingNode):
            names: set[str] = set()
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise _at(key, "a key must be a word, not a list or a table")
                if key.value in names:
                    raise _at(key, f"the key {key.value!r:.60} is given twice")
                names.add(key.value)
                look(value, inside)
        elif isinstance(node, yaml.SequenceNode):
            for one in node.value:
                look(one, inside)

    look(root, ())


def _at(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
