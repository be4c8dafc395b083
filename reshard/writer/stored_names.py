"""Names under which leaves are stored: no two of one, and none inside of another."""

import itertools
import json
import re

from reshard.arrays import zarr
from reshard.arrays.handle import ArrayHandle, stored_name
from reshard.checkpoint import Checkpoint, name_clashes
from reshard.tree import Path, format_path


def stored_name_clashes(ckpt: Checkpoint) -> list[str]:
    """Leaves of which one would overwrite the other, or could not be written beside it."""
    arrays = {handle.path: handle for handle in ckpt.arrays}
    strings = [path for path, leaf in ckpt.items() if isinstance(leaf, str)]

    def is_unchanged(path: Path) -> bool:
        return arrays[path].formed is None and arrays[path].name == stored_name(path)

    clashes = name_clashes(arrays, is_unchanged) + name_clashes(strings)
    for kind in (arrays, strings):
        names = {stored_name(path): path for path in kind}
        for name, path in names.items():
            for end in [place.start() for place in re.finditer("/", name)]:
                outer = names.get(name[:end])
                if outer is None:
                    continue
                two = f"{format_path(outer)} and {format_path(path)}"
                if outer not in arrays:
                    clashes.append(f"{two}: the string `{name}` would be inside of `{name[:end]}`")
                elif file := _file_above(arrays[outer], arrays[path], name[end + 1 :]):
                    clashes.append(f"{two}: `{name[:end]}/{file}` is a file of `{name[:end]}`")
    return clashes


def _file_above(outer: ArrayHandle, inner: ArrayHandle, below: str) -> str | None:
    """The chunk or metadata of an array that is in the place of what is stored of another, or of a
    directory that this is in; None if there is none. In an OCDBT database there are no directories.

    Args:
      outer: the array.
      inner: the other one.
      below: its name, below that of the array.
    """
    chunks = zarr.chunk_keys(json.loads(outer.metadata))
    first = zarr.chunk_key(json.loads(inner.metadata), (0,) * len(inner.shape))
    *directories, whole = itertools.accumulate(f"{below}/{first}".split("/"), "{}/{}".format)
    for key in [whole] if outer.store.ocdbt else [*directories, whole]:
        if key == outer.store.metadata_key or chunks.fullmatch(key):
            return key
    return None
