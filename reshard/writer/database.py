"""The OCDBT database of a destination: staged writes, shared data files, one merged B-tree.

Orbax's own layout: array bytes in `ocdbt.process_0/d/`, and a root manifest whose B-tree refers to
them by relative path. Chunks that stay are not copied: the source's data files get a second name
inside the destination, under the same relative path, and the source's B-tree entries are copied.
That takes the same `ts.Context` on both sides, and a source database whose base lies inside the
target's: the source is opened with the destination's files and its own manifest.
"""

import collections
import concurrent.futures
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import tensorstore as ts

from reshard.arrays.derived import stored_chunks
from reshard.arrays.handle import ArrayHandle
from reshard.engine.budget import WINDOW
from reshard.errors import CorruptCheckpointError
from reshard.storage import bucket, posix
from reshard.storage.array_store import ArrayStore, names_above
from reshard.storage.location import Location
from reshard.storage.ocdbt import (
    MANIFEST,
    PROCESS,
    StoredValue,
    entry_copies,
    new_context,
    node_files,
    ocdbt_spec,
    value_files,
)
from reshard.writer.journal import Fingerprint
from reshard.writer.stream import wait_written
from reshard.writer.target_format import TargetFormat

STAGE = f"{PROCESS}0"
# What Orbax gives its root database, so that readers need one read for the whole B-tree.
_ROOT_CONFIG = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000}
# Every commit of a staged batch writes the nodes on its path again: small ones keep that linear.
_STAGE_CONFIG = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 1 << 18}
# Each commit makes nodes that no later one reads, and a merge reads each node once: a large cache
# would only fill up with them.
STAGE_CACHE_BYTES = 4 << 20
# A data file is shared with the source if at least this part of it stays in use.
_WORTH_LINKING = 0.5
# The empty key below a path that is a whole key.
_ONE_KEY = ts.KvStore.KeyRange(b"", b"\0")


