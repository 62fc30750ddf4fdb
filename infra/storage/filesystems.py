"""Where files are: paths and URIs, the file systems behind them, and their errors in our own words."""

import errno
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, unquote, urlsplit

from ebbflow.infra.errors import InfraError, StorageError, StorageFullError
from ebbflow.planners.errors import OptionError

CONNECT_TIMEOUT = 5.0  # seconds
REQUEST_TIMEOUT = 20.0  # seconds without a byte
MAX_ATTEMPTS = 4  # per S3 request, the first included

MEMORY = "memory+"  # before the scheme of the store behind

ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+):(.*)$", re.DOTALL)
_S3_SCHEMES = ("s3", "s3a", "s3n")


class StorageTier(Protocol):
    """Peers' memory before a store: files are written there first, and to the store behind asynchronously."""

    filesystem: Any  # of ``pyarrow.fs``

    def flush(self, path: str = "") -> None:
        """Wait until the store behind has all at or below ``path``. Raises ``StorageError`` or ``OSError``."""
        ...


_tiers: dict[str, StorageTier] = {}  # of this process, by scheme


def attach(scheme: str, tier: StorageTier | None) -> None:
    """Use ``tier`` for ``scheme``, such as ``memory+file``, in this process; ``None``: the store behind alone."""
    if tier is None:
        _tiers.pop(scheme, None)
    else:
        _tiers[scheme] = tier


def flush(scheme: str, path: str) -> None:
    """Wait until the store behind a tier has all at or below ``path``. Raises ``StorageError`` or ``OSError``."""
    if (tier := _tiers.get(scheme)) is not None:
        tier.flush(path)


def resolve(uri: str | os.PathLike[str]) -> tuple[Any, str]:
    """Return the file system that holds ``uri`` and the path in its terms.

    ``uri`` is a plain path (``~`` and relative paths allowed), ``file:///...`` (percent-encoded) or
    ``s3://bucket/key`` (``s3a`` is the same). S3 follows the usual AWS environment variables:
    ``AWS_ENDPOINT_URL_S3`` or ``AWS_ENDPOINT_URL``, ``AWS_REGION`` or ``AWS_DEFAULT_REGION``, and the SDK's
    own search for credentials. Requests have timeouts and a bounded number of retries.

    Returns ``(pyarrow.fs.FileSystem, path)``. Raises ``OptionError`` for anything else.
    """
    scheme, path = split(uri)
    return filesystem(scheme), path


def split(uri: str | os.PathLike[str]) -> tuple[str, str]:
    """Return the scheme (``file`` or ``s3``, after ``memory+`` where that is said) and the path in pyarrow's terms,
    without touching storage.

    Raises ``OptionError``.
    """
    text = os.fspath(uri)
    if not text.strip():
        raise OptionError(
            "a path must not be empty; give a directory, file:///DIRECTORY or s3://BUCKET/DIRECTORY"
        )
    if "\0" in text:
        raise OptionError(f"{text!r} must not hold a NUL character")
    if text.startswith(MEMORY):
        scheme, path = split(text.removeprefix(MEMORY))
        return MEMORY + scheme.removeprefix(MEMORY), path
    match = _SCHEME.match(text)
    scheme = match.group(1).lower() if match else ""
    if not match or (not match.group(2).startswith("/") and Path(text).exists()):
        return "file", _local(text)
    if scheme == "file":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise OptionError(
                f"{text!r} names the host {parts.netloc!r}; a local file is file:///DIRECTORY/NAME"
            )
        return "file", _local(unquote(text.split(":", 1)[1].removeprefix("//" + parts.netloc)))
    if scheme in _S3_SCHEMES:
        return "s3", _bucket_path(text, match.group(2))
    raise OptionError(f"{text!r} has the scheme {scheme!r}; use a plain path, file:// or s3://")


def to_uri(path: str, scheme: str = "file") -> str:
    """Return the URI of a path in pyarrow's terms; ``split`` is the inverse.

    Examples:
        >>> to_uri("/data/a b")
        'file:///data/a%20b'
        >>> to_uri("bucket/key", "s3")
        's3://bucket/key'
    """
    if scheme.startswith(MEMORY):
        return MEMORY + to_uri(path, scheme.removeprefix(MEMORY))
    return f"s3://{path}" if scheme == "s3" else "file://" + quote(path)


def filesystem(scheme: str) -> Any:
    """Return the ``pyarrow.fs.FileSystem`` of ``file`` or ``s3``, as the environment describes it now.

    Of ``memory+file`` and ``memory+s3`` it is that of the tier that is attached, else that of the store behind.

    Raises ``OptionError``.
    """
    if scheme.startswith(MEMORY):
        tier = _tiers.get(scheme)
        return filesystem(scheme.removeprefix(MEMORY)) if tier is None else tier.filesystem
    if scheme == "file":
        from pyarrow.fs import LocalFileSystem

        return LocalFileSystem()
    if scheme != "s3":
        raise OptionError(f"scheme must be 'file' or 's3'; got {scheme!r}")
    env = os.environ
    endpoint = env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL") or ""
    region = env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or ("us-east-1" if endpoint else "")
    credentials = tuple(
        env.get(name, "")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE")
    )
    # the process id: an S3 client must not be carried over a fork
    return _s3(endpoint, region, credentials, os.getpid())


