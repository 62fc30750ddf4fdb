"""Lost apps that name a deployment are started again by it: the part of a capacity loop that knows Prefect."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ebbflow.infra.errors import InfraError
from ebbflow.infra.ledger import Ledger
from ebbflow.planners.errors import EbbflowError
from ebbflow.tasks.apps.recovery import LostApp, request_of, resume_lost
from ebbflow.tasks.request import QueryRequest

LOOK = 2.0  # s between looks for apps that are lost

log = logging.getLogger(__name__)

Run = Callable[..., Any]


@contextmanager
def resuming(ledger: Ledger, run: Run | None = None, every: float = LOOK) -> Iterator[None]:
    """Start lost apps again while the block runs, from a thread of its own that the loop never waits for.

    ``run`` starts a deployment: ``prefect.deployments.run_deployment`` unless given.
    """
    stop = threading.Event()
    thread = threading.Thread(target=_work, args=(ledger, stop, run, every), name="loop-resume", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(every + 5.0)


def start(app: LostApp, run: Run | None = None) -> str:
    """Create a flow run of the app's deployment, and say which. Raises ``EbbflowError``."""
    assert app.resume is not None
    request = request_of(app.resume)
    if isinstance(request, QueryRequest):
        given: dict[str, Any] = {"sql": request.sql, "tables": request.tables, "store": request.store}
    else:
        given = {
            "script": request.script,
            "id": app.resume.id,
            "folder": app.resume.folder,
            "resume": True,
        }
    if run is None:
        from prefect.deployments import run_deployment

        run = run_deployment
    try:
        made = run(app.resume.deployment, parameters=given, timeout=0, as_subflow=False)
    except Exception as error:  # of Prefect's client, which has no common root
        raise InfraError(f"the deployment {app.resume.deployment} could not be run: {error}") from error
    return f"flow run {getattr(made, 'name', made)} of {app.resume.deployment}"


def _work(ledger: Ledger, stop: threading.Event, run: Run | None, every: float) -> None:
    told = False
    while not stop.wait(every):
        try:
            resume_lost(
                ledger,
                lambda app: start(app, run),
                mine=lambda app: bool(app.resume is not None and app.resume.deployment),
            )
            told = False
        except EbbflowError as error:
            if not told:  # an outage is told once
                log.warning("lost apps cannot be looked for: %s", error)
            told = True
        except Exception:
            log.exception("lost apps could not be started again")
