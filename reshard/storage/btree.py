"""The encoding of OCDBT's B-tree nodes, as TensorStore's page on the format describes it.

`decoded_bytes` bounds the memory that decoding a node takes. A node says how long its keys are, and
how many bytes each shares with the one before. 260 KB of nodes can ask for gigabytes of keys, and
compressed ones for a terabyte, and TensorStore allocates what they ask for.

`range_database` makes a database whose values are byte ranges of files that something else wrote.
TensorStore's page names this use. So it reads the arrays of another format as uncompressed zarr
chunks, in any store.
"""

import functools
import itertools
import struct
from collections.abc import Iterable, Sequence

import numpy as np

_NODE, _MANIFEST = 0x0CDB20DE, 0x0CDB3A2A
_HEADER = struct.Struct(">I8x")
# Bytes of a node in which its lengths must be: enough for a million entries.
_LENGTHS = 1 << 24
# Bytes that are decompressed at once.
_PIECE = 1 << 16
# Bytes of a whole decoded B-tree (of millions of chunks). Larger ones are not read.
MAX_BTREE = 1 << 30
# Bytes that an entry takes besides its key.
_ENTRY = 64
_ENDS_EARLY = "a node of its B-tree ends early"
# The table of the checksum CRC-32C.
_CRC = [
    functools.reduce(lambda byte, _: byte >> 1 ^ (0x82F63B78 if byte & 1 else 0), range(8), byte)
    for byte in range(256)
]


def decoded_bytes(data: bytes) -> int:
    """Bytes of the content of a node or a manifest, and of its names and keys once decoded. Raises
    ValueError for anything else."""
    try:
        (magic,) = _HEADER.unpack_from(data)
    except struct.error as error:
        raise ValueError(_ENDS_EARLY) from error
    version, position = _total(data, _HEADER.size)
    compression, position = _total(data, position)
    if magic not in (_NODE, _MANIFEST) or version > 1 or compression > 1:
        raise ValueError("it is not a B-tree node")
    content, whole = data[position : position + _LENGTHS], len(data)
    if compression:
        content, whole = _decompressed(data[position:-4])
    if magic == _MANIFEST:
        # A configuration: an id of 16 bytes, its kind, the longest inlined value, the largest node,
        # a number of one byte, the compression and its level.
        _, position = _total(content, 16, 3)
        compression, position = _total(content, position + 1)
        return whole + _files_bytes(content, position + 4 * compression)[0]
    files, position = _files_bytes(content, 1)
    return whole + files + _names(content, position)[1]


def _files_bytes(content: bytes, position: int) -> tuple[int, int]:
    """Bytes that the names in a table of data files take, and the end of the table."""
    count, nbytes, own, position = _names(content, position)
    _, position = _total(content, position, count)
    return nbytes, position + own


def _names(content: bytes, position: int) -> tuple[int, int, int, int]:
    """The number of names, their bytes, their bytes without shared prefixes, and the position."""
    count, position = _total(content, position)
    shared, position = _total(content, position, count - 1)
    own, position = _total(content, position, count)
    return count, shared + own + _ENTRY * count, own, position


def _total(content: bytes, position: int, count: int = 1) -> tuple[int, int]:
    """The sum of several numbers below 2^35 in groups of seven bits, and their end."""
    if count <= 0:
        return 0, position
    data = np.frombuffer(content[position : position + 5 * count], np.uint8)
    ends = np.flatnonzero(data < 0x80)[:count]
    if len(ends) < count:
        raise ValueError(_ENDS_EARLY)
    lengths = np.diff(ends, prepend=-1)
    if lengths.max() > 5:
        raise ValueError("its OCDBT index has a number that is too large")
    end = int(ends[-1]) + 1
    shifts = 7 * (np.arange(end) - np.repeat(ends - lengths + 1, lengths))
    return int(((data[:end] & 0x7F).astype(np.int64) << shifts).sum()), position + end


def _decompressed(frame: bytes) -> tuple[bytes, int]:
    """The first bytes of a zstd frame's content, and the number of all, up to about `MAX_BTREE`."""
    import zstandard

    try:
        reader = zstandard.ZstdDecompressor().stream_reader(frame)
        start, nbytes = bytearray(), 0
        while nbytes <= MAX_BTREE and (more := reader.read(_PIECE)):
            nbytes += len(more)
            start += more if len(start) < _LENGTHS else b""
    except zstandard.ZstdError as error:
        raise ValueError(f"a node of its B-tree is not compressed with zstd: {error}") from error
    return bytes(start), nbytes


def range_database(values: Iterable[tuple[bytes, str, int, int]], node: str) -> dict[str, bytes]:
    """The two files of a database of one or more values: its only B-tree node, in a file of the
    name `node`, and its manifest, under the empty name. Each value has a key, a file relative to
    the database (empty for the database itself), an offset and a size."""
    keys, files, offsets, sizes = zip(*sorted(values), strict=True)
    table, ids = _file_table(files)
    body = b"\0" + table + _numbers([len(keys)]) + _keys(keys, 0)
    body += _numbers(sizes) + b"\1" * len(keys) + _numbers(ids) + _numbers(offsets)
    data = _sealed(_NODE, body)
    table, ids = _file_table([node])
    config = bytes(16) + _numbers([0, 0, 1 << 23]) + b"\4\0"
    # Of one version: its number, its height, and its root with the statistics of the tree.
    version = _numbers([1, 1, 0, *ids, 0, len(data), len(keys), len(data), sum(sizes)])
    return {node: data, "": _sealed(_MANIFEST, config + table + version + bytes(9))}


def _file_table(files: Sequence[str]) -> tuple[bytes, list[int]]:
    """The table of some files, and the number of each of them in it."""
    names = sorted(set(files))
    numbers = {name: number for number, name in enumerate(names)}
    encoded = [name.encode(errors="surrogateescape") for name in names]
    table = _numbers([len(names)]) + _keys(encoded, len(names))
    return table, [numbers[file] for file in files]


def _keys(keys: Sequence[bytes], zeros: int) -> bytes:
    """Sorted keys without the prefixes that they share; some zeros follow their lengths."""
    shared = [_shared(one, other) for one, other in itertools.pairwise(keys)]
    own = [key[start:] for key, start in zip(keys, [0, *shared], strict=True)]
    return _numbers([*shared, *map(len, own)]) + bytes(zeros) + b"".join(own)


def _shared(one: bytes, other: bytes) -> int:
    """The length of the prefix that two different keys share."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def _numbers(numbers: Iterable[int]) -> bytes:
    """Each number in groups of seven bits, the lowest first."""
    encoded = bytearray()
    for number in numbers:
        while number >= 0x80:
            encoded.append(number & 0x7F | 0x80)
            number >>= 7
        encoded.append(number)
    return bytes(encoded)


def _sealed(magic: int, body: bytes) -> bytes:
    """A node or a manifest, uncompressed, with its header and its checksum."""
    data = struct.pack(">I", magic) + struct.pack("<Q", len(body) + 18) + b"\0\0" + body
    return data + struct.pack("<I", crc32c(data))


def crc32c(data: bytes) -> int:
    checksum = 0xFFFFFFFF
    for byte in data:
        checksum = _CRC[(checksum ^ byte) & 0xFF] ^ checksum >> 8
    return checksum ^ 0xFFFFFFFF
