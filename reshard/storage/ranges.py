"""An OCDBT database in memory, whose values are byte ranges of files that something else wrote.

TensorStore reads a value by its file, offset and length. So the arrays of another format are read
as uncompressed zarr chunks, by ranges, in any store. TensorStore's page on the OCDBT format
describes the encoding, and names this use.
"""

import functools
import itertools
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_MANIFEST, _NODE = 0x0CDB3A2A, 0x0CDB20DE
# Entries of a node: TensorStore looks at all of a node's for each value.
_ENTRIES = 256
_CRC = [
    functools.reduce(lambda byte, _: byte >> 1 ^ (0x82F63B78 if byte & 1 else 0), range(8), byte)
    for byte in range(256)
]


class Range(NamedTuple):
    """A part of a file, whose path is relative to the database; empty for the database itself."""

    file: str
    offset: int
    size: int


class _Child(NamedTuple):
    """A node below another one: its first key, its place, and how many keys are below it."""

    key: bytes
    place: Range
    keys: int
    tree_bytes: int
    value_bytes: int


def database(values: Iterable[tuple[str, Range]], prefix: str) -> dict[str, bytes]:
    """The files of a database of these values, one or more: those of its nodes, whose names begin
    with `prefix`, and its manifest, under the empty name."""
    ordered = sorted((key.encode(errors="surrogateescape"), place) for key, place in values)
    files: dict[str, bytes] = {}

    def node(height: int, key: bytes, body: bytes, keys: int, below: int, nbytes: int) -> _Child:
        name = f"{prefix}{len(files)}"
        files[name] = data = _sealed(_NODE, bytes([height]) + body)
        return _Child(key, Range(name, 0, len(data)), keys, len(data) + below, nbytes)

    level = []
    for some in _groups(ordered):
        places = [place for _, place in some]
        own, ids = _files(places)
        body = own + _number(len(some)) + _keys([key for key, _ in some], ())
        body += _numbers(place.size for place in places) + b"\1" * len(some)
        body += _numbers(ids) + _numbers(place.offset for place in places)
        level.append(node(0, some[0][0], body, len(some), 0, sum(p.size for p in places)))
    height = 0
    while len(level) > 1:
        height += 1
        above = []
        for some in _groups(level):
            own, ids = _files([child.place for child in some])
            body = own + _number(len(some)) + _keys([child.key for child in some], [0] * len(some))
            body += _numbers(ids) + _numbers(child.place.offset for child in some)
            columns = zip(*((c.place.size, *c[2:]) for c in some), strict=True)
            sizes, keys, below, nbytes = map(list, columns)
            body += b"".join(map(_numbers, (sizes, keys, below, nbytes)))
            above.append(node(height, some[0].key, body, sum(keys), sum(below), sum(nbytes)))
        level = above
    return {**files, "": _manifest(level[0], height)}


def _manifest(root: _Child, height: int) -> bytes:
    """The manifest of one version, with its root."""
    own, ids = _files([root.place])
    config = bytes(16) + _numbers([0, 0, 1 << 23]) + b"\4" + _number(0)
    version = _numbers([1, 1]) + bytes([height]) + _numbers([*ids, 0, root.place.size, *root[2:]])
    return _sealed(_MANIFEST, config + own + version + bytes(8) + _number(0))


def _groups(items: Sequence) -> Iterable[Sequence]:
    return (items[start : start + _ENTRIES] for start in range(0, len(items), _ENTRIES))


def _files(places: Sequence[Range]) -> tuple[bytes, list[int]]:
    """The table of the files of these places, and the number of each place's file."""
    names = sorted({place.file for place in places})
    table = {name: number for number, name in enumerate(names)}
    return (
        _number(len(names)) + _keys([name.encode() for name in names], [0] * len(names)),
        [table[place.file] for place in places],
    )


def _keys(keys: Sequence[bytes], between: Sequence[int]) -> bytes:
    """Sorted keys, each without the prefix that it shares with the one before. The numbers
    `between` follow the lengths of the keys."""
    shared = [_shared(one, other) for one, other in itertools.pairwise(keys)]
    own = [key[start:] for key, start in zip(keys, [0, *shared], strict=False)]
    return _numbers(shared) + _numbers(map(len, own)) + _numbers(between) + b"".join(own)


def _shared(one: bytes, other: bytes) -> int:
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _numbers(numbers: Iterable[int]) -> bytes:
    return b"".join(map(_number, numbers))


def _number(number: int) -> bytes:
    """Seven bits a byte, the lowest first."""
    found = bytearray()
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def _sealed(magic: int, body: bytes) -> bytes:
    """A node or a manifest with its header and its checksum, CRC-32C."""
    size = struct.calcsize(">I") + struct.calcsize("<Q") + 2 + len(body) + struct.calcsize("<I")
    data = struct.pack(">I", magic) + struct.pack("<Q", size) + b"\0\0" + body
    checksum = 0xFFFFFFFF
    for byte in data:
        checksum = _CRC[(checksum ^ byte) & 0xFF] ^ checksum >> 8
    return data + struct.pack("<I", checksum ^ 0xFFFFFFFF)
