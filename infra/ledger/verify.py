"""Is the ledger what its events say?"""

from dataclasses import replace

from sqlalchemy import Connection, func, select

from ebbflow.infra.errors import LedgerError
from ebbflow.infra.ledger import history
from ebbflow.infra.ledger.database.schema import clusters, decisions, events, snapshots
from ebbflow.infra.ledger.rows.tables import accounts, differences, from_tables
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.ledger import GONE, AppEntered, AppRecord
from ebbflow.planners.model.ledger_state import State, fold


def verify(connection: Connection, cluster: str) -> list[str]:
    """Replay all events of a cluster, compare each snapshot on the way and the tables at the end.

    Returns what is wrong, as sentences; nothing where all is well. Reads one moment, so it may run beside writers.
    """
    row = connection.execute(select(clusters).where(clusters.c.cluster == cluster)).one()
    numbers = _snapshot_numbers(connection, cluster)
    forgotten: dict[str, AppRecord] = {}
    try:
        state = history.origin(connection, cluster)
        said = _replay(connection, cluster, state, numbers, forgotten)
    except (LedgerError, OptionError) as error:
        return [str(error)]
    if state.number != row.number:
        said.append(f"the last event is {state.number}, the cluster's row says {row.number}")
    try:
        found = from_tables(connection, cluster)
    except LedgerError as error:
        return [*said, str(error)]
    said += accounts(connection, cluster, state, found.apps)
    known = {**forgotten, **state.apps}
    for app, record in list(found.apps.items()):
        if app not in known and record.number <= row.pruned and record.phase in GONE:
            del found.apps[app]  # it was forgotten before the first event that is still there
    said += differences(replace(state, apps=known, teams={}, pipelines={}), found)
    return said + _decisions(connection, cluster, row.pruned)


def _replay(
    connection: Connection, cluster: str, state: State, numbers: list[int], forgotten: dict[str, AppRecord]
) -> list[str]:
    """Fold all events into ``state``, and apps that it forgets into ``forgotten``; return which snapshots differ."""
    said, begun = [], state.number
    waiting = [number for number in numbers if number > begun]
    for event in history.stream(connection, cluster, state.number):
        fold(state, event, forgotten)
        if isinstance(event.change, AppEntered):
            forgotten.pop(event.change.spec.id, None)
        if waiting and waiting[0] == event.number:
            waiting.pop(0)
            found = history.snapshot(connection, cluster, event.number)
            if found is None:
                said.append(f"the snapshot at event {event.number} cannot be read")
            elif found != state:
                said += [f"the snapshot at event {event.number}: {one}" for one in differences(state, found)]
    said += [f"there is a snapshot at event {number}, but no such event" for number in waiting]
    said += [
        f"the snapshot at event {number} is before the first event" for number in numbers if number < begun
    ]
    return said


def _snapshot_numbers(connection: Connection, cluster: str) -> list[int]:
    wanted = select(snapshots.c.number).where(snapshots.c.cluster == cluster).order_by(snapshots.c.number)
    return list(connection.execute(wanted).scalars())


def _decisions(connection: Connection, cluster: str, pruned: int) -> list[str]:
    """Return whether the table of decisions lacks or invents one."""
    of_kind = (events.c.cluster == cluster) & (events.c.kind == "decided") & (events.c.number > pruned)
    written = connection.execute(select(func.count()).where(of_kind)).scalar_one()
    mine = (decisions.c.cluster == cluster) & (decisions.c.number > pruned)
    joined = (events.c.cluster == decisions.c.cluster) & (events.c.number == decisions.c.number)
    matched = connection.execute(
        select(func.count()).select_from(decisions.join(events, joined)).where(of_kind, mine)
    ).scalar_one()
    kept = connection.execute(select(func.count()).where(mine)).scalar_one()
    if written == matched == kept:
        return []
    return [f"{written} decisions were written, the table has {kept}, of which {matched} belong to them"]
