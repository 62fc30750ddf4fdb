"""What aggregators hold, and of whom: the tables of pages, and what reads those of a cluster."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ebbflow.tasks.apps.aggregators import (
    AggregatedTraining,
    AggregationReport,
    AggregatorRow,
    aggregation_report,
)
from ebbflow.tasks.drawing.wording import bytes_text, label_text, money_text, plural

if TYPE_CHECKING:
    from ebbflow.infra.ledger.records import ServiceRecords

_NAME = 48  # characters of a name that a table shows

log = logging.getLogger(__name__)


def aggregation_reader(records: "ServiceRecords") -> Callable[[], AggregationReport | None]:
    """Return what reads the report of a cluster's aggregation service, which raises ``LedgerError``.

    It returns ``None`` while no aggregator and no training is there, and for records that another version has written
    and this one cannot read.
    """
    from ebbflow.infra.aggregation.registry import ServiceRegistry

    registry = ServiceRegistry(records)

    def read() -> AggregationReport | None:
        view = registry.read()
        try:
            return aggregation_report(view)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            log.warning("a record of the aggregation service cannot be read: %s", error)
            return None

    return read


def aggregation_rows(report: AggregationReport | None, most: int) -> dict[str, Any]:
    """Return what the page shows of the service; empty without one.

    Args:
        report: of the service.
        most: rows of a table.
    """
    if report is None:
        return {}
    return {
        "words": _words(report),
        "aggregators": {
            "columns": ["state", "held", "shares of trainings", "updates", "moved away", "waits for copies"],
            "numbers": ["held", "updates", "moved away", "waits for copies"],
            "rows": [_aggregator(one) for one in report.aggregators[:most]],
            "left_out": _rest(len(report.aggregators) - most, "aggregator"),
        },
        "trainings": {
            "columns": [
                "aggregators", "instead of", "held", "iteration", "update", "mirrors", "mirrors' age",
                "sent to mirrors", "cost",
            ],
            "numbers": [
                "instead of", "held", "iteration", "update", "mirrors", "mirrors' age", "sent to mirrors", "cost",
            ],
            "rows": [_training(one) for one in report.trainings[:most]],
            "left_out": _rest(len(report.trainings) - most, "training"),
        },
    }  # fmt: skip


def _words(report: AggregationReport) -> str:
    private = report.private_servers
    saved = f" ({1 - report.used / private:.0%} saved)" if private else ""
    words = [
        f"{plural(report.used, 'aggregator')} instead of {plural(private, 'private server')}{saved}",
        f"in charge: {label_text(report.manager, _NAME) or 'none'}",
    ]
    if report.unused_dollars:
        words.append(f"nodes that no training used: {money_text(report.unused_dollars)}")
    if report.finished_dollars:
        words.append(f"trainings that are over: {money_text(report.finished_dollars)}")
    return "; ".join(words) + "."


def _aggregator(one: AggregatorRow) -> dict[str, Any]:
    shares = [
        f"{label_text(share.training, _NAME)} {share.fraction:.0%}, {bytes_text(share.bytes)}"
        + (f" ({bytes_text(share.mirror_bytes)} of mirrors)" if share.mirror_bytes else "")
        for share in one.shares
    ]
    cells = [
        one.state, bytes_text(one.bytes), "; ".join(shares) or "–", str(one.updates), str(one.moved),
        f"{one.waited_s * 1e3:.1f} ms" if one.waited_s else "–",
    ]  # fmt: skip
    return {"name": label_text(one.name, _NAME), "more": label_text(one.node, _NAME), "cells": cells}


def _training(one: AggregatedTraining) -> dict[str, Any]:
    cells = [
        ", ".join(label_text(name, _NAME) for name in one.aggregators) or "–",
        plural(one.servers, "server"),
        bytes_text(one.bytes),
        *("–" if value is None else f"{value * 1e3:.1f} ms" for value in (one.iteration_s, one.update_s)),
        bytes_text(one.mirror_bytes) if one.mirror_bytes else "–",
        "–" if one.mirror_age is None else plural(one.mirror_age, "round"),
        bytes_text(one.mirrored_bytes) if one.mirrored_bytes else "–",
        money_text(one.dollars) if one.dollars else "–",
    ]
    return {"name": label_text(one.training, _NAME), "more": plural(one.tensors, "tensor"), "cells": cells}


def _rest(count: int, noun: str) -> list[str]:
    return [plural(count, noun)] if count > 0 else []
