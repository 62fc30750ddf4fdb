"""Listings of a store with nodes' memory before it hold each file, whenever the store behind gets it."""

from types import SimpleNamespace
from typing import Any

from pyarrow.fs import FileInfo, FileSelector, FileType

from ebbflow.infra.memory.arrow import TierHandler
from ebbflow.infra.memory.blocks import BlockSettings
from ebbflow.infra.memory.files import TierFile


def test_a_file_that_is_stored_while_the_store_is_listed_is_in_the_listing() -> None:
    file = TierFile("bucket/data/part")
    file.size = 7

    class Base:
        """A store that answers with what it had before the file came."""

        def get_file_info(self, asked: Any) -> list[FileInfo]:
            file.stored = True
            return [FileInfo(path, FileType.NotFound) for path in asked] if isinstance(asked, list) else []

    tier: Any = SimpleNamespace(
        base=Base(), scheme="memory+s3", find=lambda path: file, below=lambda folder: [file]
    )
    handler = TierHandler(tier, BlockSettings())
    (found,) = handler.get_file_info_selector(FileSelector("bucket/data"))
    assert (found.path, found.type, found.size) == (file.path, FileType.File, 7)
    file.stored = False
    (found,) = handler.get_file_info([file.path])
    assert (found.type, found.size) == (FileType.File, 7)
    (found,) = handler.get_file_info([file.path])
    assert found.type == FileType.NotFound, "it is the store's now"
