"""Requests of queries, kept beside their checkpoints so that whoever finds one lost can run it again."""

import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from ebbflow.infra.spark.cluster.authentication import is_sensitive
from ebbflow.infra.storage import records
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.ledger import AppSpec
from ebbflow.tasks.apps.specs import Resume, app_spec
from ebbflow.tasks.query.request import QueryRequest

_FORMAT = 1
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def save_query(request: QueryRequest, id: str) -> str:
    """Write the request of the app ``id`` into its store and return the address.

    Settings whose names speak of secrets are left out, and so are functions that were allowed, which no file may:
    whoever runs it again gives them anew. Raises ``OptionError``
    for an id that is no file's name, ``StorageError``.
    """
    address = _address(request.store, id)
    said = asdict(request) | {"conf": {k: v for k, v in request.conf.items() if not is_sensitive(k)}}
    left_out = sorted(request.conf.keys() - said["conf"].keys())
    functions = list(said.pop("allow_functions"))
    records.save(address, {"left_out": left_out, "functions": functions, **said}, _FORMAT)
    return address


def load_query(store: str, id: str, conf: Mapping[str, str] | None = None) -> QueryRequest:
    """Return the request of the app ``id``, with ``conf`` for what was left out.

    Raises ``StorageError`` where there is none, ``OptionError`` for one that is damaged or of another version, where
    settings that were left out are not given, and where functions had been allowed.
    """
    address = _address(store, id)
    try:
        said = records.load(address, _FORMAT)
        if missing := sorted(set(said.get("left_out", ())) - set(conf or ())):
            raise OptionError(
                f"query {id} was begun with conf that is never written down, as it holds secrets: "
                f"{', '.join(missing)}; run the query anew under this id and give them again"
            )
        if functions := said.get("functions"):
            raise OptionError(
                f"query {id} was begun with functions that its user has allowed ({', '.join(functions)}), "
                f"which no file may; run the query anew under this id and allow them again"
            )
        known = {f.name for f in fields(QueryRequest)} - {"allow_functions"}
        values = {name: value for name, value in said.items() if name in known}
        return QueryRequest(**{**values, "store": store, "conf": {**values["conf"], **(conf or {})}})
    except records.OtherVersionError:
        raise OptionError(
            f"query {id} was begun by another version of Ebbflow; go on with that one"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptionError(f"{address} is damaged ({error}); run the query anew") from error


def forget_query(store: str, id: str) -> None:
    """Remove the request of an app that is over. Raises ``StorageError``; what is not there is fine."""
    records.remove(_address(store, id))


def lock_folder(store: str, id: str) -> str:
    """Return where the lock of the app ``id`` is. Raises ``OptionError``."""
    return _address(store, id).removesuffix(".json")


def _address(store: str, id: str) -> str:
    if not _ID.fullmatch(id):
        raise OptionError(
            f"an app's id holds letters, digits, dashes, dots and underscores, 100 at most; got {id!r}"
        )
    return f"{store.rstrip('/')}/apps/{id}.json"


def query_spec(request: QueryRequest, id: str, *, deployment: str = "", **fields: Any) -> AppSpec:
    """Return what a query asks for: no GPU, its weight among queries; see ``training_spec``."""
    given: dict[str, Any] = {
        "id": id,
        "title": request.title,
        "weight": request.weight,
        "resume": Resume("query", request.store, id, deployment).to_dict(),
    }
    return app_spec("query", given, fields)
