import http.server
import sys
import threading
import traceback
from collections.abc import Iterator

import pytest
from botocore.exceptions import ClientError
from botocore.retries.standard import RetryPolicy

from ebbflow.infra.aws import clients as module
from ebbflow.infra.aws.clients import ATTEMPTS, Clients, calling, of_code, scrubbed
from ebbflow.infra.errors import (
    AwsError,
    AwsUnavailableError,
    CredentialsError,
    InsufficientCapacityError,
    SpotPriceTooHighError,
)

SECRET = "FwoGZXIvYXdzEXAMPLETOKEN"


def client_error(code: str, message: str = "no", status: int = 400) -> ClientError:
    return ClientError(
        {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}, "Any"
    )


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("RequestLimitExceeded", AwsUnavailableError),
        ("Throttling", AwsUnavailableError),
        ("ServiceUnavailable", AwsUnavailableError),
        ("ScalingActivityInProgress", AwsUnavailableError),
        ("ExpiredToken", CredentialsError),
        ("RequestExpired", CredentialsError),
        ("UnauthorizedOperation", CredentialsError),
        ("AccessDeniedException", CredentialsError),
        ("InsufficientInstanceCapacity", InsufficientCapacityError),
        ("MaxSpotInstanceCountExceeded", InsufficientCapacityError),
        ("VcpuLimitExceeded", InsufficientCapacityError),
        ("SpotMaxPriceTooLow", SpotPriceTooHighError),
        ("ValidationError", AwsError),
    ],
)
def test_codes_become_our_errors(code, kind):
    with pytest.raises(AwsError) as caught, calling("do it"):
        raise client_error(code)
    assert type(caught.value) is kind
    assert caught.value.code == code
    assert "cannot do it" in str(caught.value)


def test_an_unknown_code_with_a_server_status_may_work_later():
    with pytest.raises(AwsUnavailableError, match="HTTP status 503"), calling("do it"):
        raise client_error("Odd", status=503)


def test_expired_credentials_say_what_to_do_and_keep_the_signed_text_to_themselves():
    said = f"The Canonical String should have been 'x-amz-security-token:{SECRET}' by AKIAIOSFODNN7EXAMPLE"
    with pytest.raises(CredentialsError, match="renew them") as caught, calling("look"):
        raise client_error("SignatureDoesNotMatch", said)
    shown = "".join(traceback.format_exception(caught.value))
    assert SECRET not in shown
    assert "AKIA" not in shown


def test_a_denied_call_names_the_action():
    error = of_code(
        "end a node", "UnauthorizedOperation", "You are not authorized to perform: ec2:TerminateInstances"
    )
    assert "ec2:TerminateInstances" in str(error)


def test_messages_lose_keys_and_blobs_and_are_cut():
    text = scrubbed(f"AKIAIOSFODNN7EXAMPLE {'x' * 200} ok\n  then {'word ' * 200}")
    assert "AKIA" not in text
    assert "xxx" not in text
    assert text.startswith("... ... ok then word")
    assert len(text) == 300


def test_without_boto3_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(AwsError, match=r"prefect-ebbflow\[aws\]"):
        Clients("eu-north-1")


def test_a_profile_that_does_not_exist(monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(CredentialsError, match="nobody"):
        Clients("eu-north-1", profile="nobody")


def test_no_credentials_at_all(monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    client = Clients("eu-north-1", "http://127.0.0.1:9").client("ec2")
    with pytest.raises(CredentialsError, match="no usable credentials"), calling("look"):
        client.describe_instances()


def test_a_client_is_made_once_and_a_wrong_argument_is_our_error():
    clients = Clients("eu-north-1", "http://127.0.0.1:9")
    assert clients.client("ec2") is clients.client("ec2")
    assert clients.client("ec2", "us-east-1").meta.region_name == "us-east-1"
    with pytest.raises(AwsError, match="Unknown parameter"), calling("look"):
        clients.client("ec2").modify_fleet(FleetId="fleet-1", TargetCapacity=5)
    clients.close()
    clients.close()


class Refusing(http.server.BaseHTTPRequestHandler):
    """Answers every call as a service that is asked too often."""

    asked = 0
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        type(self).asked += 1
        self.rfile.read(int(self.headers["Content-Length"]))
        error = "<Error><Code>RequestLimitExceeded</Code><Message>slower</Message></Error>"
        body = f"<Response><Errors>{error}</Errors></Response>".encode()
        self.send_response(503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Silent(Refusing):
    """Takes the request and says nothing until it is let go."""

    let_go = threading.Event()

    def do_POST(self) -> None:
        type(self).asked += 1
        self.let_go.wait(150)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA000000000000EBBF")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "emulated")
    monkeypatch.setattr(RetryPolicy, "compute_retry_delay", lambda *_: 0.0)
    servers = []

    def start(handler: type[Refusing]) -> str:
        handler.asked = 0
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    Silent.let_go.set()
    for server in servers:
        server.shutdown()
        server.server_close()


def test_throttling_is_retried_a_bounded_number_of_times(serve):
    client = Clients("eu-north-1", serve(Refusing)).client("ec2")
    with pytest.raises(AwsUnavailableError, match="RequestLimitExceeded"), calling("look"):
        client.describe_instances()
    assert Refusing.asked == ATTEMPTS


def test_no_answer_is_waited_for_a_bounded_time(serve, monkeypatch):
    monkeypatch.setattr(module, "READ_TIMEOUT", 0.2)
    client = Clients("eu-north-1", serve(Silent), attempts=2).client("ec2")
    with pytest.raises(AwsUnavailableError, match="ReadTimeoutError"), calling("look"):
        client.describe_instances()
    assert Silent.asked == 2


def test_nobody_listens(serve):
    client = Clients("eu-north-1", "http://127.0.0.1:9", attempts=1).client("ec2")
    with pytest.raises(AwsUnavailableError, match="EndpointConnectionError"), calling("look"):
        client.describe_instances()


def test_a_role_is_taken_on_for_all_calls(aws_account):
    role = f"arn:aws:iam::{aws_account.id}:role/ebbflow-lab-capacity"
    clients = Clients("us-east-1", aws_account.emulator.url, role_arn=role)
    who = clients.client("sts").get_caller_identity()["Arn"]
    assert "assumed-role/ebbflow-lab-capacity/ebbflow" in who
