"""One changed byte in a store, of a chosen kind, as a disk that goes bad leaves it: same size, same time."""

import os
import random
import struct
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from ebbflow.infra.storage.checksums import unsealed

KINDS = ("page header", "page", "footer", "manifest")
_HEADER = 12  # bytes; no page header is shorter
_TAIL = 8  # bytes: the footer's length and the magic


@dataclass(frozen=True)
class Flip:
    """Byte ``offset`` of ``path`` is replaced by itself xor ``mask``."""

    kind: str
    path: Path
    offset: int
    mask: int

    def __str__(self) -> str:
        return (
            f"{self.kind} of {self.path.parent.name}/{self.path.name}: byte {self.offset} ^ {self.mask:#04x}"
        )


def regions(path: Path, kind: str) -> list[range]:
    """Return where a file holds bytes of ``kind``."""
    size = path.stat().st_size
    if kind == "manifest":
        return [range(size)]
    with path.open("rb") as file:
        file.seek(size - _TAIL)
        (length,) = struct.unpack("<I", file.read(4))
    if kind == "footer":
        return [range(size - _TAIL - length, size)]
    found, metadata = [], pq.read_metadata(path)
    for group in range(metadata.num_row_groups):
        for index in range(metadata.num_columns):
            column = metadata.row_group(group).column(index)
            starts = [at for at in (column.dictionary_page_offset, column.data_page_offset) if at is not None]
            end = min(starts) + column.total_compressed_size
            for start, stop in zip(sorted(starts), [*sorted(starts)[1:], end], strict=True):
                if kind == "page header":
                    found.append(range(start, start + _HEADER))
                else:  # the last third of a page with its header, which is beyond the header
                    found.append(range(stop - max(1, (stop - start) // 3), stop))
    return found


def choose(rng: random.Random, kind: str, folder: Path, fingerprint: str) -> Flip:
    """Return a flip of ``kind`` in the checkpoint ``fingerprint`` of the store ``folder``."""
    path = folder / "manifests" / f"{fingerprint}.json"
    if kind != "manifest":
        manifest = unsealed(path.read_bytes())
        path = folder / manifest["data"] / rng.choice(manifest["files"])["name"]
    return Flip(kind, path, rng.choice(rng.choice(regions(path, kind))), 1 << rng.randrange(8))


def apply(flip: Flip) -> None:
    """Change one byte in place; size and times stay."""
    before = flip.path.stat()
    with flip.path.open("r+b") as file:
        file.seek(flip.offset)
        value = file.read(1)[0]
        file.seek(flip.offset)
        file.write(bytes([value ^ flip.mask]))
    os.utime(flip.path, ns=(before.st_atime_ns, before.st_mtime_ns))
