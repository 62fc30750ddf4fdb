"""What each change does to the tables, in the transaction that writes it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

from sqlalchemy import Connection, Executable, Table, bindparam, case, delete, update
from sqlalchemy.dialects import postgresql, sqlite

from ebbflow.infra.ledger.database.schema import (
    apps,
    checkpoints,
    clusters,
    decisions,
    events,
    leases,
    mentions,
    nodes,
    notices,
    reports,
)
from ebbflow.infra.ledger.rows import codec, seals
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.ledger import (
    AppEntered,
    AppMoved,
    AppRecord,
    CapacityChanged,
    Change,
    Decided,
    Ended,
    Event,
    Extended,
    Granted,
    Lease,
    Recalled,
    Saved,
)
from ebbflow.planners.model.ledger_state import State

_CHUNK = 500  # values in one IN list
_HEAD = ("number", "at", "token", "holder", "revision", "last_lease", "hazard")

Row = dict[str, Any]


def chunks(values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Return ``values`` in parts that fit one IN list."""
    for start in range(0, len(values), _CHUNK):
        yield values[start : start + _CHUNK]


def upsert(connection: Connection, table: Table, rows: Sequence[Row]) -> None:
    """Insert ``rows``, or set every column of those whose key is there."""
    if rows:
        connection.execute(_upserting(connection.dialect.name, table), rows)


@cache
def _upserting(dialect: str, table: Table) -> Executable:
    module = sqlite if dialect == "sqlite" else postgresql
    statement = module.insert(table)
    keys = [column.key for column in table.primary_key]
    values: Row = {
        column.key: statement.excluded[column.key] for column in table.columns if column.key not in keys
    }
    if table is nodes:  # a node that is there has come when it came first
        values["came"] = case((nodes.c.gone.is_(None), nodes.c.came), else_=statement.excluded.came)
    found: Executable = statement.on_conflict_do_update(index_elements=keys, set_=values)
    return found


def record(
    connection: Connection,
    cluster: str,
    batch: str,
    packed: Sequence[codec.StoredChange],
    written: Sequence[Event],
) -> None:
    """Append ``written`` to the events."""
    rows = [
        {
            "cluster": cluster,
            "number": event.number,
            "at": event.at,
            "kind": change.kind,
            "format": codec.FORMAT,
            "batch": batch,
            "body": seals.seal(change.body, event.number, float(event.at), change.kind),
        }
        for change, event in zip(packed, written, strict=True)
    ]
    connection.execute(events.insert(), rows)


def mentioned(change: Change, state: State) -> frozenset[str]:
    """Return the apps that ``change`` is about; ``state`` is the one before it."""
    match change:
        case AppEntered():
            return frozenset({change.spec.id})
        case AppMoved() | Saved():
            return frozenset({change.app})
        case Decided():
            return frozenset({change.app} - {""})
        case Granted():
            return frozenset(lease.app for lease in change.leases)
        case Extended() | Recalled() | Ended():
            return frozenset(state.leases[number].app for number in change.leases if number in state.leases)
    return frozenset()


def mention(connection: Connection, cluster: str, about: Sequence[tuple[int, frozenset[str]]]) -> None:
    """Note which events are about which apps."""
    rows = [
        {"cluster": cluster, "app": app, "number": number} for number, ids in about for app in sorted(ids)
    ]
    if rows:
        connection.execute(mentions.insert(), rows)


def project(
    connection: Connection,
    cluster: str,
    event: Event,
    known: Mapping[str, AppRecord],
    about: frozenset[str],
) -> None:
    """Make the tables follow ``event``, which is ``about`` these apps; ``known`` are all apps as it has made them."""
    change = event.change
    key = {"cluster": cluster}
    match change:
        case CapacityChanged():
            _project_capacity(connection, cluster, event.at, change)
        case AppEntered():
            upsert(connection, apps, [app_row(cluster, known[change.spec.id])])
            connection.execute(
                delete(reports).where(reports.c.cluster == cluster, reports.c.app == change.spec.id)
            )
        case AppMoved():
            _set_apps(connection, cluster, known, [change.app], "phase", "reason", "ended")
        case Granted():
            if change.leases:
                rows = [lease_row(cluster, lease) for lease in change.leases]
                connection.execute(leases.insert(), rows)
            begun = {lease.since for lease in change.leases}
            new = [app for app in sorted(about) if known[app].first_lease in begun]
            _set_apps(connection, cluster, known, new, "first_lease")
        case Extended():
            _set_leases(connection, cluster, change.leases, until=change.until)
        case Recalled():
            _set_leases(connection, cluster, change.leases, recalled=change.deadline)
        case Ended():
            _set_leases(connection, cluster, change.leases, ended=event.at, ended_reason=change.reason)
            _set_apps(connection, cluster, known, sorted(about), "service", "dollars")
        case Saved():
            _set_apps(connection, cluster, known, [change.app], "checkpoint")
            row = {**key, "number": event.number, "app": change.app, "uri": change.uri}
            connection.execute(checkpoints.insert(), {**row, "step": change.step, "at": event.at})
        case Decided():
            row = {**key, "number": event.number, "at": event.at, "kind": change.kind, "app": change.app}
            more = {"revision": change.revision, "seconds": change.seconds, "reason": change.reason}
            connection.execute(decisions.insert(), {**row, **more})


