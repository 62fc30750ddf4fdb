"""The connection that says where a cluster's ledger is, so that its password stands in no DAG."""

from typing import Any

from airflow.sdk import BaseHook


class EbbflowHook(BaseHook):
    """Reads an Airflow connection of type ``ebbflow``.

    Host, login, password, port and schema name a database of PostgreSQL. A ledger in a file has its path in the field
    ``extra``, as ``{"ledger": "/var/lib/ebbflow/ledger.db"}``, which may hold ``{"cluster": "..."}`` too.
    """

    conn_name_attr = "ledger_conn_id"
    default_conn_name = "ebbflow_default"
    conn_type = "ebbflow"
    hook_name = "Ebbflow ledger"

    def __init__(self, ledger_conn_id: str = default_conn_name) -> None:
        super().__init__()
        self.ledger_conn_id = ledger_conn_id

    def address(self) -> tuple[str, str]:
        """Return the ledger's address and the cluster's name; both may be empty. Raises ``OptionError``."""
        from ebbflow.flows.airflow.work import address_of

        return address_of(self.get_connection(self.ledger_conn_id))

    @classmethod
    def get_ui_field_behaviour(cls) -> dict[str, Any]:
        """Return how Airflow's form shows the connection."""
        return {
            "hidden_fields": [],
            "relabeling": {"schema": "Database"},
            "placeholders": {"extra": '{"cluster": "local"}', "port": "5432"},
        }
