"""The arithmetic of a job: which boxes are read and written, in what order, in how much memory.

Pure: no I/O and no jax. One array is rewritten in boxes:

    source chunks (a)     target shards, split into chunks (c)      one box
    +-------+-------+     +---+---+---+---+                         +-------+
    |       |       |     |   |   |   |   |      whole chunks       | a | a |
    +-------+-------+     |---|---|---|---|      of both grids:     |---+---|
    |       |       |     |   |   |   |   |      lcm(a, c)          | c | c |
    +-------+-------+     +---+---+---+---+      in each dimension  +-------+

A box is read once, in one go, so every source chunk in it is decoded once; then its target chunks
are encoded and written once. A shard that would make the box too large for memory is split evenly
into smaller chunks. If even that does not fit, a box is a single target chunk, and a source chunk
that several boxes touch is read several times.
"""

import bisect
import functools
import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from reshard.arrays.boxes import Box, Shape, chunks_together, common_multiple, grid_boxes, grid_size
from reshard.arrays.derived import stored_values
from reshard.arrays.handle import ArrayHandle
from reshard.arrays.zarr import Encoding
from reshard.engine.memory import cost_bytes, usable
from reshard.errors import MemoryLimitError
from reshard.storage.ocdbt import StoredValue
from reshard.tree import Path, format_path
from reshard.units import format_bytes, whole_kib

# An array whose boxes would take no more than this together is one box: fewer, larger reads.
WHOLE_ARRAY = 1 << 22
# Chunks are not split below this (decoded bytes): small chunks cost more than reading twice.
SMALLEST_CHUNK = 1 << 16
# The same if nothing else fits into memory, and such a chunk needs fewer source chunks at once.
_TINY_CHUNK = 1 << 14
# A grid that divides the new shards evenly is left alone up to this many chunks a shard.
MAX_KEPT_CHUNKS = 16
# Chunks of an array: one of more could not be opened again.
_MAX_CHUNKS = 1 << 22
# Of arrays with so many ways to split them, the last dimensions stay whole.
_MAX_SPLITS = 1 << 16
_KEEP = 'chunks="keep" keeps the stored grid'


# A split of shards: a chunk, the box that it is read and written in, and the chunks of a shard.
_Split = tuple[Shape, Shape, int]


class ArrayPlan(NamedTuple):
    """The facts about one array, and its plan.

    Attributes:
      handle: the array.
      source_itemsize, target_itemsize: decoded bytes of an element, as stored and as written.
      read_itemsize: bytes of an element as it is read.
      source_chunk: shape of a stored chunk.
      source_shard: shape of a shard on the saved mesh.
      target_shard: shape of a shard on the new mesh.
      stored_bytes: stored bytes of all its chunks.
      largest_stored: stored bytes of the largest one.
      encoding: of its chunks in the destination.
      same_bytes: stored chunks can be copied verbatim (same dtype and codec).
      encoded_ratio: estimated encoded bytes for each decoded byte of the target.
      group: the number of its co-read group.
      co_read: how many arrays are in it.
      group_bytes: bytes that decoding a box of `source_chunk` of each of them takes, all at once,
        encoded and decoded.
      chunk: shape of a chunk of the destination.
      box: shape of a box, which is read and written at once; None if chunks are copied verbatim.
      passes: how often each stored byte is read, at most; 1.0 if one pass fits.
      split: chunks for each shard; more than 1 if a shard was split.
      linked: its stored chunks are in data files that are shared with the source.
    """

    handle: ArrayHandle
    shape: Shape
    source_itemsize: int
    target_itemsize: int
    read_itemsize: int
    source_chunk: Shape
    source_shard: Shape
    target_shard: Shape
    stored_bytes: int
    largest_stored: int
    encoding: Encoding
    same_bytes: bool
    encoded_ratio: float
    group: int
    co_read: int
    group_bytes: int
    chunk: Shape = ()
    box: Shape | None = None
    passes: float = 1.0
    split: int = 1
    linked: bool = False

    @property
    def path(self) -> Path:
        return self.handle.path

    @property
    def verbatim(self) -> bool:
        """Whether stored chunks are copied or shared without decoding."""
        return self.box is None

    @property
    def values(self) -> list[StoredValue]:
        """Its stored values, if they are copied verbatim."""
        return stored_values(self.handle, self.encoding) or []

    @property
    def metadata(self) -> bytes:
        """Its metadata document in the destination."""
        return self.encoding.document(self.shape, self.chunk, self.handle.dtype)

    def bytes_of(self, box: Shape) -> int:
        """Bytes of memory to rewrite one box, together with the boxes that are read with it: while
        it is read, its chunks and a buffer; while it is written, the buffer and the encoded
        chunks."""
        box = tuple(map(min, box, self.shape))
        elements = self.co_read * math.prod(box)
        decoding = _most_touched(self.shape, self.source_chunk, box) * self.group_bytes
        buffers = elements * self.read_itemsize
        return cost_bytes(decoding, buffers, self.consumer_bytes(elements), self.co_read)

    def consumer_bytes(self, elements: int) -> int:
        """Bytes of memory for elements that were read: as they are written, and either as they were
        read or as they are encoded."""
        return elements * (self.target_itemsize + max(self.read_itemsize, self.target_itemsize))

    @property
    def amplification(self) -> tuple[float, float]:
        """Decoded bytes for each byte that a restore on the target mesh needs, before and after."""
        chunks = self.source_chunk, self.chunk
        before, after = (read_amplification(self.shape, c, self.target_shard) for c in chunks)
        return before, after

    @property
    def box_bytes(self) -> int:
        """Bytes in flight to rewrite one box; 0 if none is rewritten."""
        return 0 if self.box is None else self.bytes_of(self.box)

    @property
    def decoded_bytes(self) -> int:
        return math.prod(self.shape) * self.target_itemsize

    @property
    def bytes_read(self) -> int:
        """Stored bytes fetched."""
        return 0 if self.linked else round(self.stored_bytes * self.passes)

    @property
    def bytes_written(self) -> int:
        """Stored bytes written: exact if chunks are copied verbatim, otherwise an estimate."""
        if self.verbatim:
            return 0 if self.linked else self.stored_bytes
        return round(self.decoded_bytes * self.encoded_ratio)

    def with_larger_boxes(self, nbytes: int) -> "ArrayPlan":
        """The plan with boxes of several chunks, of about `nbytes` in flight."""
        if self.box is None:
            return self
        shape, count = self.shape, nbytes // max(self.box_bytes, 1)
        cell = tuple(max(size, 1) for size in self.box)  # an array may have no elements
        box = chunks_together(shape, cell, max(count, 1))
        return self._replace(box=tuple(max(min(*p), 1) for p in zip(box, shape, strict=True)))

    def boxes(self, start: int = 0, stop: int | None = None) -> Iterator[Box]:
        """Its boxes in row-major order, from one number to another."""
        if self.box is None:
            return iter(())
        return itertools.islice(grid_boxes(self.shape, self.box), start, stop)


