"""Taking part in a tuning run that another process has begun: what was asked for is in the study's database."""

from collections.abc import Mapping
from typing import Any

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import TrainingError
from ebbflow.infra.packages import require
from ebbflow.infra.tuning.database import open_storage, study_errors
from ebbflow.planners.model import names
from ebbflow.tasks.training.code import has_code
from ebbflow.tasks.tuning.code import TuningCode
from ebbflow.tasks.tuning.request import CODE, LEDGER, TuningRequest
from ebbflow.tasks.tuning.study import REQUEST


def join_tuning(
    study: str, id: str, changes: Mapping[str, Any] | None = None, clock: Clock | None = None
) -> TuningRequest:
    """Return the request of this process for its part in the tuning run ``id``, to be run with ``resume``.

    Args:
        study: database of the study, or ``ledger``; see ``TuningRequest.study``.
        id: ID of the tuning run.
        changes: options of this process: its nodes, the script where it is elsewhere, the directory of runs.
        clock: the time.

    Raises ``TrainingError`` where there is no such study, ``OptionError`` for an address that is none and for options
    that are the same for all processes and differ, ``LedgerError``.
    """
    from ebbflow.infra.ledger.address import parse

    require("optuna", "a tuning run", "tune")
    names.RUN.check(id)
    address = parse(None if study == LEDGER else study)
    storage = open_storage(address, clock or SystemClock())
    try:
        with study_errors("read the study", address):
            content = storage.get_study_user_attrs(storage.get_study_id_from_name(id)).get(REQUEST)
    except KeyError:
        content = None
    finally:
        storage.engine.dispose()
    if not isinstance(content, Mapping):
        raise TrainingError(
            f"there is no tuning run {id!r} in {address} to join: begin it with ebbflow tune SCRIPT --study"
        )
    request = TuningRequest.joined(content, study, changes or {})
    if set(CODE) & (changes or {}).keys() and has_code(request):  # whatever its directory has
        TuningCode(request, fresh=True).check(content.get("code", {}))
    return request
