"""Where a ledger is, and that nobody sees its password."""

import sys
from pathlib import Path

import pytest

from ebbflow.infra.errors import LedgerError
from ebbflow.infra.ledger import Ledger, address
from ebbflow.infra.ledger.address import parse
from ebbflow.planners.errors import OptionError

SECRET = "p@ss/w0rd:x"
QUOTED = "p%40ss%2Fw0rd%3Ax"


def test_a_path_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse("some.db").path == tmp_path / "some.db"
    assert parse(f"sqlite:///{tmp_path}/x.db").path == tmp_path / "x.db"
    assert parse("sqlite:///x.db").path == tmp_path / "x.db"
    assert str(parse("x.db")) == f"sqlite:///{tmp_path}/x.db"


def test_the_default_is_a_file_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EBBFLOW_LEDGER", raising=False)
    monkeypatch.setenv("EBBFLOW_HOME", str(tmp_path / "home"))
    assert parse(None).path == tmp_path / "home" / "ledger.db"
    monkeypatch.delenv("EBBFLOW_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse(None).path == tmp_path / ".cache" / "ebbflow" / "ledger.db"
    monkeypatch.setenv("EBBFLOW_LEDGER", str(tmp_path / "named.db"))
    assert parse(None).path == tmp_path / "named.db"
    with Ledger.open() as ledger:
        assert ledger.address.path == tmp_path / "named.db"


@pytest.mark.parametrize(
    "given",
    ["sqlite://", "sqlite:///:memory:", "sqlite:///file:x?mode=memory&uri=true", "mysql://u@h/d", "postgresql:/x",
     "postgresql://user@host", "postgresql://u:p@h:port/d", "oracle://x/y"],
)  # fmt: skip
def test_what_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(OptionError):
        parse(given)


@pytest.mark.parametrize("name", ["", "x" * 101, "a\nb"])
def test_what_is_no_cluster_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="100 at most"):
        Ledger.open(str(tmp_path / "x.db"), cluster=name)


@pytest.mark.parametrize(
    ("given", "secret"),
    [
        ("postgresql://user:word@host/db", True),
        ("postgresql://user@host/db?password=word", True),
        ("postgresql://user@host/db?sslpassword=word", True),
        ("postgresql://user@host/db?sslmode=require", False),
        ("/some/where.db", False),
    ],
)
def test_it_is_known_whether_a_password_stands_in_it(given: str, secret: bool) -> None:
    assert parse(given).secret is secret


@pytest.mark.parametrize(
    ("prefect", "advice"), [(True, r"'prefect-ebbflow\[postgres\]'"), (False, r"'psycopg\[binary\]'")]
)
def test_without_a_driver_it_is_said_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, prefect: bool, advice: str
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    monkeypatch.setattr(address, "find_spec", lambda name: prefect or None)
    with pytest.raises(LedgerError, match=rf"needs psycopg 3.*: pip install {advice}$"):
        parse("postgresql://u@h/d")


@pytest.mark.parametrize("form", ["postgresql", "postgres", "postgresql+psycopg", "postgresql+asyncpg"])
def test_a_password_is_never_shown(form: str) -> None:
    found = parse(f"{form}://user:{QUOTED}@host:5433/db?sslpassword=other+{QUOTED}&application_name=x")
    assert found.url.password == SECRET
    assert str(found) == "postgresql://user:***@host:5433/db"
    shown = found.hide(f"dsn user:{SECRET}@host, {QUOTED}, {found!r} {found}")
    for text in (shown, str(found), repr(found)):
        assert SECRET not in text
        assert QUOTED not in text


@pytest.mark.parametrize(
    "bad", [f"postgresql://u:{QUOTED}@h:notaport/d", f"mysql://u:{QUOTED}@h/d", f"post://u:{SECRET}@["]
)
def test_an_address_that_is_none_is_not_repeated(bad: str) -> None:
    with pytest.raises(OptionError) as told:
        parse(bad)
    assert SECRET not in str(told.value)
    assert QUOTED not in str(told.value)
    assert told.value.__cause__ is None
    assert told.value.__suppress_context__ or told.value.__context__ is None


def test_a_ledger_that_is_not_there_can_be_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "none" / "x.db"
    with pytest.raises(LedgerError, match="there is no ledger at"):
        Ledger.open(str(path), create=False)
    assert not path.parent.exists()
    Ledger.open(str(path)).close()
    with pytest.raises(LedgerError, match="no cluster 'other'; there are local"):
        Ledger.open(str(path), cluster="other", create=False)
    with Ledger.open(str(path), create=False) as ledger:
        assert ledger.overview().clusters == ("local",)
