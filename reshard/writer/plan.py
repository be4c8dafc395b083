"""`Plan`: the plan of every item of a job, made before a byte is written."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from reshard import units
from reshard.arrays import derived
from reshard.arrays.boxes import grid_size
from reshard.arrays.handle import ArrayHandle, stored_name
from reshard.checkpoint import Checkpoint
from reshard.engine import memory
from reshard.engine.plan import ArrayPlan, co_read
from reshard.engine.shares import Range, divide, grid_sums, sums
from reshard.errors import ArgumentError, ReshardError, lines_of
from reshard.sharding.mesh import NamedSharding, most_held, sharding_document
from reshard.storage.array_store import key_of
from reshard.storage.identity import Identity
from reshard.storage.location import Location
from reshard.tree import format_path
from reshard.verify.digest_record import Record
from reshard.writer.arrays import ItemShare, Piece
from reshard.writer.format import TargetFormat
from reshard.writer.replaced import Seen
from reshard.writer.siblings import Sibling

# Bytes of a share, as they are stored, and the least that a worker is given one for.
SHARE_BYTES = 1 << 30
_SMALLEST = 32 << 20
# The fixed cost of a chunk, as bytes that could be copied in the same time.
_CHUNK_BYTES = 1 << 16
# Split arrays that a printed plan lists.
_SHOWN_SPLITS = 10


@dataclasses.dataclass(frozen=True)
class Share:
    """A part of a plan that one process can execute. It pickles without open files.

    Attributes:
      number, count: which share it is, from 0, and of how many.
      items: its part of each item.
      max_memory: bytes.
      nbytes: bytes that are written: decoded bytes of rewritten chunks, stored bytes of copied
        ones.
    """

    number: int
    count: int
    items: tuple[ItemShare, ...]
    max_memory: int
    nbytes: int


class _Work(NamedTuple):
    """Boxes of arrays that are read together, or stored values of one array, or files of an export;
    with the bytes and the chunks of the first n of them, for each n from 0."""

    item: int
    arrays: Sequence[ArrayPlan]
    nbytes: np.ndarray
    chunks: np.ndarray

    def piece(self, start: int = 0, stop: int | None = None) -> Piece:
        stop = len(self.nbytes) - 1 if stop is None else stop
        nbytes, chunks = (int(each[stop] - each[start]) for each in (self.nbytes, self.chunks))
        return Piece(self.arrays, start, stop, nbytes, chunks)


def _boxes(item: int, group: Sequence[ArrayPlan]) -> _Work:
    """All boxes of arrays that are read together."""
    sizes = [grid_sums(a.shape, a.box or (), a.chunk) for a in group]
    itemsize = sum(array.target_itemsize for array in group)
    return _Work(item, group, sizes[0][0] * itemsize, np.sum([n for _, n in sizes], axis=0))


@dataclasses.dataclass(frozen=True)
class ItemPlan:
    """The plan of one item.

    Attributes:
      ckpt: its tree.
      format: how its arrays are stored.
      arrays: the plan of each of its arrays.
      files: data files to share with the source, and their bytes; None if none is shared.
      record: the recorded digests of the source.
      read_sources: recorded arrays that are read only for their digests: cast and derived arrays
        are made of them.
      read_verbatim: arrays that are copied verbatim, have no digest, and are read for one.
    """

    ckpt: Checkpoint
    format: TargetFormat
    arrays: tuple[ArrayPlan, ...]
    files: Mapping[str, int] | None
    record: Record
    read_sources: Sequence[ArrayHandle]
    read_verbatim: Sequence[ArrayHandle]

    @property
    def rewritten(self) -> list[ArrayHandle]:
        """Arrays that are decoded and encoded."""
        return [array.handle for array in self.arrays if not array.verbatim]

    @functools.cached_property
    def groups(self) -> list[list[ArrayPlan]]:
        """The rewritten arrays, in groups that are read together."""
        return co_read(self.arrays)

    def work(self, number: int) -> Iterator[_Work]:
        """The work of its shares. An export is written in whole files. `number` is the item's."""
        copied = (a for a in self.arrays if a.verbatim and not a.linked)
        sizes = [([array], [v.size for v in array.values]) for array in copied]
        if self.format.files:
            sizes = [([], [file.nbytes for file in self.format.files])]
        for arrays, each in sizes:
            yield _Work(number, arrays, sums(np.array(each, np.int64)), np.arange(len(each) + 1))
        for group in () if self.format.files else self.groups:
            if not derived.from_memory(group[0].handle):
                yield _boxes(number, group)

    def from_memory(self) -> list[Piece]:
        """The work on arrays that are made of values in memory. An export has none."""
        groups = [] if self.format.files else self.groups
        return [_boxes(0, g).piece() for g in groups if derived.from_memory(g[0].handle)]

    def share(self, number: int, pieces: Sequence[Piece], first: bool) -> ItemShare:
        """The share that has these pieces. The first share has the metadata of all arrays, too."""
        metadata = self.metadata() if first else {}
        if not self.format.files:
            return ItemShare(number, self.format, metadata, pieces)
        files = [f for piece in pieces for f in self.format.files[piece.start : piece.stop]]
        paths = {path for file in files for path in file.offsets}
        groups = [[array for array in g if array.path in paths] for g in self.groups]
        boxes = [_boxes(number, group).piece() for group in groups if group]
        return ItemShare(number, self.format, metadata, boxes, files)

    @property
    def reads_twice(self) -> bool:
        """Whether several shares would decode the same chunks: those of arrays in several files."""
        numbers = {path: n for n, file in enumerate(self.format.files) for path in file.offsets}
        return any(len({numbers[array.path] for array in g}) > 1 for g in self.groups)

    def metadata(self) -> dict[str, bytes]:
        """Metadata of arrays, by their keys, unless they are copied from the source."""
        if self.format.files:
            return {}
        stored = ((a, a.handle.stored) for a in self.arrays)
        return {
            key_of(stored_name(a.path), self.format.metadata_key): a.metadata
            for a, data in stored
            if not a.verbatim or data is None or data.store.ranged or data.encoding != a.encoding
        }

    def directory(self, root: Location) -> Location:
        """Its directory below the destination's root."""
        if self.format.files:
            return root
        return root / self.ckpt.source.step / self.ckpt.source.item

    def documents(self, steps: bool) -> Iterator[dict[str, Any]]:
        """The arrays in the plan's JSON document; with `steps`, each has its step."""
        for array in self.arrays:
            handle = array.handle
            saved = sharding_document(handle.saved_sharding)
            nbytes = handle.nbytes // handle.dtype.itemsize * array.source_itemsize
            yield {
                **({"step": self.ckpt.source.number} if steps else {}),
                "path": format_path(handle.path),
                "keys": list(handle.path),
                "shape": list(handle.shape),
                "dtype": handle.dtype.name,
                "bytes": handle.nbytes,
                "chunk_shape": list(array.chunk),
                **sharding_document(handle.sharding),
                "saved": saved | {"chunk_shape": list(handle.chunk_shape), "bytes": nbytes},
                "read_amplification": _before_and_after(array.amplification),
                "moved": array.verbatim,
                "passes": array.passes,
                "split": array.split,
                "bytes_read": array.bytes_read,
                "bytes_written": array.bytes_written,
            }


