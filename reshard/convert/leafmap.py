"""`LeafMap`: how the leaves of one tree are made of the leaves of another. Pure, except that `bind`
reads some values to check them.

    Source(path, shape)                 a leaf of the tree before
    Output(Call(operation, inputs), i)  what an operation makes of such values
    Filled(shape, dtype)                 made of nothing

The values of a map are a graph: the outputs of one operation share its `Call`. The graph has no
order, so leaves may change places. The inverse map is the graph read from its other end.
"""

import collections
import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from reshard.arrays.boxes import Shape, grid_boxes
from reshard.arrays.derived import apply, comparisons, has_value, zeros
from reshard.arrays.handle import ArrayHandle
from reshard.arrays.operations import (
    Concat,
    Crop,
    Operation,
    Pad,
    Reshape,
    Split,
    Stack,
    Transpose,
    Unstack,
)
from reshard.checkpoint import Leaf, type_name
from reshard.errors import TreeMismatchError
from reshard.storage.location import checked
from reshard.tree import Path, format_path
from reshard.units import format_runs


class Source(NamedTuple):
    """A leaf of the tree before: its path and shape."""

    path: Path
    shape: Shape


class Filled(NamedTuple):
    """An array of zeros, or of a constant that a rule of a map gives."""

    shape: Shape
    dtype: np.dtype
    fill: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """An operation on values; `shapes` are those of its outputs. See `applied`."""

    operation: Operation
    inputs: "tuple[Value, ...]"
    shapes: tuple[Shape, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """Output number `part` of a call."""

    call: Call
    part: int

    @property
    def shape(self) -> Shape:
        """Its shape."""
        return self.call.shapes[self.part]

    def in_words(self) -> str:
        """The operations that make it, in order: `slice 0 of 4`."""
        found: dict[int, Call] = {}
        _add_calls(self.call, found)
        used = [self, *(x for c in found.values() for x in c.inputs if isinstance(x, Output))]
        return ", ".join(
            _words(call.operation, len(call.inputs), {x.part for x in used if x.call is call})
            for call in found.values()
        )


def _words(operation: Operation, inputs: int, parts: Collection[int]) -> str:
    """An operation on some inputs, of whose outputs these parts are used."""
    runs = format_runs(sorted(parts))
    match operation:
        case Unstack(axis, count):
            return f"slice {runs} of {count}" + (f" along axis {axis}" if axis else "")
        case Split(axis, sizes):
            return f"part {runs} of {len(sizes)} along axis {axis}"
        case Stack(axis):
            return f"{inputs} stacked along axis {axis}"
        case Concat(axis):
            return f"{inputs} joined along axis {axis}"
        case Transpose(axes):
            return f"axes in the order {', '.join(map(str, axes))}"
        case Reshape(shape):
            return f"reshaped to {list(shape)}"
        case Pad(widths, fill):
            return f"padded by {list(map(list, widths))} with {fill}"
        case Crop(widths):
            return f"cropped by {list(map(list, widths))}"
    return str(operation)


Value = Source | Filled | Output


def applied(operation: Operation, inputs: Sequence[Value]) -> tuple[Output, ...]:
    """The outputs of an operation. Raises TreeMismatchError: it does not apply to values of these
    shapes, or one of them is filled."""
    shapes = operation.shapes([value.shape for value in inputs])
    if any(isinstance(value, Filled) for value in inputs):
        raise TreeMismatchError("a filled leaf cannot be changed: `fill` gives its final shape")
    call = Call(operation, tuple(inputs), tuple(shapes))
    return tuple(Output(call, part) for part in range(len(shapes)))


class Row(NamedTuple):
    """Some leaves become others: a line of a map in written form."""

    inputs: tuple[Path, ...]
    outputs: tuple[Path, ...]
    operation: Operation | None = None  # None for a leaf that only changes its path
    origin: str = "map"  # what decided it

    def __str__(self) -> str:
        before, after = (" + ".join(map(format_path, p)) for p in (self.inputs, self.outputs))
        if self.operation is None:
            return f"{before} -> {after}"
        words = _words(self.operation, len(self.inputs), range(len(self.outputs)))
        return f"{before} -> {after}  {words}"


@dataclasses.dataclass(frozen=True)
class LeafMap:
    """How the leaves of one tree become those of another.

    Attributes:
      values: path after -> value.
      origin: path after -> what decided it: `"map"` (the user's file), `"path"` (the same path,
        after the standard conversions of layers and containers), `"structure"` (the order of
        modules of one class), or several of these. An undecided leaf has no origin.
      dropped: leaves before that are left out.
      must_be_zero: leaves before that are left out, and must hold zeros or the given constant.
    """

    values: dict[Path, Value]
    origin: dict[Path, str] = dataclasses.field(default_factory=dict)
    dropped: tuple[Path, ...] = ()
    must_be_zero: dict[Path, Filled] = dataclasses.field(default_factory=dict)

    @property
    def shapes(self) -> dict[Path, Shape]:
        """Path after -> shape."""
        return {path: value.shape for path, value in self.values.items()}

    def calls(self) -> list[Call]:
        """The operations, each after those whose outputs it takes."""
        found: dict[int, Call] = {}
        for value in self.values.values():
            if isinstance(value, Output):
                _add_calls(value.call, found)
        return list(found.values())

    def sources(self) -> dict[Path, Shape]:
        """Path before -> shape, of the leaves that values are made of."""
        inputs = (value for call in self.calls() for value in call.inputs)
        values = (*self.values.values(), *inputs)
        return {value.path: value.shape for value in values if isinstance(value, Source)}

    def made_of(self) -> dict[Path, list[Path]]:
        """Path after -> the paths before that it is made of, for leaves with an origin."""
        return {p: sources_of(v) for p, v in self.values.items() if p in self.origin}

    def then(self, other: "LeafMap") -> "LeafMap":
        """This map, followed by a map of its result. Leaves that the other map does not name stay.
        Raises TreeMismatchError: the other map drops the result of an operation, except rearranged
        zeros; or two leaves would have the same path."""
        gone = {path: self.values[path] for path in other.dropped}
        zero = {path: _rearranged(self.values[path]) for path in other.must_be_zero}
        lost = [path for path, value in gone.items() if not isinstance(value, Source)]
        if lost := [*lost, *(path for path, leaves in zero.items() if leaves is None)]:
            raise TreeMismatchError(
                "the result of an operation cannot be dropped", list(map(format_path, lost))
            )
        was = [value.path for value in gone.values() if isinstance(value, Source)]
        taken = {*other.sources(), *gone, *zero}
        values = {path: value for path, value in self.values.items() if path not in taken}
        origin = {path: text for path, text in self.origin.items() if path in values}
        _check_free(path for path in other.values if path in values)
        values |= other._of(self.values)
        for path, value in other.values.items():
            before = [self.origin.get(p, "") for p in sources_of(value)] if self.origin else []
            texts = ", ".join(filter(None, (*before, other.origin.get(path, "")))).split(", ")
            if texts != [""]:
                origin[path] = ", ".join(dict.fromkeys(texts))
        must_be_zero = {
            leaf.path: other.must_be_zero[path]._replace(shape=leaf.shape)
            for path, leaves in zero.items()
            for leaf in leaves or ()
        }
        return LeafMap(values, origin, (*self.dropped, *was), self.must_be_zero | must_be_zero)

    def inverse(self) -> "LeafMap":
        """The inverse map. Dropped leaves are not in it. Raises TreeMismatchError: an operation has
        no inverse."""
        values: dict[Path, Value] = {}
        origin: dict[Path, str] = {}
        must_be_zero: dict[Path, Filled] = {}
        back: dict[tuple[int, int], Value] = {}  # by the output of a call
        origin_of: dict[int, str] = {}

        def put(value: Value, made: Value, text: str | None) -> None:
            if isinstance(value, Source):
                if value.path in values:
                    raise TreeMismatchError(f"{format_path(value.path)} becomes two leaves")
                values[value.path] = made
                if text:
                    origin[value.path] = text
            elif isinstance(value, Output):
                back[id(value.call), value.part] = made
                origin_of.setdefault(id(value.call), text or "")

        for path, value in reversed(self.values.items()):
            if isinstance(value, Filled):
                must_be_zero[path] = value
            put(value, Source(path, value.shape), self.origin.get(path))
        for call in reversed(self.calls()):
            undo = call.operation.inverse([value.shape for value in call.inputs])
            parts = [(id(call), part) for part in range(len(call.shapes))]
            outputs = [back[key] for key in parts if key in back]
            if len(outputs) < len(call.shapes):
                raise TreeMismatchError(f"a part of {call.operation} is not used")
            for value, made in zip(call.inputs, applied(undo, outputs), strict=True):
                put(value, made, origin_of[id(call)])
        return LeafMap({**values, **self.must_be_zero}, origin, (), must_be_zero)

    def bind(self, leaves: Mapping[Path, Leaf]) -> dict[Path, Leaf]:
        """The leaves after, of those before. Reads only padding, leaves that must hold the constant
        of a rule, and leaves that must be equal before they are cut. Raises TreeMismatchError:
        arrays that cannot become one, or other values in one of these places."""
        names, compared = names_of(self), set[int]()
        wrong = [
            f"{format_path(path)}: {problem}"
            for path, value in self.must_be_zero.items()
            if value.fill is not None and (problem := _differs(leaves[path], value.fill, value))
        ]
        if wrong:
            raise TreeMismatchError("dropped leaves do not hold the constant of their rule", wrong)

        def run(call: Call, values: Sequence[Any]) -> Sequence[Leaf]:
            inputs = [leaf for leaf in values if isinstance(leaf, ArrayHandle)]
            if isinstance(call.operation, Crop):
                _check_padding(inputs[0], call.operation)
            crop = isinstance(call.operation, Crop) and call.operation.fill is None
            if crop or isinstance(call.operation, Split | Unstack):
                _compare(inputs[0], compared)  # some parts may never be read
            paths = [names[id(call), part] for part in range(len(call.shapes))]
            return apply(call.operation, inputs, paths)

        found = self.evaluated(lambda source: leaves[source.path], run)
        like = {path: leaves[path] for path in self.must_be_zero} or leaves
        for path, leaf in found.items():
            if isinstance(leaf, Filled):
                found[path] = zeros(path, *leaf, an_array(like))
            elif isinstance(leaf, ArrayHandle) and leaf.path != path:
                found[path] = leaf.at(path)
        return found

    def evaluated(
        self, leaf: Callable[[Source], Any], run: Callable[[Call, list[Any]], Sequence[Any]]
    ) -> dict[Path, Any]:
        """Path after -> its value, if `leaf` and `run` replace its sources and calls."""
        made: dict[int, Sequence[Any]] = {}

        def bound(value: Value) -> Any:
            if isinstance(value, Source):
                return leaf(value)
            return made[id(value.call)][value.part] if isinstance(value, Output) else value

        for call in self.calls():
            made[id(call)] = run(call, list(map(bound, call.inputs)))
        return {path: bound(value) for path, value in self.values.items()}

    def _of(self, leaves: Mapping[Path, Value]) -> dict[Path, Value]:
        """The values if their sources are these."""
        return self.evaluated(
            lambda source: leaves[source.path], lambda call, values: applied(call.operation, values)
        )

    def not_zero(self, leaves: Mapping[Path, Leaf]) -> list[Path]:
        """Of the leaves before that must be zeros, those that are not. Reads them."""
        zeros = [path for path, value in self.must_be_zero.items() if value.fill is None]
        return [path for path in zeros if not _holds(leaves[path], 0)]

    def sequence(self) -> list[Row]:
        """Rows that make this map if they are carried out in order, as rules of a map file are. A
        leaf at the new path of another leaf is first moved to a path with `~`."""
        taken = {*self.values, *self.sources()}
        aside: dict[Path, Path] = {}
        for path in self.sources():
            value = self.values.get(path)
            if value is not None and {*sources_of(value)} != {path} and path not in aside:
                *outer, last = path
                while (*outer, last) in taken:
                    last = f"{last}~"
                taken.add((*outer, last))
                aside[path] = (*outer, last)
        found = {p: Source(aside.get(p, p), shape) for p, shape in self.sources().items()}
        moved = self._of(found)
        rows = dataclasses.replace(self, values=moved).rows()
        return [Row((old,), (new,), None, "map") for old, new in aside.items()] + rows

    def rows(self) -> list[Row]:
        """The map as rows, in an order in which they can be carried out. Undecided leaves and zeros
        are left out."""
        names = names_of(self)
        done: dict[int, Call] = {}
        rows = []
        for path, value in self.values.items():
            origin = self.origin.get(path, "")
            if isinstance(value, Source) and (origin or value.path != path):
                rows.append(Row((value.path,), (path,), None, origin))
            if not isinstance(value, Output):
                continue
            known = len(done)
            _add_calls(value.call, done)
            for call in list(done.values())[known:]:
                outputs = tuple(names[id(call), part] for part in range(len(call.shapes)))
                rows.append(Row(input_names(call, names), outputs, call.operation, origin))
        return rows


def renaming(paths: Mapping[Path, Path], shapes: Mapping[Path, Shape]) -> LeafMap:
    """The map of leaves that only change their paths, before -> after. `shapes` has the paths
    before. Raises TreeMismatchError: two leaves would have the same path."""
    _check_free(path for path, n in collections.Counter(paths.values()).items() if n > 1)
    return LeafMap({new: Source(old, shapes[old]) for old, new in paths.items()})


def _check_free(taken: Iterable[Path]) -> None:
    """Raises TreeMismatchError for paths at which one leaf would replace another."""
    if problems := [format_path(path) for path in taken]:
        raise TreeMismatchError("two leaves would have the same path", problems)


def from_rows(rows: Iterable[Row], leaves: Mapping[Path, Shape]) -> LeafMap:
    """The map of rows that are carried out in order. Leaves that no row takes stay. Raises
    TreeMismatchError: rows with missing inputs, with outputs that exist, or with operations that do
    not apply: all of them."""
    values: dict[Path, Value] = {path: Source(path, tuple(s)) for path, s in leaves.items()}
    origin: dict[Path, str] = {}
    problems = []
    for row in rows:
        missing = [path for path in row.inputs if path not in values]
        if missing:
            problems += [f"{row}: there is no {format_path(path)}" for path in missing]
            continue
        inputs = [values.pop(path) for path in row.inputs]
        origins = [*(origin.pop(path, "") for path in row.inputs), row.origin]
        try:
            made = inputs if row.operation is None else applied(row.operation, inputs)
        except TreeMismatchError as error:
            problems.append(f"{row}: {error.summary}")
            continue
        texts = ", ".join(filter(None, origins)).split(", ")
        for path, value in zip(row.outputs, made, strict=True):
            if path in values:
                problems.append(f"{row}: there is a {format_path(path)} already")
            values[path] = value
            origin[path] = ", ".join(dict.fromkeys(texts))
    if problems:
        raise TreeMismatchError("operations that cannot be applied", problems)
    return LeafMap(values, origin)


def input_names(call: Call, names: Mapping[tuple[int, int], Path]) -> tuple[Path, ...]:
    """The names of the inputs of a call."""
    return tuple(
        value.path if isinstance(value, Source) else names[id(value.call), value.part]
        for value in call.inputs
        if not isinstance(value, Filled)
    )


def an_array(leaves: Mapping[Path, Leaf]) -> ArrayHandle:
    """An array whose storage new leaves copy: a device array if there is one."""
    arrays = [leaf for leaf in leaves.values() if isinstance(leaf, ArrayHandle)]
    if not arrays:
        raise TreeMismatchError("the checkpoint holds no array")
    return min(arrays, key=lambda leaf: (leaf.value_type != "jax.Array", leaf.key_impl is not None))


def _add_calls(call: Call, found: dict[int, Call]) -> None:
    """Adds a call and the calls that it needs, each after those whose outputs it takes."""
    pending = [call]
    while pending:
        call = pending[-1]
        needed = [
            value.call
            for value in call.inputs
            if isinstance(value, Output) and id(value.call) not in found
        ]
        if needed:
            pending += reversed(needed)
        else:
            found[id(call)] = pending.pop()


def sources_of(value: Value) -> list[Path]:
    """Paths of the leaves that a value is made of."""
    return [value.path] if isinstance(value, Source) else [*LeafMap({(): value}).sources()]


def _rearranged(value: Value) -> list[Source] | None:
    """The leaves of which a value has exactly all elements; None for other values."""
    if isinstance(value, Source):
        return [value]
    kinds = Concat | Reshape | Stack | Transpose
    if not isinstance(value, Output) or not isinstance(value.call.operation, kinds):
        return None
    parts = [_rearranged(each) for each in value.call.inputs]
    return None if None in parts else [leaf for part in parts for leaf in part or ()]


def names_of(found: LeafMap) -> dict[tuple[int, int], Path]:
    """A path for each output of a call. A final value has its path after. Others have the path of
    their only input, or of the first leaf that is made of them; `~` keeps them distinct."""
    calls = found.calls()
    names: dict[tuple[int, int], Path] = {}
    for path, value in found.values.items():
        if isinstance(value, Output):
            names.setdefault((id(value.call), value.part), path)
    leads_to = dict(names)
    for call in reversed(calls):
        parts = [(id(call), part) for part in range(len(call.shapes))]
        first = next(leads_to[key] for key in parts if key in leads_to)
        leads_to |= dict.fromkeys((key for key in parts if key not in leads_to), first)
        for value in call.inputs:
            if isinstance(value, Output):
                leads_to.setdefault((id(value.call), value.part), first)
    held = set(found.sources()) if calls else set()
    for call in calls:
        inputs = input_names(call, names)
        held.difference_update(inputs)
        for part in range(len(call.shapes)):
            key = id(call), part
            if key not in names:
                alone = len(inputs) == len(call.shapes) == 1
                name = first = inputs[0] if alone else leads_to[key]
                while name in held or (name != first and name in found.values):
                    name = (*name[:-1], f"{name[-1]}~")
                names[key] = name
            held.add(names[key])
    return names


def _holds(leaf: Leaf, number: float) -> bool:
    """Whether all values of a leaf are a number. Reads it. Other leaves than arrays hold any."""
    if not isinstance(leaf, ArrayHandle):
        return True
    return _all_are(leaf.read(), number) and has_value(leaf.dtype, number)


def _all_are(values: np.ndarray, number: float) -> bool:
    """Whether all values are a number; any NaN is NaN, and -0.0 is 0.0."""
    expected = np.array(number).astype(values.dtype)
    return bool(((values == expected) | ((values != values) & (expected != expected))).all())


def _differs(leaf: Leaf, number: float, rule: Filled) -> str:
    """Why a leaf is not the array of a constant that a rule describes; empty if it is. Reads it."""
    if not isinstance(leaf, ArrayHandle):
        return f"it is no array, but {type_name(leaf)}"
    if leaf.value_type == "scalar":
        return "it is no array, but a Python scalar"
    if leaf.dtype != rule.dtype or leaf.key_impl is not None:
        return f"it is {leaf.describe()}, not {rule.dtype.name}"
    return "" if _holds(leaf, number) else f"not {number}"


def _compare(handle: ArrayHandle, compared: set[int]) -> None:
    """Compares arrays that must be equal, of which an array is computed, as a whole. Those that
    were `compared` before are not read again."""
    for equal in comparisons(handle):
        if id(equal.data) not in compared:
            compared.add(id(equal.data))
            for box in grid_boxes(equal.shape, equal.chunk_shape):
                checked(equal.view()[box].read(), f"{format_path(equal.path)}: its stored bytes")


def _check_padding(handle: ArrayHandle, crop: Crop) -> None:
    """Raises TreeMismatchError if the padding no longer holds its fill value."""
    if crop.fill is None:
        return
    view = handle.view()
    for axis, (before, after) in enumerate(crop.widths):
        size = handle.shape[axis]
        for part in (slice(0, before), slice(size - after, size)):
            read = view[(*[slice(None)] * axis, part)].read()
            values = np.asarray(checked(read, f"{format_path(handle.path)}: its stored bytes"))
            if not _all_are(values, crop.fill):
                raise TreeMismatchError(
                    f"{format_path(handle.path)}: it was padded with {crop.fill}, but holds other "
                    "values there now",
                    hints=["a map to linen with `crop` cuts them off"],
                )
