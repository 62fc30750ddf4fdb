"""boto3 clients with timeouts and bounded retries, and AWS's errors in our own words.

boto3 is imported here only, and only when a client is wanted.
"""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ebbflow.infra.errors import (
    AwsError,
    AwsUnavailableError,
    CredentialsError,
    InsufficientCapacityError,
    SpotPriceTooHighError,
)

ATTEMPTS = 4
"""Requests per call, the first included; between them botocore's ``standard`` mode waits with full jitter."""
CONNECT_TIMEOUT = 5.0  # seconds
READ_TIMEOUT = 30.0  # seconds without a byte; above the 20 s for which a queue may hold a long poll

_SESSION = "ebbflow"  # who did it, in CloudTrail
_MESSAGE = 300  # characters of AWS's own message that are shown

_CREDENTIALS = frozenset(
    (
        "AuthFailure",
        "ExpiredToken",
        "ExpiredTokenException",
        "IncompleteSignature",
        "InvalidAccessKeyId",
        "InvalidClientTokenId",
        "InvalidToken",
        "MissingAuthenticationToken",
        "MissingAuthenticationTokenException",
        "OptInRequired",
        "RequestExpired",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
        "UnrecognizedClientException",
        "UnrecognizedClient",
    )
)
_DENIED = frozenset(
    (
        "AccessDenied",
        "AccessDeniedException",
        "AuthorizationError",
        "AuthorizationErrorException",
        "Client.UnauthorizedOperation",
        "NotAuthorized",
        "UnauthorizedOperation",
    )
)
PRICE_CODES = frozenset(("SpotMaxPriceTooLow",))
"""Codes that say that the spot price is above the limit."""
CAPACITY_CODES = frozenset(
    (
        "InsufficientCapacity",
        "InsufficientCapacityOnHost",
        "InsufficientHostCapacity",
        "InsufficientInstanceCapacity",
        "InsufficientReservedInstanceCapacity",
        "InstanceLimitExceeded",
        "MaxSpotInstanceCountExceeded",
        "SpotInstanceCountLimitExceeded",
        "UnfulfillableCapacity",
        "VcpuLimitExceeded",
    )
)
"""Codes that say that there are no such machines, or that the account may have no more."""
_BUSY = frozenset(
    (
        "BandwidthLimitExceeded",
        "EC2ThrottledException",
        "InternalError",
        "InternalFailure",
        "InternalServerError",
        "PriorRequestNotComplete",
        "RequestLimitExceeded",
        "RequestThrottled",
        "RequestThrottledException",
        "RequestTimeout",
        "RequestTimeoutException",
        "ResourceContention",
        "ResourceContentionFault",
        "ScalingActivityInProgress",
        "ScalingActivityInProgressFault",
        "ServiceUnavailable",
        "ServiceUnavailableException",
        "SlowDown",
        "ThrottledException",
        "Throttling",
        "ThrottlingException",
        "TooManyRequestsException",
        "TransactionInProgressException",
        "Unavailable",
    )
)

_KEY_ID = re.compile(r"\b(?:AKIA|ASIA|AIDA|AROA)[A-Z0-9]{12,}\b")
_ACTION = re.compile(r"perform:?\s+([a-z0-9-]+:[A-Za-z*]+)")
_BLOB = re.compile(r"\S{120,}")  # encoded authorization messages, session tokens


class Clients:
    """Makes the clients of one account and region. Safe for several threads; a client is made once.

    ``endpoint_url`` is for an emulator, ``profile`` a section of the AWS configuration, and ``role_arn`` a role that
    is taken on, and renewed, for all calls (``Settings.capacity_role_arn``). Raises ``AwsError`` without boto3, which
    the extra ``prefect-ebbflow[aws]`` brings, and ``CredentialsError`` for a profile that does not exist.
    """

    def __init__(
        self,
        region: str,
        endpoint_url: str | None = None,
        profile: str | None = None,
        *,
        role_arn: str | None = None,
        attempts: int = ATTEMPTS,
    ) -> None:
        self.region = region
        self._endpoint_url = endpoint_url
        boto3 = _boto3()
        from botocore.config import Config

        self._config = Config(
            connect_timeout=CONNECT_TIMEOUT,
            read_timeout=READ_TIMEOUT,
            retries={"mode": "standard", "total_max_attempts": attempts},
            user_agent_extra="ebbflow",
        )
        self._lock = threading.Lock()
        self._made: dict[tuple[str, str, int | None], Any] = {}
        with calling("read the AWS configuration"):
            self._session = boto3.session.Session(profile_name=profile, region_name=region)
            if role_arn is not None:
                self._session = self._in_role(boto3, role_arn)

    def client(self, service: str, region: str | None = None, *, attempts: int | None = None) -> Any:
        """Return the client of ``service``, such as ``ec2``; ``region`` where another than ours must be asked.

        ``attempts`` is for calls that must not be repeated without a look at what became of the first. Raises
        ``CredentialsError`` or ``AwsError``.
        """
        key = (service, region or self.region, attempts)
        with self._lock, calling(f"make a client of {service}"):
            if key not in self._made:  # making one is not safe for several threads
                config = self._config
                if attempts is not None:
                    from botocore.config import Config

                    config = config.merge(
                        Config(retries={"mode": "standard", "total_max_attempts": attempts})
                    )
                self._made[key] = self._session.client(
                    service, region_name=key[1], endpoint_url=self._endpoint_url, config=config
                )
            return self._made[key]

    def close(self) -> None:
        """Close all connections; may be called twice. A later call opens new ones."""
        with self._lock:
            made, self._made = list(self._made.values()), {}
        for client in made:
            client.close()

    def _in_role(self, boto3: Any, role_arn: str) -> Any:
        import botocore.session
        from botocore.credentials import AssumeRoleCredentialFetcher, DeferredRefreshableCredentials

        source = self._session.get_credentials()
        if source is None:
            raise CredentialsError(_what_to_do("no credentials were found"))
        fetcher = AssumeRoleCredentialFetcher(
            client_creator=partial(
                self._session._session.create_client,
                region_name=self.region,
                endpoint_url=self._endpoint_url,
                config=self._config,
            ),
            source_credentials=source,
            role_arn=role_arn,
            extra_args={"RoleSessionName": _SESSION},
        )
        inner = botocore.session.Session()
        # botocore has no public way to be given credentials that renew themselves
        inner._credentials = DeferredRefreshableCredentials(
            method="assume-role", refresh_using=fetcher.fetch_credentials
        )
        return boto3.session.Session(botocore_session=inner, region_name=self.region)


