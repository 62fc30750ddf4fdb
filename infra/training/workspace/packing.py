"""A working directory, or a commit of a git repository, as one archive that is the same for the same files."""

import gzip
import hashlib
import io
import os
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from ebbflow.infra.storage import user_files
from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.ignoring import ALWAYS, IgnoreRules

MAX_BYTES = 256 * 2**20
"""Of all files of a working directory together: code and small data; large data belongs where all nodes read it."""
MAX_FILES = 20_000
IGNORE_FILES = (".ebbflowignore", ".gitignore")
"""In the root of a working directory; the first that is there holds."""
_GIT = 300.0  # seconds for a command of git
_LARGEST = 3  # files that an error names


@dataclass(frozen=True)
class PackedCode:
    """An archive of code."""

    data: bytes  # a tar archive, compressed by gzip
    digest: str  # SHA-256 of the archive before compression, in hex
    files: int
    size: int  # bytes of all files
    commit: str = ""  # of git, where it is one


@dataclass(frozen=True)
class _File:
    path: str  # below the root, with ``/``
    data: bytes
    executable: bool = False
    link: str = ""  # target of a symbolic link


def pack(source: str, script: str) -> PackedCode:
    """Return the code of ``source``, which holds ``script``.

    ``source`` is a directory, ``REPOSITORY@REF`` of a git repository on this machine, or ``git+URL[@REF]``; those of
    git may end in ``#subdirectory=PATH``. Times, owners and the order of files leave no trace in the archive.

    Raises ``OptionError``: no such directory, commit or script, a link or special file that cannot be packed, more
    than ``MAX_BYTES`` or ``MAX_FILES``.
    """
    commit = ""
    if user_files.expanded(source).is_dir():
        found = _bounded(source, _files_of(user_files.expanded(source)))
    else:
        archive, commit = _archived(source)
        found = _bounded(source, _members_of(archive, source))
    name = str(PurePosixPath(script))
    if all(one.path != name for one in found):
        raise OptionError(f"script must be a file of workdir {source}; it has no {script!r}")
    data = _tarred(found)
    packed = gzip.compress(data, compresslevel=6, mtime=0)
    size = sum(len(one.data) for one in found)
    return PackedCode(packed, hashlib.sha256(data).hexdigest(), len(found), size, commit)


def check_script_path(script: str) -> None:
    """Raise ``OptionError`` unless ``script`` may be the path of a script in a working directory."""
    path = PurePosixPath(script)
    if path.is_absolute() or ".." in path.parts or path.suffix != ".py":
        raise OptionError(
            f"script must be the path of a Python file relative to workdir, such as train.py; got {script!r}"
        )


# --- where files come from ----------------------------------------------------------------------------------------


def _files_of(root: Path) -> Iterator[_File]:
    rules = _rules_of(root)
    for folder, directories, names in os.walk(root):
        here = Path(folder).relative_to(root)
        inner = {name: (here / name).as_posix() for name in [*directories, *names]}
        linked = [name for name in directories if (Path(folder) / name).is_symlink()]
        directories[:] = sorted(
            name
            for name in directories
            if name not in linked and not rules.excludes(inner[name], directory=True)
        )
        for name in sorted([*names, *linked]):
            if not rules.excludes(inner[name], directory=name in linked):
                yield _read(Path(folder) / name, inner[name], root)


def _rules_of(root: Path) -> IgnoreRules:
    for name in IGNORE_FILES:
        if (root / name).is_file():
            return IgnoreRules([*ALWAYS, *user_files.read_text(root / name).splitlines()])
    return IgnoreRules(ALWAYS)


def _read(path: Path, name: str, root: Path) -> _File:
    try:
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            target = os.readlink(path)
            if os.path.isabs(target) or not path.resolve().is_relative_to(root.resolve()):
                raise OptionError(
                    f"workdir holds a symbolic link to a file outside of it: {name} -> {target}; put the file in its "
                    f"place, or leave it out by {IGNORE_FILES[0]}"
                )
            return _File(name, b"", link=target)
    except OSError as error:
        raise OptionError(f"workdir cannot be read: {path}: {user_files.reason(error)}") from error
    return _File(name, user_files.read_bytes(path, max_bytes=MAX_BYTES), bool(mode & stat.S_IXUSR))


