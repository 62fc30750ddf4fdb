"""Where an app's trainings run: on the nodes of its leases, whatever provides those."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import ClusterError, TrainingError
from ebbflow.infra.protocols import Decide, Trainer
from ebbflow.infra.training.launcher.journal import Journal
from ebbflow.infra.training.launcher.pool import NodePool
from ebbflow.infra.training.process.channel import Report
from ebbflow.tasks.apps.agent import AppAgent
from ebbflow.tasks.training.code import variables_of
from ebbflow.tasks.training.leased.enforcer import LeaseEnforcer
from ebbflow.tasks.training.leased.nodes import FencedPool, Numbers
from ebbflow.tasks.training.request import TrainingRequest
from ebbflow.tasks.training.sites import request_logs

_POLL = 0.2  # s between polls for processes of an earlier self
_BEYOND = 60.0  # s that they get beyond their own grace

MakePool = Callable[[], NodePool]
"""Returns a pool of the cluster's nodes, under the names that the ledger has for them; one for each launcher."""
MakeTrainer = Callable[..., Trainer]


class _ClusterNodes:
    """Nodes that belong to the cluster."""

    def _refuse(self, *_: object) -> NoReturn:
        raise ClusterError("scripted faults are for a training on its own nodes; these are the cluster's")

    kill = notice = pause = resume = _refuse


class LeasedSite:
    """A ``Site`` on the leases of an app.

    Args:
        pool: makes the pool of nodes.
        agent: of the app.
        enforcer: ends what stays on a GPU for too long.
        on_report: called with all that processes report, in the launcher's thread.
        clock: the app's.
        among: see ``LeasedNodes``.
        make: makes the launcher: ``TorchTrainer`` unless given.
        options: of it.
    """

    def __init__(
        self,
        pool: MakePool,
        agent: AppAgent,
        enforcer: LeaseEnforcer,
        on_report: Callable[[Report], None],
        clock: Clock,
        *,
        among: Numbers = lambda: None,
        make: MakeTrainer | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._pool, self._agent, self._enforcer, self._on_report = pool, agent, enforcer, on_report
        self._clock, self._among = clock, among
        self._make, self._options = make, dict(options or {})
        self._request: TrainingRequest | None = None

    @property
    def nodes(self) -> _ClusterNodes:
        """See ``Site``."""
        return _ClusterNodes()

    def trainer(
        self, request: TrainingRequest, decide: Decide, record_report: Callable[[Report], None]
    ) -> Trainer:
        """See ``Site``."""

        def both(report: Report) -> None:
            self._on_report(report)
            record_report(report)

        self._request = request
        agent = self._agent
        fenced = FencedPool(
            self._pool(), agent.lease_table, agent.left, self._clock, self._among, agent.is_pool_reported
        )
        self._enforcer.watch(fenced)
        agent.poke()  # nothing starts before the ledger has heard of it
        options: dict[str, Any] = {
            "logs": request_logs(request),
            "decide": decide,
            "node_timeout": max(request.node_timeout, 1e-3),
            "on_report": both,
            "variables": variables_of(request),
            "replica": request.replica_gpus,
            "replace": False,  # what a node is replaced by, the capacity loop decides
            **self._options,
        }
        try:
            return self._maker()(fenced, **options)
        except BaseException:
            fenced.close()
            raise

    def _maker(self) -> MakeTrainer:
        if self._make is not None:
            return self._make
        from ebbflow.infra.training.launcher.trainer import TorchTrainer

        return TorchTrainer


def await_end_of_earlier(requests: Collection[TrainingRequest], pool: MakePool, clock: Clock) -> None:
    """Wait until no process is left of launchers that ran these before, and that are gone.

    They save and end by themselves within their grace. Raises ``TrainingError`` when some are still there after it.
    """
    uids = {}
    for request in requests:
        if request.launched:
            whose = f"an earlier launcher of run {request.run_id}"
            uids[Journal(request.place).read_run()[-1]] = (request.termination_grace, whose)
    await_end_of_pools(uids, pool, clock)


def await_end_of_pools(uids: Mapping[str, tuple[float, str]], pool: MakePool, clock: Clock) -> None:
    """Wait until no process is left of earlier pools of nodes, whose owners are gone.

    Args:
        uids: by which the pools are known, each with the seconds that its processes get to save in, and what they
            are, for people.
        pool: makes pools of the same nodes.

    Raises ``TrainingError`` when some are still there well after that.
    """
    if not uids:
        return
    asked = pool()
    try:
        for uid, (grace, whose) in uids.items():
            end = clock.now() + grace + _BEYOND
            while not asked.gone(uid):
                if clock.now() >= end:
                    raise TrainingError(
                        f"processes of {whose} are still there {_BEYOND:.0f} s after their termination grace; end "
                        "them first"
                    )
                clock.sleep(_POLL)
    finally:
        asked.close()
