"""Opens a path as a `Checkpoint`. Each format has a module, and `locate` chooses it."""

import dataclasses
import os
from typing import Any

from reshard.checkpoint import FOREIGN_KINDS, Checkpoint, Item
from reshard.errors import ArgumentError, CorruptCheckpointError, ReshardError, StoreError
from reshard.loader import msgpack, orbax, safetensors, zarr_tree
from reshard.loader.detection import is_index
from reshard.loader.locate import check_inside, locate
from reshard.storage.bucket import REQUESTS
from reshard.storage.disk import Entry
from reshard.storage.identity import Identity, unchanged
from reshard.storage.location import parse_location

_READERS: dict[str, Any] = dict(zip(FOREIGN_KINDS, (safetensors, msgpack, zarr_tree), strict=True))


def open(
    path: str | os.PathLike,
    *,
    step: int | None = None,
    item: str | None = None,
    concurrency: int = REQUESTS,
) -> Checkpoint:
    """Open a saved checkpoint. Reads only metadata and needs no device.

    Args:
      path: a PyTree item directory, a standalone checkpoint, a step, a `CheckpointManager` root,
        or a checkpoint of Orbax's v1 API; a file or a directory of safetensors or of Flax's
        msgpack, also in the cache of Hugging Face; or a tree of zarr arrays. On a disk, or in a
        bucket (`gs://`, `s3://`).
      step: the step of a manager's root; by default, the latest committed one.
      item: the item of a step that has several trees.
      concurrency: the most requests for arrays that are sent to a bucket at once.

    Returns:
      The checkpoint.

    Raises:
      CheckpointNotFoundError: the path, step or item does not exist, or is being deleted.
      UncommittedCheckpointError: its writer never finished.
      CheckpointFormatError: it is not such a checkpoint; the message names the format if known.
      CorruptCheckpointError: its parts contradict each other.
      ChangedCheckpointError: its files have changed while it was opened.
      StoreError: a request to a bucket failed, or this user may not read a file.

    Example:
      >>> ckpt = reshard.open("run/1000")
      >>> ckpt["params/layer_0/kernel"]
      <params/layer_0/kernel: float32[32,32] P(None, 'model')>
      >>> [str(mesh) for mesh in ckpt.meshes]
      ['data=2,model=4']
    """
    if concurrency < 1:
        raise ArgumentError(f"concurrency must be 1 or more, not {concurrency!r}")
    if isinstance(step, str):
        hints = [f"step={int(step)}"] if step.isdecimal() else []
        raise ArgumentError(f"a step is a number, not text: {step!r:.40}", hints=hints)
    try:
        with parse_location(path).cached_listing():
            located = locate(path, step, item)
            check_inside(located)
            located.directory.check_opens()
            if not located.is_foreign and (file := orbax.values_file(located)):
                held = dataclasses.replace(located, file=file.name)
                located = Item(file, "msgpack", located.v1) if located.kind == "item" else held
            reader = msgpack if located.file else _READERS.get(located.kind, orbax)
            seen: dict[str, Entry] = {}
            top = located.data
            top = top.parent if is_index(top.name) and top.is_file() else top
            with unchanged(*[Identity(top, seen)] * top.is_local):
                return reader.read(located, concurrency, seen)
    except ReshardError:
        raise
    except OSError as error:
        kind = StoreError if isinstance(error, PermissionError) else CorruptCheckpointError
        raise kind(
            f"`{os.fspath(path)}` cannot be read: {error.strerror}",
            [f"{error.filename!s:.200}"] if error.filename else [],
        ) from error
