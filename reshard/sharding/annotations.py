"""From a model's annotations and new rules to a partition spec for every leaf, and its reason.

The spec of a leaf comes from the first of these that applies: a path regex of the caller; the
parameter that the leaf belongs to, if the leaf is optimizer state without an annotation of its own;
the names of its axes, through the rules; its present sharding. Any other leaf is replicated, and
`Coverage` reports it.
"""

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from reshard.errors import check_choice
from reshard.sharding.mesh import Mesh, Spec, format_spec, spec_problems
from reshard.sharding.optimizer_state import Parameters, matching_part
from reshard.sharding.rules import (
    SEMANTICS,
    Names,
    Rule,
    match_specs,
    parse_rules,
    resolve_names,
    spec_pairs,
)
from reshard.tree import Path, as_python, format_path
from reshard.units import count_leaves, format_bytes

# Attributes of leaves in the JSON of a coverage.
_FIELDS = ("shape", "spec", "names", "source", "device_bytes", "replicated")
# Leaves that a printed coverage lists of each kind.
_SHOWN = 10
_SOURCES = {
    "specs": "by the given specs",
    "names": "by the names of their axes",
    "sharding": "by their present sharding",
    "optimizer": "like their parameter",
    "none": "by nothing",
}


@dataclasses.dataclass(frozen=True, slots=True)
class AnnotatedLeaf:
    """An array leaf of a model's state."""

    path: Path
    shape: tuple[int, ...]
    itemsize: int
    names: Names | None = None  # of its axes, if it is annotated
    # What the names are: "mesh" (Linen's `Partitioned`: mesh axes), "logical" (Linen's
    # `LogicallyPartitioned`), "nnx" (metadata of an NNX variable).
    kind: str = "mesh"
    own_rules: Any = None  # rules in the annotation; the caller's take precedence
    saved: Spec | None = None  # the spec of its present sharding
    parameter: bool = False  # whether it is a parameter, which optimizer state follows
    variable: bool = False  # whether it is the value of an NNX variable


@dataclasses.dataclass(frozen=True, slots=True)
class LeafCoverage:
    """The spec of one leaf.

    Attributes:
      source: the origin of its spec: `"specs"`, `"names"`, `"sharding"`, `"optimizer"`, `"none"`.
      rules: positions of the rules that decided it, in the order in which they were given.
      nbytes: bytes of the whole array.
      device_bytes: bytes of a shard.
      replicated: whether every device of the mesh holds all of it.
    """

    path: Path
    shape: tuple[int, ...]
    names: Names | None
    spec: Spec
    source: str
    rules: tuple[int, ...]
    nbytes: int
    device_bytes: int
    replicated: bool


