"""Data files that the destination shares with the source, as hard links.

If nearly all of an item is copied verbatim, the source's data files get second names inside the
destination, under the same relative paths. The source's B-tree entries are copied, and no array
byte is read. This takes the same `ts.Context` on both sides, and a source database whose base lies
inside the target's: the source is opened with the destination's files and its own manifest.
"""

import collections
import contextlib
import itertools
from collections.abc import Iterator, Sequence

import tensorstore as ts

from reshard.arrays.derived import stored_chunks, unchanged
from reshard.arrays.handle import stored_name
from reshard.engine.plan import ArrayPlan
from reshard.errors import CorruptCheckpointError
from reshard.storage import disk
from reshard.storage.array_store import ArrayStore, key_of
from reshard.storage.location import Location
from reshard.storage.ocdbt import (
    entry_copies,
    memory_manifest,
    new_context,
    node_files,
    ocdbt_spec,
    root_spec,
    wait_written,
)
from reshard.writer.arrays import Written
from reshard.writer.format import TargetFormat
from reshard.writer.plan import ItemPlan

# The part of an item's stored bytes that is copied verbatim at least where data files are linked:
# a conversion changes counters and random state, and nothing else.
_MOST = 15 / 16
# All keys below a path; and the empty one, if the path is a whole key.
_ALL_KEYS, _ONE_KEY = ts.KvStore.KeyRange(), ts.KvStore.KeyRange(b"", b"\0")


def files_to_link(
    store: ArrayStore, destination: Location | None, form: TargetFormat, arrays: Sequence[ArrayPlan]
) -> dict[str, int] | None:
    """The data files, with their bytes, that the destination shares with the source. None if arrays
    are rewritten, or less than half of the files' bytes stay in use. Raises
    CorruptCheckpointError if a file is missing."""
    directory = store.directory
    every = sum(array.stored_bytes for array in arrays)
    verbatim = sum(array.stored_bytes for array in arrays if array.verbatim)
    if not (form.linkable and directory.is_local and verbatim and verbatim >= _MOST * every):
        return None
    if destination is not None and not (
        destination.is_local and disk.device(directory) == disk.device(destination)
    ):
        return None
    values = (value for array in arrays if array.verbatim for value in array.values)
    kept = {(v.file, v.offset): v.size for v in values if v.file is not None}
    files = {}
    for file in dict.fromkeys(file for file, _ in kept):
        size = (directory / file).file_bytes()
        if size is None:
            raise CorruptCheckpointError(f"the data file `{directory / file}` is missing")
        files[file] = size
    return files if 0 < sum(files.values()) <= 2 * sum(kept.values()) else None


def write_linked(item: ItemPlan, directory: Location, name: str) -> Written:
    """Links an item's data files, and the files of their B-tree nodes, into the destination. Writes
    a database in its directory that has only nodes, and refers to these files. If the file
    system refuses a link, the file is copied."""
    source, files = item.ckpt.source.store, item.files or {}
    linked = {*files}
    for part in source.parts:
        linked |= {f"{part}/{file}".lstrip("/") for file in node_files(source.directory / part)}
    (directory / name).make_directory()
    for file in sorted(linked):
        with contextlib.suppress(FileExistsError):  # by another attempt of the same job
            disk.link_or_copy(source.directory / file, directory / file, directory / name / "copy")
    context = new_context()
    transaction = ts.Transaction(atomic=True)
    spec = root_spec(directory, name)
    root = ts.KvStore.open(spec, context=context).result().with_transaction(transaction)
    databases, complete = {}, set[str]()
    counts = collections.Counter(v.part for found in source.values.values() for v in found.values())
    for part in source.parts:
        spec = ocdbt_spec(directory / part, source.directory / part)
        stored = ts.KvStore.open(spec, context=context).result()
        # In a B-tree of small nodes, whose manifest is in memory: each of many ranges takes as
        # long to copy as the node that it is in is large.
        spec = memory_manifest(directory / part, f"{part}/", name)
        databases[part] = ts.KvStore.open(spec, context=context).result()
        for copy in entry_copies(stored, databases[part], source.values):
            wait_written(copy, directory / part)
        if len(databases[part].list().result()) == counts[part]:
            complete.add(part)
    copies, keys = [], 0
    for part, old, new, key_range, count in _key_ranges(item, complete):
        copies.append((databases[part] / old).experimental_copy_range_to(root / new, key_range))
        keys += count
    for copy in copies:
        wait_written(copy, directory)
    wait_written(transaction.commit_async(), directory)
    nodes = {f"{name}/{e.path}": e.nbytes for e in (directory / name).walk() if e.is_file}
    nodes |= {file: (directory / file).file_bytes() or 0 for file in linked - {*files}}
    return Written({name: keys}, dict(files), nodes)


def _key_ranges(
    item: ItemPlan, complete: set[str]
) -> Iterator[tuple[str, str, str, ts.KvStore.KeyRange, int]]:
    """Ranges of keys of linked arrays: the part of the source, the path before and after, the keys
    below it, and their number. An array whose keys keep their names below its own is one range in
    each part, unless a part is not in `complete`, because it has keys of no array, or its name
    begins like that of another array, whose keys may be among its own."""
    values = item.ckpt.source.store.values
    above = {n: {*itertools.accumulate(n.split("/")[:-1], "{}/{}".format)} for n in values}
    nested = {n for name, outer in above.items() for n in (name, *outer) if outer & values.keys()}
    for array in item.arrays:
        if not array.linked:
            continue
        name, data = key_of(stored_name(array.path)), unchanged(array.handle, array.encoding)
        if data is not None and data.name not in nested:
            parts = collections.Counter(value.part for value in values[data.name].values())
            if parts.keys() <= complete:
                for part, count in parts.items():
                    yield part, key_of(data.name), name, _ALL_KEYS, count
                continue
        for key, chunk in (stored_chunks(array.handle, array.encoding) or {}).items():
            yield chunk.value.part, key_of(chunk.name, chunk.key), name + key, _ONE_KEY, 1
