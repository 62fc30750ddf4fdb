"""Requests of queries, kept beside their checkpoints so that whoever finds one lost can run it again."""

import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from ebbflow.infra.clock import Clock
from ebbflow.infra.spark.cluster.authentication import is_sensitive
from ebbflow.infra.storage import records
from ebbflow.infra.storage.locks import RunLock
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.ledger import AppSpec
from ebbflow.tasks.apps.specs import Resume, app_spec
from ebbflow.tasks.query.request import QueryRequest

_FORMAT = 2
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


class AppFolder:
    """What a store keeps of one query's app: the request, for whoever finds the app lost, and the app's lock.

    Args:
        store: where the query's checkpoints are.
        id: of the app. Raises ``OptionError`` for one that is no file's name.
        clock: of the lock.
    """

    def __init__(self, store: StorageLocation, id: str, clock: Clock | None = None) -> None:
        if not _ID.fullmatch(id):
            raise OptionError(
                f"an app's id holds letters, digits, dashes, dots and underscores, 100 at most; got {id!r}"
            )
        self._store, self._id = store, id
        self.file = store.under(f"apps/{id}.json")
        self.lock = RunLock(store.under(f"apps/{id}"), id, clock=clock)

    def keep(self, request: QueryRequest) -> None:
        """Write the request down.

        Settings whose names speak of secrets are left out, and so are functions that were allowed, which no file may:
        whoever runs it again gives them anew. Raises ``StorageError``.
        """
        said = asdict(request) | {"conf": {k: v for k, v in request.conf.items() if not is_sensitive(k)}}
        left_out = sorted(request.conf.keys() - said["conf"].keys())
        functions = list(said.pop("allow_functions"))
        records.save(self.file, {"left_out": left_out, "functions": functions, **said}, _FORMAT)

    def load(self, conf: Mapping[str, str] | None = None) -> QueryRequest:
        """Return the request, with ``conf`` for what was left out.

        Raises ``StorageError`` where there is none, ``OptionError`` for one that is damaged or of another version,
        where settings that were left out are not given, and where functions had been allowed.
        """
        try:
            said = records.load(self.file, _FORMAT)
            if missing := sorted(set(said.get("left_out", ())) - set(conf or ())):
                raise OptionError(
                    f"query {self._id} was started with conf that is never stored, as it holds secrets: "
                    f"{', '.join(missing)}; submit the query again under this id with these settings"
                )
            if functions := said.get("functions"):
                raise OptionError(
                    f"query {self._id} was started with functions that its user allowed ({', '.join(functions)}), "
                    f"which no stored request may; submit the query again under this id and allow them"
                )
            known = {f.name for f in fields(QueryRequest)} - {"allow_functions"}
            values = {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in said.items()
                if name in known
            }
            given = {"store": str(self._store), "conf": {**values["conf"], **(conf or {})}}
            return QueryRequest(**{**values, **given})
        except records.OtherVersionError:
            raise OptionError(
                f"query {self._id} was started by another version of Ebbflow; resume it with that version"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise OptionError(f"{self.file} is damaged ({error}); submit the query again") from error

    def forget(self) -> None:
        """Remove the request of an app that is over. Raises ``StorageError``; what is not there is fine."""
        records.remove(self.file)


def query_spec(request: QueryRequest, id: str, *, deployment: str = "", **fields: Any) -> AppSpec:
    """Return what a query asks for: no GPU, its weight among queries; see ``training_spec``."""
    given: dict[str, Any] = {
        "id": id,
        "title": request.name,
        "weight": request.weight,
        "resume": Resume("query", request.store, id, deployment).to_dict(),
    }
    return app_spec("query", given, fields)
