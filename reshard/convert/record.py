"""A record in a converted checkpoint's custom metadata of what NNX cannot hold.

With it, the checkpoint converts back to exactly the tree that it was made of: its paths (boxes are
levels of them), its leaves without a value, the dtype of its step counter, and its zeros that were
left out. Orbax keeps custom metadata and ignores them. A program that loads the checkpoint, trains
and saves again loses the record.
"""

import contextlib
import dataclasses
import math
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import tensorstore as ts

from reshard.arrays import operations as ops
from reshard.arrays.boxes import MOST_AXES, Shape
from reshard.arrays.dtypes import name_of
from reshard.arrays.handle import ArrayHandle, array_text
from reshard.checkpoint import EMPTY_LEAVES, Checkpoint, Leaf, empty_name
from reshard.convert.layout import KINDS
from reshard.convert.leafmap import Filled, LeafMap, Output, Row, Source, from_rows, renaming
from reshard.errors import CorruptCheckpointError, ReshardError, TreeMismatchError
from reshard.loader.json_documents import parse_json
from reshard.sharding.mesh import SingleDeviceSharding, replicated
from reshard.storage.location import checked
from reshard.tree import MAX_KEYS, Path, format_path, overlaps

# A leaf map as JSON, and back. A document that is read is not trusted.

_OPERATIONS = "Transpose Reshape Split Concat Stack Unstack Pad Interleave Copies Equal Scale Add"


def map_json(found: LeafMap) -> dict[str, Any]:
    """A map as JSON: the leaves that only change their paths (`moved`), and the operations on other
    leaves in order (`steps`). These leaves `enter` a tree of their own, and `leave` it."""
    values = found.values.items()
    moved = [(value.path, path) for path, value in values if isinstance(value, Source)]
    made = LeafMap({path: value for path, value in values if isinstance(value, Output)})
    zeros = {path: value for path, value in values if isinstance(value, Filled)}
    pairs = {
        "moved": moved,
        "enter": [(path, path) for path in made.sources()],
        "leave": [(path, path) for path in made.values],
    }
    return {
        **{name: [[list(old), list(new)] for old, new in each] for name, each in pairs.items()},
        "vanish": _zeros_json(found.must_be_zero),
        "appear": _zeros_json(zeros),
        "steps": [_row_json(row) for row in made.sequence()],
    }


def _zeros_json(found: Mapping[Path, Filled]) -> list[Any]:
    return [
        [list(path), list(z.shape), z.dtype.name, *[z.fill] * (z.fill is not None)]
        for path, z in found.items()
    ]


def _row_json(row: Row) -> dict[str, Any]:
    document: dict[str, Any] = {
        "from": [list(path) for path in row.inputs],
        "to": [list(path) for path in row.outputs],
    }
    if isinstance(row.operation, ops.Apply):
        document["Apply"] = {"function": row.operation.name}  # for messages, never imported
    elif row.operation is not None:
        document[type(row.operation).__name__] = dataclasses.asdict(row.operation)
    return document


def map_of(document: Mapping[str, Any], shapes: Mapping[Path, Shape]) -> LeafMap:
    """The inverse of `map_json` for leaves of these shapes. Raises KeyError, TypeError or
    ValueError for any other document."""
    moved, enter, leave = (
        {path_of(old): path_of(new) for old, new in document[name]}
        for name in ("moved", "enter", "leave")
    )
    vanish, appear = (_zeros(document[name]) for name in ("vanish", "appear"))
    inside = {new: shapes[old] for old, new in enter.items()}
    rows = list(map(_row, document["steps"]))
    try:
        made = from_rows(rows, inside)
    except TreeMismatchError as error:
        raise ValueError("; ".join(error.problems)) from error
    found = renaming(enter, shapes).then(made).then(renaming(leave, made.shapes))
    values = {**renaming(moved, shapes).values, **found.values, **appear}
    if len(values) != len(moved) + len(leave) + len(appear):
        raise ValueError("its paths are not those of one tree")
    return LeafMap(values, {}, (), vanish)


def _zeros(entries: list[Any]) -> dict[Path, Filled]:
    return {
        path_of(path): Filled(shape_of(shape), dtype_of(dtype), *(_typed(x, float) for x in fill))
        for path, shape, dtype, *fill in entries
    }


