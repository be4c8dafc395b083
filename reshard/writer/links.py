"""Data files that the destination shares with the source, under hard links.

Where nearly all of an item is copied verbatim, the source's data files get a second name inside
the destination, under the same relative path, and the source's B-tree entries are copied: no array
byte is read. That takes the same `ts.Context` on both sides, and a source database whose base lies
inside the target's: the source is opened with the destination's files and its own manifest.
"""

import bisect
import contextlib
from collections.abc import Iterable, Sequence

import tensorstore as ts

from reshard.arrays.derived import stored_chunks
from reshard.arrays.handle import stored_name
from reshard.errors import CorruptCheckpointError
from reshard.storage import disk
from reshard.storage.array_store import ArrayStore
from reshard.storage.location import Location
from reshard.storage.ocdbt import (
    StoredValue,
    entry_copies,
    memory_manifest,
    new_context,
    node_files,
    ocdbt_spec,
    root_spec,
    wait_written,
)
from reshard.writer.arrays import Written
from reshard.writer.plan import ItemPlan

# Data files are shared with the source if at least this part of them stays in use.
_WORTH_LINKING = 0.5
# The empty key below a path that is a whole key.
_ONE_KEY = ts.KvStore.KeyRange(b"", b"\0")


def files_to_link(store: ArrayStore, values: Iterable[StoredValue]) -> dict[str, int] | None:
    """Data files, with their bytes, that hold values which stay; None where they are not worth
    sharing: less than half of their bytes stay, and less than all that the source itself uses.
    Raises CorruptCheckpointError where one is missing."""
    kept = {(v.file, v.offset): v.size for v in values if v.file is not None}
    used = {
        (v.file, v.offset): v.size
        for array in store.values.values()
        for v in array.values()
        if v.file is not None
    }
    files = {}
    for file in dict.fromkeys(file for file, _ in kept):
        size = (store.directory / file).file_bytes()
        if size is None:
            raise CorruptCheckpointError(f"the data file `{store.directory / file}` is missing")
        files[file] = size
    stays = sum(kept.values())
    enough = stays >= min(sum(used.values()), _WORTH_LINKING * sum(files.values()))
    return files if enough else None


def link_files(item: ItemPlan, directory: Location) -> tuple[bool, dict[str, int]]:
    """Gives an item's data files, and the B-tree nodes that lead to them, a name in the
    destination: whether all could be linked, and those, with their bytes, that are not needed after
    the commit: the files of nodes, or where one cannot be linked all that were."""
    source, files = item.ckpt.source.store, item.files or {}
    if not files:
        return False, {}
    nodes = {
        f"{part}/{file}".lstrip("/")
        for part in source.parts
        for file in node_files(source.directory / part)
    }
    done, linked = True, []
    for file in sorted({*files, *nodes}):
        with contextlib.suppress(FileExistsError):  # by another attempt of the same job
            done = disk.link(source.directory / file, directory / file)
        if not done:
            break
        linked.append(file)
    spare = sorted(nodes - {*files}) if done else linked
    return done, {file: (directory / file).file_bytes() or 0 for file in spare}


def write_linked(item: ItemPlan, directory: Location, name: str) -> Written:
    """Writes a database in an item's directory, of nodes alone, which refer to linked files."""
    source, target = item.ckpt.source.store, item.format
    context = new_context()
    transaction = ts.Transaction(atomic=True)
    spec = root_spec(directory, name)
    root = ts.KvStore.open(spec, context=context).result().with_transaction(transaction)
    handles = {stored_name(h.path): h for h in item.linked}
    copies = []
    # Databases that were never merged may hold the same key: only the listed one is linked.
    merged = len(source.parts) == 1
    verbatim = {n: h.stored.name for n, h in handles.items() if h.stored and target.is_verbatim(h)}
    same = all(old == new for new, old in verbatim.items())
    whole = merged and same and set(verbatim) == set(source.values)
    for part in source.parts:
        spec = ocdbt_spec(directory / part, source.directory / part)
        own = ts.KvStore.open(spec, context=context).result()
        keys = sorted(own.list().result()) if merged else []
        # Keys that belong to no array refer to files that are not linked.
        whole = whole and len(keys) == sum(map(len, source.values.values()))
        one_by_one = {new: h for new, h in handles.items() if not whole or new not in verbatim}
        if whole:
            copies.append(own.experimental_copy_range_to(root))
        if one_by_one:
            # In a B-tree of small nodes, whose manifest is in memory: each of many ranges takes as
            # long to copy as the node that it is in is large.
            spec = memory_manifest(directory / part, f"{part}/", name)
            small = ts.KvStore.open(spec, context=context).result()
            for copy in entry_copies(own, small, source.values):
                wait_written(copy, directory / part)
            own = small
        for new, handle in one_by_one.items():
            old = verbatim.get(new)
            if old is not None and _keys_below(old, keys) == len(source.values[old]):
                below = own / f"{old}/"
                copies.append(below.experimental_copy_range_to(root / f"{new}/"))
                continue
            for key, chunk in (stored_chunks(handle, target.encoding(handle)) or {}).items():
                if chunk.value.part == part:
                    one = own / f"{chunk.name}/{chunk.key}"
                    copies.append(one.experimental_copy_range_to(root / f"{new}/{key}", _ONE_KEY))
    for copy in copies:
        wait_written(copy, directory)
    wait_written(transaction.commit_async(), directory)
    keys = sum(len(item.values(handle)) for handle in item.linked)
    nodes = {f"{name}/{e.path}": e.nbytes for e in (directory / name).walk() if e.is_file}
    return Written({name: keys}, dict(item.files or {}), nodes, {})


def _keys_below(name: str, keys: Sequence[bytes]) -> int:
    """How many keys, in order, are below an array's name: its own, those of arrays below it (`z/b`
    beside `z`), and those of none."""
    below, after = (f"{name}{end}".encode(errors="surrogateescape") for end in "/0")
    return bisect.bisect_left(keys, after) - bisect.bisect_left(keys, below)
