"""A real Airflow with a home of its own. Where Airflow is not installed nothing here is collected: make airflow."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
collect_ignore_glob = ["dags/*"] if find_spec("airflow") else ["*"]


@dataclass(frozen=True)
class Airflow:
    """An Airflow with its database, and the folder that its DAGs write into."""

    home: Path
    out: Path
    ledger: Path
    environment: dict[str, str]

    def start(self, *arguments: str, **more: str) -> subprocess.Popen[bytes]:
        """Start a program of this Airflow's environment; what it says goes into ``log``."""
        with self.log.open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *arguments],
                env={**self.environment, **more},
                cwd=self.out,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def log(self) -> Path:
        """Return the file with what the program said that was started last."""
        return self.out.parent / "said.log"

    def run(self, *arguments: str, **more: str) -> tuple[int, str]:
        """Run a program of this Airflow's environment to its end; return its status and what it said."""
        status = self.start(*arguments, **more).wait(300)
        return status, self.log.read_text()

    def dag(self, name: str, **more: str) -> dict[str, dict[str, object]]:
        """Run a DAG and return by task its state and its XCom."""
        _, said = self.run("tests.airflow_provider.run_dag", name, **more)
        line = next((x for x in said.splitlines() if x.startswith("RESULT ")), None)
        assert line is not None, said
        found: dict[str, dict[str, object]] = json.loads(line.removeprefix("RESULT "))
        print(said)
        return found


@pytest.fixture(scope="session")
def airflow_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an Airflow home with a migrated database."""
    home = tmp_path_factory.mktemp("airflow")
    subprocess.run(
        [sys.executable, "-m", "airflow", "db", "migrate"], env=_environment(home), check=True, timeout=300
    )
    return home


@pytest.fixture
def airflow(airflow_home: Path, tmp_path: Path) -> Airflow:
    """Return Airflow with a ledger, tables and a folder of this test's own."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = tmp_path / "tables"
    tables.mkdir()
    columns: dict[str, dict[str, list[object]]] = {
        "nation": {"id": list(range(6)), "name": [f"nation {i}" for i in range(6)]},
        "customer": {"id": list(range(60)), "nation": [i % 6 for i in range(60)]},
        "orders": {
            "id": list(range(600)),
            "customer": [i % 60 for i in range(600)],
            "price": [float(i) for i in range(600)],
        },
    }
    for name, data in columns.items():
        pq.write_table(pa.table(data), tables / f"{name}.parquet")
    out = tmp_path / "out"
    out.mkdir()
    ledger = tmp_path / "ledger.db"
    environment = _environment(airflow_home) | {
        "EBBFLOW_HOME": str(tmp_path / "home"),
        "AIRFLOW_VAR_TABLES": str(tables),
        "AIRFLOW_VAR_SCRIPT": str(HERE / "trained.py"),
        "AIRFLOW_VAR_OUT": str(out),
        "AIRFLOW_VAR_STEPS": "6",
        "AIRFLOW_CONN_EBBFLOW_TEST": json.dumps(
            {"conn_type": "ebbflow", "extra": {"ledger": str(ledger), "cluster": "test"}}
        ),
    }
    return Airflow(airflow_home, out, ledger, environment)


def _environment(home: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__DAGS_FOLDER": str(HERE / "dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__LOGGING__LOGGING_LEVEL": "INFO",
        "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
        "PYTHONPATH": str(HERE.parents[1]),
        "OMP_NUM_THREADS": "1",
    }
