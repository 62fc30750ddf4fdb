"""One directory put in the place of another, in which programs write that know nothing of it.

The new one has links to the files that stay. Linux exchanges the names of two directories at once: renameat2(2).
What others have done to the old one until then is done to the new one as well, as if they had done it afterwards. A
process that dies meanwhile leaves the old one beside the new one: with the ``Links`` another can finish.
"""

import ctypes
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass

from ebbflow.infra.clock import Clock

OLD = ".old"  # behind the name that the new directory had: what that of the old one is once it is decided
_SWAP = 2  # RENAME_EXCHANGE of linux/fs.h
_HERE = -100  # AT_FDCWD
_PAUSE = 0.05  # seconds between two tries to empty a directory that others write into
Identity = tuple[int, int, int]


@dataclass(frozen=True)
class Links:
    """Files by their paths below two directories, one of which takes the place of the other."""

    new: str  # the name of the other one before
    record: str  # the file of the new one that tells of the exchange
    before: dict[str, Identity]  # the files of the old one
    after: dict[str, Identity]  # those of them that the new one has: other files where they were copied
    removed: frozenset[str]  # those of the old one that others must not change
    ours: frozenset[str]  # of the new one alone

    def encoded(self) -> bytes:
        """Return what ``decoded`` reads."""
        copied = {below: one for below, one in self.after.items() if self.before[below] != one}
        kept = [self.new, self.record, self.before, copied, sorted(self.removed), sorted(self.ours)]
        return json.dumps([*kept, sorted(self.before.keys() - self.after.keys())]).encode()

    @classmethod
    def decoded(cls, content: bytes) -> "Links | None":
        """Return what was ``encoded``, ``None`` for anything else."""
        try:
            new, record, before, copied, removed, ours, missing = json.loads(content)
            there = {str(below): _identity_of(one) for below, one in before.items()}
            after = {below: there[below] for below in there.keys() - set(missing)}
            after |= {str(below): _identity_of(one) for below, one in copied.items()}
            return cls(str(new), str(record), there, after, frozenset(removed), frozenset(ours))
        except (ValueError, TypeError, AttributeError):
            return None


def _identity_of(raw: list[int]) -> Identity:
    number, size, changed = raw
    return int(number), int(size), int(changed)


def linked_folder(folder: str) -> str | None:
    """Return a directory below ``folder`` that is a link; ``None``: there is none. Raises ``OSError``."""
    for above, folders, _ in os.walk(folder, onerror=_raised):
        for name in folders:
            if os.path.islink(f"{above}/{name}"):
                return f"{above}/{name}"
    return None


def link(root: str, new: str, removed: Set[str], record: str) -> Links:
    """Make links in ``new`` of all files of ``root`` but those at the paths ``removed``. Raises ``OSError``."""
    ours = frozenset(_inside(new))
    before: dict[str, Identity] = {}
    after: dict[str, Identity] = {}
    for below in _inside(root, _raised):
        path, to = f"{root}/{below}", f"{new}/{below}"
        there = _identity(path)
        if there is None:  # deleted by another program just now
            continue
        before[below] = there
        if path in removed:
            continue
        os.makedirs(os.path.dirname(to), exist_ok=True)
        try:
            _link(path, to)
        except FileNotFoundError:
            del before[below]
            continue
        linked = _identity(to)
        assert linked is not None
        after[below] = linked
    gone = frozenset(path.removeprefix(f"{root}/") for path in removed)
    return Links(os.path.basename(new), record, before, after, gone, ours)


def exchange(root: str, new: str, links: Links) -> list[str]:
    """Give ``new`` the name ``root``. Return the files that are to be removed and that others have changed: then
    everything is as it was before ``link``, with what others have done since.

    The directory that had the name is in ``new`` + ``OLD`` then, for ``emptied``. Raises ``OSError`` with the
    directories as they were.
    """
    if changed := _changed(root, links):
        unlink(new, links)
        return changed
    swap(new, root)
    return conclude(root, new, links)


def conclude(root: str, old: str, links: Links) -> list[str]:
    """Decide whether an exchange, after which the former ``root`` is in ``old``, stays; see ``exchange``."""
    try:
        changed = _changed(old, links)
        if not changed:
            _delete(root, old, links.before, links.after)
            os.rename(old, f"{old}{OLD}")
            return []
    except OSError:
        _return(root, old, links)
        raise
    _return(root, old, links)
    return changed


