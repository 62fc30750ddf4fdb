"""Reading spot traces of nodes that are added and removed (Oobleck, SOSP 2023, artefact)."""

import re
from pathlib import Path
from typing import Literal, NamedTuple

from ebbflow.infra.errors import WorkloadError
from ebbflow.infra.storage import user_files

_MILLISECONDS = re.compile(r"[0-9]{1,16}")


class SpotRow(NamedTuple):
    """One row of a spot trace."""

    at: int  # ms
    kind: Literal["add", "remove"]
    node: str


def read_spot_rows(path: Path) -> list[SpotRow]:
    """Return the rows of a headerless ``time_ms,add|remove,node`` file, in its order.

    Raises ``WorkloadError`` with file, line and reason: malformed row, time going back, a node added twice or removed
    while absent.
    """
    lines = user_files.read_text(path, max_bytes=user_files.MAX_TEXT_BYTES, error=WorkloadError).splitlines()
    rows: list[SpotRow] = []
    present: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        fields = [field.strip() for field in line.split(",")]
        if not (
            len(fields) == 3
            and _MILLISECONDS.fullmatch(fields[0])
            and fields[1] in ("add", "remove")
            and fields[2]
        ):
            raise WorkloadError(f"{path}, line {number}: must be time_ms,add|remove,node; got {line!r}")
        at, kind, node = int(fields[0]), fields[1], fields[2]
        if rows and at < rows[-1].at:
            raise WorkloadError(f"{path}, line {number}: time goes back from {rows[-1].at} to {at} ms")
        if (kind == "add") == (node in present):
            state = "added while present" if kind == "add" else "removed while absent"
            raise WorkloadError(f"{path}, line {number}: node {node} is {state}")
        present ^= {node}
        rows.append(SpotRow(at, "add" if kind == "add" else "remove", node))
    if not rows:
        raise WorkloadError(f"{path}: has no events")
    return rows
