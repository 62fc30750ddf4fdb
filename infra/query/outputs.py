"""Looking at the Parquet files that an engine has written."""

from concurrent.futures import ThreadPoolExecutor

from ebbflow.infra.errors import StageFailedError


def count_rows(uri: str) -> int:
    """Return the exact number of rows in the Parquet files directly in folder ``uri``, from their footers.

    Raises ``StageFailedError`` when there is no file or one is unreadable.
    """
    import pyarrow as pa
    import pyarrow.fs as pafs
    import pyarrow.parquet as pq

    from ebbflow.infra.storage.filesystems import resolve

    filesystem, folder = resolve(uri)

    def rows(path: str) -> int:
        return int(pq.read_metadata(path, filesystem=filesystem).num_rows)

    try:
        found = filesystem.get_file_info(pafs.FileSelector(folder, allow_not_found=True))
        paths = [f.path for f in found if f.is_file and f.path.endswith(".parquet")]
        if not paths:
            raise StageFailedError(f"the engine reported success but wrote no Parquet file into {uri}")
        with ThreadPoolExecutor(max_workers=min(8, len(paths))) as pool:
            return sum(pool.map(rows, paths))
    except (OSError, pa.ArrowException) as error:
        raise StageFailedError(f"what was written into {uri} cannot be read back: {error}") from error
