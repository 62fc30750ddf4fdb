"""A small JSON file that changes only if it is still what was read, as far as its storage can promise that."""

import json
import os
from typing import Any, Protocol

from ebbflow.infra.clock import Clock
from ebbflow.infra.storage.filesystems import CONNECT_TIMEOUT, MAX_ATTEMPTS, REQUEST_TIMEOUT
from ebbflow.infra.storage.places import StorageLocation

SETTLE = 2.0  # seconds until what was written is read back, where no conditional write exists
_LOST_RACE = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")
_MISSING = ("NoSuchKey", "404")


class LeaseFile(Protocol):
    """Reads and writes with versions."""

    def read(self) -> tuple[dict[str, Any], str] | None:
        """Return the content and its version, ``None`` if there is no file or none that is whole."""
        ...

    def write(self, content: dict[str, Any], version: str | None) -> str | None:
        """Replace the content of that version, or create it for ``None``; return the new version.

        ``None`` means that it was not, or is no longer, of that version.
        """
        ...


def lease_file(place: StorageLocation, name: str, clock: Clock) -> LeaseFile:
    """Return the file with the strongest promise to be had: conditional writes on S3 if boto3 is installed."""
    if not place.local:
        try:
            import boto3  # noqa: F401
        except ImportError:
            return ReadBack(place, name, clock)
        return Conditional(place, name)
    return ReadBack(place, name, clock)


class ReadBack:
    """Writes, waits, and looks whether it is still there. The content's token is its version."""

    def __init__(self, place: StorageLocation, name: str, clock: Clock, settle: float = SETTLE) -> None:
        self._place, self._name, self._clock, self._settle = place, name, clock, settle

    def read(self) -> tuple[dict[str, Any], str] | None:
        try:
            return _decode(self._place.read(self._name), "")
        except FileNotFoundError:
            return None

    def write(self, content: dict[str, Any], version: str | None) -> str | None:
        there = self.read()
        if (there[1] if there else None) != version:
            return None
        self._place.write(self._name, json.dumps(content).encode())
        if version != content["token"]:  # a renewal needs no waiting: nobody writes over a running lease
            self._clock.sleep(self._settle)
        there = self.read()
        return content["token"] if there is not None and there[1] == content["token"] else None


class Conditional:
    """S3's conditional writes; the entity tag is the version."""

    def __init__(self, place: StorageLocation, name: str) -> None:
        self._bucket, _, self._key = place.path(name).partition("/")
        self._client = _client()

    def read(self) -> tuple[dict[str, Any], str] | None:
        try:
            found = self._call("get_object")
        except _Refused as exc:
            if exc.code in _MISSING:
                return None
            raise
        return _decode(found["Body"].read(), found["ETag"])

    def write(self, content: dict[str, Any], version: str | None) -> str | None:
        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
        try:
            done = self._call("put_object", Body=json.dumps(content).encode(), **condition)
        except _Refused as exc:
            if exc.code in (*_LOST_RACE, *_MISSING):
                return None
            raise
        return str(done["ETag"])

    def _call(self, operation: str, **arguments: Any) -> Any:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return getattr(self._client, operation)(Bucket=self._bucket, Key=self._key, **arguments)
        except ClientError as exc:
            raise _Refused(str(exc.response.get("Error", {}).get("Code", "")), str(exc)) from exc
        except BotoCoreError as exc:
            raise OSError(f"S3 cannot be reached: {exc}") from exc


class _Refused(OSError):
    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


def _client() -> Any:
    import boto3
    from botocore.config import Config

    env = os.environ
    endpoint = env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL") or None
    region = env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or ("us-east-1" if endpoint else None)
    config = Config(
        connect_timeout=CONNECT_TIMEOUT,
        read_timeout=REQUEST_TIMEOUT,
        retries={"total_max_attempts": MAX_ATTEMPTS, "mode": "standard"},
    )
    return boto3.client("s3", endpoint_url=endpoint, region_name=region, config=config)


def _decode(data: bytes, version: str) -> tuple[dict[str, Any], str] | None:
    """Return a lease's content; one that is not whole counts as long free, and can be replaced."""
    try:
        content = json.loads(data)
        if isinstance(content["token"], str) and content["beat"] >= 0 and content["ttl"] > 0:
            return content, version or content["token"]
    except (ValueError, KeyError, TypeError):
        pass
    return {"token": "", "beat": 0.0, "ttl": 1.0, "free": True}, version
