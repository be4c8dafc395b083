"""Arrays that TensorStore wrote without Orbax, for example for Levanter: zarr v2 or v3, in an OCDBT
database or in plain files. Their shardings are unknown."""

from reshard.checkpoint import Checkpoint, Item, Leaf
from reshard.errors import CorruptCheckpointError
from reshard.loader.json_documents import parse_json
from reshard.loader.orbax import array, source_of, tree_problems, without_tree
from reshard.storage.array_store import ArrayStore, name_problem
from reshard.storage.disk import Entry
from reshard.storage.ocdbt import MANIFEST
from reshard.tree import Path, natural


def read(item: Item, requests: int, seen: dict[str, Entry]) -> Checkpoint:
    """The checkpoint of a directory. An array's path is its key, split at each `/`. See
    `reshard.open` for the errors."""
    root = item.root
    parts = ("",) if (root / MANIFEST).exists() else ()
    stores = [ArrayStore(zarr3, root, parts, True, requests) for zarr3 in (False, True)]
    used = [store for store in stores if store.values]
    if len(used) > 1:
        raise CorruptCheckpointError(
            f"`{root}` holds arrays of zarr v2 and of zarr v3, but a checkpoint has one version"
        )
    if not used or not any("/" in name for name in used[0].values):
        raise without_tree(root)  # an item of Orbax: its names have no `/`
    (store,) = used
    leaves: dict[Path, Leaf] = {}
    names = sorted(store.values, key=lambda name: natural((name,)))
    problems = [f"{name}: {why}" for name in names if (why := name_problem(name))]
    names = [name for name in names if not name_problem(name)]
    for name, metadata in zip(names, store.read_metadata(names), strict=True):
        if not _is_group(metadata):
            path = tuple(name.split("/"))
            leaves[path] = array(path, name, "np.ndarray", store, metadata, {}, {}, problems)
    problems += tree_problems(leaves)
    if problems:
        raise CorruptCheckpointError(f"`{root}` cannot be read as a tree of zarr arrays", problems)
    document = {"use_ocdbt": store.ocdbt, "use_zarr3": store.zarr3}
    return Checkpoint(leaves, source_of(item, store, document, seen))


def _is_group(metadata: bytes | None) -> bool:
    """Whether a `zarr.json` describes a group instead of an array."""
    try:
        document = parse_json(metadata or b"")
    except ValueError:
        return False
    return isinstance(document, dict) and document.get("node_type") == "group"
