"""The trigger that waits for capacity, in Airflow's triggerer: no worker slot is taken meanwhile."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from ebbflow.flows.airflow.wait import CapacityProbe, lookout
from ebbflow.infra.errors import InfraError
from ebbflow.planners.capacity.need import Need


def open_lookout(where: dict[str, Any]) -> CapacityProbe:
    """Return where to look, a connection of Airflow looked up. Not for the event loop's thread."""
    address, cluster = where.get("ledger") or "", where.get("cluster") or ""
    if where.get("ledger_conn_id"):
        from ebbflow.flows.airflow.hook import EbbflowHook

        address, named = EbbflowHook(where["ledger_conn_id"]).address()
        cluster = cluster or named
    return lookout(master=where.get("master"), ledger=address or None, cluster=cluster or "local")


class WaitForCapacityTrigger(BaseTrigger):
    """Fires once when a cluster has enough, or when the time is over.

    Its event is ``{"status": "ready", "room": {...}}`` or ``{"status": "late", "lacking": [...], "problem": ...}``.
    A look that fails is repeated: a ledger or master may be away for a while.

    Args:
        need: the fields of ``planners.capacity.need.Need``.
        where: any of ``ledger_conn_id``, ``ledger``, ``cluster`` and ``master``; never a password, since Airflow
            stores it.
        deadline: seconds since the Unix epoch; another triggerer that takes over keeps it.
        poll: seconds between two looks.
    """

    def __init__(
        self, need: dict[str, Any], where: dict[str, Any], deadline: float, poll: float = 10.0
    ) -> None:
        super().__init__()
        self.need, self.where, self.deadline, self.poll = need, where, deadline, poll
        self._need = Need(**need)
        self._open: CapacityProbe | None = None

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return what makes the same trigger elsewhere."""
        return (
            "ebbflow.flows.airflow.triggers.WaitForCapacityTrigger",
            {"need": self.need, "where": self.where, "deadline": self.deadline, "poll": self.poll},
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Look until there is enough. Looks block, so they are made in a thread."""
        lacking: tuple[str, ...] = ()
        problem = ""
        while True:
            try:
                room = await asyncio.to_thread(self._look)
            except InfraError as error:
                problem = str(error)
            else:
                problem, lacking = "", self._need.lacking(room)
                if not lacking:
                    yield TriggerEvent({"status": "ready", "room": asdict(room)})
                    return
            left = self.deadline - time.time()
            if left <= 0:
                yield TriggerEvent({"status": "late", "lacking": list(lacking), "problem": problem})
                return
            await asyncio.sleep(min(self.poll, left))

    async def cleanup(self) -> None:
        """Close the ledger."""
        if self._open is not None:
            await asyncio.to_thread(self._open.close)

    def _look(self) -> Any:
        if self._open is None:
            self._open = open_lookout(self.where)
        return self._open.look()
