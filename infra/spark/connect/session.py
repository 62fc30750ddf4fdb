"""Sessions of Spark Connect, whose driver is a server's, spoken to over gRPC: opened, checked, ended."""

import copy
import re
import socket
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from ebbflow.infra.errors import EngineLostError, EngineUnavailableError, InfraError
from ebbflow.infra.spark.failures import first_line, parse, translate
from ebbflow.planners.errors import OptionError

SCHEME = "sc://"
_PORT = 15002  # Spark's default
_PORT_SECONDS = 5.0  # to connect
_RETRIES = {"max_retries": 7, "max_backoff": 5_000}  # 20 s in all; PySpark's own policy takes ten minutes
_LAST_RETRIES = {"max_retries": 3, "max_backoff": 500}  # 0.8 s: of what nobody needs an answer to
# Seconds that a server may take for each; PySpark gives ten minutes. Statements and their analysis may take longer:
# gRPC's keepalive tells of a server that hangs in one.
_DEADLINES = {
    "config": 60.0,
    "clone_session": 60.0,
    "fetch_error_details": 60.0,
    "interrupt": 10.0,
    "release_session": 5.0,
}
# PySpark's client says NO_ACTIVE_SESSION where it asks why a session has changed, as it has closed itself by then
_FORGOTTEN = re.compile(
    r"INVALID_HANDLE\.(SESSION|OPERATION)|SESSION_CHANGED|SESSION_CLOSED|NO_ACTIVE_SESSION"
)


def is_connect(session: object) -> bool:
    """Tell whether a value is a session of Spark Connect; nothing is imported for that."""
    return any(kind.__module__.startswith("pyspark.sql.connect.") for kind in type(session).__mro__)


def address(session: Any) -> str:
    """Return where a session's server is, without the parameters of the connection, of which one may be a token."""
    endpoint = getattr(
        session.client._builder, "endpoint", ""
    )  # a caller's own kind of channel may have none
    return f"{SCHEME}{endpoint or 'server'}"


def check_session(session: Any) -> None:
    """Raise ``OptionError`` for a session that was stopped, and ``EngineUnavailableError`` for one whose server does
    not listen."""
    if session.is_stopped:
        raise OptionError("session has been stopped; give one that runs")
    if getattr(session.client._builder, "endpoint", ""):
        _reach(address(session))


def open_session(server: str, conf: Mapping[str, str]) -> Any:
    """Return a new session of the server at ``sc://HOST[:PORT]``, in UTC, with these SQL settings.

    Raises:
        EngineUnavailableError: packages are missing, or there is no such server.
        OptionError: for a setting that is not one of a session.
    """
    if wrong := sorted(key for key in conf if not key.startswith("spark.sql.")):
        raise OptionError(
            f"conf: a session of Spark Connect has settings of SQL only (spark.sql.*); set {', '.join(wrong)} where "
            "its server is started"
        )
    try:
        from pyspark.sql.connect.session import SparkSession
    except Exception as error:  # missing packages, or a protobuf that is too old: of several families
        raise EngineUnavailableError(
            f"Spark Connect needs further packages: pip install 'prefect-ebbflow[connect]' ({first_line(error)})"
        ) from error
    _reach(server)
    session = SparkSession(connection=server)
    try:
        with translated("the start", address(session)):
            limit(session)
            session.conf.set("spark.sql.session.timeZone", "UTC")
            for key, value in conf.items():
                _set(session, key, value)
    except BaseException:
        end_session(session)
        raise
    return session


def end_session(session: Any) -> None:
    """Have the server forget a session of ours, which takes seconds where the server is gone. Not ``stop``, which may
    also stop a server that a caller started."""
    with suppress(Exception):
        if not session.is_stopped:
            hurry(session)
            session.client.release_session()
    with suppress(Exception):
        session.client.close()


