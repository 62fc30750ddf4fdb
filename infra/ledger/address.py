"""Where a ledger is: an address as people write it, and how it may be shown."""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal
from urllib.parse import quote, quote_plus

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from ebbflow.infra.errors import LedgerError
from ebbflow.planners.errors import OptionError

VARIABLE = "EBBFLOW_LEDGER"
FORMS = "postgresql://user:password@host/database, sqlite:////absolute/path or the path of a file"
_HIDDEN = "***"
_PASSWORDS = ("password", "sslpassword")
_SECRET_OPTIONS = (*_PASSWORDS, "passfile", "sslkey", "options")


@dataclass(frozen=True, repr=False)
class Address:
    """A database. Its text never shows a password."""

    url: URL
    kind: Literal["sqlite", "postgresql"]

    @property
    def path(self) -> Path:
        """Return the file of a SQLite database."""
        return Path(self.url.database or "")

    @property
    def secret(self) -> bool:
        """Return whether a password stands in it, in whichever way."""
        return bool(self.url.password) or any(self.url.query.get(name) for name in _PASSWORDS)

    def hide(self, text: str) -> str:
        """Return ``text`` without this address's password, in whichever way it is written."""
        secrets = [self.url.password, *(self.url.query.get(name) for name in _SECRET_OPTIONS)]
        for secret in secrets:
            if isinstance(secret, str) and secret:
                for form in {secret, quote(secret, safe=""), quote(secret), quote_plus(secret)}:
                    text = text.replace(form, _HIDDEN)
        return text

    def __str__(self) -> str:
        if self.kind == "sqlite":
            return f"sqlite:///{self.path}"
        shown = self.url.set(drivername="postgresql", query={})
        return shown.render_as_string(hide_password=True)

    def __repr__(self) -> str:
        return f"Address({self})"


def default_address() -> str:
    """Return ``$EBBFLOW_LEDGER``, or the address of ``ledger.db`` in ``$EBBFLOW_HOME`` or ``~/.cache/ebbflow``."""
    given = os.environ.get(VARIABLE)
    if given:
        return given
    home = Path(os.environ.get("EBBFLOW_HOME") or Path.home() / ".cache" / "ebbflow")
    return str(home / "ledger.db")


def parse(given: str | None) -> Address:
    """Return the address that ``given`` means; ``None`` means the default one.

    Raises ``OptionError`` for one that is none, without repeating it: it may hold a password.
    """
    text = given or default_address()
    if "://" not in text:
        if text.startswith(("sqlite:", "postgresql", "postgres:", "mysql")):
            raise OptionError(f"a ledger's address must be {FORMS}")
        return Address(URL.create("sqlite", database=str(Path(text).expanduser().absolute())), "sqlite")
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise OptionError(f"the ledger's address cannot be read; it must be {FORMS}") from None
    name = url.drivername.partition("+")[0]
    if name == "sqlite":
        if (
            url.database in (None, "", ":memory:")
            or "mode=memory" in text
            or str(url.database).startswith("file:")
        ):
            raise OptionError(
                "a ledger must outlive its process: name a SQLite file, such as sqlite:////var/ebb.db"
            )
        path = Path(str(url.database)).expanduser().absolute()
        return Address(URL.create("sqlite", database=str(path)), "sqlite")
    if name in ("postgresql", "postgres"):
        if not url.database:
            raise OptionError("the ledger's address names no database; it must be " + FORMS)
        _require_driver()
        return Address(url.set(drivername="postgresql+psycopg"), "postgresql")
    raise OptionError(f"a ledger lives in SQLite or PostgreSQL, not in {name!r}; its address must be {FORMS}")


def _require_driver() -> None:
    try:
        import psycopg  # noqa: F401
    except ImportError as error:
        # without Prefect, beside Airflow, Ebbflow was installed without what it needs: its extras would bring Prefect
        what = "prefect-ebbflow[postgres]" if find_spec("prefect") else "psycopg[binary]"
        raise LedgerError(
            f"a ledger in PostgreSQL needs psycopg 3, which cannot be loaded ({error}): pip install '{what}'"
        ) from None


def recorded_study(text: str) -> str:
    """Return the address of a study as recorded, without a secret. Raises ``OptionError`` or ``LedgerError``."""
    address = parse(text)
    if address.secret:
        raise OptionError(
            f"study must have no password, since it is recorded; got {address}: give it in PGPASSWORD or ~/.pgpass, "
            "or name the ledger's database (study ledger, with EBBFLOW_LEDGER)"
        )
    return text if address.kind == "postgresql" else str(address)
