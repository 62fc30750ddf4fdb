"""Apps that the state has forgotten: the tables know them, and give their accounts back when they come back."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from sqlalchemy import ColumnElement, Connection, func, select

from ebbflow.infra.ledger.database.schema import apps
from ebbflow.infra.ledger.rows.tables import app_of
from ebbflow.planners.model.ledger import OVER, AppEntered, AppMoved, AppRecord, Change, Past, Saved
from ebbflow.planners.model.ledger_state import State


def completed(connection: Connection, cluster: str, state: State, change: Change) -> Iterator[Change]:
    """Return what is written for ``change`` where ``state`` stands: itself, with what was forgotten.

    An app that enters gets its account back. One that was forgotten and has more to say has come back: it enters
    first, as it was described last.
    """
    match change:
        case AppEntered():
            yield _entering(connection, cluster, state, change)
        case AppMoved(app=id_) | Saved(app=id_) if id_ not in state.apps:
            known = recorded(connection, cluster, id_)
            if known is not None:
                yield _entering(connection, cluster, state, AppEntered(known.spec), known)
                if isinstance(change, Saved):  # which does not say that it runs again
                    yield AppMoved(id_, known.phase, known.reason)
            yield change
        case _:
            yield change


def recorded(connection: Connection, cluster: str, id_: str) -> AppRecord | None:
    """Return an app as the tables have it. Raises ``LedgerError`` for a specification that cannot be read."""
    row = connection.execute(select(apps).where(_mine(cluster), apps.c.app == id_)).one_or_none()
    return None if row is None else app_of(row)


def ended(connection: Connection, cluster: str, most: int) -> list[AppRecord]:
    """Return the ``most`` apps that were over last, the newest first. Raises ``LedgerError``."""
    wanted = select(apps).where(_mine(cluster), apps.c.phase.in_(sorted(OVER)))
    return [app_of(row) for row in connection.execute(wanted.order_by(apps.c.ended.desc()).limit(most))]


def _entering(
    connection: Connection, cluster: str, state: State, change: AppEntered, known: AppRecord | None = None
) -> AppEntered:
    spec = change.spec
    past = None
    if spec.id not in state.apps:
        known = known or recorded(connection, cluster, spec.id)
        past = None if known is None else _past(known)
    dollars = 0.0
    if spec.pipeline and not any(one.spec.pipeline == spec.pipeline for one in state.apps.values()):
        others = _mine(cluster) & (apps.c.pipeline == spec.pipeline) & (apps.c.app != spec.id)
        dollars = float(connection.execute(select(func.sum(apps.c.dollars)).where(others)).scalar() or 0.0)
    return replace(change, past=past, pipeline_dollars=dollars)


def _past(known: AppRecord) -> Past:
    return Past(
        known.entered,
        known.number,
        known.service,
        known.dollars,
        known.first_lease,
        known.checkpoint,
        known.spec.team,
        known.spec.pipeline,
    )


def _mine(cluster: str) -> ColumnElement[bool]:
    mine: ColumnElement[Any] = apps.c.cluster == cluster
    return mine
