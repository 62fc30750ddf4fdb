"""Values that processes of one world exchange: what comes out is what went in, and nothing else can come out."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from ebbflow.infra.errors import CheckpointsLostError, DamagedInputError, StorageFullError, TrainingError
from ebbflow.infra.training.checkpoints.folder import VerifiedCheckpoint
from ebbflow.infra.training.checkpoints.manifest import Payload
from ebbflow.infra.training.process import agreeing
from ebbflow.infra.training.resuming import Choice


def through(value: Any) -> Any:
    return agreeing._decoded(agreeing._tensor(agreeing._encoded(value)))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -3,
        2.5,
        math.inf,
        "é",
        [1, "a", None],
        (1, (2.0, [3])),
        {"a": (1, 2), 3: {"b": []}, (4, 5): None},
        {"class": "Choice", "error": "x", "tuple": 1},
        Payload("a.pt", 7, "00" * 32),
        Choice(
            found=VerifiedCheckpoint(
                3, "n", "u", 1.0, 9, {"k": [1]}, {"w": ((2,), "int8")}, "sharded", (Payload("a", 1, "0"),)
            ),
            passed_over=("x",),
        ),
    ],
)  # fmt: skip
def test_what_comes_out_is_what_went_in(value: Any) -> None:
    assert through(value) == value
    assert type(through(value)) is type(value)


def test_numbers_of_numpy_are_numbers() -> None:
    assert through([np.int64(3), np.float64(0.5), np.float32(0.5), np.bool_(True)]) == [3, 0.5, 0.5, True]
    assert math.isnan(through(math.nan))


def test_errors_keep_their_kind_where_it_is_ours() -> None:
    for error in (StorageFullError("full: é"), CheckpointsLostError("all")):
        found = through((None, error))[1]
        assert (type(found), str(found)) == (type(error), str(error))
    for error in (OSError("x"), DamagedInputError("x", ["f"])):
        found = through(error)
        assert type(found) is TrainingError
        assert str(found) == f"{type(error).__name__}: x"


def test_what_is_no_plain_value_is_refused_where_it_starts() -> None:
    for value in (object(), torch.zeros(2), {1, 2}, b"x", print):
        with pytest.raises(TrainingError, match="processes cannot exchange a"):
            agreeing._encoded(value)


@pytest.mark.parametrize(
    "said",
    [
        b"\x80\x04cos\nsystem\n(S'true'\ntR.",
        b"\xff",
        b"{}",
        b'{"class": "system"}',
        b'{"class": "Payload", "fields": {"no": 1}}',
        b'{"class": ["Payload"], "fields": {}}',
        b'{"class": "Payload", "fields": 3}',
        b'{"tuple": 3}',
        b'{"dict": [[1]]}',
        b'{"dict": [[[], 1]]}',
        b'{"number": "x"}',
        json.dumps({"error": "x"}).encode(),
        b"[" * 100_000,
    ],
)
def test_what_another_process_should_not_send_is_an_error(said: bytes) -> None:
    with pytest.raises(TrainingError, match="another process sent an invalid value"):
        agreeing._decoded(agreeing._tensor(said))
