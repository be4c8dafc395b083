"""OCDBT databases: their specs, and the contents of their B-trees, read without an array.

Facts about the B-tree are from TensorStore (`tensorstore.ocdbt.dump`).
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorstore as ts
from tensorstore import ocdbt

from reshard.errors import CorruptCheckpointError, DestinationError, first_line
from reshard.storage import bucket, disk
from reshard.storage.btree import MAX_BTREE, decoded_bytes, range_database
from reshard.storage.disk import MAX_DOCUMENT, Entry, Location, not_a_file
from reshard.storage.location import checked
from reshard.storage.machine import thread_limits
from reshard.storage.store_errors import store_error, translated_errors
from reshard.units import format_bytes

MANIFEST = "manifest.ocdbt"
# The prefix of the databases of single processes, which Orbax merges into one.
PROCESS = "ocdbt.process_"
# Folders of data files: of any kind, of values, of nodes, and of temporary nodes.
FOLDERS = ("d", "ocdbt_data", "ocdbt_meta", "ocdbt_tmp_meta")
# The cache of B-tree nodes. Orbax writes root nodes of up to 100 MB. If the cache cannot hold one,
# each read decodes it again. Array data is not cached: no array driver gets this pool.
BTREE_CACHE = "cache_pool#ocdbt"
BTREE_CACHE_BYTES = 100_000_000
# In a bucket, reads that are this close together are one request, as in Orbax. A single request is
# bounded: one connection is slow.
_COALESCED = {
    "experimental_read_coalescing_threshold_bytes": 1_000_000,
    "experimental_read_coalescing_merged_bytes": 1 << 26,
    "experimental_read_coalescing_interval": "1ms",
}
# Orbax's settings for its root database, so that readers need one read for the whole B-tree.
_ROOT_CONFIG = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000}
# Each commit rewrites the nodes on its path. Small nodes keep the total linear.
_STAGE_CONFIG = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 1 << 18}
# Bytes of memory per merged key.
_KEY_BYTES = 1024
# Arrays whose entries are copied at once.
_PIECE = 10_000
# The place of nodes in memory, and the most bytes of one.
_NODES = "nodes/"
_MEMORY_NODES = {"base": {"driver": "memory", "path": _NODES}, "prefix": _NODES}
_SMALL_NODE = 1 << 14
_PREFIXES = ("btree_node_data_prefix", "version_tree_node_data_prefix", "value_data_prefix")
SAME_CHUNK = "several shares hold the same chunk"
# Nodes of a B-tree in a bucket that are read at once.
_NODES_AHEAD = 8


def new_context(
    btree_cache_bytes: int = BTREE_CACHE_BYTES,
    mapped: Location | None = None,
    requests: int = bucket.REQUESTS,
) -> ts.Context:
    """Shared resources of stores, with a cache of decoded B-tree nodes.

    Files are synced once, before the commit, and not at each write. If it is safe, files of the
    `mapped` directory, which are only read, are mapped into memory instead of copied. `requests`
    to a bucket are sent at once.
    """
    resources = {BTREE_CACHE: {"total_bytes_limit": btree_cache_bytes}, "file_io_sync": False}
    resources |= bucket.resources(requests) | thread_limits()
    if mapped is not None and mapped.is_local and disk.on_local_disk(mapped):
        resources["file_io_mode"] = {"mode": "memmap"}
    return ts.Context(resources)


def ocdbt_spec(directory: Location, manifest: Location | None = None) -> dict[str, Any]:
    """The OCDBT database in a directory, whose manifest may be in another directory."""
    spec = {"driver": "ocdbt", "base": directory.spec, "cache_pool": BTREE_CACHE}
    if not directory.is_local:
        spec |= _COALESCED
    if manifest is not None:
        spec["manifest"] = manifest.spec
    return spec


def wait_written(write: ts.Future, directory: Location) -> None:
    """Waits for a write below a directory. Raises DestinationError if it fails."""
    try:
        write.result()
    except ValueError as error:
        if refused := store_error(error, f"`{directory}`", "written"):
            raise DestinationError(refused.summary, refused.problems) from error
        raise DestinationError("the destination cannot be written", [first_line(error)]) from error


def stage_spec(directory: Location, name: str, file_bytes: int) -> dict[str, Any]:
    """A database for the commits of batches, with data files of about `file_bytes`."""
    spec = _writable(ocdbt_spec(directory / name), _STAGE_CONFIG)
    return spec | {"target_data_file_size": file_bytes}


def root_spec(directory: Location, name: str) -> dict[str, Any]:
    """A database of a directory whose nodes and manifest are below a name in it. It refers to data
    files like the root database, whose manifest is in the directory itself."""
    return _writable(ocdbt_spec(directory, directory / name), _ROOT_CONFIG, f"{name}/d/")


def memory_manifest(directory: Location, path: str, name: str) -> dict[str, Any]:
    """The same with small nodes, and with the manifest at a path in memory."""
    spec = _writable(ocdbt_spec(directory), _STAGE_CONFIG, f"{name}/d/")
    return spec | {"manifest": {"driver": "memory", "path": path}}


def _writable(spec: dict[str, Any], config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A database that is written with a configuration, in files whose names begin with a prefix."""
    spec = spec | {"config": {**config, "manifest_kind": "single"}, "assume_config": True}
    return spec | dict.fromkeys(_PREFIXES, prefix) if prefix else spec


