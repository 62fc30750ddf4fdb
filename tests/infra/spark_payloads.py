"""Answers of a Spark 4.3 driver and standalone master, recorded and cut to a few fields beside those read."""

from typing import Any


def executor(name: str, host: str, **changes: Any) -> dict[str, Any]:
    return {
        "id": name,
        "hostPort": f"{host}:38939",
        "isActive": True,
        "totalCores": 1,
        "maxTasks": 1,
        "isBlacklisted": False,
        "maxMemory": 434031820,
        "addTime": "2026-11-20T15:00:32.219GMT",
        "executorLogs": {"stdout": f"http://{host}:36129/logPage/?executorId={name}&logType=stdout"},
        "resourceProfileId": 0,
        "isExcluded": False,
        "excludedInStages": [],
    } | changes


def driver(cores: int = 0) -> dict[str, Any]:
    return executor("driver", "127.0.0.1", totalCores=cores, maxMemory=455501414, executorLogs={})


def worker(host: str, state: str = "ALIVE", **changes: Any) -> dict[str, Any]:
    return {
        "id": f"worker-20261120150016-{host}-39875",
        "host": host,
        "port": 39875,
        "webuiaddress": f"http://{host}:36129",
        "cores": 1,
        "coresused": 1,
        "coresfree": 0,
        "memory": 2048,
        "memoryused": 1024,
        "state": state,
        "lastheartbeat": 1795186832242,
    } | changes


def master(*workers: dict[str, Any]) -> dict[str, Any]:
    return {
        "url": "spark://127.0.0.1:23660",
        "workers": list(workers),
        "aliveworkers": sum(w["state"] == "ALIVE" for w in workers),
        "activeapps": [{"id": "app-20261120150023-0000", "cores": 2, "state": "RUNNING"}],
        "status": "ALIVE",
    }
