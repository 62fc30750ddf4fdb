"""Daemons that lend memory to a test, and the registry that knows them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ebbflow.infra.memory.registry import MemoryRegistry
from tests.infra.memory.lenders import Lender


@pytest.fixture(name="registry")
def _registry(tmp_path: Path) -> MemoryRegistry:
    found = MemoryRegistry(tmp_path / "memory")
    found.token(create=True)
    return found


@pytest.fixture(name="lend")
def _lend(registry: MemoryRegistry) -> Iterator[Callable[..., Lender]]:
    made: list[Lender] = []

    def start(name: str, **options: object) -> Lender:
        made.append(Lender(registry, name, **options))
        return made[-1]

    yield start
    for one in made:
        one.close()