def build_root(
    directory: Location,
    name: str,
    databases: Sequence[tuple[dict[str, Any], int]],
    max_memory: int,
    cache_bytes: int,
) -> bytes:
    """Writes the nodes of a database that refers to what others in its directory hold, each of so
    many keys; `name` is as of `root_spec`. Its manifest, which is written nowhere. A few commits,
    one after another: one of all takes much memory, and one for each database the square of their
    number. Raises CorruptCheckpointError if two of them have the same key."""
    most = max_memory // (2 * _KEY_BYTES)
    context = new_context(cache_bytes)
    memory = {"driver": "memory"}
    spec = root_spec(directory, name) | {"manifest": memory}
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
    manifest = ts.KvStore.open(memory, context=context).result()
    newest = ocdbt.dump(manifest).result()["versions"][-1]
    if newest["root"]["statistics"]["num_keys"] != sum(keys for _, keys in databases):
        raise CorruptCheckpointError(SAME_CHUNK)
    return manifest.read(MANIFEST).result().value


def entry_copies(
    source: ts.KvStore, target: ts.KvStore, names: Iterable[str]
) -> Iterator[ts.Future]:
    """Copies the entries of all arrays from one database to another. Wait for each copy before the
    next one: a single copy would take much memory."""
    keys = sorted(name.encode(errors="surrogateescape") for name in names)
    for begin, end in itertools.pairwise([b"", *keys[_PIECE::_PIECE], b""]):
        yield source.experimental_copy_range_to(target, ts.KvStore.KeyRange(begin, end))


def in_small_nodes(
    spec: dict[str, Any], names: Iterable[str], context: ts.Context, what: str
) -> dict[str, Any]:
    """A copy of an OCDBT database with its B-tree in small nodes, in a context's memory.

    TensorStore looks at all entries of a node for each value that it reads, and Orbax writes all
    entries of a checkpoint into one node. So without the copy, the time to read is quadratic.
    """
    base = {"driver": "kvstack", "layers": [{"base": spec["base"]}, _MEMORY_NODES]}
    source = ts.KvStore.open(spec | {"base": base}, context=context).result()
    copied = spec | {"base": base, "manifest": {"driver": "memory"}}
    small = _writable(copied, {"max_decoded_node_bytes": _SMALL_NODE}, _NODES)
    target = ts.KvStore.open(small, context=context).result()
    for copy in entry_copies(source, target, names):
        checked(copy, what)
    return copied


