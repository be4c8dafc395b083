"""Data files that a destination shares with its source."""

import collections
from collections.abc import Collection, Iterable, Sequence

from reshard.arrays.derived import stored_values
from reshard.arrays.handle import ArrayHandle
from reshard.engine.plan import ArrayPlan
from reshard.errors import CorruptCheckpointError
from reshard.storage.array_store import ArrayStore
from reshard.storage.location import Location
from reshard.storage.ocdbt import StoredValue
from reshard.writer.target_format import TargetFormat

# A data file is shared with the source if at least this part of it stays in use.
_WORTH_LINKING = 0.5


def files_to_link(
    store: ArrayStore,
    form: TargetFormat,
    handles: Sequence[ArrayHandle],
    arrays: Sequence[ArrayPlan],
) -> dict[str, int]:
    """Data files, with their bytes, of which enough stays in use, by arrays that only need such
    files.

    Enough is a good part of the file, or all of it that the source itself uses.
    """
    verbatim = [
        stored_values(handle, form.encoding(handle)) or ()
        for handle, array in zip(handles, arrays, strict=True)
        if array.moved
    ]
    if not verbatim:
        return {}
    used = _bytes_by_file(values.values() for values in store.values.values())
    files: dict[str, int] | None = None
    while True:
        kept = _bytes_by_file(
            values for values in verbatim if files is None or is_linked(values, files)
        )
        sizes = {file: _data_file_bytes(store.directory / file) for file in kept}
        enough = {
            file: sizes[file]
            for file, size in kept.items()
            if size >= min(used[file], _WORTH_LINKING * sizes[file])
        }
        if enough == files:
            return enough
        files = enough


def _bytes_by_file(arrays: Iterable[Iterable[StoredValue]]) -> collections.Counter[str]:
    """Data file -> bytes of stored values in it."""
    found: collections.Counter[str] = collections.Counter()
    for values in arrays:
        for value in values:
            if value.file is not None:
                found[value.file] += value.size
    return found


def _data_file_bytes(file: Location) -> int:
    """Bytes of a data file; raises CorruptCheckpointError where it is missing."""
    size = file.file_bytes()
    if size is None:
        raise CorruptCheckpointError(f"the data file `{file}` is missing")
    return size


def is_linked(values: Iterable[StoredValue], files: Collection[str] | None) -> bool:
    """Whether all that is stored of an array is in shared files, or inlined in the B-tree."""
    return files is not None and all(value.file is None or value.file in files for value in values)