def head(connection: Connection, cluster: str, state: State) -> None:
    """Make the cluster's own row follow ``state``."""
    values = {name: getattr(state, name) for name in _HEAD}
    connection.execute(
        _updating(clusters, "cluster", _HEAD), {"of_cluster": cluster, "of_key": cluster, **values}
    )


def app_row(cluster: str, found: AppRecord) -> Row:
    """Return an app as its table has it."""
    spec = found.spec
    return {
        "cluster": cluster,
        "app": spec.id,
        "kind": spec.kind,
        "team": spec.team,
        "title": spec.title,
        "pipeline": spec.pipeline,
        "phase": found.phase,
        "reason": found.reason,
        "entered": found.entered,
        "number": found.number,
        "ended": found.ended,
        "service": found.service,
        "dollars": found.dollars,
        "first_lease": found.first_lease,
        "checkpoint": found.checkpoint,
        "spec": json.dumps(codec.encode(spec), separators=(",", ":")),
    }


def lease_row(cluster: str, lease: Lease) -> Row:
    """Return a lease that is held as its table has it."""
    row = asdict(lease)
    row["lease"] = row.pop("number")
    return {"cluster": cluster, **row, "ended": None, "ended_reason": ""}


def node_row(cluster: str, node: Node, came: float) -> Row:
    """Return a node that is there as its table has it."""
    row = asdict(node)
    row["node"] = row.pop("id")
    return {"cluster": cluster, **row, "came": came, "gone": None}


def _project_capacity(connection: Connection, cluster: str, at: float, change: CapacityChanged) -> None:
    upsert(connection, nodes, [node_row(cluster, node, at) for node in change.nodes])
    for part in chunks(change.left):
        gone = update(nodes).where(nodes.c.cluster == cluster, nodes.c.node.in_(part))
        connection.execute(gone, {"gone": at})
    connection.execute(delete(notices).where(notices.c.cluster == cluster))
    told = {n.node_id: n for n in change.notices}  # of one node the last counts, as in ``fold``
    if told:
        connection.execute(
            notices.insert(),
            [
                {"cluster": cluster, "node": n.node_id, "deadline": n.deadline, "kind": n.kind}
                for n in told.values()
            ],
        )


def _set_apps(
    connection: Connection, cluster: str, known: Mapping[str, AppRecord], ids: Sequence[str], *names: str
) -> None:
    """Make these columns of these apps follow ``known``."""
    rows = [
        {"of_cluster": cluster, "of_key": app, **{name: getattr(known[app], name) for name in names}}
        for app in ids
    ]
    if rows:
        connection.execute(_updating(apps, "app", names), rows)


@cache
def _updating(table: Table, key: str, names: tuple[str, ...]) -> Executable:
    mine = (table.c.cluster == bindparam("of_cluster")) & (table.c[key] == bindparam("of_key"))
    return update(table).where(mine).values({name: bindparam(name) for name in names})


def _set_leases(connection: Connection, cluster: str, numbers: Sequence[int], **values: Any) -> None:
    statement = _updating_leases(tuple(values))
    for part in chunks(numbers):
        connection.execute(statement, {"of_cluster": cluster, "of_numbers": part, **values})


@cache
def _updating_leases(names: tuple[str, ...]) -> Executable:
    return update(leases).where(_THESE_LEASES).values({name: bindparam(name) for name in names})


_THESE_LEASES = (leases.c.cluster == bindparam("of_cluster")) & leases.c.lease.in_(
    bindparam("of_numbers", expanding=True)
)