def ranges_spec(
    directory: Location, values: "Iterable[tuple[str, StoredValue]]", context: ts.Context
) -> dict[str, Any]:
    """A database, in a context's memory, of ranges of the files in a directory, or of one file, and
    of values that are inline."""
    memory = ts.KvStore.open({"driver": "memory"}, context=context).result()
    places, files = [], directory.spec
    for number, (key, value) in enumerate(values):
        file = f"{_NODES}value{number}" if value.file is None else value.file
        if value.file is None:
            memory.write(file, value.inline).result()
        elif not file:  # the directory is the file itself
            files["path"] = files["path"].removesuffix("/")
        places.append((key.encode(errors="surrogateescape"), file, value.offset, value.size))
    database = range_database(places, f"{_NODES}ranges") if places else {}
    for name, data in database.items():
        memory.write(name or f"{_NODES}{MANIFEST}", data).result()
    base = {"driver": "kvstack", "layers": [{"base": files}, _MEMORY_NODES]}
    return ocdbt_spec(directory) | {"base": base, "manifest": _MEMORY_NODES["base"]}


class StoredValue(NamedTuple):
    """One value of a key-value store.

    Attributes:
      size: stored bytes.
      part: the OCDBT database that lists it, as in `ArrayStore.parts`; "" for plain files.
      file: the file that holds it, relative to the item's directory; None if the B-tree holds it.
      inline: its bytes, for zarr metadata in the B-tree.
      truncated: bytes of the file, None if it is missing, and bytes that the file needs to hold
        this value; None if the file is long enough.
      offset: where it begins in the file.
    """

    size: int
    part: str = ""
    file: str | None = None
    inline: bytes | None = None
    truncated: tuple[int | None, int] | None = None
    offset: int = 0


def stored_values(
    directory: Location,
    part: str,
    metadata_key: str,
    manifest: Location | None,
    index: set[str],
    files: dict[str, Entry],
) -> Iterator[tuple[str, StoredValue]]:
    """Every key of an OCDBT database, and the place of its value, from its B-tree nodes alone. Adds
    the manifest and the nodes to `index`, and the entries of all files to `files`."""
    own = f"{part}/".lstrip("/")
    index.add(own + MANIFEST)

    is_link = functools.cache(lambda folder: (directory / folder).is_symlink())

    @functools.cache
    def look(file: str) -> int | None:
        place = _data_file(directory, file, is_link)
        if (entry := place.file_entry()) is not None:  # raises for a link, too
            files[own + file] = entry
        return None if entry is None else entry.nbytes

    for node, prefix, entries in _btree_nodes(directory, manifest, None if manifest else look):
        index.add(own + node)
        for entry in entries:
            key = (prefix + entry["key"]).decode(errors="surrogateescape")
            inline = entry.get("inline_value")
            if inline is not None:
                kept = inline if key.endswith(metadata_key) else None
                yield key, StoredValue(len(inline), part, None, kept)
                continue
            file, offset, size = _split_location(entry["indirect_value"])
            nbytes, needed = look(file), offset + size
            whole = nbytes is not None and (nbytes == disk.UNKNOWN or nbytes >= needed)
            truncated = None if whole else (nbytes, needed)
            yield key, StoredValue(size, part, own + file, None, truncated, offset)


def node_files(directory: Location, manifest: bytes | None = None) -> set[str]:
    """Files below `directory` that hold the nodes of its OCDBT database. A `manifest` may be given
    that is not written yet."""
    return {file for file, _, _ in _btree_nodes(directory, manifest, leaves=False)}


def contents(directory: Location) -> tuple[int, set[str]]:
    """The number of keys of an OCDBT database, and the files below its directory that hold
    values."""
    keys, files = 0, set()
    for _, _, entries in _btree_nodes(directory):
        keys += len(entries)
        places = {entry["indirect_value"] for entry in entries if "indirect_value" in entry}
        files |= {_split_location(place)[0] for place in places}
    return keys, files


def value_files(directory: Location, nodes: bool = False) -> set[str]:
    """Files below `directory` that hold values of its OCDBT database, or its nodes too."""
    return contents(directory)[1] | (node_files(directory) if nodes else set())