def emptied(root: str, old: str, links: Links, passes: int, clock: Clock) -> str:
    """Move what others have changed or added in ``old``, from which ``root`` was linked, to ``root`` and remove
    ``old``; return why it stays, empty where it does not."""
    for number in range(passes):
        if number:
            clock.sleep(_PAUSE)
        failed = _move(old, root, links.before, links.after)
        if _removed(old):
            return ""
    return str(failed or "it does not become empty, as where another program writes into it")


def unlink(new: str, links: Links) -> None:
    """Leave in ``new`` only what it had before ``link``."""
    for below in (links.record, *links.after):
        with suppress(FileNotFoundError):
            os.unlink(f"{new}/{below}")


def _return(root: str, old: str, links: Links) -> None:
    """Undo an exchange, and do to the old directory what others have done to the new one meanwhile."""
    swap(old, root)
    with suppress(FileNotFoundError):
        os.unlink(f"{old}/{links.record}")
    _delete(root, old, links.after, links.before)
    if failed := _move(old, root, links.after, links.before, links.ours):
        raise failed


def _changed(folder: str, links: Links) -> list[str]:
    """Return the files to be removed that are others than when they were linked."""
    now = {below: _identity(f"{folder}/{below}") for below in links.removed}
    return sorted(below for below, one in now.items() if one is not None and one != links.before.get(below))


def _delete(root: str, source: str, were: Mapping[str, Identity], are: Mapping[str, Identity]) -> None:
    """Delete the files of ``root`` that others have deleted in ``source``, and not written again since.

    ``were`` and ``are`` tell what files the two had.
    """
    for below in were.keys() & are.keys():
        gone = not os.path.lexists(f"{source}/{below}")
        if gone and _identity(f"{root}/{below}") == are[below]:
            with suppress(FileNotFoundError):
                os.unlink(f"{root}/{below}")


def _move(
    source: str,
    root: str,
    were: Mapping[str, Identity],
    are: Mapping[str, Identity],
    kept: Set[str] = frozenset(),
) -> OSError | None:
    """Move the files of ``source`` that others have written to ``root``, unless there are newer ones; delete the
    rest, but those ``kept``. Return the last error.

    ``were`` and ``are`` tell what files the two had.
    """
    failed: OSError | None = None
    for below in _inside(source):
        path, to = f"{source}/{below}", f"{root}/{below}"
        if below in kept:
            continue
        try:
            here, there = _identity(path), _identity(to)
            same = here is not None and there is not None and here[0] == there[0]  # two links to one file
            if here == were.get(below) or same or there not in (None, are.get(below)):
                os.unlink(path)
            else:
                os.makedirs(os.path.dirname(to), exist_ok=True)
                os.rename(path, to)
        except FileNotFoundError:  # another program was quicker
            continue
        except OSError as error:
            failed = error
    return failed


def _inside(folder: str, onerror: Callable[[OSError], object] | None = None) -> Iterator[str]:
    """Yield the paths of all in a directory that are no directories, below it; links to directories are files."""
    for above, folders, names in os.walk(folder, onerror=onerror):
        links = [name for name in folders if os.path.islink(f"{above}/{name}")]
        for name in (*names, *links):
            yield f"{above}/{name}".removeprefix(f"{folder}/")


def _raised(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # else another program has just removed a directory
        raise error


def _identity(path: str) -> Identity | None:
    """Return what differs between two files that have had one path: inode, bytes and time of change in ns."""
    try:
        told = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return told.st_ino, told.st_size, told.st_mtime_ns


def _link(path: str, to: str) -> None:
    try:
        os.link(path, to)
    except (FileNotFoundError, FileExistsError):
        raise
    except OSError:  # a file system without links, a file of another user, or one with too many
        shutil.copy2(path, to, follow_symlinks=False)


def _removed(folder: str) -> bool:
    """Remove a directory that holds no files; tell whether it is gone, which it is not where one has appeared."""
    for above, _, _ in os.walk(folder, topdown=False):
        try:
            os.rmdir(above)
        except OSError:
            return False
    return True


def check(folder: str) -> None:
    """Raise ``OSError`` where the names of two directories in ``folder`` cannot be exchanged, as on NFS."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".ebbflow-exchange-") as tried:
        for name in "ab":
            os.mkdir(f"{tried}/{name}")
        swap(f"{tried}/a", f"{tried}/b")


def swap(new: str, old: str) -> None:
    """Exchange the names of two directories. Raises ``OSError``."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None or call(_HERE, os.fsencode(new), _HERE, os.fsencode(old), _SWAP):
        number = ctypes.get_errno() if call is not None else errno.ENOSYS
        raise OSError(
            number,
            f"the directories {new} and {old} cannot be exchanged ({os.strerror(number)}), which writing into a "
            f"directory of Parquet files needs; write into a table of Delta Lake there",
        )