def co_read(arrays: Sequence[ArrayPlan]) -> list[list[ArrayPlan]]:
    """Groups of arrays that are read box by box together, at the place of their first array. An
    array whose boxes are elsewhere is a group of its own. Without arrays that are copied
    verbatim."""
    groups: dict[Hashable, list[ArrayPlan]] = {}
    for number, array in enumerate(arrays):
        if not array.verbatim:
            alone = array.co_read == 1
            key = number if alone else (array.group, array.box)
            groups.setdefault(key, []).append(array)
    return list(groups.values())


@functools.lru_cache(maxsize=4096)
def read_amplification(shape: Shape, chunk: Shape, shard: Shape) -> float:
    """Elements decoded for each element wanted, when every shard is loaded from whole chunks.

    At least 1; for divisible sizes the product over the dimensions of max(1, chunk / shard).
    """
    if 0 in shape:
        return 1.0
    return math.prod(
        sum(min(-(-(start + b) // a) * a, size) - start // a * a for start in range(0, size, b))
        / size
        for size, a, b in zip(shape, chunk, shard, strict=True)
    )


def plan_array(array: ArrayPlan, chunks: int | str, max_memory: int) -> ArrayPlan:
    """An array with its plan. Raises MemoryLimitError if a target chunk and a source chunk do not
    fit into memory together, or there are too many chunks.

    Args:
      chunks: `"shard"` for one chunk per shard, split if memory requires it; `"keep"` for the
        source's grid; or the largest number of decoded bytes in a chunk.
    """
    most = None if isinstance(chunks, str) else chunks
    keeps = chunks == "keep" or 0 in array.shape or _grid_fits(array, most)
    if keeps and array.same_bytes:
        return array._replace(chunk=array.source_chunk)
    shape, source = array.shape, array.source_chunk
    if keeps:
        splits = ((source, common_multiple((source,), shape), 1),)
    else:
        splits = _even_splits(shape, source, array.target_shard, array.target_itemsize, most)
    plan = _first_fit(array, splits, usable(max_memory) // 2)  # two boxes
    plan = plan or _first_fit(array, splits, max_memory)
    if plan is None and not keeps:
        splits = (*splits, *_splits_read_again(array, most))
        plan = _first_fit(array, splits, max_memory)
    if plan is None:
        raise too_large(array, min(array.bytes_of(box) for _, box, _ in splits), max_memory)
    count = grid_size(shape, plan.chunk)
    if count > _MAX_CHUNKS:
        found = f"{format_path(array.path)}: the new grid would have {count} chunks"
        text = f"{found} of {list(plan.chunk)}, more than {_MAX_CHUNKS}"
        raise MemoryLimitError(text, hints=[_KEEP])
    if array.same_bytes and plan.chunk == source:
        return plan._replace(box=None, passes=1.0)
    return plan


def _grid_fits(array: ArrayPlan, most: int | None) -> bool:
    """Whether shards already consist of whole source chunks, not too large and not too many."""
    if most is not None and math.prod(array.source_chunk) * array.target_itemsize > most:
        return False
    pairs = list(zip(array.source_chunk, array.target_shard, strict=True))
    if any(shard % chunk for chunk, shard in pairs):
        return False
    count = math.prod(shard // chunk for chunk, shard in pairs)
    return count <= MAX_KEPT_CHUNKS or array.source_shard == array.target_shard


def _first_fit(array: ArrayPlan, splits: Iterable[_Split], limit: int) -> ArrayPlan | None:
    """The first split whose box takes at most `limit` bytes."""
    for chunk, box, split in splits:
        if array.bytes_of(box) <= limit:
            if array.bytes_of(array.shape) <= min(WHOLE_ARRAY, limit):
                box = array.shape
            passes = _passes(array, box)
            return array._replace(chunk=chunk, box=box, passes=passes, split=split)
    return None


# Arrays of a checkpoint are alike: layers, and thousands of small ones.
@functools.lru_cache(maxsize=32)
def _even_splits(
    shape: Shape, source: Shape, shard: Shape, itemsize: int, most: int | None
) -> tuple[_Split, ...]:
    """Even splits of a shard into chunks of at most `most` decoded bytes, fewest chunks first.
    Without it, only splits that shrink the box are tried."""
    nbytes = math.prod(shard) * itemsize
    fewest = None if most is None else min(math.ceil(nbytes / most), math.prod(shard))
    options: list[Sequence[int]] = []
    combinations = 1  # of arrays with many axes there could be billions
    for size, a, b in zip(shape, source, shard, strict=True):
        parts = _parts(size, a, b, fewest)
        options.append(parts if combinations * len(parts) <= _MAX_SPLITS else parts[:1])
        combinations *= len(options[-1])
    found = []
    for parts in itertools.product(*options):
        split = math.prod(parts)
        if split >= (fewest or 1):
            chunk = tuple(b // k for b, k in zip(shard, parts, strict=True))
            found.append((chunk, common_multiple((source, chunk), shape), split))
    smallest = min(SMALLEST_CHUNK, most or SMALLEST_CHUNK)
    found = [each for each in found if nbytes // each[2] >= smallest] or found
    return tuple(sorted(found, key=lambda s: (s[2], math.prod(s[1]), max(s[1], default=1))))


def _splits_read_again(array: ArrayPlan, most: int | None) -> Iterator[_Split]:
    """Even splits whose boxes are single chunks, the largest first. Several boxes may read the same
    source chunks. Tiny chunks are among them only if they touch fewer source chunks."""
    size = math.prod(array.target_shard) * array.target_itemsize
    size = min(size, most or size)
    smallest = min(SMALLEST_CHUNK, size)
    grids = array.shape, array.source_chunk, array.target_shard, array.target_itemsize
    fewest = math.inf
    while size >= smallest or (size >= _TINY_CHUNK and fewest > 1):
        for chunk, _, split in _even_splits(*grids, size):
            touched = _most_touched(array.shape, array.source_chunk, chunk)
            if size >= smallest or touched < fewest:
                yield chunk, chunk, split
                fewest = min(fewest, touched)
        size //= 2


@functools.lru_cache(maxsize=4096)
def _parts(size: int, source: int, shard: int, fewest: int | None) -> Sequence[int]:
    """Numbers of parts of a dimension of a shard, up to `fewest`, or those that shrink its box."""
    low = [d for d in range(1, math.isqrt(shard) + 1) if shard % d == 0]
    divisors = sorted({*low, *(shard // d for d in low)})
    if fewest is not None:
        return divisors[: bisect.bisect_left(divisors, fewest) + 1]
    boxes = [min(math.lcm(source, shard // k), size) for k in divisors]
    smallest = [math.inf, *itertools.accumulate(boxes, min)]
    return [k for k, box, less in zip(divisors, boxes, smallest, strict=False) if box < less]


def too_large(array: ArrayPlan, needed: int, max_memory: int) -> MemoryLimitError:
    """The error for an array if it takes `needed` bytes to rewrite one stored chunk."""
    decoded = math.prod(array.source_chunk) * array.source_itemsize
    return MemoryLimitError(
        f"{format_path(array.path)}: rewriting one stored chunk of {list(array.source_chunk)} "
        f"({format_bytes(decoded)}) takes {format_bytes(needed)}, more than the memory limit of "
        f"{format_bytes(max_memory)}",
        hints=[f'max_memory="{whole_kib(needed)}" is the least that is enough'],
        least=needed,
    )


def _passes(array: ArrayPlan, box: Shape) -> float:
    """How often a source chunk is read, on average, when each box reads all it touches."""
    if 0 in array.shape:
        return 1.0
    dims = zip(array.shape, array.source_chunk, box, strict=True)
    return (
        math.prod(
            sum(math.ceil(min(start + b, size) / a) - start // a for start in range(0, size, b))
            / math.ceil(size / a)
            for size, a, b in dims
        )
        * 1.0
    )


def _most_touched(shape: Shape, chunk: Shape, box: Shape) -> int:
    """The most chunks that one box of a grid touches, at most."""
    dims = zip(shape, chunk, box, strict=True)
    return math.prod(
        min(math.ceil((b - math.gcd(a, b)) / a) + 1, math.ceil(size / a)) for size, a, b in dims
    )
