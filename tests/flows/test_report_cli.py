"""``ebbflow report``: the page, the JSON, the server, and what it says where there is nothing."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from ebbflow.flows.cli import app
from ebbflow.flows.report import moment
from ebbflow.infra.errors import InfraError, LedgerError, LedgerUnavailableError
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.machine.page_server import PageResponse, PageServer
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.ledger import AppEntered, AppSpec, Decided, LoopBegan
from ebbflow.tasks.report.cluster.live import ClusterFollower
from ebbflow.tasks.report.cluster.report import ClusterReport
from tests.cluster_day import simulated_day
from tests.cluster_events import START


class Set:
    """A clock that stands where it is put."""

    def __init__(self, at: float) -> None:
        self.at = at

    def now(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds

    def wait(self, event: threading.Event, timeout: float) -> bool:
        return event.is_set()


def fill(path: Path, cluster: str = "local") -> ClusterReport:
    """Write four hours of a cluster into a ledger; return what its report must say."""
    events, reports = simulated_day(hours=4)
    clock = Set(START)
    with Ledger.open(str(path), cluster=cluster, clock=clock) as ledger:
        lead = ledger.lead("loop on host-a", 60.0)
        for event in events:
            clock.at = max(clock.at, event.at)
            if not isinstance(event.change, LoopBegan):
                lead.write([event.change])
        for name, report in reports.items():
            ledger.report(name, report)
        lead.resign()
        return ClusterFollower(ledger, clock, cluster=cluster).look()


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ClusterReport]:
    path = tmp_path_factory.mktemp("ledger") / "ledger.db"
    return path, fill(path)


def run(*arguments: str):
    return CliRunner().invoke(app, ["report", *arguments])


# --- files --------------------------------------------------------------------------------------------------------


def test_a_page_is_written_and_what_matters_said(filled, tmp_path):
    path, report = filled
    found = run("--ledger", str(path), "--output", str(tmp_path / "deep" / "page.html"))
    assert found.exit_code == 0, found.output
    assert f"{len(report.apps)} apps:" in found.output
    html = (tmp_path / "deep" / "page.html").read_text()
    assert "Cluster <bdi>local</bdi>" in html
    assert 'id="live"' not in html


def test_json_goes_to_a_file_or_to_standard_output(filled, tmp_path, monkeypatch):
    path, report = filled
    monkeypatch.chdir(tmp_path)
    found = run("--ledger", str(path), "--json")
    assert found.exit_code == 0
    assert ClusterReport.from_json(found.stdout).apps == report.apps
    assert json.loads(found.stdout)["format"] == 2
    assert run("--ledger", str(path), "--output", "r.json").exit_code == 0
    assert ClusterReport.from_json(Path("r.json").read_text()).number == report.number
    assert not list(tmp_path.glob("*.html"))
    assert run("--ledger", str(path)).exit_code == 0
    assert [file.name for file in tmp_path.glob("*.html")] == ["ebbflow-report.html"]


def test_a_part_of_the_time_and_a_pipeline(filled):
    path, _ = filled
    found = run(
        "--ledger", str(path), "--json", "--since", "2026-09-21T15:00", "--until", "2026-09-21T16:00:00Z"
    )
    part = ClusterReport.from_json(found.stdout)
    assert part.seconds == 3600
    found = run("--ledger", str(path), "--json", "--pipeline", "nightly")
    assert {a.pipeline for a in ClusterReport.from_json(found.stdout).apps} == {"nightly"}


def test_the_page_is_opened_where_that_is_asked_for(filled, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert run("--ledger", str(filled[0]), "--output", str(tmp_path / "a page.html"), "--open").exit_code == 0
    assert opened == [(tmp_path / "a page.html").as_uri()]


def test_prices_of_one_s_own_are_compared_with(filled, tmp_path):
    file = tmp_path / "prices.toml"
    file.write_text('source = "me"\nregion = "eu-west-1"\n[on_demand]\n"m6i.4xlarge" = 0.856\n')
    found = run("--ledger", str(filled[0]), "--json", "--on-demand-prices", str(file))
    assert json.loads(found.stdout)["money"]["total"]["list_dollars"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cluster", "other"], "no cluster 'other'; there are local"),
        (["--pipeline", "weekly"], "pipelines there: nightly"),
        (["--since", "1h", "--until", "2h"], "--since must be before --until"),
        (["--since", "yesterday"], "--since must be like 2h"),
        (["--since", "25:00"], "--since must be like 2h"),
        (["8080"], "a port is for --serve"),
        (["--serve", "70000"], "a port is 0 to 65535"),
        (["--output", "/proc/nowhere/page.html"], "cannot write"),
        (["--output", "page.pdf"], "must end with .html"),
    ],
)
def test_what_cannot_be_done_is_said(filled, arguments, said):
    found = run("--ledger", str(filled[0]), *arguments)
    assert found.exit_code != 0
    assert said in f"{found.exception} {found.output}"


def test_a_ledger_that_is_not_there_is_not_made(tmp_path):
    found = run("--ledger", str(tmp_path / "none.db"))
    assert isinstance(found.exception, LedgerError)
    assert not list(tmp_path.iterdir())


def test_a_cluster_in_which_nothing_has_happened(tmp_path):
    with Ledger.open(str(tmp_path / "new.db")):
        pass
    found = run("--ledger", str(tmp_path / "new.db"))
    assert "nothing has happened yet in cluster 'local'" in str(found.exception)


@pytest.mark.parametrize(
    ("text", "at"),
    [("90s", -90), ("2h", -7200), ("1.5d", -129600), ("14:13", -20), ("14:13:30", 10), ("2026-09-21T14:13:21", 1),
     ("2026-09-21 16:13:20+02:00", 0)],
)  # fmt: skip
def test_moments(text, at):
    assert moment(text, START, "--since") == START + at


def test_a_moment_that_was_not_given_is_none():
    assert moment(None, START, "--since") is None


# --- served -------------------------------------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path) -> Iterator[tuple[httpx.Client, Ledger, Set]]:
    clock = Set(START)
    with Ledger.open(str(tmp_path / "ledger.db"), clock=clock) as ledger, ledger.lead("loop", 600.0) as lead:
        lead.write([AppEntered(AppSpec("x", "training", title="first app", gpus=1))])
        follower = ClusterFollower(ledger, clock)
        with (
            PageServer(follower.answer) as server,
            httpx.Client(base_url=server.url, trust_env=False, timeout=20.0) as client,
        ):
            yield client, ledger, clock


def test_a_live_page_is_served_with_the_right_headers(served):
    client, *_ = served
    page = client.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["cache-control"] == "no-store"
    assert page.headers["x-frame-options"] == "DENY"
    policy = page.headers["content-security-policy"]
    script = re.search(r"script-src '(sha256-[^']+)'", policy)[1]
    assert script in page.text
    for rule in ("default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'"):
        assert rule in policy
    assert "Python" not in page.headers["server"]
    assert "first app" in page.text
    head = client.head("/")
    assert (head.status_code, head.content) == (200, b"")
    assert ClusterReport.from_json(client.get("/report.json").text).apps[0].id == "x"


def test_only_parts_that_changed_are_sent(served):
    client, ledger, clock = served
    page = client.get("/").text
    have = dict(re.findall(r'data-part="(\w+)" data-digest="(\w+)"', page))
    assert len(have) == 9
    same = client.get("/live.json", params=have).json()
    assert (same["parts"], same["problem"]) == ([], "")
    ledger.write([Decided("guard", "<script>no</script>", "x")])
    assert client.get("/live.json", params=have).json()["parts"] == []  # not looked at again so soon
    clock.at += 60
    told = client.get("/live.json", params=have).json()
    parts = {name: (digest, html) for name, digest, html in told["parts"]}
    assert "decisions" in parts
    assert "&lt;script&gt;no" in parts["decisions"][1]
    assert "money" not in parts
    again = client.get(
        "/live.json", params=have | {name: digest for name, (digest, _) in parts.items()}
    ).json()
    assert again["parts"] == []


class Away:
    """A ledger that can be out of reach."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.away = ledger, False

    def __getattr__(self, name: str):
        if self.away:
            raise LedgerUnavailableError("the ledger at postgresql://x:***@db/ebb does not answer")
        return getattr(self.ledger, name)


