"""A DAG that waits for GPUs, prepares features with a query, and trains on them.

Put it, or a link to it, into the DAG folder, with three Airflow Variables: ebbflow_tables (a directory of Parquet
tables), ebbflow_script (a script with an ElasticRun) and ebbflow_out (a directory that all workers reach). The
connection ebbflow_default says where the ledger is (docs/airflow.md).
"""

from datetime import datetime, timedelta

from airflow.sdk import dag

from ebbflow import EbbflowQueryOperator, EbbflowTrainingOperator, WaitForCapacityOperator

OUT = "{{ var.value.ebbflow_out }}/{{ dag_run.run_after | ds_nodash }}"


@dag(schedule="@daily", start_date=datetime(2026, 1, 1), catchup=False, tags=["ebbflow"])
def ebbflow_nightly() -> None:
    """Wait for two free GPUs; make features; train on them."""
    wait = WaitForCapacityOperator(
        task_id="wait_for_gpus", gpus=2, ledger_conn_id="ebbflow_default", timeout=4 * 3600
    )
    features = EbbflowQueryOperator(
        task_id="features",
        sql="SELECT o_custkey, count(*) AS orders, sum(o_totalprice) AS total FROM orders GROUP BY o_custkey",
        tables="{{ var.value.ebbflow_tables }}",
        engine="duckdb",
        output=f"{OUT}/features.parquet",
    )
    train = EbbflowTrainingOperator(
        task_id="train",
        script="{{ var.value.ebbflow_script }}",
        arguments=["--features", "{{ ti.xcom_pull(task_ids='features')['result'] }}"],
        nodes="local:2x1",
        folder="{{ var.value.ebbflow_out }}/runs",
        retries=2,  # a retry resumes from the newest checkpoint
        retry_delay=timedelta(minutes=1),
    )
    wait >> features >> train


nightly = ebbflow_nightly()
