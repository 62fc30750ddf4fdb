"""A Spark for a module of tests of native stages."""

from collections.abc import Iterator

import pytest

from ebbflow.infra.spark.engine import SparkEngine


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkEngine]:
    with SparkEngine.start("local[2]", memory="1g") as engine:
        yield engine
