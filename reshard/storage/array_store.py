"""The arrays of one checkpoint item, in plain files or in OCDBT databases.

TensorStore reads and writes all bytes of arrays, through the key-value stores opened here.
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorstore as ts

from reshard.errors import CorruptCheckpointError
from reshard.storage.bucket import REQUESTS
from reshard.storage.disk import Entry, Location, is_utf8, not_a_file
from reshard.storage.identity import Identity
from reshard.storage.location import checked
from reshard.storage.ocdbt import (
    MANIFEST,
    StoredValue,
    in_small_nodes,
    new_context,
    ocdbt_spec,
    ranges_spec,
    stored_values,
)
from reshard.units import format_bytes

# The most bytes of one array's metadata that is read.
_MAX_METADATA = 1 << 16
# Where a blosc chunk stores its decoded bytes.
_BLOSC_SIZE = slice(4, 8)
# Metadata documents, or headers of chunks, that are read at once.
_TOGETHER = 1000
# The most bytes of an array's name: those of a file's path.
_MAX_NAME = 4096
# From this many stored values on, reading is faster through a B-tree of small nodes.
_MANY_VALUES = 4096


def name_problem(name: str) -> str | None:
    """The reason why nothing may be stored under a name; None if it may. Some readers use the name
    as a path below the checkpoint."""
    if "\0" in name:
        return "its name holds a NUL"
    if not is_utf8(name):
        return "its name is not UTF-8"
    if name.startswith("/") or ".." in name.split("/"):
        return "its name points outside the checkpoint"
    length = len(name.encode(errors="replace"))
    return f"its name has {length} bytes" if length > _MAX_NAME else None


def key_of(name: str, below: str = "") -> str:
    """A key below the name of an array. The only array of a tree that is one leaf has no name."""
    return f"{name}/{below}" if name else below


@dataclasses.dataclass(frozen=True)
class ZarrVersion:
    """Whether arrays are of zarr v3 rather than v2."""

    zarr3: bool

    @property
    def driver(self) -> str:
        """TensorStore's name of the array driver."""
        return "zarr3" if self.zarr3 else "zarr"

    @property
    def metadata_key(self) -> str:
        """The key of an array's own metadata, below its name."""
        return "zarr.json" if self.zarr3 else ".zarray"