def _members_of(archive: bytes, source: str) -> Iterator[_File]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            if member.issym():
                yield _File(member.name, b"", link=member.linkname)
            elif member.isfile():
                file = tar.extractfile(member)
                assert file is not None
                yield _File(member.name, file.read(), bool(member.mode & stat.S_IXUSR))
            elif not member.isdir():
                raise OptionError(
                    f"workdir {source} holds {member.name}, which is no file that can be packed"
                )


def _bounded(source: str, files: Iterator[_File]) -> list[_File]:
    found, size = [], 0
    for one in files:
        found.append(one)
        size += len(one.data)
        if size > MAX_BYTES:
            largest = sorted(found, key=lambda file: -len(file.data))[:_LARGEST]
            named = ", ".join(f"{file.path} ({len(file.data) / 2**20:.0f} MiB)" for file in largest)
            raise OptionError(
                f"workdir {source} must have at most {MAX_BYTES // 2**20} MiB of files; the largest so far: {named}. "
                f"Leave data out by a pattern in {IGNORE_FILES[0]}, and read it from where all nodes reach it"
            )
        if len(found) > MAX_FILES:
            raise OptionError(
                f"workdir {source} must have at most {MAX_FILES:,} files; leave some out by patterns in "
                f"{IGNORE_FILES[0]}"
            )
    if not found:
        raise OptionError(f"workdir {source} holds no file")
    return sorted(found, key=lambda one: one.path)


def _tarred(files: list[_File]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.TarFile(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for one in files:
            info = tarfile.TarInfo(one.path)
            info.size, info.mode = len(one.data), 0o755 if one.executable else 0o644
            if one.link:
                info.type, info.linkname = tarfile.SYMTYPE, one.link
            tar.addfile(info, io.BytesIO(one.data))
    return buffer.getvalue()


# --- git ----------------------------------------------------------------------------------------------------------


def _archived(source: str) -> tuple[bytes, str]:
    """Return the tar archive of a git reference and its commit."""
    named, _, subdirectory = source.partition("#subdirectory=")
    if named.startswith("git+"):
        url, ref = _address(named.removeprefix("git+"))
        with tempfile.TemporaryDirectory(prefix="ebbflow-git-") as folder:
            _git(source, folder, "init", "--quiet")
            _git(source, folder, "fetch", "--quiet", "--depth", "1", url, ref)
            return _committed(source, folder, "FETCH_HEAD", subdirectory)
    folder, at, ref = named.rpartition("@")
    if at and user_files.expanded(folder or ".").is_dir():
        return _committed(
            source, str(user_files.expanded(folder or ".")), _checked(source, ref), subdirectory
        )
    raise OptionError(
        f"workdir must be a directory, REPOSITORY@REF of a git repository on this machine, or git+URL@REF; got "
        f"{source!r}"
    )


def _address(text: str) -> tuple[str, str]:
    parts = urlsplit(text)
    if parts.password or (parts.username and parts.scheme in ("http", "https")):
        raise OptionError(
            f"workdir must not hold a password or token: {parts.scheme}://***@{parts.hostname}{parts.path}; git "
            "finds it by a credential helper, or use git+ssh"
        )
    path, _, ref = parts.path.partition("@")
    if not parts.scheme or not path:
        raise OptionError(
            f"workdir must be git+URL@REF, such as git+https://host/team/code@main; got git+{text}"
        )
    return parts._replace(path=path).geturl(), _checked(text, ref) if ref else "HEAD"


def _checked(source: str, ref: str) -> str:
    if not ref or ref.startswith("-"):
        raise OptionError(f"workdir must name a branch, tag or commit of git after its @; got {source!r}")
    return ref


def _committed(source: str, folder: str, ref: str, subdirectory: str) -> tuple[bytes, str]:
    commit = _git(source, folder, "rev-parse", "--verify", "--end-of-options", f"{ref}^{{commit}}").decode()
    inner = subdirectory.strip("/")
    tree = f"{commit.strip()}:{inner}" if inner else commit.strip()
    return _git(source, folder, "archive", "--format=tar", tree), commit.strip()


def _git(source: str, folder: str, *arguments: str) -> bytes:
    try:
        done = subprocess.run(
            ["git", "-C", folder, *arguments],
            capture_output=True,
            timeout=_GIT,
            check=False,
            env={**os.environ, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        raise OptionError(f"workdir {source} needs git, which is not installed here") from None
    except subprocess.TimeoutExpired:
        raise OptionError(f"workdir {source}: git {arguments[0]} took over {_GIT:g} s") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise OptionError(
            f"workdir {source}: git {arguments[0]} failed: {lines[-1] if lines else done.returncode}"
        )
    return done.stdout
