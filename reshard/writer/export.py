"""`export`: a checkpoint as a directory of safetensors files, as Hugging Face has them.

It is a job like any other; see `reshard.writer.save`. In a bucket, the index is created last. A
single file has no index: then its configuration is the last.
"""

import collections
import dataclasses
import json
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from typing import Any

from reshard import errors, tree, units
from reshard.arrays.handle import ArrayHandle, array_text, stored_name
from reshard.checkpoint import Checkpoint, check_checkpoints, name_clashes
from reshard.loader import detection, hf_files
from reshard.loader import open as open_checkpoint
from reshard.loader.json_documents import read_json
from reshard.loader.plain_arrays import weight_map
from reshard.loader.safetensors import MAX_HEADER, find_index
from reshard.storage import identity, location
from reshard.verify import values
from reshard.writer import destination as destinations
from reshard.writer import format as target_format
from reshard.writer import planning, siblings
from reshard.writer.plan import Plan
from reshard.writer.save import execute

# Leaves that a hint lists one by one.
_NAMED = 8
# Bytes of an object that s3 copies in one request.
_MOST_COPIED = 5 << 30
# Dtypes of models. Others are quantized weights.
_FLOATS = ("float16", "bfloat16", "float32", "float64")


class Export(Plan):
    """What `export` writes. `print()` shows it."""

    @property
    def files(self) -> tuple[target_format.File, ...]:
        """The safetensors files."""
        return self.items[0].format.files

    @property
    def copied(self) -> tuple[str, ...]:
        """Names of the files that are copied from `like` unchanged."""
        return tuple(sibling.path for sibling in self.siblings if sibling.data is None)

    @property
    def nbytes(self) -> int:
        """Bytes of all safetensors files."""
        return sum(file.nbytes for file in self.files)

    def document(self, *_: Any) -> dict[str, Any]:
        """What `reshard export --json` prints."""
        changed = [sibling.path for sibling in self.siblings if sibling.data is not None]
        return {
            "destination": str(self.destination),
            "bytes": self.nbytes,
            "files": [
                {
                    "name": file.name,
                    "bytes": file.nbytes,
                    "tensors": [*map(stored_name, file.offsets)],
                }
                for file in self.files
            ],
            "copied": list(self.copied),
            **({"changed": changed} if changed else {}),
            **({"rounded": self.rounded._asdict()} if self.rounded.arrays else {}),
        }

    def _repr_html_(self) -> None:
        return None

    def __repr__(self) -> str:
        arrays = units.count_of(len(self.arrays), "array")
        files = units.count_of(len(self.files), "file")
        lines = [f"{arrays}, {units.format_bytes(self.nbytes)} in {files}"]
        lines += [f"copy     {', '.join(self.copied)}"] * bool(self.copied)
        lines += [f"rounded  {self.rounded}"] * bool(self.rounded.arrays)
        lines += [f"note     {note}" for note in self.notes]
        return "\n".join(lines)


def export(
    ckpt: Checkpoint,
    destination: str | os.PathLike,
    *,
    file_size: int | str = "5GB",
    like: str | os.PathLike | None = None,
    max_memory: int | str = "1GiB",
    overwrite: bool = False,
    resume: bool = False,
    share: tuple[int, int] | None = None,
    workers: int | None = None,
    executor: Executor | None = None,
    progress: values.Progress | None = None,
) -> Export:
    """Write a checkpoint as safetensors files, in Hugging Face's layout.

    The name of a tensor is its path, joined with dots. Shardings are not written. The files are
    the same for any mesh, and for any number of workers.

    Args:
      ckpt: the checkpoint, from `open` or a transform.
      destination: the new directory, or the prefix in a bucket.
      file_size: the most bytes of tensors in a file. A larger tensor has its own file.
      like: a Hugging Face directory. Its configuration, tokenizer, licence and model card are
        copied; the configuration gets the dtype of the written tensors. The names and shapes of
        its tensors, if it has any, must be those of `ckpt`.
      max_memory: the most bytes of arrays in memory, in each worker.
      overwrite: replace an earlier export on a disk once the new one is complete; ignore the
        leftovers of unfinished jobs.
      resume: use the shares that an earlier run of the same export has finished.
      share: (i, n) writes only share i of n, numbered from 0; then `reshard.commit` makes the
        directory. A share writes whole files.
      workers: how many processes of this machine write the shares.
      executor: any `concurrent.futures.Executor` that runs the shares instead.
      progress: called with (bytes done, bytes in all).

    Returns:
      What was written.

    Raises:
      TreeMismatchError: leaves that safetensors has no type for, names of two leaves, or leaves
        that are not those of `like`: all of them.
      ChangedCheckpointError: the source has changed since it was opened.
      CorruptCheckpointError: arrays that cannot be read, or differ from their recorded digests.
      DestinationError: the destination exists, is being written, or cannot be written.
      MemoryLimitError: one stored chunk does not fit into `max_memory`.

    Example:
      >>> ckpt = reshard.select(reshard.open("run/1000"), "params/**")
      >>> [file.name for file in reshard.export(ckpt, "out/hf").files]
      ['model.safetensors']
      >>> reshard.diff("out/hf", ckpt).equal
      True
    """
    plan = plan_export(
        ckpt,
        destination,
        file_size=file_size,
        like=like,
        max_memory=max_memory,
        overwrite=overwrite,
    )
    return execute(plan, resume, share, workers, executor, progress)