@dataclasses.dataclass(frozen=True)
class ArrayStore(ZarrVersion):
    """The arrays of one checkpoint item, by name.

    Attributes:
      directory: the item's directory.
      parts: directories of OCDBT databases, relative to `directory`: `("",)` for a merged one,
        `("ocdbt.process_0", ...)` for unmerged ones, `()` for plain files.
      omits_fill: an absent chunk holds the fill value. Otherwise, an absent chunk is missing data.
      requests: the most requests that are sent to a bucket at once.
      manifest: the directory of a merged database's manifest, if it is not `directory`.
      ranged: values are ranges of files of another format. No database lists them: `values` is
        given.
      index: files of manifests and nodes of databases, which reading any array takes.
      files: file -> its entry before it was read.
    """

    directory: Location
    parts: tuple[str, ...]
    omits_fill: bool
    requests: int = REQUESTS
    manifest: Location | None = None
    ranged: bool = False
    index: set[str] = dataclasses.field(default_factory=set, compare=False)
    files: dict[str, Entry] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def ocdbt(self) -> bool:
        """Whether the arrays are in OCDBT databases rather than plain files."""
        return bool(self.parts)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but open stores, `values` and `files`: each array is pickled with its own."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | {"has_many": self.has_many, "files": {}}

    @functools.cached_property
    def context(self) -> ts.Context:
        return new_context(mapped=self.directory, requests=self.requests)

    @functools.cached_property
    def _root(self) -> ts.KvStore:
        """The files, or the only database, with its cached B-tree nodes."""
        spec = self.directory.spec
        if self.ranged:
            ranges = (
                (key_of(name, key), value)
                for name, values in self.values.items()
                for key, value in values.items()
            )
            spec = ranges_spec(self.directory, ranges, self.context)
        elif self.ocdbt:
            spec = ocdbt_spec(self.directory / self.parts[0], self.manifest)
        if self.ocdbt and self.has_many:
            what = f"the OCDBT database in `{self.directory}`"
            spec = in_small_nodes(spec, self.values, self.context, what)
        return ts.KvStore.open(spec, context=self.context).result()

    @functools.cached_property
    def values(self) -> dict[str, dict[str, StoredValue]]:
        """Array name -> key below it -> stored value, for everything in the store.

        Reads B-tree nodes or lists directories, and no array.
        """
        values = {} if self.ocdbt else dict(_list_files(self.directory, self.files))
        for part in self.parts:
            (self.directory / part).prefetch([MANIFEST])
        for part in self.parts:
            where = self.directory / part, part, self.metadata_key, self.manifest
            values |= stored_values(*where, self.index, self.files)
        return _group_by_array(values, self.metadata_key)

    @functools.cached_property
    def has_many(self) -> bool:
        """Whether it holds so many values that finding one in the nodes of Orbax is slow."""
        return sum(map(len, self.values.values())) >= _MANY_VALUES

    def identity(self, name: str) -> Identity:
        """The files that reading an array takes."""
        own = {value.file for value in self.values[name].values()} | self.index
        return Identity(self.directory, {f: self.files[f] for f in own if f in self.files})

    def largest_chunk(self, name: str) -> int:
        """Stored bytes of the largest chunk of an array; 0 if it has no chunk."""
        if name not in self._largest_chunks:  # a worker's store has other arrays for each task
            values = self.values[name].items()
            sizes = (value.size for key, value in values if key != self.metadata_key)
            self._largest_chunks[name] = max(sizes, default=0)
        return self._largest_chunks[name]

    @functools.cached_property
    def _largest_chunks(self) -> dict[str, int]:
        return {}

    def read_metadata(self, names: Iterable[str]) -> Iterator[bytes | None]:
        """The zarr metadata of each of these arrays, or None without one. Reads many at once."""
        rest = iter(names)
        while reads := [self._begin_metadata(name) for name in itertools.islice(rest, _TOGETHER)]:
            yield from (read() for read in reads)

    def _begin_metadata(self, name: str) -> Callable[[], bytes | None]:
        value = self.values.get(name, {}).get(self.metadata_key, StoredValue(0))
        if value.inline is not None or value.file is None:
            return lambda: value.inline
        if value.size > _MAX_METADATA:
            most = format_bytes(_MAX_METADATA)
            text = f"the metadata of `{name}` has {format_bytes(value.size)}, more than {most}"
            raise CorruptCheckpointError(text)
        read = self.kvstore(name).read(self.metadata_key)
        return lambda: checked(read, f"the metadata of `{name}`").value or None

    def truncated_file(self, name: str) -> str | None:
        """The first missing or truncated file of an array, in words; None if all are long enough.
        Reads nothing."""
        values = (value for value in self.values[name].values() if value.truncated is not None)
        first = min(values, key=lambda value: (value.file or "", -value.offset), default=None)
        if first is None:
            return None
        file, (nbytes, needed) = self.directory / (first.file or ""), first.truncated or (0, 0)
        if nbytes is None:
            return f"`{file}` is missing"
        expected = f"at least {needed}" if nbytes < needed else str(needed)
        return f"`{file}` has {nbytes} bytes, expected {expected}"

    def check_blosc(self, name: str, nbytes: int) -> None:
        """Raises CorruptCheckpointError unless the headers of all blosc chunks of an array say that
        they decode to `nbytes`, the bytes of a chunk. TensorStore does not check that. Reads each
        header once."""
        if self._checked.get(name) == nbytes:
            return
        store = self.kvstore(name)
        keys = (key for key in self.values[name] if key != self.metadata_key)
        while some := [*itertools.islice(keys, _TOGETHER)]:
            for key, read in [(key, store.read(key, byte_range=_BLOSC_SIZE)) for key in some]:
                what = f"the chunk `{key}` of `{name}`"
                declared = int.from_bytes(checked(read, what).value, "little")
                if declared != nbytes:
                    raise CorruptCheckpointError(
                        f"{what} declares {declared} decoded bytes, but a chunk has {nbytes}"
                    )
        self._checked[name] = nbytes

    @functools.cached_property
    def _checked(self) -> dict[str, int]:
        return {}

    def kvstore(self, name: str) -> ts.KvStore:
        """The key-value store below one array's name."""
        if len(self.parts) < 2:
            return self._root / key_of(name)
        # Unmerged databases hold different chunks of one array: each key is a layer.
        layers = [
            {
                "base": ocdbt_spec(self.directory / v.part) | {"path": key_of(name, key)},
                "exact": key,
            }
            for key, v in sorted(self.values[name].items())
        ]
        spec = {"driver": "kvstack", "layers": layers}
        return ts.KvStore.open(spec, context=self.context).result()

    def open_array(self, name: str | None, metadata: bytes, omits_fill: bool) -> ts.TensorStore:
        """A view of one stored array, from its zarr metadata alone; reads nothing. An absent
        chunk holds the fill value if `omits_fill`, and is an error otherwise. Without a name, no
        chunk is stored."""
        spec = array_spec(self.driver, metadata, fill_missing_data_reads=omits_fill)
        chunks = ts.KvStore.open("memory://").result() if name is None else self.kvstore(name)
        return ts.open(spec, kvstore=chunks, context=self.context).result()


@functools.lru_cache(maxsize=1024)
def array_spec(driver: str, metadata: bytes, **options: bool) -> ts.Spec:
    """The spec of all arrays with the same metadata. It is cached: for thousands of small arrays,
    parsing takes longer than reading."""
    return ts.Spec(
        {
            "driver": driver,
            "metadata": json.loads(metadata),
            "assume_metadata": True,
            "recheck_cached_data": False,
            "recheck_cached_metadata": False,
            **options,
        }
    )


def _list_files(directory: Location, files: dict[str, Entry]) -> Iterator[tuple[str, StoredValue]]:
    """Every file below the folders of a directory, which are added to `files`. The item's documents
    are not in folders."""
    for entry in directory.walk(inner=True):
        if "/" in entry.path and (entry.is_file or not entry.is_dir):
            if not entry.is_file:
                raise not_a_file(directory / entry.path)
            files.setdefault(entry.path, entry)
            yield entry.path, StoredValue(entry.nbytes, file=entry.path)


def _group_by_array(
    values: dict[str, StoredValue], metadata_key: str
) -> dict[str, dict[str, StoredValue]]:
    """Groups values by array. A key below the names of several arrays (`a/c/0` for `a` and `a/c`)
    is in each of them, until the loader removes the keys that are not chunks."""
    ending = f"/{metadata_key}"
    arrays = {key.removesuffix(ending): {} for key in values if key.endswith(ending)}
    if metadata_key in values:
        arrays[""] = dict(values)
    for key, value in values.items():
        name = key
        while name := name.rpartition("/")[0]:
            if name in arrays:
                arrays[name][key[len(name) + 1 :]] = value
    return arrays
