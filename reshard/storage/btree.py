"""What a B-tree node of OCDBT takes when it is decoded, found without decoding it.

A node says how long its keys are, and what each shares with the one before: 260 KB of nodes can
ask for gigabytes of keys, compressed ones for a terabyte, and TensorStore allocates what they ask
for. So the lengths are read first. Facts about the format are those of TensorStore's page on it.
"""

import struct

import numpy as np
import tensorstore as ts

_NODE, _MANIFEST = 0x0CDB20DE, 0x0CDB3A2A
_HEADER = struct.Struct(">I8x")
# Bytes of a node that its lengths are looked for in: a million entries' fit.
_LENGTHS = 1 << 24
# How a frame of zstd starts, what a block decodes to at most, and blocks that are too many.
_ZSTD = b"\x28\xb5\x2f\xfd"
_BLOCK = 1 << 17
_MAX_BLOCKS = 1 << 16
# Ratio of sizes that TensorStore takes for no bomb.
_LEAST_RATIO = 100
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
            raise ValueError("it is no node of a B-tree")
        content, whole = data[position : position + _LENGTHS], len(data)
        if compression:
            content, whole = _start(data[position:-4])
        if magic == _MANIFEST:
            return whole + _names_bytes(content, _config_end(content))[0]
        names, position = _names_bytes(content, 1)
        count, position = _varint(content, position)
        shared, position = _varints(content, position, count - 1)
        own, position = _varints(content, position, count)
    except (struct.error, IndexError) as error:
        raise ValueError("a node of its B-tree ends early") from error
    return whole + names + int(shared.sum() + own.sum()) + _ENTRY * count


def _config_end(content: bytes) -> int:
    """Where the configuration of a database ends, at the start of a manifest."""
    position = 16  # its id
    for _ in range(3):  # kind, longest inlined value, largest node
        _, position = _varint(content, position)
    compression, position = _varint(content, position + 1)
    return position + 4 * compression  # the level


def _names_bytes(content: bytes, position: int) -> tuple[int, int]:
    """Bytes of the names of data files in a table of them, and where it ends."""
    count, position = _varint(content, position)
    if not count:
        return 0, position
    shared, position = _varints(content, position, count - 1)
    own, position = _varints(content, position, count)
    _, position = _varints(content, position, count)
    suffixes = int(own.sum())
    return suffixes + int(shared.sum()) + _ENTRY * count, position + suffixes


def _varint(content: bytes, position: int) -> tuple[int, int]:
    """A number, seven bits a byte, and where it ends."""
    value = shift = 0
    while content[position] & 0x80:
        value |= (content[position] & 0x7F) << shift
        position, shift = position + 1, shift + 7
    return value | content[position] << shift, position + 1


def _varints(content: bytes, position: int, count: int) -> tuple[np.ndarray, int]:
    """Several numbers below 2^16, and where they end."""
    if count <= 0:
        return np.zeros(0, np.int64), position
    found = np.frombuffer(content, np.uint8, offset=position)[: 3 * count]
    ends = np.flatnonzero(found < 0x80)[:count]
    if len(ends) < count:
        raise ValueError("a node of its B-tree ends early")
    starts = np.concatenate([[0], ends[:-1] + 1])
    if (ends - starts).max() > 2:
        raise ValueError("a node of its B-tree holds a name that is too long")
    values = (found[starts] & 0x7F).astype(np.int64)
    for byte in (1, 2):
        longer = ends - starts >= byte
        values[longer] |= (found[starts[longer] + byte] & 0x7F).astype(np.int64) << 7 * byte
    return values, position + int(ends[-1]) + 1


def _start(frame: bytes) -> tuple[bytes, int]:
    """The first bytes of what a zstd frame holds, and a bound on all that it holds."""
    single, has_size, position = frame[4] & 0x20, frame[4] >> 6, 5
    if frame[:4] != _ZSTD or frame[4] & 3:
        raise ValueError("a node of its B-tree is not compressed with zstd")
    window = _BLOCK
    if not single:
        window = (1 << 10 + (frame[5] >> 3)) * (8 + (frame[5] & 7)) // 8
        position += 1
    if single or has_size:  # then it says how much it holds
        digits = (1, 2, 4, 8)[has_size]
        size = int.from_bytes(frame[position : position + digits], "little")
        size += 256 if digits == 2 else 0
        return _unzipped(frame, min(size, _LENGTHS)), size
    last, bound = _blocks(frame, position)
    # Zeros after its last block: how much is before them is not known.
    block = min(window, _BLOCK)
    length = min(bound, _LENGTHS)
    zeros = (block << 3 | 2).to_bytes(3, "little") + b"\0"
    end = (block << 3 | 3).to_bytes(3, "little") + b"\0"
    open_ended = frame[:4] + bytes([frame[4] & ~4]) + frame[5:last] + bytes([frame[last] & ~1])
    after = _after(frame, last)
    padded = open_ended + frame[last + 1 : after] + zeros * (length // block) + end
    return _unzipped(padded, length), bound


def _blocks(frame: bytes, position: int) -> tuple[int, int]:
    """Where the last block of a frame is, and a bound on what all of them hold."""
    bound = 0
    for _ in range(_MAX_BLOCKS):
        header = int.from_bytes(frame[position : position + 3], "little")
        bound += _BLOCK if header >> 1 & 3 == 2 else header >> 3
        if header & 1:
            return position, bound
        position = _after(frame, position)
    raise ValueError("a node of its B-tree is too large")


def _after(frame: bytes, position: int) -> int:
    """Where the block after another one is."""
    header = int.from_bytes(frame[position : position + 3], "little")
    if position + 3 > len(frame):
        raise IndexError
    return position + 3 + (1 if header >> 1 & 3 == 1 else header >> 3)


def _unzipped(frame: bytes, length: int) -> bytes:
    """The first bytes of what a zstd frame holds. TensorStore reads zstd in zip archives as far as
    it is asked to, so it is given the frame as the only member of one; what it takes for a bomb by
    its ratio alone it does not read, so that what is never read is added."""
    frame += bytes(length // _LEAST_RATIO)
    sizes = (len(frame), length)
    local = struct.pack("<IHHHHHIIIHH", 0x04034B50, 63, 0, 93, 0, 0x21, 0, *sizes, 1, 0) + b"n"
    central = struct.pack(
        "<IHHHHHHIIIHHHHHII", 0x02014B50, 63, 63, 0, 93, 0, 0x21, 0, *sizes, 1, 0, 0, 0, 0, 0, 0
    )
    end = struct.pack(
        "<IHHHHIIH", 0x06054B50, 0, 0, 1, 1, len(central) + 1, len(local) + len(frame), 0
    )
    context = ts.Context()
    archive = {"driver": "memory", "path": "node.zip"}
    ts.KvStore.open(archive, context=context).result().write(
        "", local + frame + central + b"n" + end
    ).result()
    member = ts.KvStore.open({"driver": "zip", "base": archive}, context=context).result()
    return member.read("n").result().value