def plan_export(
    ckpt: Checkpoint,
    destination: str | os.PathLike,
    *,
    file_size: int | str = "5GB",
    like: str | os.PathLike | None = None,
    max_memory: int | str = "1GiB",
    overwrite: bool = False,
) -> Export:
    """What `export` would write. Its `errors` are those that `export` would raise."""
    check_checkpoints(ckpt)
    ckpt = _with_elements(ckpt)
    place = location.parse_location(destination)
    model = None if like is None else hf_files.snapshot(like)
    limit = units.parse_bytes(max_memory)
    problems = [*_unwritable(ckpt), *_clashes(ckpt), *_unlike(ckpt, model)]
    handles = [h for h in ckpt.arrays if target_format.why_not_written(h) is None]
    handles.sort(key=lambda handle: tree.natural(handle.path))
    form = target_format.safetensors_format(handles, units.parse_bytes(file_size))
    lines = [
        f"`{file.name}`: a header of {units.format_bytes(len(file.header))}, but readers accept "
        f"at most {units.format_bytes(MAX_HEADER)}"
        for file in form.files
        if len(file.header) - 8 > MAX_HEADER
    ]
    if lines:
        hints = ['file_size="1GB"']
        problems.append(errors.ArgumentError("too many tensors in a file", lines, hints))
    large = [file.name for file in form.files if file.nbytes > _MOST_COPIED]
    if large and place.path.startswith("s3:"):
        text = f"s3 copies no files of more than {units.format_bytes(_MOST_COPIED)}"
        problems.append(errors.ArgumentError(text, large, ['file_size="5GB"']))
    written = ckpt.replace({handle.path: handle for handle in handles})
    item = planning.plan_item(written, place, limit, "keep", form, False, False, problems)
    if model is not None and detection.is_index(model.name):
        model = model.parent
    notes = [*ckpt.notes]
    replaced = ()
    seen: identity.Files = {}
    copied = [] if model is None else _copied(model, seen, handles, notes, problems)
    try:
        if model is not None:
            destinations.check_apart(place, model, "directory of `like`")
        destinations.check_no_step(place)
        notes += destinations.check_destination(place, [ckpt], overwrite, exported=True)
        if overwrite:
            replaced = destinations.replaced(place, [ckpt], copied, exported=True)
    except errors.ReshardError as error:
        problems.insert(0, error)
    opened = siblings.source_identity([ckpt], ())
    if model is not None and seen:
        opened = (identity.listed(model, seen), *opened)
    found = Export((item,), tuple(copied), place, limit, overwrite, identity=opened)
    found = dataclasses.replace(found, replaced=replaced, notes=tuple(notes))
    return planning.with_cost_errors(found, problems)


def _copied(
    like: location.Location,
    seen: identity.Files,
    handles: Sequence[ArrayHandle],
    notes: list[str],
    problems: list[errors.ReshardError],
) -> list[siblings.Sibling]:
    """The files of a Hugging Face directory that are copied. They may be links into a cache. Adds
    their entries to those that were `seen`."""
    found = []
    for name in filter(detection.is_copied, like.names() if like.is_dir() else ()):
        file = like / name
        entry = file.entry(follow=True)
        try:
            if entry is None or (not entry.is_file and not entry.is_dir):
                file.file_bytes(follow=True)  # raises for a link to nothing, and for a pipe
            elif entry.is_file:
                seen[name] = entry
                hf_files.check_no_pointer(file)
                data = _with_dtype(file, handles, notes) if name == "config.json" else None
                entry = entry if data is None else entry._replace(nbytes=len(data))
                found.append(siblings.Sibling(name, file.resolved(), entry, data))
        except errors.ReshardError as error:
            problems.append(error)
    return found


