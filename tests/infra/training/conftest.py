"""What tests of checkpoints share."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def no_sync() -> Iterator[None]:
    """Leave out waiting for the disk, which says nothing about what is written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield
