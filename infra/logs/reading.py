"""The logs of a run, read from its directory: files of this machine, or segments in object storage (``shipping``)."""

import re
from dataclasses import dataclass

from ebbflow.infra.errors import StorageError
from ebbflow.infra.logs.shipping import SEGMENT, segment_name
from ebbflow.infra.storage import files
from ebbflow.infra.storage.filesystems import translated
from ebbflow.infra.storage.places import StorageLocation

LOGS = "logs"  # in a run's directory
_NAME = re.compile(r"generation-(?P<generation>\d+)/(?P<node>[^/]+)/rank-(?P<rank>\d+)\.(?P<stream>out|err)")


@dataclass(frozen=True, slots=True)
class LogFile:
    """One log of a run.

    Args:
        place: the directory of the run's logs.
        name: below it.
        shipped: whether it is a folder of segments.
    """

    place: StorageLocation
    name: str
    shipped: bool

    @property
    def generation(self) -> int:
        """Return the generation of the process that wrote it; 0 for other logs."""
        found = _NAME.fullmatch(self.name)
        return int(found["generation"]) if found else 0

    @property
    def rank(self) -> int | None:
        """Return the rank of the process that wrote it."""
        found = _NAME.fullmatch(self.name)
        return int(found["rank"]) if found else None

    @property
    def uri(self) -> str:
        return self.place.uri_of(self.name)

    def size(self) -> int:
        """Return bytes. Raises ``StorageError``."""
        with translated(f"read the log {self.uri}"):
            if not self.shipped:
                return int(self.place.fs().get_file_info(self.place.path(self.name)).size or 0)
            last = self.place.entries(self.name)[-1:]
            return sum(int(one.base_name) + int(one.size or 0) for one in last if one.base_name.isdigit())

    def read(self, offset: int) -> bytes:
        """Return what there is from ``offset`` bytes on. Raises ``StorageError`` where a segment is missing."""
        with translated(f"read the log {self.uri}"):
            if not self.shipped:
                size = self.size()
                return self.place.read_range(self.name, offset, size - offset) if size > offset else b""
            found, at = b"", offset - offset % SEGMENT
            names = {one.base_name for one in self.place.entries(self.name)}
            while segment_name(at) in names:
                found += self.place.read(f"{self.name}/{segment_name(at)}")
                at += SEGMENT
            if any(int(name) > at for name in names if name.isdigit()):
                raise StorageError(f"the log {self.uri} lacks its segment {segment_name(at)}")
            return found[offset % SEGMENT :]

    def tail(self, lines: int) -> tuple[list[bytes], int]:
        """Return the last ``lines`` lines, and the offset after them. Raises ``StorageError``."""
        size = self.size()
        begin = max(size - SEGMENT, 0)
        content = self.read(begin)
        found = content.splitlines()
        if begin and found:
            found = found[1:]  # its beginning is not there
        return (found[-lines:] if lines else []), begin + len(content)


def find_logs(run: StorageLocation) -> list[LogFile]:
    """Return the logs of a run, those of the newest generation last. Raises ``StorageError``.

    Args:
        run: its directory.
    """
    place = run.under(LOGS)
    with translated(f"list the logs in {place}"):
        found = files.listing(place.fs(), place.root, recursive=True)
    names: dict[str, bool] = {}
    for one in found:
        name = str(one.path)[len(place.root.rstrip("/")) + 1 :]
        if place.local and one.is_file:
            names[name] = False
        elif one.is_file and one.base_name.isdigit():
            names[name.rpartition("/")[0]] = True
    logs = [LogFile(place, name, shipped) for name, shipped in names.items()]
    kept = [one for one in logs if one.rank is not None or one.name.endswith(".log")]
    return sorted(kept, key=lambda one: (one.generation, one.rank or 0, one.name))
