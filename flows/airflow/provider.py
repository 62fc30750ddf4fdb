"""What Airflow shows of this provider: the entry point ``apache_airflow_provider`` leads here."""

from typing import Any


def get_provider_info() -> dict[str, Any]:
    """Return the provider's description, by Airflow's schema of it."""
    return {
        "package-name": "prefect-ebbflow",
        "name": "Ebbflow",
        "description": "SQL queries and trainings on capacity that comes and goes.",
        "connection-types": [
            {
                "hook-class-name": "ebbflow.flows.airflow.hook.EbbflowHook",
                "connection-type": "ebbflow",
                "hook-name": "Ebbflow ledger",
            }
        ],
    }
