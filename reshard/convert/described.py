"""MaxText's `scan_layers` and `lora`: custom metadata that describe the layers of the tree."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from reshard.checkpoint import Checkpoint
from reshard.loader.orbax import step_document
from reshard.tree import Path

_WHERE = " in the custom metadata "
_STALE = f"`{{}}`{_WHERE}may be stale: it describes the tree that was saved"
_NOW = f"`scan_layers`{_WHERE}is now {{}}"
# The key of a layer, or of stacked layers. The number of a layer may be the next key.
_LAYER = re.compile(r"(?:\w+_)?layers?(_?\d+)?", re.ASCII)


def with_true_metadata(ckpt: Checkpoint, by_map: bool = False) -> Checkpoint:
    """The checkpoint with another `scan_layers` if all layers are stacked now, or none is. If that
    is not known, or after a map, with a note."""
    kinds = {*_are_stacked(() if by_map else ckpt)}
    source, changed, told = ckpt.source, {}, {}
    for name, document in ("step_document", step_document(source)), ("metadata", source.metadata):
        custom: Any = document.get("custom_metadata")
        if not isinstance(custom, dict):
            continue
        saved = custom.get("scan_layers")
        if isinstance(saved, bool) and kinds != {saved}:
            told["scan_layers"] = _STALE.format("scan_layers")
            if len(kinds) == 1:
                told["scan_layers"] = _NOW.format(str(not saved).lower())
                custom = custom | {"scan_layers": not saved}
                changed[name] = {**document, "custom_metadata": custom}
        if isinstance(custom.get("lora"), dict):
            told["lora"] = _STALE.format("lora")
    earlier = [note for note in ckpt.notes if _WHERE not in note]
    return Checkpoint(
        ckpt, ckpt.with_source(**changed).source, (*earlier, *told.values()), ckpt.retyped
    )


def _are_stacked(paths: Iterable[Path]) -> Iterator[bool]:
    """Of each path below a layer or stacked layers: which it is."""
    for path in paths:
        for key, below in zip(path, (*path[1:], ""), strict=True):
            if match := _LAYER.fullmatch(str(key)):
                yield match[1] is None and not str(below).isdecimal()
                break