def _reach(server: str) -> None:
    """Raise ``EngineUnavailableError`` unless somebody listens there: gRPC would try again for minutes."""
    place = server.removeprefix(SCHEME).partition("/")[0]
    host, _, port = place.rpartition(":") if re.search(r":[0-9]+$", place) else (place, "", str(_PORT))
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_PORT_SECONDS):
            return
    except OSError as error:
        raise EngineUnavailableError(
            f"no Spark Connect server at {SCHEME}{place} ({error}): check the address, that the server runs "
            "(start-connect-server.sh) and that no firewall is in between"
        ) from error


def limit(session: Any) -> None:
    """Have a session's client try again for some 20 s only, and wait for answers for a minute, but for statements."""
    from pyspark.sql.connect.client.retries import DefaultPolicy

    warnings.filterwarnings("ignore", message=r"\[RETRIES_EXCEEDED\]")  # an error says it
    client = session.client
    client.set_retry_policies([DefaultPolicy(**_RETRIES)])
    if (known := getattr(client, "_rpc_deadlines", None)) is not None:  # since PySpark 4.3
        client._rpc_deadlines = replace(known, **_DEADLINES)


def hurry(session: Any) -> None:
    """Have a session's client hardly try again: nothing that it is asked for from now on is needed."""
    from pyspark.sql.connect.client.retries import DefaultPolicy

    session.client.set_retry_policies([DefaultPolicy(**_LAST_RETRIES)])


def limited(session: Any) -> Any:
    """Return a session of a caller's as one whose client has the bounds of ``limit``; the caller's stays as it is.

    It is the same session to the server, over the same channel, which stays open when this object goes.
    """
    client = copy.copy(session.client)
    client.close = lambda: None
    found = object.__new__(type(session))
    found.__dict__.update(vars(session), _client=client)
    found.__dict__.pop("_sqm", None)  # the caller's streams, which a session ends with itself
    limit(found)
    return found


def _set(session: Any, key: str, value: str) -> None:
    from pyspark.errors import PySparkException

    try:
        session.conf.set(key, value)
    except PySparkException as error:
        if "CONFIG" not in (error.getCondition() or ""):
            raise
        raise OptionError(
            f"conf: the Spark Connect server does not take {key}: {error.getCondition()}"
        ) from error


@contextmanager
def translated(what: str, server: str, sql: str = "") -> Iterator[None]:
    """Raise the errors of PySpark's client as ours. ``what`` was done, with the statement ``sql`` if any."""
    import grpc
    from pyspark.errors import PySparkException

    try:
        yield
    except InfraError:
        raise
    except (PySparkException, grpc.RpcError) as error:  # some calls of PySpark's let those of gRPC through
        raise _meaning(error, what, server, sql) from error


def server_gone(error: Exception, server: str) -> EngineLostError | None:
    """Return that the server or its session is gone, where that is what an error of PySpark's client means."""
    found = _meaning(error, "a look for tables", server, "")
    return found if isinstance(found, EngineLostError) else None


def _meaning(error: Any, what: str, server: str, sql: str) -> Exception:
    condition, text = getattr(error, "getCondition", str)() or "", str(error)
    status = getattr(error, "getGrpcStatusCode", getattr(error, "code", lambda: None))()
    known = getattr(status, "name", "")
    if known == "UNAUTHENTICATED":
        return EngineUnavailableError(
            f"the Spark Connect server at {server} refuses {what}: it wants a token; set "
            "SPARK_CONNECT_AUTHENTICATE_TOKEN"
        )
    if known in ("UNAVAILABLE", "DEADLINE_EXCEEDED") or "Cannot invoke RPC on closed channel" in text:
        return EngineLostError(
            f"the Spark Connect server at {server} does not answer any more ({what}); finished stages are kept: "
            "start it, or give another with --master, and run the query again"
        )
    if _FORGOTTEN.search(condition) or _FORGOTTEN.search(text):
        return EngineLostError(
            f"the Spark Connect server at {server} was restarted, or has ended the session ({what}); finished stages "
            "are kept: run the query again, with a new session where it was given one"
        )
    trace = getattr(error, "getStackTrace", lambda: None)() or ""
    links = [(type(error).__name__, text)] + (parse(trace) if trace.strip() else [])
    return translate(links, stage=what, sql=sql)
