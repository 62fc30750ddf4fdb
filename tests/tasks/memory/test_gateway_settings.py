"""The file with Spark's settings is one gateway's alone, on whichever node of a registry."""

from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from ebbflow.infra.memory.registry import MemoryRegistry
from ebbflow.tasks.memory.gateway import OpenGateway, gateway


def test_gateways_of_one_registry_and_port_have_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = MemoryRegistry(tmp_path / "memory")
    registry.token(create=True)

    def serve(host: str, port: int = 0) -> AbstractContextManager[OpenGateway]:
        return gateway(str(tmp_path / "store"), host=host, port=port, notify=print, registry=registry)

    monkeypatch.setattr("socket.gethostname", lambda: "one")
    with serve("127.0.0.1") as first:
        with serve("127.0.0.2", first.port) as second:
            assert second.port == first.port
            assert second.settings != first.settings
        assert not second.settings.exists()
        assert f"127.0.0.1:{first.port}" in first.settings.read_text()
        port = first.port
    monkeypatch.setattr("socket.gethostname", lambda: "two")
    with serve("127.0.0.1", port) as other:
        assert other.settings != first.settings
