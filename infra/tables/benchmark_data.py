"""Tables to try queries on, as Parquet, made once and kept: nothing half-made is ever left in place.

TPC-H comes from ``tpchgen-cli``. TPC-DS comes from DuckDB's ``tpcds`` extension, which has no build for the DuckDB
that Ebbflow runs on, so an older one lives in a virtual environment of its own beside the data. The tables whose
columns depend on each other are our own (``skewed_data``).
"""

import shutil
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import duckdb

from ebbflow.infra.errors import DataError
from ebbflow.infra.tables import skewed_data

SUITES = ("tpch", "tpcds", "skewed")
MAX_SCALE = 1000.0
MAX_PARTS = 10_000

TPCDS_PACKAGES = ("duckdb==1.5.5", "duckdb-extensions==1.5.5", "duckdb-extension-tpcds==1.5.5")
_GIB_PER_SCALE = {"tpch": 0.4, "tpcds": 1.2, "skewed": 0.15}  # TPC-DS: a database beside the Parquet files
_GIB_AT_LEAST = 0.1
_INSTALL = 600.0  # seconds

Say = Callable[[str], None]


def default_folder(home: Path, suite: str, scale: float, parts: int = 1) -> Path:
    """Return where the tables of a suite are kept under ``home``."""
    return home / suite / (f"sf{scale:g}" + (f"-parts{parts}" if parts > 1 else ""))


def tpch(scale: float, folder: Path, say: Say, parts: int = 1) -> Path:
    """Make the eight TPC-H tables at ``scale`` in ``folder``, unless it is there, and return it.

    With ``parts`` above 1 each table is a directory of that many files. ``say`` is called with a line for each step.
    Raises ``DataError``: a value out of range, ``tpchgen-cli`` missing or failing, no space, too slow.
    """
    _check(scale, parts)
    if folder.is_dir():
        return folder
    beside = Path(sys.executable).parent / "tpchgen-cli"
    program = str(beside) if beside.exists() else shutil.which("tpchgen-cli")
    if program is None:
        raise DataError("tpchgen-cli is missing: pip install 'prefect-ebbflow[demo]'")
    with _made("tpch", scale, folder) as part:
        say(f"generating TPC-H scale factor {scale:g} in {folder}")
        split = ["--parts", str(parts)] if parts > 1 else []
        _run(
            [program, "parquet", "-s", f"{scale:g}", *split, "--output-dir", str(part)],
            _seconds(scale),
            say,
            "tpchgen-cli",
        )
    return folder


def tpcds(scale: float, folder: Path, tools: Path, say: Say) -> Path:
    """Make the 24 TPC-DS tables at ``scale`` in ``folder``, and its 99 queries in ``folder/queries``.

    ``tools`` is a directory for the generator's virtual environment, kept for the next time. Raises ``DataError``:
    a value out of range, no package registry, no space, too slow.
    """
    _check(scale, 1)
    if folder.is_dir():
        return folder
    with _made("tpcds", scale, folder) as part:
        python = _environment(tools, say)
        say(f"generating TPC-DS scale factor {scale:g} in {folder}")
        script = Path(__file__).with_name("dsdgen.py")
        _run([str(python), "-I", str(script), f"{scale:g}", str(part)], _seconds(scale), say, "dsdgen")
    return folder


def skewed(scale: float, folder: Path, say: Say) -> Path:
    """Make the eight tables whose columns depend on each other at ``scale``, and eight queries in ``folder/queries``.

    Raises ``DataError``: a value out of range, no space or memory.
    """
    _check(scale, 1)
    if folder.is_dir():
        return folder
    with _made("skewed", scale, folder) as part:
        say(f"generating skewed tables of scale factor {scale:g} in {folder}")
        try:
            skewed_data.generate(scale, part, say)
        except duckdb.Error as error:
            raise DataError(f"the tables cannot be made: {error}") from error
    return folder


def _check(scale: float, parts: int) -> None:
    if not 0 < scale <= MAX_SCALE:
        raise DataError(f"scale must be in (0, {MAX_SCALE:g}]; got {scale}")
    if not 1 <= parts <= MAX_PARTS:
        raise DataError(f"parts must be in [1, {MAX_PARTS}]; got {parts}")


def _seconds(scale: float) -> float:
    """Return the seconds that generating may take: some hundred times what an idle machine needs."""
    return 900.0 + 900.0 * scale


@contextmanager
def _made(suite: str, scale: float, target: Path) -> Iterator[Path]:
    """Give a hidden directory beside ``target`` that becomes ``target`` when all went well, and vanishes if not."""
    part = target.parent / f".{target.name}-{uuid.uuid4().hex}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        needed = max(_GIB_PER_SCALE[suite] * scale, _GIB_AT_LEAST)
        free = shutil.disk_usage(target.parent).free / 2**30
        if free < needed:
            raise DataError(
                f"{suite} at scale factor {scale:g} needs about {needed:.1f} GiB while it is made; "
                f"{target.parent} has {free:.1f} GiB free"
            )
        part.mkdir()
        yield part
        try:
            part.rename(target)
        except OSError:
            if not target.is_dir():  # another process was faster: equal content is there
                raise
    except OSError as error:
        raise DataError(
            f"cannot keep data in {target.parent}: {error.strerror or error}; choose another directory"
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _environment(tools: Path, say: Say) -> Path:
    """Return the interpreter of the generator's environment, which is built now unless it is there."""
    target = tools / f"tpcds-{TPCDS_PACKAGES[0].rpartition('=')[2]}"
    python = Path("bin") / "python"
    if (target / python).exists():
        return target / python
    say(f"installing DuckDB's TPC-DS generator in {target} (once)")
    building = tools / f".{target.name}-{uuid.uuid4().hex}"
    try:
        tools.mkdir(parents=True, exist_ok=True)
        _run(
            [sys.executable, "-P", "-m", "venv", str(building)],
            _INSTALL,
            None,
            "making a virtual environment",
        )
        pip = [str(building / python), "-P", "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        try:
            _run([*pip, "--retries", "2", *TPCDS_PACKAGES], _INSTALL, None, "pip")
        except DataError as error:
            raise DataError(
                f"{', '.join(TPCDS_PACKAGES)} cannot be installed: is a package registry reachable? ({error})"
            ) from error
        try:
            building.rename(target)  # only ``bin/python`` is used, which does not mind
        except OSError:
            if not target.is_dir():
                raise
    except OSError as error:
        raise DataError(f"cannot build {target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target / python


def _run(command: Sequence[str], seconds: float, say: Say | None, name: str) -> None:
    """Run ``command``, pass its lines on, and raise ``DataError`` when it fails or takes too long."""
    late = threading.Event()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL, text=True
        )

        def stop() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, stop)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if say is not None and line.strip():
                    say(line.strip())
            process.wait()
        finally:
            timer.cancel()
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        if late.is_set():
            raise DataError(f"{name} was stopped: it took more than {seconds:.0f} s")
        if process.returncode != 0:
            errors.seek(0)
            said = " ".join(errors.read().split())[-400:]
            full = " (no space left on the disk)" if "no space left" in said.lower() else ""
            raise DataError(f"{name} failed with status {process.returncode}{full}: {said}")
