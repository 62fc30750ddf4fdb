"""Packages that may be missing."""

import pytest

from ebbflow.infra.errors import EngineUnavailableError
from ebbflow.infra.packages import require


def test_what_is_missing_is_named_with_what_brings_it() -> None:
    require("json", "a report", "none")
    with pytest.raises(
        EngineUnavailableError, match=r"a dream needs no_such_thing: pip install 'prefect-ebbflow\[dreams\]'"
    ):
        require("no_such_thing", "a dream", "dreams")
