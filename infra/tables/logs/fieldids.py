"""Names of an Iceberg table's columns in its files: the table knows columns by ids, engines find them by names."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ebbflow.infra.errors import TableError
from ebbflow.infra.storage.files import FileEntry
from ebbflow.infra.storage.filesystems import translated
from ebbflow.infra.tables import filefooters
from ebbflow.infra.tables.logs.versions import refused

_KIND = "Iceberg"
_PLAIN = re.compile(
    r"[A-Za-z_][A-Za-z0-9_]*"
)  # names that files have as they are: others are rewritten for Avro
_MAPPING = "schema.name-mapping.default"


class Places(NamedTuple):
    """How the columns of a table are found in its files: by their own names unless these say otherwise."""

    stored: tuple[tuple[str, str], ...] = ()  # columns with the other name that they have in all files
    ids: tuple[
        tuple[str, int], ...
    ] = ()  # all columns with their ids, where no name is the same in all files


class _Found(NamedTuple):
    """A column of a file."""

    name: str
    inside: frozenset[tuple[str, int]]  # paths and ids of the fields inside
    numbered: bool  # the file itself has its id


def places(scheme: str, name: str, metadata: Any, schema: Any, files: Sequence[FileEntry]) -> Places:
    """Return how the columns of ``schema`` are found in ``files``.

    Where no column was ever renamed, or dropped and added again, files have the names of the schema. Else, and where
    the metadata do not know of all schemas, files were written with names of their own: their footers tell. Raises
    ``TableError`` where neither names nor ids find the same columns in all of them.
    """
    if _never_renamed(metadata, schema):
        return Places()
    wanted = {field.field_id: field for field in schema.fields}
    mapping = _mapped(metadata)
    known: list[dict[int, _Found]] = []
    for file, footer in zip(files, filefooters.opened(scheme, files), strict=True):
        with translated(f"read the schema of {file.path}", TableError):
            known.append(_columns_of(footer.schema.to_arrow_schema(), mapping, name, file.path))
        for number, found in known[-1].items():
            if number in wanted and not found.inside <= _inside(wanted[number].field_type, "").items():
                raise _unlike(name, wanted[number].name, f"has other fields in {file.path}")
    stored = _names_in_all(wanted, known)
    if stored is not None:
        return Places(
            tuple((str(wanted[n].name), there) for n, there in stored.items() if there != wanted[n].name)
        )
    for file, columns in zip(files, known, strict=True):
        if scheme != "file" or not all(found.numbered for found in columns.values()):
            where = "in object storage" if scheme != "file" else f"and no ids in {file.path}"
            raise refused(
                name,
                _KIND,
                f"has columns of several names in its files {where}",
                "rewrite them (rewrite_data_files)",
            )
    return Places(ids=tuple((str(field.name), number) for number, field in wanted.items()))


def _names_in_all(wanted: Mapping[int, Any], known: Sequence[Mapping[int, _Found]]) -> dict[int, str] | None:
    """Return the name of each column in the files; ``None`` where one has several, or a name several columns."""
    names: dict[int, set[str]] = {}
    owners: dict[str, set[int]] = {}
    for columns in known:
        for number, found in columns.items():
            names.setdefault(number, set()).add(found.name)
            owners.setdefault(found.name.lower(), set()).add(number)
    for number in wanted.keys() & names.keys():
        if len(names[number]) > 1 or any(len(owners[one.lower()]) > 1 for one in names[number]):
            return None
    return {n: min(names[n]) if n in names else _unused(field.name, n, owners) for n, field in wanted.items()}


def _unused(name: str, number: int, owners: Mapping[str, object]) -> str:
    """Return a name that no file has for a column that none has: one that was dropped might have had its own."""
    while name.lower() in owners:
        name = f"{name}_{number}"
    return name


def _unlike(name: str, column: str, what: str) -> TableError:
    return refused(
        name, _KIND, f"has a column {column!r} that {what}", "rewrite its data files (rewrite_data_files)"
    )


def _never_renamed(metadata: Any, schema: Any) -> bool:
    from pyiceberg.schema import index_name_by_id

    schemas = metadata.schemas
    if {one.schema_id for one in schemas} != set(range(len(schemas))) or _MAPPING in metadata.properties:
        return False
    names: dict[int, set[str]] = {}
    owners: dict[str, set[int]] = {}
    for one in schemas:
        for number, path in index_name_by_id(one).items():
            if not all(map(_PLAIN.fullmatch, path.split("."))):
                return False
            names.setdefault(number, set()).add(path)
            owners.setdefault(path.lower(), set()).add(number)
    known = index_name_by_id(schema)
    return all(len(names[number]) == 1 and len(owners[path.lower()]) == 1 for number, path in known.items())


def _columns_of(schema: Any, mapping: Mapping[str, int] | None, name: str, path: str) -> dict[int, _Found]:
    """Return the columns of a file by their ids; those that the table does not know have negative ones."""
    found: dict[int, _Found] = {}
    for field in schema:
        number = said = _id(field)
        if said is None:
            if mapping is None:
                raise refused(
                    name, _KIND, f"has the file {path}, whose columns have no ids", "rewrite its data files"
                )
            if _nested(field.type):
                raise refused(
                    name, _KIND, f"has nested columns without ids in {path}", "rewrite its data files"
                )
            number = mapping.get(field.name)
        if number is None or number in found:
            number = -1 - len(found)
        found[number] = _Found(str(field.name), frozenset(_inside_arrow(field.type, "")), said is not None)
    return found


def _mapped(metadata: Any) -> Mapping[str, int] | None:
    from pyiceberg.table.name_mapping import parse_mapping_from_json

    if _MAPPING not in metadata.properties:
        return None
    fields = parse_mapping_from_json(metadata.properties[_MAPPING]).root
    return {name: field.field_id for field in fields if field.field_id is not None for name in field.names}


def _id(field: Any) -> int | None:
    said = (field.metadata or {}).get(b"PARQUET:field_id")
    return None if said is None else int(said)


def _nested(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_nested(kind))


def _inside_arrow(kind: Any, path: str) -> Iterator[tuple[str, int]]:
    """Return the paths of the fields inside a type of a file, with their ids."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        parts = [(field.name, field) for field in kind]
    elif pa.types.is_map(kind):
        parts = [("key", kind.key_field), ("value", kind.item_field)]
    elif _nested(kind):
        parts = [("element", kind.value_field)]
    else:
        return
    for name, field in parts:
        number = _id(field)
        yield f"{path}.{name}", -1 if number is None else number
        yield from _inside_arrow(field.type, f"{path}.{name}")


def _inside(kind: Any, path: str) -> dict[str, int]:
    """Return the paths of the fields inside a type of the table, with their ids."""
    from pyiceberg.types import ListType, MapType, StructType

    if isinstance(kind, StructType):
        parts = [(field.name, field.field_id, field.field_type) for field in kind.fields]
    elif isinstance(kind, MapType):
        parts = [("key", kind.key_id, kind.key_type), ("value", kind.value_id, kind.value_type)]
    elif isinstance(kind, ListType):
        parts = [("element", kind.element_id, kind.element_type)]
    else:
        return {}
    found = {}
    for name, number, inner in parts:
        found[f"{path}.{name}"] = number
        found |= _inside(inner, f"{path}.{name}")
    return found