def _btree_nodes(
    directory: Location,
    manifest: Location | bytes | None = None,
    look: Callable[[str], object] | None = None,
    leaves: bool = True,
) -> Iterator[tuple[str, bytes, list[dict[str, Any]]]]:
    """The file, the key prefix and the entries of each node of a database's newest version, level
    by level. Only leaves have entries here, and only if `leaves` are read. The manifest may be in
    another directory, or in memory. Calls `look` with each file before it is read."""
    base, seen, nbytes = directory.open(new_context()), set[str](), 0
    memory = ts.KvStore.open({"driver": "memory"}, context=ts.Context()).result()

    def decode(file: str, data: bytes, location: str | None = None) -> dict[str, Any]:
        nonlocal nbytes
        nbytes += decoded_bytes(data)  # bounds the memory that TensorStore takes
        if nbytes > MAX_BTREE:
            raise ValueError("its B-tree is larger than any checkpoint's")
        memory.write(file, data).result()
        node = ocdbt.dump(memory, location).result()
        memory.write(file, None).result()
        return node

    with translated_errors(f"the OCDBT database in `{directory}`", other=CorruptCheckpointError):
        data = manifest
        if look is not None:
            look(MANIFEST)
        if not isinstance(data, bytes):
            data = ((data or directory) / MANIFEST).read() or b""
        newest = decode(MANIFEST, data).get("versions", [])[-1:]
        # The root of an empty database has no location.
        level = [(v["root"]["location"], b"") for v in newest if "location" in v["root"]]
        height = newest[0]["root_height"] if newest else 0
        together = 1 if directory.is_local else _NODES_AHEAD
        while level and (height or leaves):
            below = []
            for start in range(0, len(level), together):
                group = level[start : start + together]
                reads = [_begin_node(directory, base, location, look) for location, _ in group]
                for (location, prefix), read in zip(group, reads, strict=True):
                    if location in seen:
                        raise ValueError(f"several nodes of its B-tree refer to node {location}")
                    seen.add(location)
                    file, _, size = _split_location(location)
                    if (found := read.result()).state != "value":
                        raise ValueError(f"the data file `{file}` is missing")
                    node = decode(file, found.value, f"{location.rsplit(':', 2)[0]}:0:{size}")
                    entries = node["entries"]
                    if (own := node["height"]) != height:
                        raise ValueError(f"node {location} is at height {own}, not {height}")
                    yield file, prefix, [] if height else entries
                    for entry in entries if height else ():
                        below.append((entry["location"], prefix + entry["subtree_common_prefix"]))
                    # TensorStore 0.1.86 leaks the values in a document's entries.
                    entries.clear()
            level, height = below, height - 1
        for location, prefix in level:
            file = _split_location(location)[0]
            _data_file(directory, file)
            yield file, prefix, []


def _begin_node(
    directory: Location, base: ts.KvStore, location: str, look: Callable[[str], object] | None
) -> ts.Future:
    file, offset, size = _split_location(location)
    if size > MAX_DOCUMENT:
        raise ValueError(f"a node of its B-tree has {format_bytes(size)}: too many")
    if look is not None:
        look(file)
    elif (place := _data_file(directory, file)).is_local:
        place.file_bytes()  # raises for a pipe, which may never end
    return base.read(file, byte_range=slice(offset, offset + size))


def _data_file(
    directory: Location, file: str, is_link: Callable[[str], bool] | None = None
) -> Location:
    """A data file. Raises an error if its name leads outside of the directory. With `is_link`, only
    folders are examined."""
    names = file.split("/")
    if not {"", ".", ".."}.isdisjoint(names) or "\0" in file:
        raise CorruptCheckpointError(
            f"the OCDBT database in `{directory}` refers to `{file}`, which is outside of it"
        )
    for path in itertools.accumulate(names if is_link is None else names[:-1], "{}/{}".format):
        if (directory / path).is_symlink() if is_link is None else is_link(path):
            raise not_a_file(directory / path)
    return directory / file


def _split_location(location: str) -> tuple[str, int, int]:
    """The file, relative to the database, the offset and the bytes of a node or value location."""
    start, offset, size = location.rsplit(":", 2)
    _, base, file = start.split(":", 2)  # KIND:BASE:FILE
    return base + file, int(offset), int(size)
