"""What auctions take an app's finish-time fairness (ρ) to be."""

from collections.abc import Mapping

from ebbflow.infra.errors import LedgerError
from ebbflow.infra.ledger import Ledger
from ebbflow.planners.model.ledger import Decided

_BACK = 20  # decisions that are looked through


def auctioned_rho(ledger: Ledger, app: str) -> float | None:
    """Return what the newest auction that tells of ``app`` says; ``None``: none does, or the ledger is away."""
    try:
        events = ledger.events(limit=_BACK, kinds=[Decided], newest=True)
    except LedgerError:
        return None
    for event in reversed(events):
        change = event.change
        apps = change.inputs.get("apps") if isinstance(change, Decided) and change.kind == "auction" else None
        bid = apps.get(app) if isinstance(apps, Mapping) else None
        if isinstance(bid, Mapping) and isinstance(bid.get("rho"), int | float):
            return float(bid["rho"])
    return None
