"""msgpack files of Flax: `flax.serialization`, `flax.training.checkpoints`, `flax_model.msgpack` of
Hugging Face, and the file `checkpoint` of Orbax's `aggregate=True`.

    map of maps      the tree; Flax makes {"0": ..., "1": ...} of lists and tuples
    extension 1, 3   an array, a NumPy scalar: [shape, "float32", the bytes, rows first]
    extension 2      a complex number: [real, imaginary]

An array of over 2**30 bytes is a map `__msgpack_chunked_array__` of parts. A file is parsed from
its beginning to its end, and the bytes of arrays are skipped: see `plain_arrays`.
"""

import struct
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from reshard.arrays.boxes import MOST_AXES
from reshard.checkpoint import Checkpoint, Item
from reshard.errors import CheckpointFormatError
from reshard.loader.detection import MSGPACK_FILE
from reshard.loader.hf_files import check_no_pointer
from reshard.loader.orbax import tree_problems
from reshard.loader.plain_arrays import PlainArray, checkpoint, index_problems, weight_map
from reshard.storage.disk import MAX_DOCUMENT, Entry
from reshard.storage.location import Location
from reshard.tree import MAX_KEYS, Path, format_path
from reshard.units import format_bytes

# Bytes per read, and the most entries of all maps and lists together.
_PIECE, _MOST = 1 << 18, 1 << 20
_INDEX = f"flax_model{MSGPACK_FILE}.index.json"
_CHUNKED = "__msgpack_chunked_array__"
# Prefixes of strings that stand for arrays in other files, of Orbax 0.2 and of `save_checkpoint`
# with arrays of several processes.
_ELSEWHERE = ("PLACEHOLDER://", "//GDAPlaceholder:")
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_NUMBERS = {0xCA + number: f">{code}" for number, code in enumerate("fdBHIQbhiq")}
# First byte -> the kind of value, and the bytes of its length.
_LENGTHS = {
    first + n: (kind, size)
    for first, kind, sizes in (
        (0xC4, "bytes", (1, 2, 4)),
        (0xC7, "extension", (1, 2, 4)),
        (0xD9, "text", (1, 2, 4)),
        (0xDC, "list", (2, 4)),
        (0xDE, "map", (2, 4)),
    )
    for n, size in enumerate(sizes)
}


def read(item: Item, requests: int, seen: dict[str, Entry]) -> Checkpoint:
    """The checkpoint of a file, or of a directory with an index of its files. See `reshard.open`
    for the errors."""
    root = item.data
    files = [""] if root.is_file() else [n for n in root.names() if n.endswith(MSGPACK_FILE)]
    seen |= root.look(files if files == [""] else [*files, _INDEX])
    problems: list[str] = []
    pairs: list[tuple[Path, Any]] = []
    for file in files:
        reader = _Reader(root, file)
        try:
            reader.value(())
            if reader.at < reader.size:
                raise ValueError(
                    f"the tree ends, but the file has {reader.size - reader.at} bytes more"
                )
        except ValueError as error:
            check_no_pointer(root / file)
            reader.problems.append(f"at byte {reader.at}: {error}")
        problems += [f"`{root / file}`: {problem}" for problem in reader.problems]
        pairs += reader.leaves
    if not problems:
        problems += tree_problems([path for path, _ in pairs])
    if files != [""]:
        arrays = {"/".join(map(str, p)): a for p, a in pairs if isinstance(a, PlainArray)}
        named = weight_map(root / _INDEX)
        problems += index_problems(named, arrays) if named else ()
    paths = {path for path, _ in pairs}
    specs = (path[:-2] for path in paths if path[-2:] == ("kvstore", "driver"))
    if not problems and any((*path, "driver") in paths for path in specs):
        raise CheckpointFormatError(
            f"`{root}` is a file of T5X: it names arrays in other files, which `reshard` does not "
            "read",
            hints=["t5x.checkpoints.load_t5x_checkpoint(path) reads them; save them with Orbax"],
        )
    texts = [leaf for _, leaf in pairs if isinstance(leaf, str)]
    if not problems and any(text.startswith(_ELSEWHERE) for text in texts):
        raise CheckpointFormatError(
            f"`{root}` holds a tree whose arrays are in other files. Orbax 0.2 and Flax "
            "wrote such files, which `reshard` does not read",
            hints=["restore it with the program that saved it, and save it with a newer Orbax"],
        )
    if not problems and any(not path for path, _ in pairs):
        raise CheckpointFormatError(f"`{root}` holds a single leaf, not a tree")
    leaves = {path: _number(leaf) for path, leaf in pairs}
    notes = ["lists and tuples that Flax saved as dicts (`0`, `1`, ...) stay dicts"]
    has_numbered = any({"0"} & set(path) for path in leaves)
    notes = notes if has_numbered else []
    return checkpoint(item, "msgpack", leaves, requests, seen, problems, notes)