def _row(document: Mapping[str, Any]) -> Row:
    inputs, outputs = (tuple(map(path_of, document[name])) for name in ("from", "to"))
    if "Apply" in document:
        raise TreeMismatchError(
            f"{format_path(outputs[0])} was made by a function, "
            f"{document['Apply']['function']!r:.80}, which only a map that you pass may run",
            hints=["map_file=... with model=..., a map that names a function for this leaf"],
        )
    if document.keys() == {"from", "to"}:
        return Row(inputs, outputs)
    ((name, fields),) = ((key, document[key]) for key in document if key not in ("from", "to"))
    if name not in _OPERATIONS.split():
        raise ValueError(f"maps have no operation {name}")
    operation = getattr(ops, name)
    types = typing.get_type_hints(operation)
    given = {key: _typed(value, types[key]) for key, value in fields.items()}
    return Row(inputs, outputs, operation(**given))


def _typed(value: Any, kind: Any) -> Any:
    """A value of a type, from JSON, which has lists for tuples."""
    inner, is_tuple = typing.get_args(kind), typing.get_origin(kind) is tuple
    if is_tuple and isinstance(value, list):
        kinds = inner[:1] * len(value) if inner[-1] is ... else inner
        return tuple(_typed(*pair) for pair in zip(value, kinds, strict=True))
    kinds = () if is_tuple else (int, float) if kind is float else inner or (kind,)
    if type(value) not in kinds:
        raise ValueError(f"unexpected value: {value!r:.80}")
    return value


def path_of(keys: Any) -> Path:
    path = _typed(keys, Path)
    if any(isinstance(key, int) and key < 0 for key in path):
        raise ValueError(f"not a path: {keys!r:.80}")
    return path


def shape_of(sizes: Any) -> Shape:
    shape = _typed(sizes, Shape)
    if len(shape) > MOST_AXES or min(shape, default=0) < 0:
        raise ValueError(f"not a shape: {sizes!r:.80}")
    return shape


def dtype_of(name: Any) -> np.dtype:
    if not isinstance(name, str):
        raise ValueError(f"not a dtype: {name!r:.80}")
    dtype = ts.dtype(name).numpy_dtype
    if dtype.kind not in "biufc" and not hasattr(ml_dtypes, dtype.name):
        raise ValueError(f"not a dtype of arrays of numbers: {name!r:.80}")
    return dtype


KEY = "reshard.linen"
ORDER_KEY = "reshard.order"
_VERSION = 1
_HINT = "model=..., the model of the result, converts without the record"


def _custom(ckpt: Checkpoint) -> dict[str, Any]:
    """A checkpoint's custom metadata; empty if they are not a JSON object."""
    custom = ckpt.source.metadata.get("custom_metadata")
    return custom if isinstance(custom, dict) else {}


def _with_custom(ckpt: Checkpoint, key: str, document: dict[str, Any] | None) -> Checkpoint:
    """A checkpoint with a document in its custom metadata, or without it if it is None. Raises
    CorruptCheckpointError if they are not a JSON object."""
    custom = ckpt.source.metadata.get("custom_metadata")
    if not isinstance(custom, dict | None):
        raise CorruptCheckpointError(
            f"`{ckpt.source.root}`: its custom metadata are not a JSON object, but {custom!r:.80}"
        )
    kept = {name: value for name, value in (custom or {}).items() if name != key}
    whole = kept if document is None else kept | {key: document}
    return ckpt.with_metadata({"custom_metadata": whole or None})


# Leaves that only the order of modules of one class has matched. There is a warning, and a record
# in the result and in all checkpoints that are made of it, until outputs have been compared.

# Why `--check` does not say that an order is right.
NOT_SEEN = "not seen: exchanging them does not change the outputs"
MOST_EXCHANGES = 32
NOT_TRIED = f"not tried: at most {MOST_EXCHANGES} groups are exchanged"
# Modules of one class, each with its counterpart: paths in Linen, without a collection, and in NNX.
Modules = tuple[tuple[Path, Path], ...]
_SHOWN = 3


