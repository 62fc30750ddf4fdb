"""DAGs that the provider's tests run. Airflow Variables say where things are: tables, script, out."""

from datetime import datetime, timedelta

from airflow.sdk import DAG

from ebbflow.flows.airflow import EbbflowQueryOperator, EbbflowTrainingOperator, WaitForCapacityOperator

OUT = "{{ var.value.out }}"
TABLES = "{{ var.value.tables }}"
HEAVY = "SELECT count(*) AS n FROM orders a, orders b, orders c, orders d WHERE a.price + b.price < c.price + d.price"
DAGS: list[DAG] = []


def dag(name: str) -> DAG:
    """Return a DAG that nobody schedules."""
    made = DAG(name, schedule=None, start_date=datetime(2026, 1, 1), catchup=False)
    DAGS.append(made)
    return made


with dag("whole"):
    wait = WaitForCapacityOperator(
        task_id="wait", gpus="{{ 1 + 1 }}", ledger_conn_id="ebbflow_test", timeout=120, poll=0.5
    )
    query = EbbflowQueryOperator(
        task_id="query",
        sql="per_nation.sql",
        tables=TABLES,
        engine="duckdb",
        store=f"{OUT}/store",
        output=f"{OUT}/result.parquet",
        fetch=2,
    )
    train = EbbflowTrainingOperator(
        task_id="train",
        script="{{ var.value.script }}",
        arguments=["--steps", "6", "--seconds", "0.05", "{{ ti.xcom_pull(task_ids='query')['result'] }}"],
        nodes="local:2x1",
        folder=f"{OUT}/runs",
        options={"canary": "never"},
    )
    wait >> query >> train

with dag("late"):
    WaitForCapacityOperator(task_id="late", nodes=99, ledger_conn_id="ebbflow_test", timeout=2, poll=0.5)
    WaitForCapacityOperator(
        task_id="skipped", nodes=99, ledger_conn_id="ebbflow_test", timeout=2, poll=0.5, soft_fail=True
    )

with dag("stopped_query"):
    EbbflowQueryOperator(
        task_id="query",
        sql=HEAVY,
        tables=TABLES,
        engine="duckdb",
        store=f"{OUT}/store",
        options={"reuse": False},
    )

with dag("late_query"):
    EbbflowQueryOperator(
        task_id="query",
        sql=HEAVY,
        tables=TABLES,
        engine="duckdb",
        store=f"{OUT}/store",
        options={"reuse": False},
        execution_timeout=timedelta(seconds=4),
    )

with dag("stopped_training"):
    EbbflowTrainingOperator(
        task_id="train",
        script="{{ var.value.script }}",
        arguments=["--steps", "{{ var.value.steps }}", "--seconds", "0.05"],
        nodes="local:2x1",
        folder=f"{OUT}/runs",
        run="stopped",
        options={"canary": "never"},
    )

with dag("stopped_training_long"):
    EbbflowTrainingOperator(
        task_id="train",
        script="{{ var.value.script }}",
        arguments=["--steps", "200", "--seconds", "0.05"],
        nodes="local:2x1",
        folder=f"{OUT}/runs",
        run="stopped-long",
        options={"canary": "never"},
    )

with dag("leased"):
    EbbflowQueryOperator(
        task_id="query",
        sql="per_nation.sql",
        tables=TABLES,
        engine="duckdb",
        store=f"{OUT}/store",
        ledger_conn_id="ebbflow_test",
        team="data",
    )
    EbbflowTrainingOperator(
        task_id="train",
        script="{{ var.value.script }}",
        arguments=["--steps", "{{ var.value.steps }}", "--seconds", "0.05"],
        nodes="local:1x1",
        fleet="local:airflow-test",
        ledger_conn_id="ebbflow_test",
        team="models",
        folder=f"{OUT}/runs",
        run="leased",
        options={"canary": "never"},
    )

with dag("wrong"):
    EbbflowQueryOperator(
        task_id="query", sql="SELECT nothing FROM nowhere", tables=TABLES, engine="duckdb", retries=3
    )
