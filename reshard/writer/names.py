"""Names that leaves are stored under in the destination, and what stands against them."""

import itertools
from collections.abc import Iterator

from reshard.arrays.handle import ArrayHandle, StoredArray, stored_name
from reshard.checkpoint import Checkpoint, name_clashes
from reshard.errors import ArgumentError, ReshardError, TreeMismatchError
from reshard.storage.array_store import name_problem
from reshard.storage.ocdbt import FOLDERS, PROCESS
from reshard.tree import Path, as_python, format_path
from reshard.writer.format import TargetFormat
from reshard.writer.siblings import WRITTEN, is_sibling

# Bytes of the name of a file or a directory.
_MAX_NAME = 255


def name_errors(ckpt: Checkpoint, form: TargetFormat) -> Iterator[ReshardError]:
    """What stands against the names of the leaves of an item, as it is to be stored."""
    if clashes := _clashes(ckpt, form):
        yield TreeMismatchError("two leaves would be stored under one name", clashes)
    unusable = [
        f"{format_path(path):.80}: {problem}"
        for path in ckpt
        if (problem := name_problem(stored_name(path)))
    ]
    if unusable:
        yield TreeMismatchError("some names cannot be stored", unusable)
    if empty := [a for a in ckpt.arrays if 0 in a.shape]:
        lines = [f"{format_path(a.path)}  {a.describe()}" for a in empty]
        hints = [f"reshard.select(ckpt, drop={as_python([format_path(a.path) for a in empty])})"]
        yield TreeMismatchError("Orbax stores no arrays without elements", lines, hints)
    if slashed := [a.path for a in ckpt.arrays if stored_name(a.path).endswith("/")]:
        text = "no array can be stored under a name that ends in `/`"
        hints = ["reshard.rename(ckpt, [('/+\"$', '\"')]) removes it"]
        yield TreeMismatchError(text, [format_path(path) for path in slashed], hints)
    if not form.ocdbt and (unusable := list(_not_files(ckpt))):
        yield ArgumentError(
            "arrays that cannot be stored as plain files",
            unusable,
            ["ocdbt=True stores them in a database"],
        )


def _not_files(ckpt: Checkpoint) -> Iterator[str]:
    """Arrays whose names are none of directories, or those of something else in the item."""
    directory = ckpt.source.store.directory
    names = [] if ckpt.source.is_foreign else directory.names()  # nothing beside it is copied
    taken = {name for name in names if is_sibling(ckpt, directory / name)}
    if not ckpt.source.store.ocdbt:  # what is beside an array is beside it as before
        taken = {name for name in taken if not (directory / name).is_dir()}
    taken |= WRITTEN - {*FOLDERS}  # which are in databases alone
    for array in ckpt.arrays:
        parts = stored_name(array.path).rstrip("/").split("/")
        if not {"", "."}.isdisjoint(parts):
            yield f"{format_path(array.path):.80}: its name is not a valid path"
        elif any("\\" in part or part.endswith(".__lock") for part in parts):
            why = "TensorStore takes `\\` for `/`, and keeps names that end in `.__lock` for locks"
            yield f"{format_path(array.path):.80}: {why}"
        elif any(len(part.encode(errors="replace")) > _MAX_NAME for part in parts):
            yield f"{format_path(array.path):.80}: its name is longer than a file's may be"
        elif parts[0] in taken or parts[0].startswith(PROCESS):
            yield f"{format_path(array.path)}: `{parts[0]}` is another file of the checkpoint"


def _clashes(ckpt: Checkpoint, form: TargetFormat) -> list[str]:
    """Leaves of which one would overwrite the other, or could not be written beside it."""
    arrays = {handle.path: handle for handle in ckpt.arrays}
    strings = [path for path, leaf in ckpt.items() if isinstance(leaf, str)]

    def is_unchanged(path: Path) -> bool:
        data = arrays[path].data
        return isinstance(data, StoredArray) and data.name == stored_name(path)

    clashes = name_clashes(arrays, is_unchanged) + name_clashes(strings)
    for kind in (arrays, strings):
        names = {stored_name(path): path for path in kind}
        for name, path in names.items():
            for above in itertools.accumulate(name.split("/")[:-1], "{}/{}".format):
                outer = names.get(above)
                if outer is None:
                    continue
                two, below = f"{format_path(outer)} and {format_path(path)}", name[len(above) + 1 :]
                if outer not in arrays:
                    clashes.append(f"{two}: the string `{name}` would be inside `{above}`")
                elif file := _file_above(form, arrays[outer], arrays[path], below):
                    clashes.append(f"{two}: `{above}/{file}` is a file of `{above}`")
    return clashes


def _file_above(
    form: TargetFormat, outer: ArrayHandle, inner: ArrayHandle, below: str
) -> str | None:
    """The chunk or metadata of an array that is in the place of what is stored of another (called
    `below`, seen from the first), or of a directory that this is in; None if there is none. In an
    OCDBT database there are no directories."""
    chunks = form.encoding(outer).chunk_keys(len(outer.shape))
    first = form.encoding(inner).chunk_key((0,) * len(inner.shape))
    *directories, whole = itertools.accumulate(f"{below}/{first}".split("/"), "{}/{}".format)
    for key in [whole] if form.ocdbt else [*directories, whole]:
        if key == form.metadata_key or chunks.fullmatch(key):
            return key
    return None