class _Reader:
    """A parser of one file, which skips arrays. Its methods raise ValueError if the file is not
    Flax's msgpack.

    Attributes:
      at: the position in the file.
      leaves: paths and leaves. Numbers are Python's.
      problems: unreadable arrays.
    """

    def __init__(self, root: Location, file: str):
        self.file, self._place = file, root / file
        self.size = self._place.file_bytes(follow=True) or 0
        self.at = self._begin = self._consumed = self._entries = 0
        self._piece = b""
        self.leaves: list[tuple[Path, Any]] = []
        self.problems: list[str] = []

    def next_bytes(self, count: int) -> bytes:
        """The next bytes."""
        start, end = self.at - self._begin, self.at + count
        self._consumed += count
        if end > self.size:
            raise ValueError(f"it ends at {self.size}, in the middle of a value")
        if self._consumed > MAX_DOCUMENT:
            raise ValueError(f"it has over {format_bytes(MAX_DOCUMENT)} besides its arrays")
        if start + count > len(self._piece):
            self._begin, start = self.at, 0
            self._piece = self._place.part(self.at, min(max(end, self.at + _PIECE), self.size))
        self.at = end
        return self._piece[start : start + count]

    def head(self) -> tuple[str, Any]:
        """The next value's kind and length, or "number" and a number, None or a bool."""
        first = self.next_bytes(1)[0]
        if first < 0x80 or first >= 0xE0:
            return "number", first if first < 0x80 else first - 0x100
        if first < 0xC0:
            kind = "map" if first < 0x90 else "list" if first < 0xA0 else "text"
            length = first & (0x1F if kind == "text" else 0x0F)
        elif first in _CONSTANTS:
            return "number", _CONSTANTS[first]
        elif form := _NUMBERS.get(first):
            return "number", struct.unpack(form, self.next_bytes(struct.calcsize(form)))[0]
        elif 0xD4 <= first <= 0xD8:
            kind, length = "extension", 1 << first - 0xD4
        elif first in _LENGTHS:
            kind, size = _LENGTHS[first]
            length = int.from_bytes(self.next_bytes(size), "big")
        else:
            raise ValueError(f"no msgpack value begins with the byte 0x{first:02x}")
        if length * (2 if kind == "map" else 1) > self.size - self.at:
            raise ValueError(
                f"a {kind} of length {length} does not fit in the file, which has {self.size} bytes"
            )
        return kind, length

    def value(self, path: Path) -> None:
        """Parses the next value, and adds its leaves."""
        if len(path) > MAX_KEYS:
            raise ValueError(f"it is nested more than {MAX_KEYS} levels deep")
        kind, length = self.head()
        self._entries += length if kind in ("map", "list") else 0
        if self._entries > _MOST:
            raise ValueError(f"it has over {_MOST} entries, more than any checkpoint")
        if kind in ("map", "list") and not length:
            self.leaves.append((path, {} if kind == "map" else []))
        elif kind == "map":
            self._map(path, length)
        elif kind == "list":
            for number in range(length):
                self.value((*path, number))
        elif kind == "extension":
            self._extension(path, length)
        elif kind == "bytes":
            raise ValueError(f"{format_path(path):.80} holds bytes, which are not a leaf")
        else:
            leaf = self.next_bytes(length).decode() if kind == "text" else length
            self.leaves.append((path, leaf))

    def _map(self, path: Path, length: int) -> None:
        first, keys = len(self.leaves), set[str]()
        for _ in range(length):
            kind, key = self.head()
            if kind == "text":
                key = self.next_bytes(key).decode()
            elif kind != "number" or type(key) is not int:
                raise ValueError(f"{format_path(path):.80}: a key is neither text nor a number")
            if str(key) in keys:
                raise ValueError(f"{format_path(path):.80}: the key {key!r:.80} occurs twice")
            keys.add(str(key))
            self.value((*path, str(key)))
        if _CHUNKED in keys:
            parts = {below[len(path) :]: leaf for below, leaf in self.leaves[first:]}
            del self.leaves[first:]
            self.leaves.append((path, _joined(parts, format_path(path))))

    def _extension(self, path: Path, length: int) -> None:
        code = self.next_bytes(1)[0]
        start, end = self.at, self.at + length
        if end > self.size:
            raise ValueError(
                f"a msgpack extension of {length} bytes does not fit in a file of {self.size} bytes"
            )
        try:
            if code == 2 and self.head() == ("list", 2):
                parts = [self.head()[1] for _ in range(2)]
                leaf = complex(*parts) if {*map(type, parts)} == {float} else None
            else:
                leaf = self._array() if code in (1, 3) else None
            if leaf is None or self.at != end:
                raise ValueError(f"an extension of type {code} that Flax does not write")
            self.leaves.append((path, leaf))
        except ValueError as error:
            self.problems.append(f"{format_path(path):.80}: at byte {start}: {error}")
        self.at = end

    def _array(self) -> PlainArray | None:
        if self.head() != ("list", 3):
            return None
        kind, rank = self.head()
        if kind != "list" or rank > MOST_AXES:
            raise ValueError("its shape is not a list of sizes")
        shape = tuple(self.head() for _ in range(rank))
        if not all(kind == "number" and type(n) is int and n >= 0 for kind, n in shape):
            raise ValueError("its shape is not a list of sizes")
        kind, length = self.head()
        name = self.next_bytes(min(length, 80)).decode() if kind in ("text", "bytes") else ""
        kind, size = self.head()
        sizes = tuple(n for _, n in shape)
        plain = PlainArray(self.file, _dtype(name), sizes, ((self.at, size),))
        if kind != "bytes" or size != plain.nbytes:
            raise ValueError(f"it has {size} bytes, and {name}{list(sizes)} has {plain.nbytes}")
        self.at += size
        return plain


