"""Elastic execution by over-decomposition: executors and parameter shards move between workers that come and go.

Qiao et al., "Litz: Elastic Framework for High-Performance Distributed Machine Learning", USENIX ATC 2018.
"""

from ebbflow.infra.elastic.application import (
    Application,
    Completion,
    Dispatcher,
    Driver,
    Executor,
    MicroTask,
    TaskContext,
)
from ebbflow.infra.elastic.job import ElasticJob, Result
from ebbflow.infra.elastic.registry import register
from ebbflow.infra.elastic.settings import Event, Settings

__all__ = [
    "Application",
    "Completion",
    "Dispatcher",
    "Driver",
    "ElasticJob",
    "Event",
    "Executor",
    "MicroTask",
    "Result",
    "Settings",
    "TaskContext",
    "register",
]