@dataclasses.dataclass(frozen=True)
class Coverage:
    """Which leaves each rule matches, and which leaves no rule matches. `print()` shows it.

    Attributes:
      unmatched: names without a rule -> paths of the leaves that use them.
      problems: why specs do not fit: indivisible dimensions, unknown axes, ambiguities.
      hints: what to type to solve them.
    """

    mesh: Mesh
    rules: tuple[Rule, ...]
    leaves: tuple[LeafCoverage, ...]
    unmatched: Mapping[str, tuple[Path, ...]]
    problems: tuple[str, ...]
    hints: tuple[str, ...]

    @functools.cached_property
    def reached(self) -> tuple[tuple[Path, ...], ...]:
        """For each rule, the paths of the leaves that it decided."""
        numbers = range(len(self.rules))
        return tuple(tuple(leaf.path for leaf in self.leaves if n in leaf.rules) for n in numbers)

    @property
    def notes(self) -> tuple[str, ...]:
        """Names without a rule and rules without a leaf, with the replicated bytes."""
        if self.mesh.size == 1 or not self.rules:
            return ()
        notes, rules = [], [name for name, _ in self.rules]
        for name in self.unmatched:
            by_name = (leaf for leaf in self.leaves if leaf.source in ("names", "optimizer"))
            held = [leaf.device_bytes for leaf in by_name if name in (leaf.names or ())]
            notes.append(
                f"no rule has the axis name `{name}`{_nearest(name, rules)}. Leaves replicated "
                f"along this axis: {len(held)}, {format_bytes(sum(held))} a device"
            )
        names = {name for leaf in self.leaves for name in leaf.names or ()}
        unused = dict.fromkeys(
            f"`{name}`" for name, axes in self.rules if axes and name not in names
        )
        if unused:
            notes.append(
                f"rules whose axis name no leaf has: {', '.join(unused)}. Replicated in all: "
                f"{format_bytes(self.replicated_bytes)} a device"
            )
        return tuple(notes)

    @property
    def replicated(self) -> tuple[LeafCoverage, ...]:
        """Leaves that every device holds in full, largest first."""
        leaves = [leaf for leaf in self.leaves if leaf.replicated]
        return tuple(sorted(leaves, key=lambda leaf: -leaf.device_bytes))

    @property
    def replicated_bytes(self) -> int:
        """Bytes of replicated leaves on each device."""
        return sum(leaf.device_bytes for leaf in self.replicated)

    @property
    def device_bytes(self) -> int:
        """Bytes of all leaves on each device."""
        return sum(leaf.device_bytes for leaf in self.leaves)

    def document(self) -> dict[str, Any]:
        """The coverage as JSON."""
        return {
            "mesh": self.mesh.shape,
            "device_ids": self.mesh.device_ids and list(self.mesh.device_ids),
            "device_bytes": self.device_bytes,
            "replicated_bytes": self.replicated_bytes,
            "rules": [
                {"name": name, "axes": list(axes), "leaves": len(paths)}
                for (name, axes), paths in zip(self.rules, self.reached, strict=True)
            ],
            "unmatched": {name: [*map(format_path, p)] for name, p in self.unmatched.items()},
            "problems": list(self.problems),
            "hints": list(self.hints),
            "leaves": [
                {
                    "path": format_path(leaf.path),
                    "keys": list(leaf.path),
                    "bytes": leaf.nbytes,
                    "mesh": self.mesh.shape,
                    **{name: getattr(leaf, name) for name in _FIELDS},
                }
                for leaf in self.leaves
            ],
        }

    def _repr_html_(self) -> str:
        from reshard.report.page import framed

        return framed(self)

    def __repr__(self) -> str:
        sources = collections.Counter(leaf.source for leaf in self.leaves)
        by = ", ".join(f"{sources[key]} {text}" for key, text in _SOURCES.items() if sources[key])
        size = format_bytes(self.device_bytes)
        lines = [f"{len(self.leaves)} array leaves on `{self.mesh}`, {size} a device: {by}"]
        for (name, axes), paths in zip(self.rules, self.reached, strict=True):
            lines.append(
                f"rule        {name} -> {', '.join(axes) or 'replicated'}: {_first(paths)}"
            )
        lines += [f"no rule     {name}: {_first(paths)}" for name, paths in self.unmatched.items()]
        held, size = self.replicated, format_bytes(self.replicated_bytes)
        lines.append(f"replicated  {count_leaves(len(held))}, {size} a device")
        for leaf in held[:_SHOWN]:
            text = f"{format_path(leaf.path)}  {list(leaf.shape)}"
            lines.append(f"            {format_bytes(leaf.device_bytes)}  {text}")
        if len(held) > _SHOWN:
            lines.append(f"            ... and {len(held) - _SHOWN} more")
        lines += [f"problem     {problem}" for problem in self.problems]
        lines += [f"hint        {hint}" for hint in self.hints]
        return "\n".join(lines)


def _first(paths: Sequence[Path]) -> str:
    """The number of some leaves, and the first of them."""
    first = f", {format_path(paths[0])} the first" if paths else ""
    return count_leaves(len(paths)) + first


def _nearest(name: str, rules: Sequence[str]) -> str:
    return "".join(f"; the nearest rule is `{rule}`" for rule in get_close_matches(name, rules, 1))


def cover(
    leaves: Sequence[AnnotatedLeaf],
    mesh: Mesh,
    rules: Any,
    specs: Any,
    semantics: str | None,
) -> Coverage:
    """The spec of every leaf; see `reshard.target` for `rules`, `specs` and `semantics`.

    Raises:
      ShardingError: rules or specs that cannot be read, or a regex that matches no leaf. Specs
        that do not fit the mesh are in `Coverage.problems`.
    """
    check_choice("semantics", semantics, (None, *SEMANTICS))
    paths = [leaf.path for leaf in leaves]
    matched = match_specs(paths, spec_pairs(specs), {leaf.path for leaf in leaves if leaf.variable})
    names = (n for leaf in leaves for n in leaf.names or () if isinstance(n, str))
    parsed = () if rules is None else parse_rules(rules, dict.fromkeys(names))
    work = _Cover(mesh, parsed, rules is None, semantics, leaves)
    # Optimizer state needs the specs of parameters.
    for leaf in sorted(leaves, key=lambda leaf: not leaf.parameter):
        spec = matched.get(leaf.path)
        decided = ("specs", spec, ()) if spec is not None else work.by_parameter(leaf)
        if decided is None and leaf.names is not None:
            decided = "names", *work.by_names(leaf, leaf.names)
        if decided is None:
            decided = ("none", (), ()) if leaf.saved is None else ("sharding", leaf.saved, ())
        work.add(leaf, *decided)
    return Coverage(
        mesh,
        parsed,
        tuple(work.done[path] for path in paths),
        {name: tuple(paths) for name, paths in work.unmatched.items()},
        tuple(dict.fromkeys(itertools.chain(*work.problems.values()))),
        tuple(dict.fromkeys(work.hints)),
    )


