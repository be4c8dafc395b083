"""Bytes of memory that a B-tree node of OCDBT takes when TensorStore decodes it.

A node says how long its keys are, and what each shares with the one before: 260 KB of nodes can
ask for gigabytes of keys, compressed ones for a terabyte, and TensorStore allocates what they ask
for. So the lengths are read first. Facts about the format are those of TensorStore's page on it.
"""

import struct

import numpy as np

_NODE, _MANIFEST = 0x0CDB20DE, 0x0CDB3A2A
_HEADER = struct.Struct(">I8x")
# Bytes of a node that its lengths are looked for in: a million entries' fit.
_LENGTHS = 1 << 24
# Bytes that are decompressed at once.
_PIECE = 1 << 16
# Bytes of a whole decoded B-tree (of millions of chunks). Larger ones are not read.
MAX_BTREE = 1 << 30
# Bytes that an entry takes besides its key.
_ENTRY = 64


def decoded_bytes(data: bytes) -> int:
    """Bytes of the names and keys that a node or a manifest asks for, and of its content; raises
    ValueError for anything else."""
    try:
        (magic,) = _HEADER.unpack_from(data)
        version, position = _varint(data, _HEADER.size)
        compression, position = _varint(data, position)
        if magic not in (_NODE, _MANIFEST) or version > 1 or compression > 1:
            raise ValueError("it is not a B-tree node")
        content, whole = data[position : position + _LENGTHS], len(data)
        if compression:
            content, whole = _decompressed(data[position:-4])
        if magic == _MANIFEST:
            return whole + _files_bytes(content, _config_end(content))[0]
        files, position = _files_bytes(content, 1)
        _, keys, _, _ = _names(content, position)
    except (struct.error, IndexError) as error:
        raise ValueError("a node of its B-tree ends early") from error
    return whole + files + keys


def _config_end(content: bytes) -> int:
    """Where the configuration of a database ends, at the start of a manifest."""
    position = 16  # its id
    for _ in range(3):  # kind, longest inlined value, largest node
        _, position = _varint(content, position)
    compression, position = _varint(content, position + 1)
    return position + 4 * compression  # the level


def _files_bytes(content: bytes, position: int) -> tuple[int, int]:
    """Bytes that the names of data files take in a table of them, and where it ends."""
    count, nbytes, own, position = _names(content, position)
    _, position = _total(content, position, count)
    return nbytes, position + own


def _names(content: bytes, position: int) -> tuple[int, int, int, int]:
    """Of names, each of which shares its beginning with the one before: how many there are, bytes
    that they take, bytes without what they share, and where their lengths end."""
    count, position = _varint(content, position)
    shared, position = _total(content, position, count - 1)
    own, position = _total(content, position, count)
    return count, shared + own + _ENTRY * count, own, position


def _varint(content: bytes, position: int) -> tuple[int, int]:
    """A number, seven bits a byte, and where it ends."""
    value = shift = 0
    while content[position] & 0x80:
        value |= (content[position] & 0x7F) << shift
        position, shift = position + 1, shift + 7
    return value | content[position] << shift, position + 1


def _total(content: bytes, position: int, count: int) -> tuple[int, int]:
    """The sum of several numbers below 2^21, and where they end."""
    if count <= 0:
        return 0, position
    found = np.frombuffer(content, np.uint8, offset=position)[: 3 * count]
    ends = np.flatnonzero(found < 0x80)[:count]
    if len(ends) < count:
        raise ValueError("a node of its B-tree ends early")
    lengths = np.diff(ends, prepend=-1)
    if lengths.max() > 3:
        raise ValueError("a node of its B-tree holds a name that is too long")
    end = int(ends[-1]) + 1
    shifts = 7 * (np.arange(end) - np.repeat(ends - lengths + 1, lengths))
    return int(((found[:end] & 0x7F).astype(np.int64) << shifts).sum()), position + end


def _decompressed(frame: bytes) -> tuple[bytes, int]:
    """The first bytes of the content of a zstd frame, and how many bytes it has: at most a little
    more than `MAX_BTREE`, where counting stops."""
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