class ByOrder(NamedTuple):
    """How many leaves order alone has matched, and their modules: pairs of printed paths before and
    after, in Linen without the collection."""

    leaves: int
    modules: tuple[tuple[str, str], ...]


def by_order(model: LeafMap, to: str) -> ByOrder | None:
    """The leaves in a model's map that order alone has matched; None if there are none."""
    paths = _by_structure(model)
    if not paths:
        return None
    made, pairs = model.made_of(), {}
    for path in paths:
        for before in made[path]:
            one, other = (before[1:], path) if to == "nnx" else (before, path[1:])
            while one[1:] and other[1:] and one[-1] == other[-1]:  # to the outermost modules
                one, other = one[:-1], other[:-1]
            pairs[format_path(one), format_path(other)] = None
    return ByOrder(len(paths), tuple(pairs))


def _by_structure(model: LeafMap) -> list[Path]:
    return [path for path, origin in model.origin.items() if "structure" in origin]


def leaves_in(groups: Collection[Modules], leaves: Iterable[Path], api: str) -> dict[Path, Path]:
    """The leaves of a model, as an API has them, that are in some modules -> their paths in these
    modules."""
    side, found = ("linen", "nnx").index(api), {}
    modules = {pair[side] for group in groups for pair in group}
    for leaf in leaves:
        path = tuple(map(str, leaf))
        above, below = ((), path) if api == "nnx" else (path[:1], path[1:])
        for end in range(len(below)):
            if below[:end] in modules:
                found[leaf] = above + below[end:]
    return found


def by_order_in(groups: Collection[Modules], model: LeafMap, to: str) -> ByOrder | None:
    """The leaves that order alone has matched in some groups of modules; None without groups."""
    pairs = [pair if to == "nnx" else pair[::-1] for group in groups for pair in group]
    modules = tuple((format_path(one), format_path(other)) for one, other in pairs)
    leaves = leaves_in(groups, _by_structure(model), to)
    return ByOrder(len(leaves), modules) if groups else None


def both(one: ByOrder | None, other: ByOrder | None) -> ByOrder | None:
    """The leaves that order alone has matched in a conversion, or in an earlier one."""
    if one is None or other is None:
        return one or other
    modules = tuple(dict.fromkeys((*one.modules, *other.modules)))
    return ByOrder(one.leaves + other.leaves, modules)


def order_text(order: ByOrder) -> str:
    """The leaves that order alone has matched, in words, with some of the modules."""
    leaves = "1 leaf was" if order.leaves == 1 else f"{order.leaves} leaves were"
    pairs = ", ".join(f"{one} -> {other}" for one, other in order.modules[:_SHOWN])
    more = len(order.modules) - _SHOWN
    pairs += f" and {more} more" if more > 0 else ""
    return f"{leaves} matched only by the order of modules of one class: {pairs}"


def order_warning(order: ByOrder, why: str = "") -> str:
    """The warning. `why`: the reason why equal outputs do not clear it."""
    return f"{order_text(order)}; {why or 'check=True compares outputs'}"


def with_order(ckpt: Checkpoint, order: ByOrder | None) -> Checkpoint:
    """A checkpoint with this record of matches by order, or without one."""
    if order is None and not order_of(ckpt):
        return ckpt
    return _with_custom(ckpt, ORDER_KEY, None if order is None else order._asdict())


def order_of(ckpt: Checkpoint) -> ByOrder | None:
    """A checkpoint's record of matches by order; None if it has none that can be read."""
    return _order_in(_custom(ckpt).get(ORDER_KEY))


def _order_in(found: Any) -> ByOrder | None:
    try:
        modules = tuple((str(one), str(other)) for one, other in found["modules"])
        return ByOrder(int(found["leaves"]), modules)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return None


# The record of a conversion from Linen.


class _Array(NamedTuple):
    """An array of the Linen checkpoint: `type` and `keys` are `value_type` and `key_impl`."""

    shape: Shape
    dtype: np.dtype
    type: str
    keys: str | None


class _Record(NamedTuple):
    """A record."""

    map: LeafMap  # to NNX
    own: list[Path]  # NNX's own leaves
    leaves: dict[Path, _Array | str]  # of the Linen checkpoint: arrays, and names of empty leaves
    containers: str | None  # Orbax's record of its container types
    order: ByOrder | None  # what order matched before this conversion