@contextmanager
def calling(what: str) -> Iterator[None]:
    """Turn what botocore raises into ``AwsError`` and its kinds; ``what`` completes "cannot ...".

    Also a decorator. Messages hold AWS's code and what to do, never keys, tokens or signed text.
    """
    _boto3()
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    try:
        yield
    except ClientError as error:
        raise _of_answer(what, error.response) from None  # its text can hold signed headers
    except (BotoCoreError, ResponseParserError) as error:
        raise _of_botocore(what, error) from None


def of_code(what: str, code: str, message: str = "") -> AwsError:
    """Return the error for one of AWS's codes, as answers and scaling activities carry them."""
    said = f"cannot {what}: {code}" + (f" ({text})" if (text := scrubbed(message)) else "")
    if code in _CREDENTIALS:
        return CredentialsError(
            _what_to_do(f"cannot {what}: AWS does not take the credentials ({code})"), code
        )
    if code in _DENIED:
        action = _ACTION.search(message)
        needs = action.group(1) if action else "what this call needs"
        return CredentialsError(
            f"cannot {what}: these credentials may not ({code}); use the role that Terraform's module iam makes for "
            f"the capacity loop, or give yours {needs}",
            code,
        )
    if code in PRICE_CODES:
        return SpotPriceTooHighError(said, code)
    if code in CAPACITY_CODES:
        return InsufficientCapacityError(said, code)
    if code in _BUSY:
        return AwsUnavailableError(f"{said}; tried {ATTEMPTS} times at most, try again later", code)
    return AwsError(said, code)


def scrubbed(message: str) -> str:
    """Return AWS's message without key ids and encoded blobs, cut to a length that people read."""
    text = _BLOB.sub("...", _KEY_ID.sub("...", " ".join(message.split())))
    return text if len(text) <= _MESSAGE else text[: _MESSAGE - 3] + "..."


def _of_answer(what: str, response: Any) -> AwsError:
    error = response.get("Error", {})
    code, message = str(error.get("Code", "")), str(error.get("Message", ""))
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    found = of_code(what, code, message)
    if type(found) is AwsError and status >= 500:
        return AwsUnavailableError(
            f"cannot {what}: AWS failed with HTTP status {status}; try again later", code
        )
    return found


def _of_botocore(what: str, error: Exception) -> AwsError:
    from botocore import exceptions
    from botocore.parsers import ResponseParserError

    credentials = (
        exceptions.NoCredentialsError,
        exceptions.PartialCredentialsError,
        exceptions.CredentialRetrievalError,
        exceptions.ProfileNotFound,
        exceptions.NoAuthTokenError,
        exceptions.SSOError,
        exceptions.LoginError,
        exceptions.TokenRetrievalError,
        exceptions.RefreshWithMFAUnsupportedError,
        exceptions.InvalidConfigError,
        exceptions.MetadataRetrievalError,
    )
    unavailable = (
        exceptions.ConnectionError,
        exceptions.HTTPClientError,  # timeouts and broken connections
        ResponseParserError,
        exceptions.IncompleteReadError,
    )
    kind = type(error).__name__
    if isinstance(error, exceptions.ProfileNotFound):
        return CredentialsError(_what_to_do(f"cannot {what}: {error}"))
    if isinstance(error, credentials):
        return CredentialsError(_what_to_do(f"cannot {what}: no usable credentials ({kind})"))
    if isinstance(error, unavailable):
        return AwsUnavailableError(
            f"cannot {what}: no usable answer from AWS ({kind}: {scrubbed(str(error))}); tried {ATTEMPTS} times at "
            "most, check the network and try again later"
        )
    return AwsError(f"cannot {what}: {kind}: {scrubbed(str(error))}")


def _what_to_do(what: str) -> str:
    return (
        f"{what}; renew them (aws sso login, or new keys), name a profile, or run where the instance has the role "
        "that Terraform's module iam makes"
    )


def _boto3() -> Any:
    try:
        import boto3
    except ImportError as error:
        raise AwsError("AWS needs boto3; install prefect-ebbflow[aws]") from error
    return boto3