def _with_dtype(
    config: location.Location, handles: Sequence[ArrayHandle], notes: list[str]
) -> bytes | None:
    """A `config.json` with the dtype of most exported values: transformers loads all floats in it.
    None if it has no dtype or this one. Appends a note if a value is not what it was."""
    counts = collections.Counter[str]()
    for handle in handles:
        counts[handle.dtype.name] += math.prod(handle.shape) * (handle.dtype.name in _FLOATS)
    dtypes = [dtype for dtype, count in counts.most_common() if count]
    document = read_json(config, follow=True) or {}
    old = _set_dtype(document, dtypes[0]) if dtypes else []
    is_changed = any(dtype != dtypes[0] for _, dtype in old)
    if is_changed or (old and dtypes[1:]):
        keys = " and ".join(f"`{key}`" for key in dict.fromkeys(key for key, _ in old))
        casts = f"most values: transformers casts the {' and '.join(dtypes[1:])} tensors to it"
        what = casts if dtypes[1:] else "the tensors"
        notes.append(f"config.json is copied with {keys} = {dtypes[0]}, the dtype of {what}")
    return (json.dumps(document, indent=2) + "\n").encode() if is_changed else None


def _set_dtype(config: dict[str, Any], dtype: str) -> list[tuple[str, str]]:
    """Sets each dtype in a model's configuration and in those inside of it. Returns the keys, with
    the dtypes before."""
    old = []
    for key, value in config.items():
        if key in ("dtype", "torch_dtype") and isinstance(value, str) and value != "auto":
            old.append((key, value))
            config[key] = dtype
        elif isinstance(value, dict) and key.endswith("_config") and key != "quantization_config":
            old += _set_dtype(value, dtype)
    return old


def _with_elements(ckpt: Checkpoint) -> Checkpoint:
    """The checkpoint without None and empty containers, as states without values are saved."""
    empty = [path for path, leaf in ckpt.items() if not leaf and not isinstance(leaf, str)]
    if not empty:
        return ckpt
    shown = ", ".join(map(tree.format_path, empty[:_NAMED])) + ", ..." * (len(empty) > _NAMED)
    kept = {path: leaf for path, leaf in ckpt.items() if path not in {*empty}}
    return ckpt.replace(kept, notes=[f"left out, because they have no elements: {shown}"])


def _unwritable(ckpt: Checkpoint) -> Iterator[errors.ReshardError]:
    """Leaves that safetensors has no type for."""
    reasons = {
        path: why for path, leaf in ckpt.items() if (why := target_format.why_not_written(leaf))
    }
    if not ckpt.arrays:
        yield errors.TreeMismatchError("there is no array to export")
    if not reasons or not ckpt.arrays:
        return
    globs = [*map(tree.format_glob, reasons)]
    if len(globs) > _NAMED:
        globs = list(dict.fromkeys(f"{tree.format_glob(path[:1])}/**" for path in reasons))
    hints = [f"reshard.select(ckpt, drop={tree.as_python(globs)}) leaves them out"]
    yield errors.TreeMismatchError(
        f"{units.count_of(len(reasons), 'leaf', 'leaves')} cannot be written as safetensors",
        [f"{tree.format_path(path)}: {why}" for path, why in reasons.items()],
        hints,
    )


def _clashes(ckpt: Checkpoint) -> Iterator[errors.ReshardError]:
    """Leaves that would have the same name, or a name that a file cannot hold."""
    problems = name_clashes(ckpt)
    for path in ckpt:
        name = stored_name(path)
        if name == "__metadata__" or not name.isprintable() or not name:
            problems.append(f"{tree.format_path(path)}: `{name!a}` is not a valid name of a tensor")
    if problems:
        hints = ["reshard.rename(ckpt, [(..., ...)])"]
        yield errors.TreeMismatchError(
            "names of tensors are not unique or not valid", problems, hints
        )


def _unlike(ckpt: Checkpoint, like: location.Location | None) -> Iterator[errors.ReshardError]:
    """How the tensors differ from those of a Hugging Face directory."""
    if like is None:
        return
    if not like.is_dir() and not detection.is_index(like.name):
        yield errors.CheckpointNotFoundError(f"there is no directory `{like}`")
        return
    shapes: dict[str, tuple[int, ...] | None] = {}
    if not like.is_dir() or any(name.endswith(detection.SAFETENSORS) for name in like.names()):
        found = open_checkpoint(like)
        shapes = {stored_name(handle.path): handle.shape for handle in found.arrays}
    elif index := find_index(like):
        shapes = dict.fromkeys(weight_map(index))
    own = {stored_name(handle.path): handle for handle in ckpt.arrays}
    problems = [f"missing: `{name}`, which `{like}` has" for name in shapes if name not in own]
    for name, handle in own.items() if shapes else ():
        text = array_text(handle.dtype.name, handle.shape)
        if name not in shapes:
            problems.append(f"unexpected: `{name}` {text}, which `{like}` lacks")
        elif (shape := shapes[name]) is not None and shape != handle.shape:
            problems.append(f"mismatch: `{name}` is {text}, but {list(shape)} in `{like}`")
    if problems:
        hints = ["reshard.rename(ckpt, [(..., ...)])", "reshard.select(ckpt, drop=[...])"]
        yield errors.TreeMismatchError(
            f"the tensors differ from those of `{like}`", problems, hints
        )