def recorded(
    ckpt: Checkpoint,
    linen: Mapping[Path, Leaf],
    metadata: Mapping[str, Any],
    found: LeafMap,
    own: list[Path],
    kind: str,
    dropped: Iterable[Path],
) -> Checkpoint:
    """A converted checkpoint with the record of its source.

    Args:
      ckpt: the NNX checkpoint.
      linen: the leaves of the Linen checkpoint, without dropped ones.
      metadata: its `_METADATA` document.
      found: the map from the Linen checkpoint to the NNX checkpoint.
      own: leaves of the NNX checkpoint that are not made of Linen leaves.
      kind: the layout of the NNX checkpoint, one of `reshard.convert.layout.KINDS`.
      dropped: the leaves of the Linen checkpoint that were dropped.
    """
    document = {
        "version": _VERSION,
        "layout": kind,
        "leaves": [[list(path), _kind(leaf)] for path, leaf in linen.items()],
        "route": map_json(found),
        "own": [list(path) for path in own],
        "dropped": [list(path) for path in dropped],
        "containers": metadata.get("value_metadata_tree"),
    }
    before = order_of(ckpt)  # that of the Linen one, until this conversion's is added
    if before is not None:
        document["order"] = before._asdict()
    return _with_custom(ckpt, KEY, document)


def has_record(ckpt: Checkpoint) -> bool:
    """Whether a checkpoint has a record of its conversion."""
    return KEY in _custom(ckpt)


def recorded_kind(ckpt: Checkpoint) -> str | None:
    """The layout of a checkpoint with a record, which its paths may not show."""
    document = _custom(ckpt).get(KEY)
    kind = document.get("layout") if isinstance(document, dict) else None
    return kind if isinstance(kind, str) and kind in KINDS else None


def recorded_drop(ckpt: Checkpoint) -> list[Path]:
    """The leaves of the Linen checkpoint that were dropped; none if they are not recorded."""
    with contextlib.suppress(KeyError, TypeError, ValueError):
        return list(map(path_of, _custom(ckpt)[KEY]["dropped"]))
    return []


def without_record(ckpt: Checkpoint) -> Checkpoint:
    """A checkpoint without its record, for a changed tree."""
    return _with_custom(ckpt, KEY, None) if has_record(ckpt) else ckpt


def from_record(ckpt: Checkpoint) -> tuple[Checkpoint, LeafMap]:
    """The Linen checkpoint that an NNX checkpoint was made of, and the map to its leaves. Raises
    TreeMismatchError: the record cannot be read, or its leaves differ from the checkpoint's."""
    with _readable():
        record = _read(ckpt)
        kinds = {p: kind for p, kind in record.leaves.items() if not isinstance(kind, str)}
        back = record.map.inverse()
        needed = {*back.sources(), *back.must_be_zero}
        missing = sorted(map(format_path, needed - ckpt.keys()))
        expected = needed.union(record.own)
        problems = [f"{path}: not in the checkpoint" for path in missing]
        problems += [
            f"{format_path(path)}: not in the record of the conversion"
            for path in ckpt
            if path not in expected
        ]
        summary = "the record of the conversion from Linen does not fit the checkpoint"
        _refuse(summary, problems)
        made = back.bind(ckpt)
        problems = [text for path, kind in kinds.items() for text in _unlike(made[path], kind)]
        summary = "the checkpoint differs from the result of the conversion from Linen"
        _refuse(summary, [*problems, *_not_zero(back, ckpt)])
        whole = {
            path: EMPTY_LEAVES[kind] if isinstance(kind, str) else _as_recorded(made[path], kind)
            for path, kind in record.leaves.items()
        }
    made_of = with_order(without_record(ckpt), record.order).replace(whole, retyped=False)
    if record.containers is not None:
        made_of = made_of.with_metadata({"value_metadata_tree": record.containers})
    return made_of, dataclasses.replace(back, dropped=tuple(record.own))