def test_the_page_stays_while_the_ledger_is_away(served):
    _, ledger, clock = served
    source = Away(ledger)
    follower = ClusterFollower(source, clock)
    source.away = True
    assert follower.answer("/", {}).status == 503
    clock.at, source.away = clock.at + 60, False
    assert "first app" in follower.answer("/", {}).body
    clock.at, source.away = clock.at + 60, True
    told = json.loads(follower.answer("/live.json", {}).body)
    assert told["problem"].startswith(
        "The ledger cannot be read since 14:14:20 UTC; this is what was there then:"
    )
    assert "first app" in follower.answer("/", {}).body
    clock.at, source.away = clock.at + 60, False
    assert json.loads(follower.answer("/live.json", {}).body)["problem"] == ""


def test_a_large_report_is_made_less_often(served):
    _, ledger, clock = served

    class Slow(Away):
        def reports(self, **_):
            clock.at += 3.0
            return self.ledger.reports()

    follower = ClusterFollower(Slow(ledger), clock)
    follower.answer("/", {})
    assert json.loads(follower.answer("/live.json", {}).body)["wait"] == pytest.approx(9.0)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1:1", "localhost.evil.example", ""]
)
def test_another_name_is_refused(served, host):
    client, *_ = served
    assert client.get("/", headers={"Host": host}).status_code == 421
    assert client.get("/live.json", headers={"Host": host}).status_code == 421


def test_this_machine_s_names_are_answered(served):
    client, *_ = served
    assert client.get("/live.json", headers={"Host": f"localhost:{client.base_url.port}"}).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(served, method):
    client, *_ = served
    answer = client.request(method, "/", content=b"x" * 100)
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "/../../etc/passwd", "/%2e%2e/x", "/live.json/", "/favicon.ico"]
)
def test_there_is_nothing_else(served, path):
    client, *_ = served
    assert client.get(path).status_code == 404


def test_a_port_that_is_taken_is_an_error():
    with (
        PageServer(lambda path, query: PageResponse("x")) as server,
        pytest.raises(InfraError, match="name another"),
    ):
        PageServer(lambda path, query: None, server.port)


def test_ports_have_limits():
    with pytest.raises(OptionError, match="0 to 65535"):
        PageServer(lambda path, query: None, -1)


@pytest.mark.processes
def test_ctrl_c_ends_the_server(filled, tmp_path):
    command = [
        sys.executable,
        "-P",
        "-m",
        "ebbflow.flows.cli",
        "report",
        "--ledger",
        str(filled[0]),
        "--serve",
        "0",
    ]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "NO_COLOR": "1", "COLUMNS": "200"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            line = process.stderr.readline()
            url = re.search(r"http://127\.0\.0\.1:\d+/", line)[0]
            assert "Cluster" in httpx.get(url, trust_env=False, timeout=60.0).text
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=150)
        finally:
            process.kill()
    assert (process.returncode, out) == (0, "")
    assert "ended" in err
