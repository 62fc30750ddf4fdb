"""Run one DAG as ``airflow dags test`` does, and print the state and the XCom of each task as JSON.

python -m tests.airflow_provider.run_dag DAG [PATH OF ITS FILE]
"""

import json
import os
import sys
from pathlib import Path
from typing import Any


def main(name: str, path: str | None = None) -> None:
    """Run the DAG called ``name``."""
    from importlib.util import module_from_spec, spec_from_file_location

    from airflow.sdk import DAG

    file = Path(path or Path(__file__).parent / "dags" / "provider_dags.py")
    spec = spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    dags = {value.dag_id: value for value in vars(module).values() if isinstance(value, DAG)}
    dags |= {value.dag_id: value for value in getattr(module, "DAGS", ())}
    run = dags[name].test()
    print("RESULT " + json.dumps(_outcome(run)), flush=True)
    os._exit(0)  # threads of work that was given up need not be waited for


def _outcome(run: Any) -> dict[str, Any]:
    found = {}
    for instance in run.get_task_instances():
        found[instance.task_id] = {
            "state": str(instance.state),
            "xcom": instance.xcom_pull(task_ids=instance.task_id, key="return_value"),
        }
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