def public_settings(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return where S3 is, as the environment says it, for processes elsewhere: addresses and regions, no credentials.

    An address with a user or a password in it stays here.
    """
    found = {name: environment[name] for name in (*ENDPOINTS, *REGIONS) if environment.get(name)}
    return {name: value for name, value in found.items() if name in REGIONS or "@" not in value}


_own = public_settings()  # what this process began with


@contextmanager
def following(said: Mapping[str, str]) -> Iterator[None]:
    """Look for S3 where ``said``, another process' ``public_settings``, says, but where this one was told itself.

    Afterwards the environment is as it was: a process may serve several others, one after the other.
    """
    names = [
        name for group in (ENDPOINTS, REGIONS) if not any(one in _own for one in group) for name in group
    ]
    before = {name: os.environ.get(name) for name in names}
    _set(dict.fromkeys(names) | {name: said[name] for name in names if name in said})
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def translated(action: str, kind: type[InfraError] = StorageError) -> Iterator[None]:
    """Turn errors of files, S3 and Arrow into ours: ``kind``, or ``StorageFullError`` when space is short.

    ``action`` completes "cannot ...", such as ``"write the checkpoint to s3://b/k"``. Our own errors pass.
    """
    from pyarrow import ArrowException

    try:
        yield
    except (OSError, ArrowException) as exc:
        if _is_full(exc):
            raise StorageFullError(
                f"cannot {action}: no space left; free some space or choose another place, "
                f"finished checkpoints are kept"
            ) from exc
        raise kind(f"cannot {action}: {_meaning(exc)}") from exc


def is_denied(error: BaseException | None) -> bool:
    """Return whether an error, or one that it was made of, is for a missing right or credentials, which stay so."""
    while error is not None:
        if isinstance(error, OSError):
            text = str(error)
            told = "AWS Error" in text and any(sign in text for sign in (*_S3_DENIED, *_S3_EXPIRED))
            if told or isinstance(error, PermissionError) or error.errno == errno.EROFS:
                return True
        error = error.__cause__
    return False


def _local(text: str) -> str:
    return os.path.abspath(os.path.expanduser(text))


def _bucket_path(text: str, rest: str) -> str:
    parts = [part for part in rest.split("/") if part]
    if not rest.startswith("//") or not parts:
        raise OptionError(f"{text!r} names no bucket; write s3://BUCKET/DIRECTORY")
    if any(part in (".", "..") for part in parts):
        raise OptionError(f"{text!r} must not hold '.' or '..' as a part of its path")
    return "/".join(parts)


@lru_cache(maxsize=8)
def _s3(endpoint: str, region: str, credentials: tuple[str, ...], process: int) -> Any:
    from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

    key, secret, token, _ = credentials
    options: dict[str, Any] = {
        "connect_timeout": CONNECT_TIMEOUT,
        "request_timeout": REQUEST_TIMEOUT,
        "retry_strategy": AwsStandardS3RetryStrategy(max_attempts=MAX_ATTEMPTS),
        "allow_delayed_open": True,  # a small file is one request instead of three
    }
    if key and secret:
        options |= {"access_key": key, "secret_key": secret, "session_token": token or None}
    if endpoint:
        parts = urlsplit(endpoint if "://" in endpoint else f"https://{endpoint}")
        options |= {"endpoint_override": parts.netloc, "scheme": parts.scheme}
    if region:
        options["region"] = region
    with translated(f"connect to S3 at {endpoint or 'AWS'}"):
        return S3FileSystem(**options)


def _is_full(exc: Exception) -> bool:
    return (isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT)) or (
        "No space left on device" in str(exc) or "Disk quota exceeded" in str(exc)
    )


_S3_DENIED = ("ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH", "HTTP status 403")
_S3_EXPIRED = ("EXPIRED_TOKEN", "ExpiredToken")
_S3_MEANINGS = (
    (
        ("NO_SUCH_BUCKET", "RESOURCE_NOT_FOUND during HeadBucket", "Bucket '"),
        "there is no such bucket; create it or correct the name",
    ),
    (
        _S3_DENIED,
        "access denied; check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and the bucket's policy",
    ),
    (_S3_EXPIRED, "the AWS credentials have expired; renew them"),
    (
        ("NETWORK_CONNECTION", "curlCode"),
        "S3 cannot be reached; check the network, AWS_ENDPOINT_URL and AWS_REGION",
    ),
    (("SLOW_DOWN", "ServiceUnavailable", "HTTP status 503"), "S3 asks to slow down; try again later"),
)


def _meaning(exc: Exception) -> str:
    text = re.sub(r"\[(?:Win)?[Ee]rr(?:no|or) \d+\] ", "", str(exc)).replace(" Detail:", "")
    if "AWS Error" in text or text.startswith("Bucket "):
        for signs, meaning in _S3_MEANINGS:
            if any(sign in text for sign in signs):
                return f"{meaning} ({text})"
    if isinstance(exc, FileNotFoundError):
        return f"it does not exist ({text})"
    if isinstance(exc, PermissionError) or (isinstance(exc, OSError) and exc.errno == errno.EROFS):
        return f"permission denied; check who owns it and whether it is writable ({text})"
    return text
