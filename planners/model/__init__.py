"""Frozen values shared by planners and adapters."""

from ebbflow.planners.model.capacity import (
    Capacity,
    CapacityDiff,
    Market,
    Node,
    Notice,
    NoticeKind,
    Portion,
    Resources,
    Share,
)
from ebbflow.planners.model.tables import Catalogue, ColumnStatistics, Table, TableStatistics
from ebbflow.planners.model.work import Measured, Work

__all__ = [
    "Capacity",
    "CapacityDiff",
    "Catalogue",
    "ColumnStatistics",
    "Market",
    "Measured",
    "Node",
    "Notice",
    "NoticeKind",
    "Portion",
    "Resources",
    "Share",
    "Table",
    "TableStatistics",
    "Work",
]
