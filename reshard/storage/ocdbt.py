"""OCDBT databases: their specs, and what their B-trees hold, read without reading an array.

Facts about the B-tree are TensorStore's (`tensorstore.ocdbt.dump`).
"""

import collections
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import tensorstore as ts
from tensorstore import ocdbt

from reshard.compat import node_read
from reshard.errors import CorruptCheckpointError, ReshardError
from reshard.storage import bucket, posix
from reshard.storage.btree import decoded_bytes
from reshard.storage.location import MAX_DOCUMENT, Location, checked, not_a_file
from reshard.storage.machine import thread_limits
from reshard.storage.refusals import refusal
from reshard.units import format_bytes

MANIFEST = "manifest.ocdbt"
# What begins so is the database of a process, which Orbax merges into one, in an item.
PROCESS = "ocdbt.process_"
# Orbax writes root nodes of up to 100 MB; the pool must hold one, or each read decodes it again.
# Array data is never cached: no array driver is given this pool.
BTREE_CACHE = "cache_pool#ocdbt"
BTREE_CACHE_BYTES = 100_000_000
_MAPPED = {"file_io_mode": {"mode": "memmap"}}
# What is read of a bucket is read together with what is less than so many bytes away, as Orbax
# does; but at most so many at once, since a single connection is slow.
_COALESCED = {
    "experimental_read_coalescing_threshold_bytes": 1_000_000,
    "experimental_read_coalescing_merged_bytes": 1 << 26,
    "experimental_read_coalescing_interval": "1ms",
}
# Arrays whose entries are copied to other nodes at once.
_PIECE = 10_000
# Where nodes are that are in memory, none of them larger than so many bytes.
_NODES = "nodes/"
_PREFIXES = ("btree_node_data_prefix", "version_tree_node_data_prefix", "value_data_prefix")
_SMALL_NODE = 1 << 14
# Nodes of a B-tree that are read at once of a bucket.
_NODES_AHEAD = 8
# Bytes of a whole decoded B-tree (of millions of chunks). Larger ones are not read.
_MAX_BTREE = 1 << 30


def new_context(
    btree_cache_bytes: int = BTREE_CACHE_BYTES,
    mapped: Location | None = None,
    requests: int = bucket.REQUESTS,
) -> ts.Context:
    """Shared resources of stores, with a cache of decoded B-tree nodes. Files are synced once,
    before the commit, and not at each write. What is only read is `mapped` into memory where that
    is safe: the page cache is read in place, and no fresh memory is touched for stored bytes. Of
    buckets, `requests` are under way at once."""
    resources = {BTREE_CACHE: {"total_bytes_limit": btree_cache_bytes}, "file_io_sync": False}
    resources |= bucket.resources(requests) | thread_limits()
    if mapped is not None and mapped.is_local and _can_map() and posix.on_local_disk(mapped):
        resources |= _MAPPED
    return ts.Context(resources)


@functools.cache
def _can_map() -> bool:
    """Whether TensorStore can map files; 0.1.75 refuses to be asked."""
    try:
        ts.Context(_MAPPED)
    except ValueError:
        return False
    return True


def ocdbt_spec(directory: Location, manifest: Location | None = None) -> dict[str, Any]:
    """The OCDBT database in a directory; `manifest` if its manifest is in another one."""
    spec = {"driver": "ocdbt", "base": directory.spec, "cache_pool": BTREE_CACHE}
    if not directory.is_local:
        spec |= _COALESCED
    if manifest is not None:
        spec["manifest"] = manifest.spec
    return spec


def entry_copies(
    source: ts.KvStore, target: ts.KvStore, names: Iterable[str]
) -> Iterator[ts.Future]:
    """Copies the entries of all arrays from one database to another one, to be waited for one after
    another: piece by piece, for all of it at once takes much memory."""
    keys = sorted(name.encode(errors="surrogateescape") for name in names)
    for begin, end in itertools.pairwise([b"", *keys[_PIECE::_PIECE], b""]):
        yield source.experimental_copy_range_to(target, ts.KvStore.KeyRange(begin, end))


def in_small_nodes(
    directory: Location, names: Iterable[str], context: ts.Context
) -> dict[str, Any]:
    """The OCDBT database in a directory, with its B-tree in small nodes in a context's memory.

    TensorStore looks at all entries of a node for each value that it reads, and Orbax writes all
    entries of a checkpoint into one node: without this, reading takes the square of them.
    """
    memory = {"base": {"driver": "memory", "path": _NODES}, "prefix": _NODES, "strip_prefix": 0}
    spec = ocdbt_spec(directory)
    spec["base"] = {"driver": "kvstack", "layers": [{"base": directory.spec}, memory]}
    source = ts.KvStore.open(spec, context=context).result()
    spec["manifest"] = {"driver": "memory"}
    config = {"max_decoded_node_bytes": _SMALL_NODE, "manifest_kind": "single"}
    prefixes = dict.fromkeys(_PREFIXES, _NODES)
    small = spec | prefixes | {"config": config, "assume_config": True}
    target = ts.KvStore.open(small, context=context).result()
    for copy in entry_copies(source, target, names):
        checked(copy, f"the OCDBT database in `{directory}`")
    return spec


class StoredValue(NamedTuple):
    """One value of a key-value store.

    Attributes:
      size: stored bytes.
      part: the OCDBT database whose B-tree lists it, as in `ArrayStore.parts`; "" for plain files.
      file: the file that holds it, relative to the item's directory; None where the value is
        inlined in the B-tree.
      inline: the bytes themselves, for zarr metadata that is inlined.
      truncated: bytes that the file has, and that it would have to have to hold this value, where
        it is too short.
      offset: where it begins in the file.
    """

    size: int
    part: str = ""
    file: str | None = None
    inline: bytes | None = None
    truncated: tuple[int, int] | None = None
    offset: int = 0


