"""`plan` and `save`: jobs from storage to storage."""

import os
from collections.abc import Callable, Sequence

from reshard.checkpoint import Checkpoint
from reshard.storage.location import parse_location
from reshard.units import parse_bytes
from reshard.writer.execution import execute
from reshard.writer.job_plan import Plan
from reshard.writer.prepare import parse_chunks, prepare
from reshard.writer.target_format import parse_format

Checkpoints = Checkpoint | Sequence[Checkpoint]
Progress = Callable[[int, int], None]


def plan(
    ckpt: Checkpoints,
    destination: str | os.PathLike | None = None,
    *,
    max_memory: int | str = "1GiB",
    chunks: int | str = "shard",
    format: str | None = None,
    ocdbt: bool | None = None,
    codec: str | None = None,
    file_size: int | str | None = None,
    link: bool = True,
    overwrite: bool = False,
    digest: bool = False,
    verify: bool = False,
) -> Plan:
    """What `save` would do with the same arguments, without doing it.

    Args:
      ckpt: what to save; see `save`.
      destination: where to; without it, data files are taken to be shareable.
      max_memory: bytes, or text such as `"256MiB"`.
      chunks: `"shard"`, `"keep"`, or the most decoded bytes of a chunk.
      format, ocdbt, codec, file_size: the format of the destination; see `save`.
      link: whether unchanged data files may be shared with the source.
      overwrite: whether an existing destination is to be replaced.
      digest, verify: what is read beside; see `save`.

    Returns:
      The plan; what would make `save` raise is in its `problems`.

    Example:
      >>> plan = reshard.plan(reshard.to_mesh(reshard.open("run/1000"), "1x8"), "out/1000")
      >>> plan.problems, plan.chunks_written
      ((), 32)
    """
    return prepare(
        [ckpt] if isinstance(ckpt, Checkpoint) else list(ckpt),
        None if destination is None else parse_location(destination),
        max_memory=parse_bytes(max_memory),
        chunks=parse_chunks(chunks),
        form=parse_format(format, ocdbt, codec, file_size),
        link=link,
        overwrite=overwrite,
        digest=digest,
        verify=verify,
    )


def save(
    ckpt: Checkpoints,
    destination: str | os.PathLike,
    *,
    max_memory: int | str = "1GiB",
    chunks: int | str = "shard",
    format: str | None = None,
    ocdbt: bool | None = None,
    codec: str | None = None,
    file_size: int | str | None = None,
    link: bool = True,
    overwrite: bool = False,
    digest: bool = False,
    verify: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
) -> Plan:
    """Writes a checkpoint, in the layout that its source has; whole or not at all.

    A step stays a step with its other items, a manager's root stays a root with that step, v1
    stays v1; format, codec and its level stay the source's unless they are given. Nothing but
    `max_memory` bytes is in flight at any time. Chunks that do not change are not decoded; data
    files that stay in use are shared with the source by hard links, which is safe: Orbax and
    TensorStore never write to a data file again.

    Digests of the values are recorded beside the arrays (see `reshard.arrays.digests`), and where
    the source has some, what is read is compared with them.

    Args:
      ckpt: the checkpoint, or several steps of one manager's root.
      destination: a local path; nothing may be there unless `overwrite`.
      max_memory: bytes, or text such as `"256MiB"`.
      chunks: `"shard"` for one chunk a shard of the new mesh (split where memory asks for it),
        `"keep"` for the source's chunks, or the most decoded bytes of a chunk.
      link: share data files where that is possible; otherwise stored chunks are copied.
      overwrite: replace what is there, once the new checkpoint is complete.
      digest: also read arrays that are moved undecoded, if they have no digest on record.
      verify: read back all that was written, before the commit.
      resume: if the job is stopped, what is written stays in its temporary directory; and the job
        goes on with what an earlier run of it has left there, after which it reads back the arrays
        that this one had begun to write. Without it that is removed.
      progress: called with (bytes done, bytes in all) after each batch.

    Returns:
      The plan that was executed.

    Raises:
      ArgumentError: `max_memory` or `chunks` is no number of bytes, or the checkpoints are not
        steps of one root.
      DestinationError: the destination exists, is being written, or cannot be written.
      MemoryLimitError: a stored chunk does not fit in `max_memory`.
      CorruptCheckpointError: stored data is missing, does not decode, belongs to two leaves, or
        is not what the source's digests were recorded of; or what was written reads differently.

    Example:
      >>> ckpt = reshard.to_mesh(reshard.open("run/1000"), "1x8")
      >>> plan = reshard.save(ckpt, "out/1000", max_memory="1GiB")
      >>> print(str(plan).splitlines()[0])
      4 arrays, 8.25 KiB: 2 rewritten, 2 copied verbatim
      >>> [str(mesh) for mesh in reshard.open("out/1000").meshes]
      ['data=1,model=8']
    """
    planned = plan(
        ckpt,
        destination,
        max_memory=max_memory,
        chunks=chunks,
        format=format,
        ocdbt=ocdbt,
        codec=codec,
        file_size=file_size,
        link=link,
        overwrite=overwrite,
        digest=digest,
        verify=verify,
    )
    return execute(planned, resume=resume, progress=progress)