def like_recorded(linen: Checkpoint, ckpt: Checkpoint) -> Checkpoint:
    """A Linen checkpoint converted as the recorded source of an NNX checkpoint was. Raises
    TreeMismatchError: the record cannot be read, or its leaves differ from the Linen
    checkpoint's."""
    with _readable():
        record, dropped = _read(ckpt), {*recorded_drop(ckpt)}
        problems = [
            f"{format_path(path)}: only in the record"
            for path in record.leaves
            if path not in linen
        ]
        for path, leaf in linen.items():
            kind = record.leaves.get(path)
            if kind is None and path not in dropped:
                problems.append(f"{format_path(path)}: not in the record of the conversion")
            elif isinstance(kind, _Array):
                problems += _unlike(leaf, kind)
        summary = (
            f"`{linen.source.root}` is not the Linen checkpoint that the record of "
            f"`{ckpt.source.root}` describes"
        )
        _refuse(summary, problems or _not_zero(record.map, linen))
        made = record.map.bind(linen)
    made |= {path: ckpt[path] for path in record.own if path in ckpt}
    for path, leaf in made.items():
        match leaf, ckpt.get(path):
            case ArrayHandle(), ArrayHandle() as like if is_step(path, leaf, like.dtype):
                made[path] = recounted(leaf, like.dtype)
    return linen.replace(made, retyped=True)


def _not_zero(found: LeafMap, leaves: Mapping[Path, Leaf]) -> list[str]:
    return [f"{format_path(p)}: it was zero, but is not now" for p in found.not_zero(leaves)]


def _refuse(summary: str, problems: Sequence[str]) -> None:
    if problems:
        raise TreeMismatchError(summary, problems, [_HINT])


def _read(ckpt: Checkpoint) -> _Record:
    """The record of a checkpoint. Raises KeyError, TypeError or ValueError if it is malformed."""
    document = _custom(ckpt)[KEY]
    if document["version"] != _VERSION:
        raise ValueError(f"its version is {document['version']}, not {_VERSION}")
    leaves = {path_of(path): _recorded_leaf(kind) for path, kind in document["leaves"]}
    _check_tree(leaves)
    shapes = {path: leaf.shape for path, leaf in leaves.items() if not isinstance(leaf, str)}
    found = map_of(document["route"], shapes)
    _check_zeros(found, ckpt)
    containers = document.get("containers")
    if containers is not None:
        try:
            parse_json(containers)
        except (TypeError, ValueError) as error:
            raise ValueError(f"its containers are not JSON: {containers!r:.80}") from error
    own, order = list(map(path_of, document["own"])), _order_in(document.get("order"))
    return _Record(found, own, leaves, containers, order)


def _recorded_leaf(kind: Any) -> _Array | str:
    """The inverse of `_kind`."""
    if isinstance(kind, str) and kind in EMPTY_LEAVES:
        return kind
    if not isinstance(kind, dict) or kind.keys() != {"shape", "dtype", "type", "keys"}:
        raise ValueError(f"not a kind of leaf: {kind!r:.80}")
    shape, dtype = shape_of(kind["shape"]), dtype_of(kind["dtype"])
    value_type, keys = kind["type"], kind["keys"]
    if value_type not in ("jax.Array", "np.ndarray", "scalar"):
        raise ValueError(f"leaves cannot have the type {value_type!r:.80}")
    named = isinstance(keys, str) and keys.isprintable()
    if keys is not None and not (named and dtype == np.uint32 and shape):
        raise ValueError(f"{array_text(dtype.name, shape)} are not PRNG keys, {keys!r:.80}")
    return _Array(shape, dtype, value_type, keys)


def _check_tree(paths: Collection[Path]) -> None:
    """Raises ValueError unless the paths can be the leaves of one tree."""
    wrong = [path for _, path, _ in overlaps((path, path) for path in paths)]
    wrong += [path for path in paths if not 0 < len(path) <= MAX_KEYS]
    if wrong:
        places = ", ".join(sorted(map(format_path, wrong)))
        raise ValueError(f"its paths do not form one tree: {places:.200}")