def _dtype(name: str) -> np.dtype:
    try:
        dtype = np.dtype(getattr(ml_dtypes, name, name))
    except (TypeError, ValueError):
        dtype = np.dtype(object)
    if dtype.name != name or (dtype.kind not in "biufc" and not hasattr(ml_dtypes, name)):
        raise ValueError(f"the dtype {name!r} is not supported")
    return dtype


def _joined(parts: Mapping[Path, Any], what: str) -> PlainArray:
    """A chunked array, from the leaves of Flax's map: its shape, and one-dimensional parts."""
    count = {key: sum(path[0] == key for path in parts) for key in ("shape", "chunks")}
    keys = {(key, str(n)) for key in count for n in range(count[key])}
    if parts.keys() == keys | {(_CHUNKED,)}:
        shape = tuple(parts["shape", str(n)] for n in range(count["shape"]))
        arrays = [parts["chunks", str(n)] for n in range(count["chunks"])]
        numbers = all(type(n) is int and n >= 0 for n in shape)
        if numbers and arrays and all(isinstance(array, PlainArray) for array in arrays):
            runs = tuple(run for array in arrays for run in array.runs)
            joined = arrays[0]._replace(shape=shape, runs=runs)
            if {a.dtype for a in arrays} == {joined.dtype} and joined.nbytes == sum(
                size for _, size in runs
            ):
                return joined
            raise ValueError(f"{what:.80}: its parts do not form {list(shape)} of one dtype")
    raise ValueError(f"{what:.80} is not a chunked array in the form that Flax writes")


def _number(leaf: Any) -> Any:
    """A leaf. A Python number becomes an array, as in Orbax."""
    if not isinstance(leaf, bool | int | float | complex):
        return leaf
    values = np.asarray(leaf)
    kind = "np.ndarray" if values.dtype.kind == "c" else "scalar"
    return PlainArray("", values.dtype, (), (), values.tobytes(), kind)
