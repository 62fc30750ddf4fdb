"""The ledger of one cluster: what is written, by whom, and what it adds up to."""

from collections.abc import Callable, Collection, Iterable, MutableMapping, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from sqlalchemy import Connection, select

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import LedgerError
from ebbflow.infra.ledger import history, retention
from ebbflow.infra.ledger import overview as clusters
from ebbflow.infra.ledger.address import Address, parse
from ebbflow.infra.ledger.database.database import Database
from ebbflow.infra.ledger.database.schema import events, mentions, reports
from ebbflow.infra.ledger.journal import Journal
from ebbflow.infra.ledger.leadership import LeaderLease, Leadership, begin_leadership, leader_lease_of
from ebbflow.infra.ledger.migrate import create_or_migrate
from ebbflow.infra.ledger.overview import Overview, overview
from ebbflow.infra.ledger.records import ServiceRecords
from ebbflow.infra.ledger.rows import codec, projections, remembering, seals
from ebbflow.infra.ledger.verify import verify
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import names
from ebbflow.planners.model.ledger import FENCED, AppRecord, AppReport, Change, Event
from ebbflow.planners.model.ledger_state import State


class UnreadableReport(NamedTuple):
    """A report that this Ebbflow cannot read."""

    at: float  # s since the Unix epoch, as its app said
    why: str


