"""What is left out of the source of a conversion: named as it is saved, or as maps name it."""

from collections.abc import Sequence

from reshard.arrays.boxes import Shape
from reshard.arrays.handle import ArrayHandle
from reshard.checkpoint import Checkpoint
from reshard.convert.layout import Layout, detect
from reshard.convert.roundtrip import recorded_kind
from reshard.errors import TreeMismatchError
from reshard.transforms import select, without
from reshard.tree import Path, glob_text, named_by, named_in


def without_dropped(
    ckpt: Checkpoint, drop: Sequence[str], layout: str | None, api: str
) -> Checkpoint:
    """A checkpoint less the leaves that globs name: by their saved paths, or by those that maps
    have."""
    texts = {glob_text(path) for path in ckpt}
    if all(named_by(texts, glob) for glob in drop):
        return select(ckpt, drop=drop)
    try:
        found = detect(ckpt, layout or recorded_kind(ckpt), api)
    except TreeMismatchError:  # its names are the saved ones alone
        return select(ckpt, drop=drop)
    state = [(("opt_state", *path), saved) for path, saved in found.optimizer.items()]
    names = ([(path, path) for path in ckpt], [*found.model.items(), *state])
    return without(ckpt, named_in(names, drop))


def left_out_of(
    whole: Checkpoint, ckpt: Checkpoint, layout: Layout, said: str | None, api: str
) -> dict[Path, Shape]:
    """The leaves of the model that `drop` has left out. Where they were in the way of knowing what
    the whole is, it is all that is in the places of the model."""
    try:
        saved = detect(whole, said, api).model
    except TreeMismatchError:
        saved = {}
        for path in whole:
            keys = tuple(map(str, path[:-1] if path[-1] == "value" else path))
            for begin, root in layout.roots.items():
                if keys[: len(root)] == root:
                    saved[begin + keys[len(root) :]] = path
    gone = {path: whole[at] for path, at in saved.items() if at not in ckpt}
    return {path: leaf.shape for path, leaf in gone.items() if isinstance(leaf, ArrayHandle)}