class _Cover:
    """The rules of a coverage, and its findings until now."""

    def __init__(
        self,
        mesh: Mesh,
        rules: tuple[Rule, ...],
        without_rules: bool,
        semantics: str | None,
        leaves: Sequence[AnnotatedLeaf],
    ):
        self._mesh, self._rules = mesh, rules
        self._without_rules, self._semantics = without_rules, semantics
        self._marked = {leaf.path: leaf for leaf in leaves if leaf.parameter}
        others = [leaf.path for leaf in leaves if not leaf.parameter]
        self._parameters = Parameters(self._marked, others)
        self.done: dict[Path, LeafCoverage] = {}
        self.problems: dict[Path, list[str]] = {leaf.path: [] for leaf in leaves}
        self.unmatched: dict[str, list[Path]] = {}
        self.hints: list[str] = []

    def by_parameter(self, leaf: AnnotatedLeaf) -> tuple[str, Spec, tuple[int, ...]] | None:
        """The part of its parameter's spec, for optimizer state without another annotation."""
        if leaf.parameter:
            return None
        owners = [self.done[path] for path in self._parameters.followed_by(leaf.path)]
        if len({(owner.shape, owner.spec) for owner in owners}) != 1:
            if owners and leaf.names is None and all(owner.shape == leaf.shape for owner in owners):
                names = " or ".join(format_path(owner.path) for owner in owners)
                self._ambiguous(leaf, f"it may belong to {names}, which have different specs")
            return None
        owner, parameter = owners[0], self._marked[owners[0].path]
        if leaf.names is not None:  # optimizers copy the annotations of parameters
            follows = leaf.names == parameter.names or len(leaf.names) > len(leaf.shape)
        else:
            follows = leaf.saved is None or leaf.saved == parameter.saved
        if not follows:
            return None
        part = matching_part(leaf.path, leaf.shape, owner.shape, owner.spec)
        if isinstance(part, str):
            if leaf.names is not None or leaf.saved is not None or any(owner.spec):
                of = f"it belongs to {format_path(owner.path)}, which is {format_spec(owner.spec)}"
                self._ambiguous(leaf, f"{of}, and {part}")
            part = ()
        return "optimizer", part, owner.rules if part else ()

    def _ambiguous(self, leaf: AnnotatedLeaf, text: str) -> None:
        where = format_path(leaf.path)
        self.problems[leaf.path].append(f"{where}  {list(leaf.shape)}: {text}")
        regex = as_python(f"^{re.escape(where)}$")
        self.hints.append(f"specs=[({regex}, P(...))] says how to split it")

    def by_names(self, leaf: AnnotatedLeaf, names: Names) -> tuple[Spec, tuple[int, ...]]:
        """A spec from the names of axes, and the positions of the rules that decided it."""
        semantics = self._semantics or ("nnx" if leaf.kind == "nnx" else "linen")
        passes = leaf.kind == "mesh" or semantics == "nnx"
        rules = self._rules
        with_rule = {name for name, _ in rules}
        if leaf.own_rules:
            rules += tuple(
                rule for rule in parse_rules(leaf.own_rules, ()) if rule[0] not in with_rule
            )
            with_rule = {name for name, _ in rules}
        resolved = resolve_names(names, rules, semantics, passes)
        text, problems = format_path(leaf.path), self.problems[leaf.path]
        for name, count in collections.Counter(names).items():
            ruled = isinstance(name, str) and (not passes or name in with_rule)
            if semantics == "linen" and count > 1 and ruled:
                problems.append(f"{text}: its axes {names} have the name '{name}' twice")
        for name in resolved.unmatched:
            on_mesh = name in self._mesh.axis_names
            if on_mesh and passes:
                continue
            replicates = as_python((name, None))
            if on_mesh:
                problems.append(
                    f"{text}: no rule has the logical name '{name}', which is also an axis of "
                    f"`{self._mesh}`"
                )
                split = as_python((name, name))
                self.hints.append(f"the rule {split} shards this axis, {replicates} replicates it")
            elif passes:
                near = _nearest(name, [rule for rule, _ in self._rules])
                rule = f"the rule {replicates} replicates dimensions named '{name}'"
                self.hints.append(rule + near)
            elif self._without_rules and leaf.own_rules is None:
                problems.append(
                    f"{text}: its axes have logical names {names}, but no rules were given"
                )
                self.hints.append('rules=[("embed", "data"), ...] gives them, rules=[] replicates')
            self.unmatched.setdefault(name, []).append(leaf.path)
        return resolved.spec, tuple(place for place in resolved.used if place < len(self._rules))

    def add(self, leaf: AnnotatedLeaf, source: str, spec: Spec, used: tuple[int, ...]) -> None:
        """Adds a leaf with its spec, and why the spec does not fit it."""
        text = f"{format_path(leaf.path)}  {list(leaf.shape)}"
        if source == "names":
            text += f" {leaf.names}"
        problems = spec_problems(leaf.shape, self._mesh, spec)
        self.problems[leaf.path] += [f"{text}: {problem}" for problem in problems]
        parts = math.prod(self._mesh.shape.get(axis, 1) for entry in spec for axis in entry)
        nbytes = math.prod(leaf.shape) * leaf.itemsize
        sizes = nbytes, nbytes // parts, parts == 1 < self._mesh.size
        kind = leaf.path, leaf.shape, leaf.names
        self.done[leaf.path] = LeafCoverage(*kind, spec, source, used, *sizes)