def _check_zeros(found: LeafMap, ckpt: Checkpoint) -> None:
    """Raises ValueError for zeros with more elements than any array of the checkpoint."""
    largest = max((math.prod(array.shape) for array in ckpt.arrays), default=0)
    for path, value in (*found.must_be_zero.items(), *found.values.items()):
        if isinstance(value, Filled) and math.prod(value.shape) > largest:
            raise ValueError(f"{format_path(path)}: {list(value.shape)} is too large for an array")


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    """Errors of reading a malformed record, as TreeMismatchError."""
    try:
        yield
    except ReshardError:
        raise
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        AssertionError,
        OverflowError,
    ) as error:
        raise TreeMismatchError(
            "the record of the conversion from Linen cannot be read",
            [str(error)],
            [_HINT],
        ) from error


def _kind(leaf: Leaf) -> dict[str, Any] | str:
    if isinstance(leaf, ArrayHandle):
        return {
            "shape": list(leaf.shape),
            "dtype": name_of(leaf.dtype),
            "type": leaf.value_type,
            "keys": leaf.key_impl,
        }
    return empty_name(leaf)


def _unlike(leaf: Leaf, kind: _Array) -> Iterator[str]:
    """In what a leaf differs from its record. The step counter has another dtype in NNX."""
    if not isinstance(leaf, ArrayHandle):
        return
    name = format_path(leaf.path)
    if leaf.shape != kind.shape:
        yield f"{name}: shape {list(leaf.shape)}, it was {list(kind.shape)}"
    elif leaf.dtype != kind.dtype and not is_step(leaf.path, leaf, kind.dtype):
        yield f"{name}: dtype {leaf.dtype.name}, it was {kind.dtype.name}"


def _as_recorded(leaf: Leaf, kind: _Array) -> Leaf:
    if not isinstance(leaf, ArrayHandle):
        return leaf
    if leaf.dtype != kind.dtype:
        leaf = recounted(leaf, kind.dtype)
    leaf = dataclasses.replace(leaf, value_type=kind.type, key_impl=kind.keys)
    return leaf if kind.type == "jax.Array" else on_host(leaf)


def recounted(leaf: ArrayHandle, dtype: np.dtype) -> ArrayHandle:
    """A step counter in another integer dtype. Raises TreeMismatchError: the dtype cannot hold its
    value."""
    value = np.asarray(checked(leaf.view().read(), f"{format_path(leaf.path)}: its stored bytes"))
    if int(value) != int(value.astype(dtype)):
        raise TreeMismatchError(
            f"{format_path(leaf.path)}: the step {int(value)} does not fit {dtype.name}"
        )
    return dataclasses.replace(leaf, dtype=dtype)


def on_host(leaf: ArrayHandle) -> ArrayHandle:
    """A leaf as a host array, without a sharding."""
    return dataclasses.replace(leaf, sharding=None, saved_sharding=None)


def is_step(path: Path, leaf: ArrayHandle, like: np.dtype) -> bool:
    """Whether a leaf is the step counter, which has another integer dtype in NNX: `step` at the
    top, or in an optimizer there. An optimizer's own counts have one dtype in both."""
    integers = leaf.dtype.kind in "iu" and like.kind in "iu"
    keys = [key for key in path if key != "value"]
    return not leaf.shape and integers and len(keys) <= 2 and keys[-1:] == ["step"]


def counter(leaf: Leaf, dtype: np.dtype, value_type: str, like: ArrayHandle) -> Leaf:
    """A step counter in another integer dtype. The dtype must hold its value."""
    assert isinstance(leaf, ArrayHandle)
    made = dataclasses.replace(recounted(leaf, dtype), value_type=value_type)
    if value_type == "scalar":
        return on_host(made)
    return beside(made, like) if made.sharding is None else made


def beside(leaf: ArrayHandle, like: ArrayHandle) -> ArrayHandle:
    """A new leaf, replicated on the devices of another leaf. If that is a host array, the new leaf
    is a host array, too. Orbax accepts only device arrays as PRNG keys."""
    sharding, kind = replicated(like.sharding), like.value_type
    if kind != "jax.Array" and leaf.key_impl is not None:
        import jax

        sharding, kind = SingleDeviceSharding(str(jax.local_devices()[0])), "jax.Array"
    value_type = kind if kind == "jax.Array" else "np.ndarray"
    return dataclasses.replace(
        leaf, value_type=value_type, sharding=sharding, saved_sharding=sharding
    )
