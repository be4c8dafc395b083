"""Where stored bytes are: one array store per checkpoint item, read through TensorStore.

All I/O on array bytes goes through the key-value stores opened here, and so does the reading of
small files. Facts about the OCDBT B-tree are TensorStore's (`tensorstore.ocdbt.dump`).
"""

import dataclasses
import functools
import os
import pathlib
import stat
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorstore as ts
from tensorstore import ocdbt

from reshard.errors import CheckpointFormatError, CorruptCheckpointError, ReshardError
from reshard.storage.btree import decoded_bytes
from reshard.units import format_bytes

# Orbax writes root nodes of up to 100 MB; the pool must hold one, or each read decodes it again.
# Array data is never cached: no array driver is given this pool.
BTREE_CACHE = "cache_pool#ocdbt"
BTREE_CACHE_BYTES = 100_000_000
# Bytes of a JSON document (of a tree of half a million leaves) or of a node of a B-tree, of a whole
# decoded B-tree (of millions of chunks), and of one array's metadata. Larger ones are not read.
_LARGEST_DOCUMENT = 1 << 28
_LARGEST_BTREE = 1 << 30
_LARGEST_METADATA = 1 << 16
# Bytes of an array's name: what a path of a file may have.
_LONGEST_NAME = 4096


def new_context(btree_cache_bytes: int = BTREE_CACHE_BYTES) -> ts.Context:
    """Shared resources of stores. Files are synced once, before the commit, and not at each
    write.

    Args:
      btree_cache_bytes: decoded B-tree nodes that are kept at most.
    """
    return ts.Context(
        {BTREE_CACHE: {"total_bytes_limit": btree_cache_bytes}, "file_io_sync": False}
    )


def file_spec(directory: os.PathLike | str) -> dict[str, Any]:
    """The key-value store over a local directory."""
    return {"driver": "file", "path": os.path.join(os.fspath(directory), "")}


def ocdbt_spec(directory: os.PathLike | str, manifest: os.PathLike | str | None = None) -> dict:
    """The OCDBT database in a directory; `manifest` if its manifest is in another one."""
    spec = {"driver": "ocdbt", "base": file_spec(directory), "cache_pool": BTREE_CACHE}
    if manifest is not None:
        spec["manifest"] = file_spec(manifest)
    return spec


def checked(future: ts.Future, what: str) -> Any:
    """The result of a read; raises CorruptCheckpointError, about `what`, if it fails."""
    try:
        return future.result()
    except ValueError as error:
        raise CorruptCheckpointError(f"{what} cannot be read", [first_line(error)]) from error


def first_line(error: ValueError) -> str:
    """What TensorStore says, without the specification that it appends."""
    return str(error).partition(" [")[0].partition("\n")[0]


def read_small(path: pathlib.Path) -> bytes | None:
    """A small file whole, or None where there is none.

    Raises:
      CorruptCheckpointError: it cannot be read, or it is not small.
      CheckpointFormatError: it is something else than a file.
    """
    size = file_bytes(path)
    if size is None:
        return None
    if size > _LARGEST_DOCUMENT:
        raise CorruptCheckpointError(f"`{path}` has {format_bytes(size)}: no checkpoint's has")
    read = ts.KvStore.open(file_spec(path.parent)).result().read(path.name)
    result = checked(read, f"`{path}`")
    return result.value if result.state == "value" else None


def file_bytes(path: pathlib.Path | str) -> int | None:
    """Bytes of a file, or None where there is none.

    Raises:
      CheckpointFormatError: it is something else. What a symbolic link points to may be outside of
        the checkpoint, and a pipe may never end.
    """
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISREG(found.st_mode):
        return found.st_size
    if stat.S_ISDIR(found.st_mode):
        raise CheckpointFormatError(f"`{path}` is a directory, and not a file")
    raise not_a_file(path)


def not_a_file(path: pathlib.Path | str) -> CheckpointFormatError:
    """The error for what is neither a file nor a directory."""
    return CheckpointFormatError(
        f"`{path}` is neither a file nor a directory",
        hints=["replace a symbolic link by what it points to"],
    )


def name_problem(name: str) -> str | None:
    """Why nothing may be stored under a name; None if it may.

    Names are paths below the checkpoint, for some readers if not for all.
    """
    if "\0" in name:
        return "its name holds a NUL"
    if name.startswith("/") or ".." in name.split("/"):
        return "its name leads out of the checkpoint"
    length = len(name.encode(errors="replace"))
    return f"its name has {length} bytes" if length > _LONGEST_NAME else None


