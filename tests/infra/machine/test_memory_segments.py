"""Memory that processes of one machine share: read by who is told its proof, never shrunk, free again."""

import fcntl
import gc
import mmap
import os
import subprocess
import sys

import pytest

from ebbflow.infra.errors import InfraError
from ebbflow.infra.machine.memory_segments import MemoryArena, MemorySegment, SegmentName, open_segment

READER = """
import sys
from ebbflow.infra.machine.memory_segments import SegmentName, open_segment
view = open_segment(SegmentName(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
print(bytes(view[:5]).decode(), len(view), view.readonly)
"""


def test_another_process_reads_what_is_written_and_cannot_change_it() -> None:
    segment = MemorySegment(1 << 16)
    segment.view[:5] = b"hello"
    command = [sys.executable, "-c", READER, *map(str, segment.name)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=150, check=True)
    assert found.stdout.split() == ["hello", str(1 << 16), "True"]


def test_who_opens_a_segment_for_writing_cannot_write() -> None:
    segment = MemorySegment(100)
    writable = os.open(f"/proc/self/fd/{segment.name.descriptor}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(writable, 4096 + 100)
        with pytest.raises(PermissionError):
            os.write(writable, b"x")
    finally:
        os.close(writable)
    segment.view[:1] = b"y"
    assert open_segment(segment.name)[0] == ord("y")


def test_a_view_follows_its_segment_and_outlives_it() -> None:
    segment = MemorySegment(100)
    view = open_segment(SegmentName.of(list(segment.name)))
    segment.view[3:4] = b"x"
    assert view[3] == ord("x")
    name = segment.name
    del segment
    gc.collect()
    assert view[3] == ord("x"), "of a process that is gone, too"
    with pytest.raises(InfraError):
        open_segment(name)


def test_what_is_not_the_named_segment_is_refused() -> None:
    segment, other = MemorySegment(100), MemorySegment(100)
    with pytest.raises(InfraError, match="of who has named it"):
        open_segment(segment.name._replace(proof=other.name.proof))
    with pytest.raises(InfraError, match="101 bytes"):
        open_segment(segment.name._replace(size=101))
    with open(os.devnull) as file, pytest.raises(InfraError, match="segment of memory"):
        open_segment(segment.name._replace(descriptor=file.fileno()))
    with pytest.raises(InfraError, match="cannot be read"):
        open_segment(segment.name._replace(process=1 << 30))
    loose = os.memfd_create("ebbflow-segment", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, 4096 + 100)
    try:
        with pytest.raises(InfraError, match="sealed"):
            open_segment(segment.name._replace(descriptor=loose))
    finally:
        os.close(loose)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(segment.name.descriptor, 1)
    assert fcntl.fcntl(segment.name.descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK


@pytest.mark.parametrize(
    "values",
    [None, "abcd", [1, 2, 3], [1, 2, "short", 4], [-1, 2, "0" * 64, 4], [True, 2, "0" * 64, 4], [1, 2, 3, 4]],
)  # fmt: skip
def test_what_is_no_name_is_refused(values: object) -> None:
    with pytest.raises(InfraError, match="segment"):
        SegmentName.of(values)


def test_slots_do_not_overlap_and_are_used_again() -> None:
    arena = MemoryArena(chunk=1 << 12)
    slots = [arena.take(1000) for _ in range(9)]
    assert len({slot.name[0][1] for slot in slots}) == 3, "descriptors: four of 1000 bytes fit a segment"
    for at, slot in enumerate(slots):
        slot.view[:] = bytes([at]) * 1000
    assert [set(slot.view) for slot in slots] == [{at} for at in range(9)]
    name = slots[4].name
    assert name == slots[4].name
    del slots[4], slot
    assert arena.take(1000).name == name
    assert len(arena.take(1 << 14).view) == 1 << 14
    assert arena.name.size >= 1 << 12
