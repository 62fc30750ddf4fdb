"""The connection that says where a cluster's ledger is, so that its password stands in no DAG."""

from typing import Any
from urllib.parse import quote

from airflow.sdk import BaseHook

from ebbflow.planners.errors import OptionError


class EbbflowHook(BaseHook):
    """Reads an Airflow connection of type ``ebbflow``.

    Host, login, password, port and schema name a database of PostgreSQL. A ledger in a file has its path in the field
    ``extra``, as ``{"ledger": "/shared/ledger.db"}``, which may hold ``{"cluster": "..."}`` too.
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
        return address_of(self.get_connection(self.ledger_conn_id))

    @classmethod
    def get_ui_field_behaviour(cls) -> dict[str, Any]:
        """Return how Airflow's form shows the connection."""
        return {
            "hidden_fields": [],
            "relabeling": {"schema": "Database"},
            "placeholders": {"extra": '{"cluster": "local"}', "port": "5432"},
        }


def address_of(connection: Any) -> tuple[str, str]:
    """Return the ledger's address and the cluster's name that a connection holds. Raises ``OptionError``."""
    extra = connection.extra_dejson
    cluster = str(extra.get("cluster", ""))
    if ledger := extra.get("ledger"):
        return str(ledger), cluster
    if not connection.host:
        return "", cluster
    if not connection.schema:
        raise OptionError(f"the connection {connection.conn_id!r} names a host and no database (Database)")
    login = quote(connection.login or "", safe="")
    if connection.password:
        login += ":" + quote(connection.password, safe="")
    port = f":{connection.port}" if connection.port else ""
    return f"postgresql://{login + '@' if login else ''}{connection.host}{port}/{connection.schema}", cluster
