"""``SharedAccounts``: what trainings have used of aggregators' nodes, in dollars, those that are over included."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

MAX_FINISHED = 1000
"""Runs that are away and kept with dollars of their own at most."""


@dataclass(frozen=True, slots=True)
class AccountOwner:
    """Whose a training is.

    Args:
        team: of its app; empty: none, or not known.
        pipeline: the same.
        seen: when it was there last, seconds since the Unix epoch.
    """

    team: str = ""
    pipeline: str = ""
    seen: float = 0.0


@dataclass(frozen=True, slots=True)
class SharedAccounts:
    """Dollars of trainings, and of teams and pipelines what trainings had used that are forgotten.

    The ledger's state does the same with what leases have cost (``planners.model.ledger_state``): so the budgets of
    teams and pipelines count what is over, and the account does not grow with each training that ever was. A training
    that returns before it is forgotten here has its dollars again, and one that returns later begins with none.

    Args:
        until: up to when nodes are paid, seconds since the Unix epoch.
        dollars: by run; under the empty name what no training has used.
        owners: of the runs.
        teams: of runs that are forgotten, by team.
        pipelines: the same by pipeline, as long as the pipeline has apps or may have some again.
        forgotten: dollars of all runs that are forgotten.
        pipelines_seen: when each of ``pipelines`` had an app last, seconds since the Unix epoch.
    """

    until: float = 0.0
    dollars: Mapping[str, float] = field(default_factory=dict)
    owners: Mapping[str, AccountOwner] = field(default_factory=dict)
    teams: Mapping[str, float] = field(default_factory=dict)
    pipelines: Mapping[str, float] = field(default_factory=dict)
    forgotten: float = 0.0
    pipelines_seen: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        """Return the accounts of their plain values.

        What an older version has not written is empty, and what a newer one has more is left out. Raises
        ``TypeError``, ``ValueError`` or ``AttributeError`` for other values.
        """
        owners = {
            run: AccountOwner(str(team), str(pipeline), float(seen))
            for run, (team, pipeline, seen, *_) in body.get("owners", {}).items()
        }
        return cls(
            float(body.get("until", 0.0)),
            dict(body.get("dollars", {})),
            owners,
            dict(body.get("teams", {})),
            dict(body.get("pipelines", {})),
            float(body.get("forgotten", 0.0)),
            dict(body.get("pipelines_seen", {})),
        )

    @property
    def values(self) -> dict[str, Any]:
        """Return plain values, of which ``of`` makes the accounts again."""
        owners = {run: [one.team, one.pipeline, one.seen] for run, one in self.owners.items()}
        return {**asdict(self), "owners": owners}

    def paid(self, dollars: Mapping[str, float], until: float) -> Self:
        """Return the accounts with further dollars by run, up to a time in seconds since the Unix epoch."""
        sums = dict(self.dollars)
        for run, amount in dollars.items():
            sums[run] = sums.get(run, 0.0) + amount
        return replace(self, dollars=sums, until=max(until, self.until))

    def finished(self, since: float) -> dict[str, float]:
        """Return the dollars of each run that was seen last before a time, seconds since the Unix epoch."""
        return {
            run: amount
            for run, amount in self.dollars.items()
            if run in self.owners and self.owners[run].seen < since
        }

    def settled(
        self, apps: Mapping[str, tuple[str, str]], using: Collection[str], now: float, remembered_s: float
    ) -> "SharedAccounts":
        """Return the accounts without the runs that are over; their dollars are their teams' and pipelines'.

        A run is over once it is no app of the ledger's state and has not used the service for some time; of those
        that may return ``MAX_FINISHED`` at most are kept, the latest.

        Args:
            apps: team and pipeline of each app of the ledger's state.
            using: runs that use the service, or ask for it.
            now: seconds since the Unix epoch.
            remembered_s: seconds for which a run, or a pipeline, that returns finds what it has cost.
        """
        owners = dict(self.owners)
        for run in self.dollars.keys() - {""}:
            known = owners.get(run, AccountOwner(seen=now))
            if run in apps:
                owners[run] = AccountOwner(*apps[run], now)
            elif run in using or run not in owners:
                owners[run] = replace(known, seen=now)
        over = {run for run, one in owners.items() if now - one.seen > remembered_s}
        away = sorted((one.seen, run) for run, one in owners.items() if one.seen < now)
        over |= {run for _, run in away[: max(len(away) - MAX_FINISHED, 0)]}
        dollars, teams, pipelines = dict(self.dollars), dict(self.teams), dict(self.pipelines)
        forgotten = self.forgotten
        for run in sorted(over):
            owner, amount = owners.pop(run), dollars.pop(run, 0.0)
            forgotten += amount
            for sums, name in ((teams, owner.team), (pipelines, owner.pipeline)):
                if name and amount:
                    sums[name] = sums.get(name, 0.0) + amount
        there = {pipeline for _, pipeline in apps.values()}
        there |= {one.pipeline for one in owners.values()}
        seen = {name: now if name in there else self.pipelines_seen.get(name, now) for name in pipelines}
        seen = {name: at for name, at in seen.items() if now - at <= remembered_s}
        return replace(
            self,
            dollars=dollars,
            owners=owners,
            teams=teams,
            pipelines={name: pipelines[name] for name in seen},
            forgotten=forgotten,
            pipelines_seen=seen,
        )