def stored_values(
    directory: Location, part: str, metadata_key: str
) -> Iterator[tuple[str, StoredValue]]:
    """Every key of an OCDBT database with where its value is, from its B-tree nodes alone."""
    check_file = functools.cache(functools.partial(_check_data_file, directory))
    for _, prefix, node in _btree_nodes(directory):
        if node["height"]:
            continue
        for entry in node["entries"]:
            key = (prefix + entry["key"]).decode(errors="surrogateescape")
            inline = entry.get("inline_value")
            if inline is not None:
                kept = inline if key.endswith(metadata_key) else None
                yield key, StoredValue(len(inline), part, None, kept)
                continue
            file, offset, size = _split_location(entry["indirect_value"])
            found, needed = check_file(file), offset + size
            truncated = None if found is None or found >= needed else (found, needed)
            path = f"{part}/{file}" if part else file
            yield key, StoredValue(size, part, path, None, truncated, offset)


def node_files(directory: Location) -> set[str]:
    """Files below `directory` that hold the nodes of its OCDBT database."""
    nodes = _btree_nodes(directory, lowest=1)
    return {_split_location(location)[0] for location, _, _ in nodes}


def value_files(directory: Location, nodes: bool = False) -> set[str]:
    """Files below `directory` that hold values of its OCDBT database, or its nodes too."""
    files = set()
    for location, _, node in _btree_nodes(directory):
        if nodes:
            files.add(_split_location(location)[0])
        if not node["height"]:
            places = (entry.get("indirect_value") for entry in node["entries"])
            files.update(_split_location(place)[0] for place in places if place)
    return files


def _btree_nodes(
    directory: Location, lowest: int = 0
) -> Iterator[tuple[str, bytes, dict[str, Any]]]:
    """Location, key prefix and content of each node of the newest version of a database.

    Nodes below height `lowest` are located but not read: their content is empty.
    """
    base = directory.open(new_context())
    memory = ts.KvStore.open({"driver": "memory"}, context=ts.Context()).result()
    most = 1 if directory.is_local else _NODES_AHEAD
    seen = set()
    taken = 0

    def dumped(file: str, data: bytes, location: str | None = None) -> dict[str, Any]:
        """What a file begins with: read once, and looked at before TensorStore is given it."""
        nonlocal taken
        taken += decoded_bytes(data)
        if taken > _MAX_BTREE:
            raise ValueError("its B-tree decodes to more than any checkpoint's")
        memory.write(file, data).result()
        found = ocdbt.dump(memory, location).result()
        memory.write(file, None).result()
        return found

    try:
        manifest = (directory / MANIFEST).read() or b""
        version = dumped(MANIFEST, manifest)["versions"][-1]
        nodes = [(version["root"].get("location"), version["root_height"], b"")]
        ahead: collections.deque[tuple[str, int, bytes, Callable[[], bytes | None]]] = (
            collections.deque()
        )
        while nodes or ahead:
            while nodes and len(ahead) < most:
                location, height, prefix = nodes.pop()
                if location is None:  # an empty database
                    continue
                file, offset, size = _split_location(location)
                place = _data_file(directory, file)
                if height < lowest:
                    yield location, prefix, {}
                    continue
                if location in seen:
                    raise ValueError(f"several nodes refer to node {location}")
                seen.add(location)
                if size > MAX_DOCUMENT:
                    raise ValueError(f"a node of its B-tree has {format_bytes(size)}")
                if directory.is_local:
                    place.file_bytes()  # of a pipe, nothing is read
                part = slice(offset, offset + size)
                read = node_read(base, file, part, location, ocdbt.dump)
                ahead.append((location, height, prefix, read))
            if not ahead:
                break
            location, height, prefix, read = ahead.popleft()
            file, _, size = _split_location(location)
            if (data := read()) is None:
                raise ValueError(f"the data file `{file}` is missing")
            start = location.rsplit(":", 2)[0]
            node = dumped(file, data, f"{start}:0:{size}")
            if node["height"] != height:
                raise ValueError(f"node {location} is at height {node['height']}, not {height}")
            if height:
                nodes += [
                    (entry["location"], height - 1, prefix + entry["subtree_common_prefix"])
                    for entry in node["entries"]
                ]
            yield location, prefix, node
            # TensorStore 0.1.86 leaks what is in the values of a document's entries.
            node["entries"].clear()
    except ReshardError:
        raise
    except (ValueError, KeyError, IndexError) as error:
        what = f"the OCDBT database in `{directory}`"
        if isinstance(error, ValueError) and (refused := refusal(error, what)):
            raise refused from error
        raise CorruptCheckpointError(f"{what} cannot be read", [str(error)]) from error


def _check_data_file(directory: Location, file: str) -> int | None:
    """Bytes of a data file, None where there is none; raises an error where it leads elsewhere."""
    size = _data_file(directory, file).file_bytes()
    return None if size == posix.UNKNOWN else size


def _data_file(directory: Location, file: str) -> Location:
    """A data file; raises an error where its name leads elsewhere."""
    names = file.split("/")
    if not {"", ".", ".."}.isdisjoint(names) or "\0" in file:
        raise CorruptCheckpointError(
            f"the OCDBT database in `{directory}` refers to `{file}`, which is no name inside it"
        )
    path = directory
    for name in names:
        path /= name
        if path.is_symlink():
            raise not_a_file(path)
    return path


def _split_location(location: str) -> tuple[str, int, int]:
    """File, relative to the database, offset and bytes of a `KIND:BASE:FILE:OFFSET:SIZE`."""
    start, offset, size = location.rsplit(":", 2)
    _, base, file = start.split(":", 2)
    return base + file, int(offset), int(size)