@dataclasses.dataclass(frozen=True)
class Plan:
    """A job: what is read and written. `save` executes it; `print()` shows it. It pickles without
    open files.

    Attributes:
      items: the plan of each item; several if steps of one manager's root are saved.
      siblings: files and directories that are copied, other items among them.
      destination: where it is written; None if that is not known yet.
      max_memory: bytes.
      overwrite: an existing destination is replaced.
      verify: everything that is written is read back before the commit.
      digest: arrays that are copied verbatim get digests, too.
      identity: the files of the source when they were opened.
      errors: why it cannot be executed.
      notes: what the user should know.
      replaced: on a disk, what is replaced, as the plan has seen it.
    """

    items: tuple[ItemPlan, ...]
    siblings: tuple[Sibling, ...] = ()
    destination: Location | None = None
    max_memory: int = 0
    overwrite: bool = False
    verify: bool = False
    digest: bool = False
    identity: tuple[Identity, ...] = ()
    errors: tuple[ReshardError, ...] = ()
    notes: tuple[str, ...] = ()
    replaced: tuple[Seen, ...] = ()

    @functools.cached_property
    def arrays(self) -> tuple[ArrayPlan, ...]:
        """Each array's plan, in the order of execution."""
        return tuple(array for item in self.items for array in item.arrays)

    @property
    def problems(self) -> tuple[str, ...]:
        """Why it cannot be executed: all problems, a line each."""
        return tuple(lines_of(self.errors))

    @property
    def hints(self) -> tuple[str, ...]:
        """How to solve the problems."""
        return tuple(dict.fromkeys(hint for error in self.errors for hint in error.hints))

    @property
    def seen(self) -> tuple[Seen, ...] | None:
        """All that the job may replace at its destination; None if nothing may be there."""
        return self.replaced if self.overwrite else None

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The checkpoints that are saved."""
        return [item.ckpt for item in self.items]

    @functools.cached_property
    def _work(self) -> list[_Work]:
        """The work of all shares."""
        return [work for number, item in enumerate(self.items) for work in item.work(number)]

    @functools.cached_property
    def _weights(self) -> list[np.ndarray]:
        """The weight of the first n boxes of each work. As many bytes count as read as are
        written."""
        return [2 * work.nbytes + _CHUNK_BYTES * work.chunks for work in self._work]

    def __getstate__(self) -> dict[str, Any]:
        """Its fields, without what was computed of them."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def share_count(self, workers: int | None = None) -> int:
        """The number of shares: of about 1 GiB of stored bytes each, or smaller ones to have one
        for each worker; or one for each worker, if several shares would decode the same chunks. No
        share is empty."""
        nbytes = sum(a.bytes_written for item in self.items for a in item.arrays)
        wanted = max(math.ceil(nbytes / SHARE_BYTES), min(workers or 1, nbytes // _SMALLEST), 1)
        if any(item.format.files and item.reads_twice for item in self.items):
            wanted = min(wanted, workers or 1)
        count = 0
        while wanted != count:
            count, wanted = wanted, max(sum(map(bool, divide(self._weights, wanted))), 1)
        return count

    def shares(self, count: int) -> list[Share]:
        """All shares, if there are `count` equal ones. Together they have all work of the plan
        except values in memory, each piece once. Share 0 also has the metadata of all arrays."""
        every = enumerate(divide(self._weights, count))
        return [self._share(number, count, ranges) for number, ranges in every]

    def share(self, number: int, count: int) -> Share:
        """Share `number`, from 0, of `count`. Raises ArgumentError if there is no such share."""
        if not 0 <= number < count:
            raise ArgumentError(
                f"there is no share {number} of {count}: shares are numbered from 0"
            )
        (ranges,) = divide(self._weights, count, number)
        return self._share(number, count, ranges)

    def _share(self, number: int, count: int, ranges: Sequence[Range]) -> Share:
        work = [(self._work[n], start, stop) for n, start, stop in ranges]
        items = []
        for n, item in enumerate(self.items):
            pieces = [each.piece(start, stop) for each, start, stop in work if each.item == n]
            share = item.share(n, pieces, first=not number)
            if share.metadata or share.pieces or share.files:
                items.append(share)
        nbytes = sum(piece.nbytes for item in items for piece in item.pieces)
        return Share(number, count, tuple(items), self.max_memory, nbytes)

    @property
    def shared_bytes(self) -> int:
        """Bytes of files that the destination shares with the source."""
        return sum(sum((item.files or {}).values()) for item in self.items)

    @property
    def other_bytes(self) -> int:
        """Bytes of the files that are copied, for example of other items."""
        return sum(sibling.nbytes for sibling in self.siblings)

    @property
    def peak_memory(self) -> int:
        """The most bytes in flight."""
        costs = []  # bytes of one step of rewriting or copying an array, and the number of steps
        for array in self.arrays:
            if array.box is not None:
                steps = grid_size(array.shape, array.box) / array.co_read
                costs.append((array.box_bytes, math.ceil(steps)))
            elif not array.linked:
                steps = grid_size(array.shape, array.chunk)
                costs.append((memory.copy_bytes(array.largest_stored), steps))
        largest = max((cost for cost, _ in costs), default=0)
        cores, remote = memory.cores(), _is_remote(self)
        limit = max(memory.limiter_bytes(self.max_memory, cores, largest, remote), largest)
        return min(sum(cost * count for cost, count in costs), limit)

    @property
    def bytes_read(self) -> int:
        """Stored bytes that will be fetched."""
        return sum(array.bytes_read for array in self.arrays) + self.other_bytes

    @property
    def bytes_written(self) -> int:
        """Stored bytes that will be written; an estimate for arrays that are encoded again."""
        return sum(array.bytes_written for array in self.arrays) + self.other_bytes

    @functools.cached_property
    def rounded(self) -> derived.Rounded:
        """The arrays that a map computes and rounds."""
        return derived.rounded(array.handle for array in self.arrays)

    @property
    def decoded_bytes(self) -> int:
        """Decoded bytes of all arrays of the destination."""
        return sum(array.decoded_bytes for array in self.arrays)

    @property
    def chunks_read(self) -> int:
        """Stored chunks decoded or copied; each pass over a chunk counts. Linked ones do not."""
        return sum(
            round(grid_size(a.shape, a.source_chunk) * a.passes)
            for a in self.arrays
            if not a.linked
        )

    @property
    def chunks_written(self) -> int:
        """Chunks that will be written."""
        return sum(grid_size(a.shape, a.chunk) for a in self.arrays if not a.linked)

    @property
    def amplification(self) -> tuple[float, float]:
        """Decoded bytes for each byte that a restore on the target mesh needs, before and after."""
        total = self.decoded_bytes or 1
        before = sum(a.amplification[0] * a.decoded_bytes for a in self.arrays)
        after = sum(a.amplification[1] * a.decoded_bytes for a in self.arrays)
        return (before / total, after / total) if self.decoded_bytes else (1.0, 1.0)

    @property
    def bytes_per_device(self) -> tuple[int | None, int | None]:
        """Bytes on the device that holds most of a step, of arrays with a mesh: on the saved
        meshes, and on the new one. None if no array has a mesh."""
        before, after = [], []
        for item in self.items:
            old = (
                (a.handle.saved_sharding, a.source_shard, a.source_itemsize) for a in item.arrays
            )
            new = ((a.handle.sharding, a.target_shard, a.target_itemsize) for a in item.arrays)
            before.append(most_held(old))
            after.append(most_held(new))
        return max(filter(None, before), default=None), max(filter(None, after), default=None)

    @property
    def passes(self) -> float:
        """How often each stored byte of rewritten arrays is fetched, on average."""
        stored = sum(a.stored_bytes for a in self.arrays if not a.verbatim)
        return sum(a.bytes_read for a in self.arrays if not a.verbatim) / stored if stored else 1.0

    def document(self, phrase: Callable[[str], str] = str) -> dict[str, Any]:
        """The document of `reshard ckpt --dry-run --json`. `phrase` turns a hint into text."""
        counts = ("bytes_read", "bytes_written", "decoded_bytes", "shared_bytes")
        counts += ("chunks_read", "chunks_written", "passes")
        handles = (array.handle for array in self.arrays)
        shardings = [s for h in handles for s in (h.saved_sharding, h.sharding)]
        meshes = dict.fromkeys(s.mesh for s in shardings if isinstance(s, NamedSharding))
        return {
            "source": [str(ckpt.source.path) for ckpt in self.checkpoints],
            "destination": None if self.destination is None else str(self.destination),
            "done": False,
            **{name: getattr(self, name) for name in counts},
            **({"rounded": self.rounded._asdict()} if self.rounded.arrays else {}),
            "read_amplification": _before_and_after(self.amplification),
            "bytes_per_device": _before_and_after(self.bytes_per_device),
            "peak_memory": self.peak_memory,
            "notes": list(self.notes),
            "problems": list(self.problems),
            "hints": [*map(phrase, self.hints)],
            "meshes": [mesh.shape for mesh in meshes],
            "device_ids": [mesh.device_ids and list(mesh.device_ids) for mesh in meshes],
            "arrays": [
                array for item in self.items for array in item.documents(len(self.items) > 1)
            ],
        }

    def _repr_html_(self) -> str | None:
        from reshard.report.page import framed

        return framed(self) if len(self.items) == 1 else None  # a page shows one step

    def _per_step(self) -> Iterator[str]:
        """Bytes per device, and bytes that a restore reads, of each step; equal steps once."""
        steps: dict[tuple[str, str], list[str]] = {}
        for item in self.items:
            one = dataclasses.replace(self, items=(item,))
            held = [
                "not known" if n is None else units.format_bytes(n) for n in one.bytes_per_device
            ]
            texts = f"{held[0]} before, {held[1]} after", units.format_load(*one.amplification)
            steps.setdefault(texts, []).append(str(item.ckpt.source.number))
        for (held, load), numbers in steps.items():
            which = f"step{'s' * (len(numbers) > 1)} {', '.join(numbers)}"
            of = f" ({which})" if len(self.items) > 1 else ""
            yield f"device   {held}{of}"
            yield f"load     a restore reads {load}{of}"

    def __repr__(self) -> str:
        verbatim = sum(a.verbatim for a in self.arrays)
        counts = len(self.arrays), self.chunks_read, self.chunks_written
        arrays, read, written = (
            f"{count} {noun}{'s' * (count != 1)}"
            for count, noun in zip(counts, ("array", "chunk", "chunk"), strict=True)
        )
        lines = [
            f"{arrays}, {units.format_bytes(self.decoded_bytes)}: "
            f"{len(self.arrays) - verbatim} rewritten, {verbatim} copied verbatim",
            f"read     {units.format_bytes(self.bytes_read)} in {read}"
            + (f", {self.passes:.2f} times on average" if self.passes > 1 else ""),
            f"write    {units.format_bytes(self.bytes_written)} in {written}"
            + (f", and share {units.format_bytes(self.shared_bytes)}" if self.shared_bytes else ""),
            f"memory   {units.format_bytes(self.peak_memory)} in flight at most",
            *self._per_step(),
            *([f"rounded  {self.rounded}"] if self.rounded.arrays else []),
        ]
        split = [a for a in self.arrays if not a.verbatim and (a.split > 1 or a.passes > 1)]
        for a in split[:_SHOWN_SPLITS]:
            lines.append(
                f"split    {format_path(a.path)}: {units.count_of(a.split, 'chunk')} a shard, "
                f"{list(a.chunk)} each" + (f", read {a.passes:.2f} times" if a.passes > 1 else "")
            )
        if len(split) > _SHOWN_SPLITS:
            lines.append(f"split    ... and {len(split) - _SHOWN_SPLITS} more")
        lines += [f"note     {note}" for note in self.notes]
        lines += [f"problem  {problem}" for problem in lines_of(self.errors)]
        return "\n".join(lines)


def _before_and_after(pair: tuple[Any, Any]) -> dict[str, Any]:
    return dict(zip(("before", "after"), pair, strict=True))


def _is_remote(plan: Plan) -> bool:
    """Whether a bucket is read or written."""
    places = [*(c.source.root for c in plan.checkpoints), plan.destination]
    return any(place is not None and not place.is_local for place in places)
