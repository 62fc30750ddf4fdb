"""The operations of WebHDFS but those that move content."""

from collections.abc import Callable, Mapping
from typing import Any

from ebbflow.infra.memory.gateway.files import GatewayFiles
from ebbflow.infra.memory.gateway.messages import FileStatus, RefusedError, Request

Answer = Callable[[GatewayFiles, Request], Mapping[str, Any] | None]

_BATCH = 1000  # entries of a listing in parts


def find(op: str) -> tuple[str, Answer]:
    """Return the HTTP method of an operation, and what answers it. Raises ``RefusedError`` for one that is none."""
    found = _OPERATIONS.get(op)
    if found is not None:
        return found
    if op in _REFUSED:
        raise RefusedError("UnsupportedOperationException", f"{op} is not supported: {_REFUSED[op]}")
    raise RefusedError(
        "IllegalArgumentException", f'Invalid value for webhdfs parameter "op": no operation {op!r:.40}'
    )


def create_flags(request: Request) -> tuple[bool, bool]:
    """Return whether a new file replaces one, and whether its directories are made. Raises ``RefusedError``."""
    flags = request.parameters.get("createflag", "").upper().split(",")
    if "APPEND" in flags:
        raise RefusedError("UnsupportedOperationException", f"a file is not appended to: /{request.path}")
    overwrite = "OVERWRITE" in flags if flags != [""] else request.flag("overwrite")
    return overwrite, request.flag("createparent", True)


def _status(files: GatewayFiles, request: Request) -> Mapping[str, Any]:
    return {"FileStatus": files.status(request.path).to_json(request.owner, named=False)}


def _statuses(found: list[FileStatus], request: Request) -> dict[str, Any]:
    return {"FileStatuses": {"FileStatus": [one.to_json(request.owner, named=True) for one in found]}}


def _list(files: GatewayFiles, request: Request) -> Mapping[str, Any]:
    return _statuses(files.listing(request.path), request)


def _list_batch(files: GatewayFiles, request: Request) -> Mapping[str, Any]:
    after = request.parameters.get("startafter", "")
    found = [one for one in files.listing(request.path) if not after or one.name > after]
    part = _statuses(found[:_BATCH], request)
    return {
        "DirectoryListing": {"partialListing": part, "remainingEntries": max(0, len(found) - _BATCH)},
    }


def _locations(files: GatewayFiles, request: Request) -> Mapping[str, Any]:
    """Return that a file is at no host rather than another."""
    size = files.status(request.path).size
    none: list[str] = []
    lists = dict.fromkeys(
        ("cachedHosts", "hosts", "names", "storageIds", "storageTypes", "topologyPaths"), none
    )
    location = {**lists, "offset": 0, "length": size, "corrupt": False}
    return {"BlockLocations": {"BlockLocation": [location] if size else []}}


def _summary(files: GatewayFiles, request: Request) -> Mapping[str, Any]:
    folders, count, size = files.summary(request.path)
    return {
        "ContentSummary": {
            "directoryCount": folders,
            "fileCount": count,
            "length": size,
            "quota": -1,
            "spaceConsumed": size,
            "spaceQuota": -1,
            "typeQuota": {},
        }
    }


def _home(files: GatewayFiles, request: Request) -> Mapping[str, Any]:
    return {"Path": "/"}


def _there(files: GatewayFiles, request: Request) -> None:
    """Answer what has no meaning here: whoever has the key may do everything."""
    files.status(request.path)


def _replication(files: GatewayFiles, request: Request) -> Mapping[str, Any]:
    return {"boolean": not files.status(request.path).directory}


def _make(files: GatewayFiles, request: Request) -> Mapping[str, Any]:
    return {"boolean": files.make_folders(request.path)}


def _delete(files: GatewayFiles, request: Request) -> Mapping[str, Any]:
    return {"boolean": files.delete(request.path, recursive=request.flag("recursive"))}


def _rename(files: GatewayFiles, request: Request) -> Mapping[str, Any] | None:
    options = request.parameters.get("renameoptions", "").upper()
    if not options:
        return {"boolean": files.rename(request.path, request.destination())}
    files.rename(request.path, request.destination(), "OVERWRITE" in options.split(","))
    return None


def _content(files: GatewayFiles, request: Request) -> None:
    raise AssertionError("the server moves content itself")


_OPERATIONS: dict[str, tuple[str, Answer]] = {
    "OPEN": ("GET", _content),
    "CREATE": ("PUT", _content),
    "GETFILESTATUS": ("GET", _status),
    "GETFILELINKSTATUS": ("GET", _status),
    "LISTSTATUS": ("GET", _list),
    "LISTSTATUS_BATCH": ("GET", _list_batch),
    "GETFILEBLOCKLOCATIONS": ("GET", _locations),
    "GETCONTENTSUMMARY": ("GET", _summary),
    "GETHOMEDIRECTORY": ("GET", _home),
    "CHECKACCESS": ("GET", _there),
    "MKDIRS": ("PUT", _make),
    "RENAME": ("PUT", _rename),
    "DELETE": ("DELETE", _delete),
    "SETPERMISSION": ("PUT", _there),
    "SETOWNER": ("PUT", _there),
    "SETTIMES": ("PUT", _there),
    "SETREPLICATION": ("PUT", _replication),
}

_WHOLE = "a file is written once, from its start to its end"
_REFUSED = {
    "APPEND": _WHOLE,
    "CONCAT": _WHOLE,
    "TRUNCATE": _WHOLE,
    "CREATESYMLINK": "the store has no links",
    "GETFILECHECKSUM": "the store keeps no checksum of HDFS' kind",
    "GET_BLOCK_LOCATIONS": "ask GETFILEBLOCKLOCATIONS",
    "GETDELEGATIONTOKEN": "the gateway's key is sent instead (dfs.webhdfs.oauth2.*)",
    "GETDELEGATIONTOKENS": "the gateway's key is sent instead (dfs.webhdfs.oauth2.*)",
    "RENEWDELEGATIONTOKEN": "the gateway's key is sent instead (dfs.webhdfs.oauth2.*)",
    "CANCELDELEGATIONTOKEN": "the gateway's key is sent instead (dfs.webhdfs.oauth2.*)",
    **dict.fromkeys(
        (
            "GETACLSTATUS", "SETACL", "REMOVEACL", "MODIFYACLENTRIES", "REMOVEACLENTRIES", "REMOVEDEFAULTACL",
            "GETXATTRS", "LISTXATTRS", "SETXATTR", "REMOVEXATTR",
        ),
        "who has the key may do everything, and files have no attributes",
    ),
    **dict.fromkeys(
        (
            "GETSERVERDEFAULTS", "GETSTATUS", "GETTRASHROOT", "GETTRASHROOTS", "GETQUOTAUSAGE", "SETQUOTA",
            "GETLINKTARGET", "GETSTORAGEPOLICY", "SETSTORAGEPOLICY", "GETALLSTORAGEPOLICY", "GETECPOLICY",
            "CREATESNAPSHOT", "DELETESNAPSHOT", "RENAMESNAPSHOT", "GETSNAPSHOTLIST", "GETSNAPSHOTDIFF",
        ),
        "the store has none of that",
    ),
}  # fmt: skip