class StoredValue(NamedTuple):
    """One value of a key-value store.

    Attributes:
      size: stored bytes.
      part: the OCDBT database whose B-tree lists it, as in `ArrayStore.parts`; "" for plain files.
      file: the file that holds it, relative to the item's directory; None where the value is
        inlined in the B-tree.
      inline: the bytes themselves, for zarr metadata that is inlined.
      cut: bytes that the file has, and bytes that it would have to have to hold this value, where
        these do not fit; None where they do.
    """

    size: int
    part: str = ""
    file: str | None = None
    inline: bytes | None = None
    cut: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class ArrayStore:
    """The arrays of one checkpoint item, by name.

    Attributes:
      directory: the item's directory.
      parts: directories of OCDBT databases to read, relative to `directory`: `("",)` for a merged
        one, `("ocdbt.process_0", ...)` for one that was never merged, `()` for plain files.
      zarr3: zarr v3 rather than v2.
      fills: a chunk that is absent holds the fill value (otherwise it is missing data).
    """

    directory: pathlib.Path
    parts: tuple[str, ...]
    zarr3: bool
    fills: bool

    @property
    def driver(self) -> str:
        """TensorStore's name of the array driver."""
        return "zarr3" if self.zarr3 else "zarr"

    @property
    def metadata_key(self) -> str:
        """The key of an array's own metadata, below its name."""
        return "zarr.json" if self.zarr3 else ".zarray"

    @property
    def ocdbt(self) -> bool:
        """Whether the arrays are in OCDBT databases rather than plain files."""
        return bool(self.parts)

    def part_directory(self, part: str) -> pathlib.Path:
        """The directory of one OCDBT database."""
        return self.directory / part if part else self.directory

    @functools.cached_property
    def context(self) -> ts.Context:
        """The resources that reads of this store share."""
        return new_context()

    @functools.cached_property
    def values(self) -> dict[str, dict[str, StoredValue]]:
        """Array name -> key below it -> stored value, for everything in the store.

        Reads no array byte: B-tree nodes for OCDBT, directory entries for plain files.
        """
        found: dict[str, StoredValue] = {}
        if not self.ocdbt:
            found = dict(_list_files(self.directory))
        for part in self.parts:
            found |= _walk_btree(self.part_directory(part), part, self.metadata_key)
        return _group_by_array(found, self.metadata_key)

    def largest_chunk(self, name: str) -> int:
        """Stored bytes of the largest chunk of an array; 0 where none is there."""
        if name not in self._largest:
            values = self.values[name].items()
            sizes = (value.size for key, value in values if key != self.metadata_key)
            self._largest[name] = max(sizes, default=0)
        return self._largest[name]

    @functools.cached_property
    def _largest(self) -> dict[str, int]:
        return {}

    def array_metadata(self, name: str) -> bytes | None:
        """The zarr metadata of one array, or None if the array is not there."""
        value = self.values.get(name, {}).get(self.metadata_key)
        if value is None or value.inline is not None:
            return None if value is None else value.inline
        if value.size > _LARGEST_METADATA:
            raise CorruptCheckpointError(f"the metadata of `{name}` has {format_bytes(value.size)}")
        read = self.kvstore(name).read(self.metadata_key)
        return checked(read, f"the metadata of `{name}`").value

    def keep(self, name: str, wanted: Callable[[str], bool]) -> None:
        """Leaves out all that is stored below an array's name but its metadata and what is wanted:
        what no reader asks for is no part of the array."""
        values = self.values[name]
        for key in [key for key in values if key != self.metadata_key and not wanted(key)]:
            del values[key]

    def cut_file(self, name: str) -> str | None:
        """Which file of an array does not have the bytes that it would have to have, and how many
        it has; None if all have. Nothing is read to know that."""
        cut: dict[str, tuple[int, int]] = {}
        for value in self.values[name].values():
            if value.cut is not None and value.file is not None:
                cut[value.file] = max(cut.get(value.file, value.cut), value.cut)
        if not cut:
            return None
        file, (found, needed) = min(cut.items())
        expected = f"at least {needed}" if found < needed else str(needed)
        more = f"; {len(cut) - 1} more of its files are not whole" if len(cut) > 1 else ""
        file = self.directory / file
        return f"`{file}` has {found} bytes, and would have to have {expected}{more}"

    def kvstore_spec(self, name: str) -> dict[str, Any]:
        """The key-value store below one array's name."""
        if not self.ocdbt:
            return file_spec(self.directory / name)
        if len(self.parts) == 1:
            return ocdbt_spec(self.part_directory(self.parts[0])) | {"path": f"{name}/"}
        return {"driver": "kvstack", "layers": self._layers(name)}

    def kvstore(self, name: str) -> ts.KvStore:
        """`kvstore_spec`, opened."""
        return ts.KvStore.open(self.kvstore_spec(name), context=self.context).result()

    def _layers(self, name: str) -> list[dict[str, Any]]:
        """Databases that were never merged hold different chunks of one array: a layer a key."""
        return [
            {
                "base": ocdbt_spec(self.part_directory(value.part)) | {"path": f"{name}/{key}"},
                "exact": key,
            }
            for key, value in sorted(self.values[name].items())
        ]

    def open_array(self, name: str, metadata: Any) -> ts.TensorStore:
        """A view of one stored array; reads nothing.

        Args:
          name: the array's name in the store.
          metadata: its zarr metadata, as parsed JSON.
        """
        return ts.open(
            {
                "driver": self.driver,
                "kvstore": self.kvstore_spec(name),
                "metadata": metadata,
                "assume_metadata": True,
                "recheck_cached_data": False,
                "recheck_cached_metadata": False,
                "fill_missing_data_reads": self.fills,
            },
            context=self.context,
        ).result()


