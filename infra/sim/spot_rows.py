"""Reading spot traces of nodes that are added and removed (Oobleck, SOSP 2023, artefact)."""

from pathlib import Path
from typing import Literal, NamedTuple

from ebbflow.infra.errors import WorkloadError


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
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path}: cannot be read: {error}") from error
    rows: list[SpotRow] = []
    present: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 3 or not fields[0].isdigit() or fields[1] not in ("add", "remove") or not fields[2]:
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
