"""A Python environment for one requirements file: what the node's own lacks, on top of the node's own.

``venv`` and the node's pip make it. The node's packages are linked into it by a ``.pth`` file and not by
``--system-site-packages``, which leads past the node's environment to the interpreter's where that one is a virtual
environment itself. pip sees what is linked: it installs what is missing or of another version, so torch and ebbflow
are not downloaded again, and what the file asks for comes first. uv is not used: it does not see linked packages and
would install a second torch.
"""

import hashlib
import json
import os
import re
import site
import sys
from collections.abc import Sequence
from pathlib import Path

from ebbflow.infra.clock import Clock
from ebbflow.infra.storage import private
from ebbflow.infra.training.workspace.building import build_once, run_command

_LINK = "ebbflow_node.pth"
_PLAIN = re.compile(
    r"\s*(#.*|[A-Za-z0-9][A-Za-z0-9._-]*\s*(\[[^\]]*\])?\s*([<>=!~][^@/\\]*)?(;[^@/\\]*)?(\s#.*)?)?"
)


def environment_for(
    requirements: str,
    folder: Path,
    code: str,
    cache: Path,
    clock: Clock,
    *,
    file: str = "",
    secrets: Sequence[str] = (),
) -> Path:
    """Return the directory of the environment for the text of a requirements file, built unless it is there.

    Args:
        requirements: the text.
        folder: in which relative paths of it are found.
        code: what identifies the files there; counts where the text names more than versions of packages.
        cache: directory of all environments.
        clock: the time.
        file: path of the requirements file in ``folder``, so that files it names are found beside it; empty: it is
            not there.
        secrets: values that must not be shown.

    Raises ``TrainingError`` with the installer's last lines, or ``StorageError``.
    """
    key = environment_key(requirements, code)

    def build(target: Path) -> None:
        venv = [sys.executable, "-P", "-m", "venv", "--without-pip", str(target)]
        run_command(venv, "the environment cannot be made: venv", folder, os.environ)
        inside = python_of(target)
        lines = [f"import site; site.addsitedir({path!r})" for path in _site_folders()]
        packages = target / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        private.write_text(packages / _LINK, "\n".join(lines) + "\n")
        own = folder / file if file else target / "requirements.txt"
        if not file:
            private.write_text(own, requirements)
        environment = {**os.environ, "VIRTUAL_ENV": str(target), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        if not _has_pip():
            run_command([str(inside), "-P", "-m", "ensurepip"], "ensurepip", folder, environment, secrets)
        pip = [
            str(inside),
            "-P",
            "-m",
            "pip",
            "install",
            "--no-input",
            "--progress-bar",
            "off",
            "-r",
            str(own),
        ]
        run_command(pip, "the requirements cannot be installed: pip", folder, environment, secrets)

    return build_once(cache, key, build, clock)


def environment_key(requirements: str, code: str) -> str:
    """Return what tells environments apart: the text, the node's Python and its packages, and where the text names
    files, ``code`` too."""
    local = any(not _PLAIN.fullmatch(line) for line in requirements.splitlines())
    packages = sorted({p.name for f in _site_folders() for p in Path(f).glob("*.dist-info")})
    parts = [requirements, code if local else "", sys.version, sys.prefix, packages]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def python_of(environment: Path) -> Path:
    """Return the interpreter of an environment."""
    return environment / "bin" / "python"


def _site_folders() -> list[str]:
    """Return the directories of packages that this interpreter has."""
    own = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return [path for path in [*site.getsitepackages(), *own] if os.path.isdir(path)]


def _has_pip() -> bool:
    from importlib.util import find_spec

    return find_spec("pip") is not None
