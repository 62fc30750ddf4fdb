"""Python files that users name, checked before anything is started for them."""

import os
import warnings

from ebbflow.infra.storage import user_files
from ebbflow.planners.errors import OptionError


def check_script(path: str) -> None:
    """Raise ``OptionError`` unless ``path`` is a file of Python source that compiles. Nothing of it is run."""

    def error(said: str) -> OptionError:
        return OptionError(f"script must be a Python file: {said}")

    if not os.path.lexists(user_files.expanded(path)):
        raise OptionError(f"script must be a Python file; there is none at {path!r}")
    source = user_files.read_bytes(path, error=error)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of their code, which its own run shows
            compile(source, path, "exec", dont_inherit=True)
    except SyntaxError as problem:
        rule = problem.msg
        if rule.startswith("(unicode error)"):
            rule = "this is not text in the file's encoding, UTF-8 unless its first lines declare another"
        raise error(f"{path}, line {problem.lineno or 1}: {rule}") from None
    except (ValueError, RecursionError, MemoryError, OverflowError) as problem:
        raise error(f"{path} cannot be compiled: {problem or type(problem).__name__}") from None
