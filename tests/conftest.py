"""What several folders of tests share: benchmark data as ``ebbflow data`` makes it, and an emulated AWS."""

import fcntl
import gc
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

if TYPE_CHECKING:
    from tests.aws.emulator import AccountAt, Emulator

# how long an example takes depends on what else runs; the same few examples each time, more and others in `make fuzz`
settings.register_profile("ebbflow", deadline=None, derandomize=True, max_examples=10)
settings.register_profile("more", deadline=None, max_examples=100, print_blob=True)
settings.register_profile("search", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile("ebbflow")
# else they would also depend on which modules of ours happen to be imported, whose constants it tries
providers._get_local_constants = lambda found=providers._local_constants: found

CACHE = Path(__file__).parents[1] / ".cache"  # of what does not depend on our code
PROCESSES = ("infra/training", "infra/elastic")  # folders whose tests nearly all start some
STARTING = ("spark", "prefect", "processes")  # markers of tests that start processes
COMPUTING = ("planners", "evaluation")  # folders whose tests wait for nothing
TOGETHER = ("terraform",)  # folders whose tests share what takes seconds to make


def _in_processes(path: Path) -> bool:
    return any(f"tests/{folder}/" in path.as_posix() for folder in PROCESSES)


@cache
def _may_start(path: Path, markers: tuple[str, ...] = STARTING) -> bool:
    """Tell whether the file of tests may hold one that is marked so."""
    text = path.read_text()
    return any(f"mark.{name}" in text for name in markers)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share",
        metavar="N/M",
        default="1/1",
        help="run the tests of one of M shares of files, or of folders",
    )
    parser.addoption(
        "--cpu-report", metavar="FILE", type=Path, help="write what each test costs in CPU seconds"
    )


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # nothing that is imported is garbage
    if config.option.cpu_report:
        from tests.cpu_report import CpuReport

        config.pluginmanager.register(CpuReport(config.option.cpu_report))


def _in_share(path: Path, share: str, folders: bool) -> bool:
    """Tell whether a file is in a share, by its own name or by that of its folder, whose tests share processes."""
    number, _, shares = share.partition("/")
    parts = path.relative_to(Path(__file__).parent).parts
    if parts[0] in TOGETHER:
        parts = parts[:1]
    elif folders:
        parts = parts[: 1 if parts[0] == "flows" else 2]
    return crc32("/".join(parts).encode()) % int(shares) == int(number) - 1


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what the part of the suite that is asked for (``scripts/test.sh``) cannot need: most of the time
    before its first test goes by with imports."""
    if collection_path.suffix != ".py":
        return None
    asked = {word.strip() for word in config.option.markexpr.split(" and ")}
    share = config.option.share
    if collection_path.name != "conftest.py" and not _in_share(collection_path, share, "alone" in asked):
        return True
    if {"alone", "spark"} <= asked:
        needed = _may_start(collection_path, ("spark",))
    elif "alone" in asked:
        needed = _in_processes(collection_path) or _may_start(collection_path)
    else:
        needed = "not alone" not in asked or not _in_processes(collection_path)
    return None if needed else True


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as ``alone`` what starts processes of its own: beside other tests it would run into its time limits."""
    for item in items:
        found = [name for name in STARTING if item.get_closest_marker(name)]
        for name in found:
            if not _may_start(item.path, (name,)):  # the part that should run it would leave it out
                raise pytest.UsageError(f"{item.nodeid} is marked {name}, which its file does not name")
        if found or _in_processes(item.path):
            item.add_marker("alone")
    late: dict[Path, tuple[int, bool, bool]] = {}
    for item in items:
        late[item.path] = max(late.get(item.path, (0, False, False)), _lateness(item))
    items.sort(key=lambda item: late[item.path])


def _lateness(item: pytest.Item) -> tuple[int, bool, bool]:
    """Rank last what starts servers that are busy even when nobody asks them, and run to the end of the session;
    then what starts a Spark of its own, which ends that of the tests that share one; then what keeps a core busy
    when the parts of the suite that start processes, and mostly wait, have ended."""
    found = getattr(item, "fixturenames", ())
    spark = item.get_closest_marker("spark")
    return (
        2 if "prefect" in found else int("prefect_server" in found),
        spark is not None and not spark.kwargs.get("shared"),
        item.path.relative_to(Path(__file__).parent).parts[0] in COMPUTING,
    )


def pytest_collection_finish(session: pytest.Session) -> None:
    """Before tests start processes, have these start faster; what is imported by now stays, and is not looked through
    by each collection of garbage."""
    gc.freeze()
    gc.enable()
    if session.config.option.collectonly:
        return
    started = ExitStack()
    session.config.add_cleanup(started.close)
    if any(item.get_closest_marker("alone") for item in session.items):
        from tests.forked_python import forked_python

        started.enter_context(forked_python())
    if any(item.get_closest_marker("spark") for item in session.items):
        from tests.benchmarks.sql.class_archive import java_options
        from tests.kept_spark import kept_spark

        # JVMs of tests live for seconds: the first compiler and the serial collector do
        quick = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
        os.environ["JDK_JAVA_OPTIONS"] = java_options(CACHE, quick)
        started.enter_context(kept_spark())


@pytest.fixture(scope="session", autouse=True)
def _signals_as_in_a_shell() -> Iterator[None]:
    """A suite started in the background ignores SIGINT and SIGHUP, and so would every program it starts."""
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def tpcds() -> Path:
    """Return a folder with TPC-DS tables of scale factor 0.01 and the 99 queries, which tests must leave as they are.

    They are kept until the code that makes them is another: to install the generator takes a quarter of a minute.
    """
    from ebbflow.infra.tables import benchmark_data

    made_by = (Path(benchmark_data.__file__).with_name(name) for name in ("benchmark_data.py", "dsdgen.py"))
    folder = CACHE / f"tpcds-{crc32(b''.join(path.read_bytes() for path in made_by)):08x}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:  # another part of the suite may be making them
        fcntl.flock(lock, fcntl.LOCK_EX)
        return benchmark_data.tpcds(0.01, folder / "sf0.01", folder / "tools", print)


@pytest.fixture(scope="session")
def aws_emulator(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Emulator]":
    """Run an emulated AWS for the session; its clock is the wall's."""
    import botocore.session

    from tests.aws.emulator import Emulator

    with pytest.MonkeyPatch.context() as patch:
        # every session would read the services' models anew, a second for each test
        patch.setattr(botocore.session, "create_loader", cache(botocore.session.create_loader))
        with Emulator.start(tmp_path_factory.mktemp("aws")) as emulator:
            yield emulator


@pytest.fixture
def aws_account(aws_emulator: "Emulator", monkeypatch: pytest.MonkeyPatch) -> "Iterator[AccountAt]":
    """Return an AWS account that no other test uses, and point the process's AWS environment at it."""
    from tests.aws.emulator import ENVIRONMENT

    account = aws_emulator.account()
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    for name, value in account.environment.items():
        monkeypatch.setenv(name, value)
    yield account
    account.forget()
