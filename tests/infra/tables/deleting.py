"""Tables of Delta Lake with deletion vectors, which their library reads and does not write."""

import base64
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

DELETING = {"delta.enableDeletionVectors": "true"}


def edited(path: Path, version: int, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change the actions of a commit as ``edit`` does."""
    log = path / f"_delta_log/{version:020d}.json"
    actions = [json.loads(line) for line in log.read_text().splitlines()]
    for action in actions:
        edit(action)
    log.write_text("\n".join(map(json.dumps, actions)))


def delete_by_vector(path: Path, version: int, rows: list[int], name: str = "") -> None:
    """Let a commit's files, or the one whose path has ``name`` in it, have a deletion vector."""
    from pyroaring import BitMap

    content = struct.pack("<iqi", 1681511377, 1, 0) + BitMap(rows).serialize()
    content += b"\0" * (-len(content) % 4)
    standard = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
    ours = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    vector = base64.b85encode(content).translate(bytes.maketrans(standard, ours)).decode()

    def deleted(action: dict[str, Any]) -> None:
        if "add" in action and name in action["add"]["path"]:
            action["add"]["deletionVector"] = {
                "storageType": "i", "pathOrInlineDv": vector, "sizeInBytes": len(content), "cardinality": len(rows),
            }  # fmt: skip

    edited(path, version, deleted)
