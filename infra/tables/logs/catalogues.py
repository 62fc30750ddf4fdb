"""Iceberg's catalogues (SQL, REST, Glue, ...): which tables there are and where the metadata of each are.

``pyiceberg``'s own configuration says how a catalogue is reached: ``~/.pyiceberg.yaml`` or variables such as
``PYICEBERG_CATALOG__LAKE__URI``. Only the place of the metadata is taken from it: files are read as any others.
"""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from ebbflow.infra.errors import TableError
from ebbflow.infra.packages import require
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables.logs.versions import EXTRA
from ebbflow.planners.errors import EbbflowError, OptionError

SCHEME = "iceberg://"
TIME_LIMIT = 60.0  # seconds for one answer
_ADDRESS = re.compile(r"iceberg://([^/\s]+)/([^/\s]+(?:/[^/\s]+)*)/?")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class IcebergCatalogue:
    """The tables of one namespace of a catalogue."""

    name: str  # in pyiceberg's configuration
    namespace: tuple[str, ...]

    @classmethod
    def of(cls, address: str) -> "IcebergCatalogue":
        """Return what ``iceberg://CATALOG/NAMESPACE`` names. Raises ``OptionError``."""
        found = _ADDRESS.fullmatch(address)
        if found is None:
            raise OptionError(f"a catalogue of Iceberg is iceberg://CATALOG/NAMESPACE; got {address!r:.120}")
        return cls(found[1], tuple(found[2].split("/")))

    def __str__(self) -> str:
        return f"{SCHEME}{self.name}/{'/'.join(self.namespace)}"

    def tables(self) -> list[str]:
        """Return the names of its tables; none is opened. Raises ``TableError``."""
        return sorted(str(found[-1]) for found in self.ask(lambda known: known.list_tables(self.namespace)))

    def place(self, table: str) -> StorageLocation:
        """Return where the metadata file of its table ``table`` is. Raises ``TableError``."""
        found = self.ask(lambda known: known.load_table((*self.namespace, table)).metadata_location)
        return StorageLocation(str(found))

    def ask(self, question: Callable[[Any], Answer], purpose: str = "be read") -> Answer:
        """Return what ``question`` answers of pyiceberg's catalogue, which is open meanwhile.

        Raises ``TableError``, saying that it cannot ``purpose``, where that takes over a minute or fails.
        """
        require("pyiceberg", f"{self} is a catalogue of Iceberg, which", EXTRA)

        def answer() -> Answer:
            from pyiceberg.catalog import load_catalog

            known = load_catalog(self.name)
            try:
                return question(known)
            finally:
                known.close()

        waiting = ThreadPoolExecutor(1, thread_name_prefix="ebbflow-catalogue")
        try:
            return waiting.submit(answer).result(TIME_LIMIT)
        except TimeoutError as error:
            raise TableError(f"{self} has not answered within {TIME_LIMIT:.0f} s") from error
        except EbbflowError:
            raise
        except Exception as error:  # of whatever library speaks to it
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise TableError(
                f"{self} cannot {purpose} ({said:.300}); is it in pyiceberg's configuration?"
            ) from error
        finally:
            waiting.shutdown(wait=False)