def job_stages(fingerprint: Fingerprint) -> list[str]:
    """Databases of a job's own, in a bucket: all jobs write to one place, also one that has lost
    its lock and does not know yet. A commit takes several requests, one after another, so there are
    several, which take turns."""
    text = json.dumps(fingerprint, sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    return [f"{PROCESS}{name}{number}" for number in range(WINDOW)]


def stage_spec(directory: Location, stage: str, file_bytes: int) -> dict[str, Any]:
    """The database that batches are committed to, in data files of about so many bytes."""
    return _writable(ocdbt_spec(directory / stage), _STAGE_CONFIG) | {
        "target_data_file_size": file_bytes
    }


def _writable(spec: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    return spec | {"config": {**config, "manifest_kind": "single"}, "assume_config": True}


def files_to_link(store: ArrayStore, verbatim: Sequence[Sequence[StoredValue]]) -> dict[str, int]:
    """Data files, with their bytes, of which enough stays in use, by arrays that only need such
    files. `verbatim` is what is stored of each array that is copied verbatim.

    Enough is a good part of the file, or all of it that the source itself uses.
    """
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


def link_data_files(source: ArrayStore, directory: Location, files: Iterable[str]) -> bool:
    """Gives data files, and the B-tree nodes that lead to them, a name in the destination.

    Returns False, with nothing left behind, if a file cannot be linked.
    """
    nodes = {
        f"{part}/{file}".lstrip("/")
        for part in source.parts
        for file in node_files(source.directory / part)
    }
    linked = []
    for file in sorted({*files, *nodes}):
        if not posix.link(source.directory / file, directory / file):
            for done in linked:
                done.remove()
            return False
        linked.append(directory / file)
    return True


def merge(
    source: ArrayStore,
    directory: Location,
    linked: Mapping[str, ArrayHandle],
    target: TargetFormat,
    stages: Sequence[str],
    manifest: Location | None = None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Writes the root database of a destination, in one commit, once a `check` has passed. `linked`
    are the arrays whose data files were linked, by their names there; `stages` are the databases of
    staged writes, if any. Where its `manifest` is in another directory, it is one of those that are
    merged later."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        checked = pool.submit(check)  # while it is seen what is to be merged
        transaction = _merged(source, directory, linked, target, stages, manifest)
        checked.result()
    wait_written(transaction.commit_async(), directory)


def _merged(
    source: ArrayStore,
    directory: Location,
    linked: Mapping[str, ArrayHandle],
    target: TargetFormat,
    stages: Sequence[str],
    manifest: Location | None,
) -> ts.Transaction:
    """What writes the root database of a destination once it is committed."""
    context = new_context()
    transaction = ts.Transaction(atomic=True)
    spec = _writable(ocdbt_spec(directory, manifest), _ROOT_CONFIG)
    database = ts.KvStore.open(spec, context=context).result()
    root = database.with_transaction(transaction)
    # Its manifest, which the commit asks for.
    begun = None if directory.is_local else database.read("")
    copies = []
    # Databases that were never merged may hold the same key: only the listed one is linked.
    merged = len(source.parts) == 1
    alone = {new: h.stored.name for new, h in linked.items() if h.stored and target.is_verbatim(h)}
    same = all(old == new for new, old in alone.items())
    whole = merged and same and set(alone) == set(source.values)
    one_by_one = {new: h for new, h in linked.items() if not whole or new not in alone}
    # Arrays whose name, as a prefix, holds other arrays: `z` beside `z/b`.
    outer = {above for name in source.values for above in names_above(name)}
    for part in source.parts if linked else ():
        own = ts.KvStore.open(
            ocdbt_spec(directory / part, source.directory / part), context=context
        ).result()
        if whole:
            copies.append(own.experimental_copy_range_to(root))
        if one_by_one:
            own = _in_small_nodes(own, directory / part, part, context, source.values)
        for new, handle in one_by_one.items():
            old = alone.get(new)
            if merged and old is not None and old not in outer:
                below = own / f"{old}/"
                copies.append(below.experimental_copy_range_to(root / f"{new}/"))
                continue
            for key, chunk in (stored_chunks(handle, target.encoding(handle)) or {}).items():
                if chunk.value.part == part:
                    one = own / f"{chunk.name}/{chunk.key}"
                    copies.append(one.experimental_copy_range_to(root / f"{new}/{key}", _ONE_KEY))
    for stage in stages:
        spec = stage_spec(directory, stage, target.file_bytes)
        written = ts.KvStore.open(spec, context=context).result()
        copies.append(written.experimental_copy_range_to(root))
    for copy in copies:
        wait_written(copy, directory)
    if begun is not None:
        wait_written(begun, directory)
    return transaction


def merge_databases(
    directory: Location, databases: Sequence[tuple[dict[str, Any], int]], most: int
) -> None:
    """Writes the root database of a destination from others, each of so many keys, a few commits of
    up to `most` keys one after another: one of all takes much memory, and one for each database the
    square of their number. In the place of one that an earlier run may have left."""
    (directory / MANIFEST).remove()
    context = new_context(STAGE_CACHE_BYTES)
    spec = _writable(ocdbt_spec(directory), _ROOT_CONFIG)
    root = ts.KvStore.open(spec, context=context).result()
    left = list(databases)
    while left:
        transaction = ts.Transaction(atomic=True)
        copies, keys = [], 0
        while left and (not copies or keys + left[0][1] <= most):
            spec, own = left.pop(0)
            keys += own
            database = ts.KvStore.open(spec, context=context).result()
            target = root.with_transaction(transaction)
            copies.append(database.experimental_copy_range_to(target))
        for copy in copies:
            wait_written(copy, directory)
        wait_written(transaction.commit_async(), directory)


def _in_small_nodes(
    database: ts.KvStore, directory: Location, part: str, context: ts.Context, names: Iterable[str]
) -> ts.KvStore:
    """The same content in a B-tree of small nodes, whose manifest is in memory: for many ranges,
    each of which takes as long as the node that it is in is large.
    """
    spec = _writable(ocdbt_spec(directory), _STAGE_CONFIG)
    spec["manifest"] = {"driver": "memory", "path": f"{part}/"}
    small = ts.KvStore.open(spec, context=context).result()
    for copy in entry_copies(database, small, names):
        wait_written(copy, directory)
    return small


def prune(directory: Location, linked: Iterable[str], stages: Sequence[str], again: bool) -> None:
    """Deletes on a disk what the root database does not refer to: staged B-tree nodes, the staged
    manifest, files that only led to what is in the `linked` ones. `again` says that an earlier run
    may have been stopped while it did this."""
    if again:  # which takes longer
        needed = value_files(directory, nodes=True)
    else:
        needed = set(linked)
        for stage in stages:
            needed.update(f"{stage}/{file}" for file in value_files(directory / stage))
        needed |= node_files(directory)
    prune_all_but(directory, needed, lambda: None)


def prune_all_but(directory: Location, needed: Collection[str], check: Callable[[], None]) -> None:
    """Deletes the files of all databases that are not needed, by their paths below a directory.
    `check`s before, in a bucket, whether this job may go on."""
    for part in directory.directories():
        if part != "d" and not part.startswith(PROCESS):
            continue
        if not directory.is_local:
            files = (f"{part}/{e.path}" for e in (directory / part).walk() if e.is_file)
            bucket.remove_files(directory, (f for f in files if f not in needed), check)
            continue
        for found in reversed([*(directory / part).walk()]):
            path = directory / part / found.path
            if found.is_dir:
                posix.remove_empty(path)
            elif f"{part}/{found.path}" not in needed:
                path.remove()
        posix.remove_empty(directory / part)


def unneeded_objects(
    directory: Location, stored: Iterable[StoredValue], stages: Sequence[str]
) -> list[str]:
    """What there is of databases in a bucket that the root database, of which all is `stored`, does
    not refer to, by its path below a directory."""
    needed = {value.file for value in stored} | node_files(directory)
    found = (
        f"{part}/{entry.path}"
        for part in ("d", *stages)
        for entry in (directory / part).walk()
        if entry.is_file
    )
    return [file for file in found if file not in needed]