class Ledger:
    """The durable record of one cluster: apps, nodes, leases, decisions. Safe for several threads and processes.

    >>> with Ledger.open("ledger.db") as ledger:
    ...     ledger.write([AppEntered(AppSpec("digits", "training", gpus=2))])
    ...     print(ledger.state().apps["digits"].phase)
    waiting

    Anybody may write what is not ``FENCED``; nodes and leases are written by the loop that leads (``lead``). What a
    call writes is in the ledger as a whole or not at all.
    """

    def __init__(self, database: Database, cluster: str) -> None:
        """Use ``Ledger.open``."""
        self.cluster = cluster
        self.clock = database.clock
        self._database = database
        self._journal = Journal(database, cluster)
        self._reports: dict[str, tuple[str, AppReport]] = {}

    @classmethod
    def open(
        cls,
        url: str | None = None,
        *,
        cluster: str = "local",
        clock: Clock | None = None,
        create: bool = True,
    ) -> Self:
        """Open the ledger at ``url``, made or brought to this Ebbflow's form where that is needed.

        ``url`` is ``postgresql://user:password@host/database``, ``sqlite:////path`` or the path of a file; by default
        ``$EBBFLOW_LEDGER``, else ``ledger.db`` in ``$EBBFLOW_HOME`` or ``~/.cache/ebbflow``. One database may hold
        several clusters. With ``create`` false a ledger that is not there is an error.

        Raises ``OptionError`` for an address or cluster name that is none, ``LedgerError`` for a database that a
        newer Ebbflow has made or that is damaged, ``LedgerUnavailableError`` when it does not answer.
        """
        if create:  # before a file or a table is made; older ledgers may hold other names
            names.CLUSTER.check(cluster)
        database = Database(parse(url), clock or SystemClock())
        try:
            create_or_migrate(database, create=create)
            clusters.enter(database, cluster, create=create)
        except BaseException:
            database.close()
            raise
        return cls(database, cluster)

    @property
    def address(self) -> Address:
        """Return where the ledger is; its text shows no password."""
        return self._database.address

    @property
    def records(self) -> ServiceRecords:
        """Return what the processes of a service share here."""
        return ServiceRecords(self._database, self.cluster)

    # --- writing --------------------------------------------------------------------------------------------

    def write(
        self, changes: Sequence[Change], *, when: Callable[[State], bool] | None = None
    ) -> tuple[Event, ...]:
        """Write changes that are not ``FENCED``, all or none, and return them as they stand in the ledger.

        With ``when`` nothing is written, and nothing returned, unless that holds of the state that they meet.

        Raises ``OptionError`` for a change that is fenced, holds what cannot be stored or cannot follow,
        ``LedgerUnavailableError`` when the database does not answer.
        """
        for change in changes:
            if isinstance(change, FENCED):
                raise OptionError(f"{type(change).__name__} is for the leader: ledger.lead(...).write([...])")
        if when is None:
            return self._journal.append(changes)
        return self._journal.append((), lambda _, state: changes if when(state) else ())

    def lead(self, holder: str, seconds: float = 15.0, *, take_over: bool = False) -> Leadership:
        """Become the one writer of nodes and leases, for ``seconds`` unless renewed.

        A lead ends by ``resign``, or when ``now`` is past its end by the caller's clock. One that would hold for more
        than twice its length from now was dated by a clock that has been put back since: it counts as over. Whoever
        misjudges that harms nothing: the older leader's writes are refused, by its token and not by any clock. The
        same ``holder`` may take over from itself at once, and with ``take_over`` anybody from anybody. Raises
        ``LedgerBusyError`` while another's lead is alive.
        """
        return begin_leadership(self._journal, holder, seconds, take_over=take_over)

    def leader(self) -> LeaderLease | None:
        """Return who leads, or led last; ``None`` where no loop ever has."""
        return self._database.read("read the leader", lambda c: leader_lease_of(c, self.cluster))

    def report(self, app: str, report: AppReport) -> None:
        """Replace the report of ``app``; no event. Raises ``OptionError``."""
        body = seals.seal(codec.dump(report), codec.encode(app))
        row = {
            "cluster": self.cluster,
            "app": codec.encode(app),
            "at": report.at,
            "format": codec.FORMAT,
            "body": body,
        }

        def put(connection: Connection) -> None:
            projections.upsert(connection, reports, [row])

        self._database.transact(f"keep the report of {app!r}", put, mode="report")

    # --- reading --------------------------------------------------------------------------------------------

    def state(self, *, copy: bool = False) -> State:
        """Return what all events add up to now; only those are read that have come since the last call.

        The returned state never changes again and is shared by all callers of this ledger: do not change it. With
        ``copy`` it is the caller's own.
        """
        state = self._journal.state()
        return history.copied(state) if copy else state

    def app(self, id_: str) -> AppRecord | None:
        """Return an app, also one that the state has forgotten; ``None``: none such has ever entered."""
        known = self.state().apps.get(id_)
        if known is not None:
            return known
        return self._database.read(
            "read an app", lambda c: remembering.recorded(c, self.cluster, codec.encode(id_))
        )

    def ended(self, most: int) -> list[AppRecord]:
        """Return the ``most`` apps that were over last, the newest first, also those that the state has forgotten."""
        return self._database.read("read the apps", lambda c: remembering.ended(c, self.cluster, most))

    def reports(
        self,
        apps: Collection[str] | None = None,
        *,
        unread: MutableMapping[str, UnreadableReport] | None = None,
    ) -> dict[str, AppReport]:
        """Return the newest report of each app, also of apps that are over; with ``apps``, of these alone.

        Those that a newer Ebbflow has written in a form of its own go into ``unread``; without it the first of them
        raises ``LedgerError``.
        """
        wanted = select(reports.c.app, reports.c.at, reports.c.format, reports.c.body).where(
            reports.c.cluster == self.cluster
        )
        if apps is not None:
            wanted = wanted.where(reports.c.app.in_([codec.encode(app) for app in apps]))
        rows = self._database.read("read the reports", lambda c: c.execute(wanted).all())
        known, found = self._reports, {}
        for row in rows:
            same = known.get(row.app)
            if same is None or same[0] != row.body:
                try:
                    same = (row.body, codec.load(AppReport, row.format, seals.unseal(row.body, row.app)))
                except LedgerError as error:
                    if unread is None:
                        raise
                    unread[row.app] = UnreadableReport(row.at, str(error))
                    continue
            found[row.app] = same
        self._reports = found
        return {app: report for app, (_, report) in found.items()}

    def reported_at(self, app: str) -> float | None:
        """Return the time of an app's newest report, s since the Unix epoch; ``None``: there is none."""
        wanted = select(reports.c.at).where(
            reports.c.cluster == self.cluster, reports.c.app == codec.encode(app)
        )
        return self._database.read("read a report's time", lambda c: c.execute(wanted).scalar())

    def events(
        self,
        after: int = 0,
        limit: int = 1000,
        kinds: Iterable[type[Change] | str] | None = None,
        app: str | None = None,
        *,
        newest: bool = False,
    ) -> list[Event]:
        """Return events with numbers above ``after``, in order, at most ``limit``: the first, or the ``newest``.

        ``kinds`` are classes of changes or their names; ``app`` asks for those that are about one app, leases of it
        included. Raises ``OptionError`` for an unknown kind.
        """
        wanted = history.following(self.cluster, after, limit).where(
            events.c.number > history.pruned(self.cluster)
        )
        if kinds is not None:
            wanted = wanted.where(
                events.c.kind.in_([name for kind in kinds for name in codec.stored_kinds(kind)])
            )
        if app is not None:
            about = select(mentions.c.number).where(mentions.c.cluster == self.cluster, mentions.c.app == app)
            wanted = wanted.where(events.c.number.in_(about))
        if newest:
            wanted = wanted.order_by(None).order_by(events.c.number.desc())
        rows = list(self._database.read("read events", lambda c: c.execute(wanted).all()))
        return [history.event_of(row) for row in (reversed(rows) if newest else rows)]

    def overview(self) -> Overview:
        """Return what the ledger holds, in numbers."""
        return overview(self._database, self.cluster)

    def origin(self) -> State:
        """Return the state before the first event that is still there: an empty one unless events were pruned."""
        return self._database.read("read the first state", lambda c: history.origin(c, self.cluster))

    def verify(self) -> list[str]:
        """Replay all events and compare with snapshots and tables; return what differs, as sentences."""
        return self._database.read("verify the ledger", lambda c: verify(c, self.cluster), long=True)

    def prune(
        self, before: float, *, keep_events: bool = False, dry_run: bool = False
    ) -> retention.PruneResult:
        """Release what is older than ``before``, s since the Unix epoch; return how much.

        Old events are dropped up to the first that is newer, but never the last, after a snapshot of what they add up
        to (not with ``keep_events``); decisions older than that lose what they were based on and keep their reason,
        and the last reports of apps that were over by then go. Apps, leases, checkpoints and the list of decisions
        stay. Done in small transactions, so it may run beside a loop, and again after it was cut short. With
        ``dry_run`` nothing is changed.
        """
        return retention.prune(self._database, self.cluster, before, keep_events=keep_events, dry_run=dry_run)

    # --- life -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release connections. May be called twice."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Ledger({str(self.address)!r}, cluster={self.cluster!r})"
