"""Tables of Iceberg that tests make."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import Table

from ebbflow.infra.storage.places import StorageLocation
from tests.infra.tables.iceberg import SALES, Make


@pytest.fixture(name="make")
def _make(tmp_path: Path) -> Iterator[Make]:
    catalog = SqlCatalog(
        "tests", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{tmp_path}/warehouse"
    )
    catalog.create_namespace("n")

    def make(data: pa.Table = SALES, name: str = "t", **options: Any) -> Table:
        if catalog.table_exists(f"n.{name}"):
            catalog.drop_table(f"n.{name}")
            shutil.rmtree(tmp_path / "warehouse/n" / name)
        table = catalog.create_table(f"n.{name}", data.schema, **options)
        table.append(data)
        return table

    yield make
    catalog.close()


@pytest.fixture(name="iceberg_place")
def _place(tmp_path: Path) -> StorageLocation:
    return StorageLocation(tmp_path / "warehouse/n/t")
