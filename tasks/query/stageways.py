"""Which ways of running a stage are left to a query on Spark, once the engine can be asked."""

from dataclasses import dataclass

from ebbflow.infra.errors import EngineUnavailableError
from ebbflow.infra.protocols import SqlEngine
from ebbflow.planners.query.costs.stage_engines import StageEngineName
from ebbflow.tasks.query.planning import Gathered, stage_engines_of
from ebbflow.tasks.query.request import QueryRequest, settings_of_meaning


@dataclass(frozen=True, slots=True)
class StageWays:
    """How stages may run. ``told`` says why that is not what the plan was made for; empty if it is."""

    stages: StageEngineName
    told: str = ""


def stage_ways(request: QueryRequest, gathered: Gathered, engine: SqlEngine, *, cores: float) -> StageWays:
    """Return how stages may run on ``engine``, which is confined already.

    An executor is asked where there are ``cores``. Raises ``EngineUnavailableError`` where only Spark SQL could run
    them and lacks what it needs.
    """
    asked = stage_engines_of(request, gathered)
    lacking = str(getattr(engine, "spark_sql_obstacle", str)())
    if lacking:
        if why := _no_native_stage(request, asked, engine, cores):
            raise EngineUnavailableError(f"{lacking}; native stages need no client of Spark's, but {why}")
        told = "all stages run natively, for Spark has no client for s3://" if asked != "native" else ""
        return StageWays("native", told)
    if engine.name != "spark" or asked != "auto":
        return StageWays(asked)
    obstacle = _obstacle(request, engine, cores)
    return StageWays("spark", f"all stages run on Spark SQL: {obstacle}") if obstacle else StageWays(asked)


def _no_native_stage(request: QueryRequest, asked: StageEngineName, engine: SqlEngine, cores: float) -> str:
    """Return what keeps all stages, or the last one, from running natively."""
    if request.stages == "spark":
        return "stages=spark (--stages) rules them out"
    if asked == "spark":
        return "the query reads tables of Spark's catalogue"
    if request.into_table is not None:
        return "Spark SQL writes the files of a table (--into)"
    return _obstacle(request, engine, cores)


def _obstacle(request: QueryRequest, engine: SqlEngine, cores: float) -> str:
    """Return why no stage can run natively; an executor is asked."""
    if cores <= 0:
        return ""
    if changed := settings_of_meaning(request):
        return f"native stages are not proven to be right with {', '.join(changed[:3])} set"
    return str(getattr(engine, "native_obstacle", str)())
