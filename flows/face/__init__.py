"""Ebbflow's public names: ``from ebbflow import run_query, ElasticRun``.

Each is imported only when it is asked for, so that a training script pays for no Prefect, and a flow for no torch.
What is not named here is Ebbflow's own and may change from one version to the next.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbflow.flows.airflow.hook import EbbflowHook
    from ebbflow.flows.airflow.operators import (
        EbbflowQueryOperator,
        EbbflowTrainingOperator,
        WaitForCapacityOperator,
    )
    from ebbflow.flows.airflow.triggers import WaitForCapacityTrigger
    from ebbflow.flows.blocks import EbbflowAws, EbbflowCluster, EbbflowStorage
    from ebbflow.flows.capacity.flow import capacity_loop
    from ebbflow.flows.fleet.tasks import apply_target, end_gang, observe_fleet, start_gang
    from ebbflow.flows.pipeline.flow import run_pipeline
    from ebbflow.flows.query.flow import run_query
    from ebbflow.flows.training.flow import train
    from ebbflow.flows.tuning.flow import tune
    from ebbflow.infra.communication.all_to_all import Exchange
    from ebbflow.infra.communication.control import PlanningSettings
    from ebbflow.infra.communication.payloads import Exchanged
    from ebbflow.infra.communication.plain import PlainCollectives
    from ebbflow.infra.communication.planned import PlannedCommunication
    from ebbflow.infra.elastic.application import (
        Application,
        Completion,
        Dispatcher,
        Driver,
        Executor,
        MicroTask,
        TaskContext,
    )
    from ebbflow.infra.elastic.apps.arrays import opened as open_arrays
    from ebbflow.infra.elastic.apps.mlr import Mlr
    from ebbflow.infra.elastic.job import ElasticJob
    from ebbflow.infra.elastic.registry import register
    from ebbflow.infra.elastic.settings import Settings as ElasticSettings
    from ebbflow.infra.errors import (
        AggregationError,
        AwsError,
        AwsUnavailableError,
        BroadcastTooLargeError,
        CheckpointsLostError,
        ClusterError,
        CredentialsError,
        DamagedInputError,
        DataError,
        DatasetError,
        DoubleBookingError,
        ElasticError,
        EngineError,
        EngineLostError,
        EngineUnavailableError,
        InfraError,
        InsufficientCapacityError,
        LauncherLostError,
        LeaseError,
        LedgerBusyError,
        LedgerError,
        LedgerUnavailableError,
        MemoryTierError,
        MessageError,
        MicroTaskError,
        NoticeError,
        NotOursError,
        OtherModelError,
        PipelineRunError,
        PriceError,
        ReportError,
        RunLockedError,
        SettingsError,
        SimulationError,
        SpotPriceTooHighError,
        StageCancelledError,
        StageFailedError,
        StaleLoopError,
        StorageError,
        StorageFullError,
        TableError,
        TrainingError,
        UnusableCheckpointError,
        WorkloadError,
    )
    from ebbflow.infra.ledger.ledger import Ledger
    from ebbflow.infra.local_fleet.fleet import LocalFleet
    from ebbflow.infra.local_fleet.state.pools import LocalPool
    from ebbflow.infra.memory.samples.dataset import RemoteCachedDataset
    from ebbflow.infra.simulation.engine import simulate
    from ebbflow.infra.simulation.traces.cluster import Cluster
    from ebbflow.infra.simulation.traces.generators import philly_like
    from ebbflow.infra.training.checkpoints.reading import load_checkpoint
    from ebbflow.infra.training.data.streams import SampleStream
    from ebbflow.infra.training.frameworks import (
        accelerate_saves,
        hugging_face_callback,
        lightning_callback,
    )
    from ebbflow.infra.training.frameworks.checkpoints import newest_checkpoint
    from ebbflow.infra.training.metrics import RunStatistics
    from ebbflow.infra.training.process.leaving import RunStopped
    from ebbflow.infra.training.run import ElasticRun
    from ebbflow.planners.errors import (
        EbbflowError,
        ForbiddenSqlError,
        OptionError,
        PipelineFileError,
        PlanningError,
        SqlSyntaxError,
        UnknownColumnError,
        UnknownTableError,
        UnsupportedQueryError,
    )
    from ebbflow.planners.model.capacity import Capacity, Node, Share
    from ebbflow.planners.model.gangs import GangRequest
    from ebbflow.planners.model.scheduling import App, Decision, Grant, Policy, View
    from ebbflow.planners.scheduling.gangs.ordered import Ordered, best_effort
    from ebbflow.planners.scheduling.gangs.tiresias import Tiresias
    from ebbflow.tasks.fleet.request import FleetRequest
    from ebbflow.tasks.fleet.steps import opened as open_fleet
    from ebbflow.tasks.fleet.steps import wish as scaling_target
    from ebbflow.tasks.pipeline.outcome import PipelineOutcome
    from ebbflow.tasks.query.report import QueryReport
    from ebbflow.tasks.query.request import QueryRequest
    from ebbflow.tasks.query.run import PlainOrchestrator, QueryOutcome, explain
    from ebbflow.tasks.report.delivery import execute
    from ebbflow.tasks.report.training import run_training
    from ebbflow.tasks.training.report import TrainingReport
    from ebbflow.tasks.training.request import TrainingRequest
    from ebbflow.tasks.tuning.report import TuningReport
    from ebbflow.tasks.tuning.request import Parameter, TuningRequest, read_space
    from ebbflow.tasks.tuning.run import run_tuning

    __version__: str

__all__ = [
    "AggregationError",
    "App",
    "Application",
    "AwsError",
    "AwsUnavailableError",
    "BroadcastTooLargeError",
    "Capacity",
    "CheckpointsLostError",
    "Cluster",
    "ClusterError",
    "Completion",
    "CredentialsError",
    "DamagedInputError",
    "DataError",
    "DatasetError",
    "Decision",
    "Dispatcher",
    "DoubleBookingError",
    "Driver",
    "EbbflowAws",
    "EbbflowCluster",
    "EbbflowError",
    "EbbflowHook",
    "EbbflowQueryOperator",
    "EbbflowStorage",
    "EbbflowTrainingOperator",
    "ElasticError",
    "ElasticJob",
    "ElasticRun",
    "ElasticSettings",
    "EngineError",
    "EngineLostError",
    "EngineUnavailableError",
    "Exchange",
    "Exchanged",
    "Executor",
    "FleetRequest",
    "ForbiddenSqlError",
    "GangRequest",
    "Grant",
    "InfraError",
    "InsufficientCapacityError",
    "LauncherLostError",
    "LeaseError",
    "Ledger",
    "LedgerBusyError",
    "LedgerError",
    "LedgerUnavailableError",
    "LocalFleet",
    "LocalPool",
    "MemoryTierError",
    "MessageError",
    "MicroTask",
    "MicroTaskError",
    "Mlr",
    "Node",
    "NotOursError",
    "NoticeError",
    "OptionError",
    "Ordered",
    "OtherModelError",
    "Parameter",
    "PipelineFileError",
    "PipelineOutcome",
    "PipelineRunError",
    "PlainCollectives",
    "PlainOrchestrator",
    "PlannedCommunication",
    "PlanningError",
    "PlanningSettings",
    "Policy",
    "PriceError",
    "QueryOutcome",
    "QueryReport",
    "QueryRequest",
    "RemoteCachedDataset",
    "ReportError",
    "RunLockedError",
    "RunStatistics",
    "RunStopped",
    "SampleStream",
    "SettingsError",
    "Share",
    "SimulationError",
    "SpotPriceTooHighError",
    "SqlSyntaxError",
    "StageCancelledError",
    "StageFailedError",
    "StaleLoopError",
    "StorageError",
    "StorageFullError",
    "TableError",
    "TaskContext",
    "Tiresias",
    "TrainingError",
    "TrainingReport",
    "TrainingRequest",
    "TuningReport",
    "TuningRequest",
    "UnknownColumnError",
    "UnknownTableError",
    "UnsupportedQueryError",
    "UnusableCheckpointError",
    "View",
    "WaitForCapacityOperator",
    "WaitForCapacityTrigger",
    "WorkloadError",
    "accelerate_saves",
    "apply_target",
    "best_effort",
    "capacity_loop",
    "end_gang",
    "execute",
    "explain",
    "hugging_face_callback",
    "lightning_callback",
    "load_checkpoint",
    "newest_checkpoint",
    "observe_fleet",
    "open_arrays",
    "open_fleet",
    "philly_like",
    "read_space",
    "register",
    "run_pipeline",
    "run_query",
    "run_training",
    "run_tuning",
    "scaling_target",
    "simulate",
    "start_gang",
    "train",
    "tune",
]

_NAMES = {
    "ebbflow.flows.query.flow": "run_query",
    "ebbflow.flows.training.flow": "train",
    "ebbflow.flows.tuning.flow": "tune",
    "ebbflow.flows.pipeline.flow": "run_pipeline",
    "ebbflow.flows.capacity.flow": "capacity_loop",
    "ebbflow.flows.fleet.tasks": "apply_target end_gang observe_fleet start_gang",
    "ebbflow.tasks.fleet.steps": "open_fleet scaling_target",
    "ebbflow.tasks.fleet.request": "FleetRequest",
    "ebbflow.planners.model.gangs": "GangRequest",
    "ebbflow.flows.blocks": "EbbflowAws EbbflowCluster EbbflowStorage",
    "ebbflow.flows.airflow.hook": "EbbflowHook",
    "ebbflow.flows.airflow.operators": "EbbflowQueryOperator EbbflowTrainingOperator WaitForCapacityOperator",
    "ebbflow.flows.airflow.triggers": "WaitForCapacityTrigger",
    "ebbflow.tasks.query.request": "QueryRequest",
    "ebbflow.tasks.query.run": "PlainOrchestrator QueryOutcome explain",
    "ebbflow.tasks.report.delivery": "execute",
    "ebbflow.tasks.query.report": "QueryReport",
    "ebbflow.tasks.training.request": "TrainingRequest",
    "ebbflow.tasks.report.training": "run_training",
    "ebbflow.tasks.training.report": "TrainingReport",
    "ebbflow.tasks.tuning.request": "Parameter TuningRequest read_space",
    "ebbflow.tasks.tuning.run": "run_tuning",
    "ebbflow.tasks.tuning.report": "TuningReport",
    "ebbflow.tasks.pipeline.outcome": "PipelineOutcome",
    "ebbflow.infra.training.checkpoints.reading": "load_checkpoint",
    "ebbflow.infra.training.data.streams": "SampleStream",
    "ebbflow.infra.training.frameworks": "accelerate_saves hugging_face_callback lightning_callback",
    "ebbflow.infra.training.frameworks.checkpoints": "newest_checkpoint",
    "ebbflow.infra.training.run": "ElasticRun",
    "ebbflow.infra.communication.all_to_all": "Exchange",
    "ebbflow.infra.communication.control": "PlanningSettings",
    "ebbflow.infra.communication.payloads": "Exchanged",
    "ebbflow.infra.communication.plain": "PlainCollectives",
    "ebbflow.infra.communication.planned": "PlannedCommunication",
    "ebbflow.infra.training.metrics": "RunStatistics",
    "ebbflow.infra.training.process.leaving": "RunStopped",
    "ebbflow.infra.elastic.application": (
        "Application Completion Dispatcher Driver Executor MicroTask TaskContext"
    ),
    "ebbflow.infra.elastic.job": "ElasticJob",
    "ebbflow.infra.elastic.registry": "register",
    "ebbflow.infra.elastic.settings": "ElasticSettings",
    "ebbflow.infra.elastic.apps.arrays": "open_arrays",
    "ebbflow.infra.elastic.apps.mlr": "Mlr",
    "ebbflow.infra.ledger.ledger": "Ledger",
    "ebbflow.infra.local_fleet.fleet": "LocalFleet",
    "ebbflow.infra.memory.samples.dataset": "RemoteCachedDataset",
    "ebbflow.infra.local_fleet.state.pools": "LocalPool",
    "ebbflow.planners.model.capacity": "Capacity Node Share",
    "ebbflow.planners.model.scheduling": "App Decision Grant Policy View",
    "ebbflow.planners.scheduling.gangs.ordered": "Ordered best_effort",
    "ebbflow.planners.scheduling.gangs.tiresias": "Tiresias",
    "ebbflow.infra.simulation.engine": "simulate",
    "ebbflow.infra.simulation.traces.cluster": "Cluster",
    "ebbflow.infra.simulation.traces.generators": "philly_like",
    "ebbflow.planners.errors": (
        "EbbflowError PlanningError SqlSyntaxError UnknownTableError UnknownColumnError "
        "UnsupportedQueryError ForbiddenSqlError OptionError PipelineFileError"
    ),
    "ebbflow.infra.errors": (
        "InfraError EngineError EngineUnavailableError EngineLostError StageFailedError "
        "BroadcastTooLargeError DamagedInputError StageCancelledError TableError StorageError "
        "StorageFullError OtherModelError UnusableCheckpointError CheckpointsLostError RunLockedError "
        "ClusterError LeaseError ElasticError MicroTaskError AggregationError MemoryTierError WorkloadError "
        "TrainingError DatasetError MessageError LauncherLostError SettingsError AwsError "
        "AwsUnavailableError CredentialsError "
        "InsufficientCapacityError SpotPriceTooHighError NotOursError NoticeError LedgerError "
        "LedgerUnavailableError LedgerBusyError StaleLoopError DoubleBookingError PipelineRunError "
        "PriceError SimulationError DataError ReportError"
    ),
}
_RENAMED = {  # whose modules say the rest of the name
    "ElasticSettings": "Settings",
    "open_arrays": "opened",
    "open_fleet": "opened",
    "scaling_target": "wish",
}
_PLACES = {name: module for module, names in _NAMES.items() for name in names.split()}
_DISTRIBUTION = "prefect-ebbflow"
_UNKNOWN = "0+unknown"  # of a checkout that nobody has installed


def __getattr__(name: str) -> Any:
    """Import a public name, or read the version, when it is asked for first."""
    if name == "__version__":
        value: Any = _version()
    elif name in _PLACES:
        from importlib import import_module

        value = getattr(import_module(_PLACES[name]), _RENAMED.get(name, name))
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})


def _version() -> str:
    """Return the version of the installed distribution."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(_DISTRIBUTION)
    except PackageNotFoundError:
        return _UNKNOWN