def _list_files(directory: pathlib.Path) -> Iterator[tuple[str, StoredValue]]:
    """Every file below the folders of a directory. Not recursive: folders may be nested deeper than
    Python's stack."""
    folders = [""]
    while folders:
        prefix = folders.pop()
        with os.scandir(directory / prefix) as entries:
            for entry in entries:
                key = prefix + entry.name
                if entry.is_dir(follow_symlinks=False):
                    folders.append(f"{key}/")
                elif prefix:  # and not one of the item's own small files
                    if not entry.is_file(follow_symlinks=False):
                        raise not_a_file(entry.path)
                    yield key, StoredValue(entry.stat(follow_symlinks=False).st_size, file=key)


def _walk_btree(
    directory: pathlib.Path, part: str, metadata_key: str
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
            else:
                file, offset, size = _split_location(entry["indirect_value"])
                found, needed = check_file(file), offset + size
                cut = None if found is None or found >= needed else (found, needed)
                yield key, StoredValue(size, part, os.path.join(part, file), cut=cut)


def node_files(directory: pathlib.Path) -> set[str]:
    """Files below `directory` that hold the nodes of its OCDBT database."""
    nodes = _btree_nodes(directory, lowest=1)
    return {_split_location(location)[0] for location, _, _ in nodes}


def value_files(directory: pathlib.Path) -> set[str]:
    """Files below `directory` that hold values of its OCDBT database."""
    files = set()
    for _, _, node in _btree_nodes(directory):
        if not node["height"]:
            places = (entry.get("indirect_value") for entry in node["entries"])
            files.update(_split_location(place)[0] for place in places if place)
    return files


def _btree_nodes(
    directory: pathlib.Path, lowest: int = 0
) -> Iterator[tuple[str, bytes, dict[str, Any]]]:
    """Location, key prefix and content of each node of the newest version of a database.

    Nodes below height `lowest` are located but not read: their content is empty.
    """
    base = ts.KvStore.open(file_spec(directory)).result()
    seen = set()
    taken = 0

    def check_size(data: bytes) -> None:
        nonlocal taken
        taken += decoded_bytes(data)
        if taken > _LARGEST_BTREE:
            raise ValueError("its B-tree decodes to more than any checkpoint's")

    try:
        check_size(read_small(directory / "manifest.ocdbt") or b"")
        version = ocdbt.dump(base).result()["versions"][-1]
        nodes = [(version["root"].get("location"), version["root_height"], b"")]
        while nodes:
            location, height, prefix = nodes.pop()
            if location is None:  # an empty database
                continue
            file, _, size = _split_location(location)
            _check_data_file(directory, file)
            if height < lowest:
                yield location, prefix, {}
                continue
            if location in seen:
                raise ValueError(f"several nodes refer to node {location}")
            seen.add(location)
            if size > _LARGEST_DOCUMENT:
                raise ValueError(f"a node of its B-tree has {format_bytes(size)}")
            check_size(ocdbt.dump(base, f"value:{location.partition(':')[2]}").result())
            node = ocdbt.dump(base, location).result()
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
        raise CorruptCheckpointError(
            f"the OCDBT database in `{directory}` cannot be read", [str(error)]
        ) from error


def _check_data_file(directory: pathlib.Path, file: str) -> int | None:
    """Bytes of a data file, or None where there is none; raises an error for one that is not a file
    inside the database's directory."""
    names = file.split("/")
    if not {"", ".", ".."}.isdisjoint(names) or "\0" in file:
        raise CorruptCheckpointError(
            f"the OCDBT database in `{directory}` refers to `{file}`, which is no name inside it"
        )
    path = os.fspath(directory)
    for name in names:
        path = os.path.join(path, name)
        if os.path.islink(path):
            raise not_a_file(path)
    return file_bytes(path)


def _split_location(location: str) -> tuple[str, int, int]:
    """File, relative to the database, offset and bytes of a `KIND:BASE:FILE:OFFSET:SIZE`."""
    start, offset, size = location.rsplit(":", 2)
    _, base, file = start.split(":", 2)
    return base + file, int(offset), int(size)


def _group_by_array(
    found: dict[str, StoredValue], metadata_key: str
) -> dict[str, dict[str, StoredValue]]:
    """A key below the names of several arrays (`a/c/0` where there are `a` and `a/c`) may be a
    chunk of any of them: each has it until `ArrayStore.keep`."""
    ending = f"/{metadata_key}"
    arrays = {key.removesuffix(ending): {} for key in found if key.endswith(ending)}
    for key, value in found.items():
        for name in _above(key):
            if name in arrays:
                arrays[name][key[len(name) + 1 :]] = value
    return arrays


def _above(key: str) -> Iterator[str]:
    """`a/b` and `a` for the key `a/b/c`."""
    while key := key.rpartition("/")[0]:
        yield key
