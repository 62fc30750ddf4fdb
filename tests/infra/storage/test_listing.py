"""Listings of directories that others change meanwhile."""

from pathlib import Path
from typing import Any

import pytest
from pyarrow.fs import LocalFileSystem

from ebbflow.infra.storage import files


class Vanishing:
    """A file system in which a directory goes while it is listed, so many times."""

    def __init__(self, times: int) -> None:
        self.left = times

    def get_file_info(self, selector: Any) -> Any:
        if self.left:
            self.left -= 1
            raise FileNotFoundError(2, "Cannot list directory")
        return LocalFileSystem().get_file_info(selector)


def test_a_directory_that_goes_while_its_parent_is_listed_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    assert [info.base_name for info in files.listing(Vanishing(2), str(tmp_path))] == ["a"]
    assert files.listing(Vanishing(1), str(tmp_path / "gone")) == []
    with pytest.raises(FileNotFoundError):
        files.listing(Vanishing(3), str(tmp_path))
