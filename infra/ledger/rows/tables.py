"""The state as the tables have it, to compare with what the events add up to."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from sqlalchemy import Connection, Table, func, select

from ebbflow.infra.ledger.database.schema import (
    apps,
    checkpoints,
    clusters,
    decisions,
    leads,
    leases,
    nodes,
    notices,
)
from ebbflow.infra.ledger.rows import codec
from ebbflow.planners.model.capacity import Node, Notice
from ebbflow.planners.model.ledger import AppRecord, AppSpec, Lease, Slot
from ebbflow.planners.model.ledger_state import State

_CLOSE = 1e-9  # relative: sums of the same numbers in another order


def from_tables(connection: Connection, cluster: str) -> State:
    """Return the state that the tables hold. Raises ``LedgerError`` for a specification that cannot be read."""
    row = connection.execute(select(clusters).where(clusters.c.cluster == cluster)).one()
    names = ("number", "at", "token", "holder", "revision", "last_lease", "hazard")
    state = State(**{name: getattr(row, name) for name in names})
    for row in _rows(connection, nodes, cluster):
        if row.gone is None:
            values = {f.name: getattr(row, f.name) for f in fields(Node) if f.name != "id"}
            state.nodes[row.node] = Node(id=row.node, **values)
    for row in _rows(connection, notices, cluster):
        state.notices[row.node] = Notice(row.node, row.deadline, row.kind)
    for row in _rows(connection, apps, cluster):
        state.apps[row.app] = app_of(row)
    for row in _rows(connection, leases, cluster):
        if row.ended is None:
            values = {f.name: getattr(row, f.name) for f in fields(Lease) if f.name != "number"}
            state.leases[row.lease] = Lease(number=row.lease, **values)
            state.booked[Slot(row.node, row.slot)] = row.lease
    return state


def app_of(row: Any) -> AppRecord:
    """Return the app of a row of ``apps``. Raises ``LedgerError`` for a specification that cannot be read."""
    spec = codec.load(AppSpec, codec.FORMAT, row.spec)
    return AppRecord(spec, **{f.name: getattr(row, f.name) for f in fields(AppRecord) if f.name != "spec"})


def differences(expected: State, found: State) -> list[str]:
    """Return what differs between the state of the events and that of the tables, as sentences."""
    said = []
    for field in fields(State):
        wanted, there = getattr(expected, field.name), getattr(found, field.name)
        if isinstance(wanted, dict):
            said += _between(field.name, wanted, there)
        elif wanted != there:
            said.append(f"{field.name} is {there!r} in the tables, {wanted!r} by the events")
    return said


def accounts(connection: Connection, cluster: str, state: State, every: Mapping[str, AppRecord]) -> list[str]:
    """Return where leases that ended, decisions, checkpoints and the lead differ from ``state`` and ``every`` app."""
    said = []
    sums = (
        select(
            leases.c.app,
            func.sum(_served()),
            func.sum(_served() / 3600 * leases.c.price),
        )
        .where(leases.c.cluster == cluster, leases.c.ended.is_not(None))
        .group_by(leases.c.app)
    )
    served = {app: (seconds, dollars) for app, seconds, dollars in connection.execute(sums)}
    for app, record in every.items():
        seconds, dollars = served.get(app, (0.0, 0.0))
        if not (_near(record.service, seconds) and _near(record.dollars, dollars)):
            said.append(
                f"app {app!r} has {record.service:g} GPU-seconds and ${record.dollars:g} by the events, "
                f"its ended leases add up to {seconds:g} and ${dollars:g}"
            )
    for app in sorted(set(served) - set(every)):
        said.append(f"leases of app {app!r} have ended, but there is no such app")
    said += _forgotten(state, every)
    for table in (decisions, checkpoints):
        above = table.c.number > state.number
        count = connection.execute(select(func.count()).where(table.c.cluster == cluster, above)).scalar_one()
        if count:
            said.append(f"{count} rows of {table.name} are of events that are not there")
    token = connection.execute(select(leads.c.token).where(leads.c.cluster == cluster)).scalar() or 0
    if token != state.token:
        said.append(f"the leader lease has token {token}, by the events it is {state.token}")
    return said


def _forgotten(state: State, every: Mapping[str, AppRecord]) -> list[str]:
    """Return where the sums that ``state`` keeps are not what the apps have cost that it has forgotten."""
    teams, pipelines = dict.fromkeys(state.teams, 0.0), dict.fromkeys(state.pipelines, 0.0)
    there = {record.spec.pipeline for record in state.apps.values()}
    for app, record in every.items():
        spec = record.spec
        if app in state.apps:
            continue
        if spec.team:
            teams[spec.team] = teams.get(spec.team, 0.0) + record.dollars
        if spec.pipeline and spec.pipeline in there:
            pipelines[spec.pipeline] = pipelines.get(spec.pipeline, 0.0) + record.dollars
    said = []
    for kind, sums, kept in (("team", teams, state.teams), ("pipeline", pipelines, state.pipelines)):
        said += [
            f"{kind} {name!r}: apps that are over have cost ${dollars:g}, by the events ${kept.get(name, 0.0):g}"
            for name, dollars in sorted(sums.items())
            if not _near(dollars, kept.get(name, 0.0))
        ]
    return said


def _served() -> Any:
    seconds = leases.c.ended - leases.c.since
    return (seconds + func.abs(seconds)) / 2  # 0 where a clock was put back between


def _near(left: float, right: float) -> bool:
    return abs(left - right) <= _CLOSE * max(1.0, abs(left), abs(right))


def _rows(connection: Connection, table: Table, cluster: str) -> Any:
    return connection.execute(select(table).where(table.c.cluster == cluster))


def _between(name: str, wanted: dict[Any, Any], there: dict[Any, Any]) -> list[str]:
    said = []
    for key in sorted(set(wanted) | set(there), key=str):
        if key not in there:
            said.append(f"{name}: {key!r} is missing in the tables")
        elif key not in wanted:
            said.append(f"{name}: {key!r} is in the tables, but by no event")
        elif wanted[key] != there[key]:
            said.append(f"{name}: {key!r} is {there[key]!r} in the tables, {wanted[key]!r} by the events")
    return said
