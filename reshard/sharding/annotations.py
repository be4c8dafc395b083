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

# Leaves that a printed coverage lists of each kind.
_SHOWN = 10


@dataclasses.dataclass(frozen=True, slots=True)
class AnnotatedLeaf:
    """An array leaf of a model's state.

    Attributes:
      names: the names of its axes, if it is annotated.
      kind: what the names are: `"mesh"` (Linen's `Partitioned`: mesh axes), `"logical"` (Linen's
        `LogicallyPartitioned`), `"nnx"` (metadata of an NNX variable), "" without names.
      own_rules: rules in the annotation; the caller's take precedence.
      saved: the spec of its present sharding.
      parameter: whether it is a parameter, which optimizer state follows.
      variable: whether it is the value of an NNX variable.
    """

    path: Path
    shape: tuple[int, ...]
    itemsize: int
    names: Names | None = None
    kind: str = ""
    own_rules: Any = None
    saved: Spec | None = None
    parameter: bool = False
    variable: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class LeafCoverage:
    """The spec of one leaf.

    Attributes:
      source: the origin of its spec: `"specs"`, `"names"`, `"sharding"`, `"optimizer"`, `"none"`.
      rules: positions of the rules that decided it, in the order in which they were given.
      device_bytes: bytes of a shard.
      replicated: whether every device of the mesh holds all of it.
    """

    path: Path
    shape: tuple[int, ...]
    names: Names | None
    spec: Spec
    source: str
    rules: tuple[int, ...]
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
            close = get_close_matches(name, rules, 1)
            near = "".join(f"; the nearest rule is `{rule}`" for rule in close)
            notes.append(
                f"no rule has the axis name `{name}`{near}. Leaves replicated along this axis: "
                f"{len(held)}, {format_bytes(sum(held))} a device"
            )
        names = {name for leaf in self.leaves for name in leaf.names or ()}
        unused = [f"`{name}`" for name, axes in self.rules if axes and name not in names]
        if unused:
            listed, nbytes = ", ".join(dict.fromkeys(unused)), format_bytes(self.replicated_bytes)
            none = f"rules whose axis name no leaf has: {listed}"
            notes.append(f"{none}. Replicated in all: {nbytes} a device")
        return tuple(notes)

    @property
    def replicated(self) -> tuple[LeafCoverage, ...]:
        """Leaves that every device holds in full, largest first."""
        found = [leaf for leaf in self.leaves if leaf.replicated]
        return tuple(sorted(found, key=lambda leaf: -leaf.device_bytes))

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
                    "shape": list(leaf.shape),
                    "bytes": None
                    if spec_problems(leaf.shape, self.mesh, leaf.spec)
                    else leaf.device_bytes * _parts(self.mesh, leaf.spec),
                    "mesh": self.mesh.shape,
                    "spec": [list(axes) for axes in leaf.spec],
                    "names": leaf.names and list(leaf.names),
                    "source": leaf.source,
                    "device_bytes": leaf.device_bytes,
                    "replicated": leaf.replicated,
                }
                for leaf in self.leaves
            ],
        }

    def _repr_html_(self) -> str:
        from reshard.report.page import framed

        return framed(self)

    def __repr__(self) -> str:
        sources = collections.Counter(leaf.source for leaf in self.leaves)
        words = {
            "specs": "by the given specs",
            "names": "by the names of their axes",
            "sharding": "by their present sharding",
            "optimizer": "like their parameter",
            "none": "by nothing",
        }
        lines = [
            f"{len(self.leaves)} array leaves on `{self.mesh}`, {format_bytes(self.device_bytes)} "
            "a device: " + ", ".join(f"{sources[k]} {v}" for k, v in words.items() if sources[k])
        ]
        for (name, axes), paths in zip(self.rules, self.reached, strict=True):
            to = ", ".join(axes) or "replicated"
            first = f", {format_path(paths[0])} the first" if paths else ""
            lines.append(f"rule        {name} -> {to}: {count_leaves(len(paths))}{first}")
        for name, paths in self.unmatched.items():
            count = count_leaves(len(paths))
            lines.append(f"no rule     {name}: {count}, {format_path(paths[0])} the first")
        count, size = count_leaves(len(self.replicated)), format_bytes(self.replicated_bytes)
        lines.append(f"replicated  {count}, {size} a device")
        for leaf in self.replicated[:_SHOWN]:
            text = f"{format_path(leaf.path)}  {list(leaf.shape)}"
            lines.append(f"            {format_bytes(leaf.device_bytes)}  {text}")
        if len(self.replicated) > _SHOWN:
            lines.append(f"            ... and {len(self.replicated) - _SHOWN} more")
        lines += [f"problem     {problem}" for problem in self.problems]
        lines += [f"hint        {hint}" for hint in self.hints]
        return "\n".join(lines)


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
    found = _Cover(mesh, parsed, rules is None, semantics, {path: [] for path in paths})
    # Optimizer state needs the specs of parameters.
    marked = [leaf for leaf in leaves if leaf.parameter]
    others = [leaf for leaf in leaves if not leaf.parameter]
    parameters = Parameters([x.path for x in marked], [x.path for x in others])
    by_path, done = {leaf.path: leaf for leaf in marked}, dict[Path, LeafCoverage]()
    for leaf in (*marked, *others):
        spec, source, used = matched.get(leaf.path), "specs", ()
        if spec is None and not leaf.parameter:
            owner = found.owner(leaf, [done[path] for path in parameters.followed_by(leaf.path)])
            if owner is not None and _follows(leaf, by_path[owner.path]):
                spec, source = found.part_of(leaf, owner), "optimizer"
                used = owner.rules if spec else ()
        if spec is None and leaf.names is not None:
            spec, used = found.by_names(leaf, leaf.names)
            source = "names"
        if spec is None:
            spec, source = (leaf.saved, "sharding") if leaf.saved is not None else ((), "none")
        done[leaf.path] = found.covered(leaf, spec, source, used)
    return Coverage(
        mesh,
        parsed,
        tuple(done[path] for path in paths),
        {name: tuple(paths) for name, paths in found.unmatched.items()},
        tuple(dict.fromkeys(itertools.chain(*found.problems.values()))),
        tuple(dict.fromkeys(found.hints)),
    )


def _follows(leaf: AnnotatedLeaf, parameter: AnnotatedLeaf) -> bool:
    """Whether a leaf has no annotation of its own: optimizers copy those of parameters."""
    if leaf.names is not None:
        return leaf.names == parameter.names or len(leaf.names) > len(leaf.shape)
    return leaf.saved is None or leaf.saved == parameter.saved


@dataclasses.dataclass
class _Cover:
    """The rules of a coverage, and its findings until now."""

    mesh: Mesh
    rules: tuple[Rule, ...]
    without_rules: bool
    semantics: str | None
    problems: dict[Path, list[str]]
    unmatched: dict[str, list[Path]] = dataclasses.field(default_factory=dict)
    hints: list[str] = dataclasses.field(default_factory=list)

    def owner(self, leaf: AnnotatedLeaf, found: list[LeafCoverage]) -> LeafCoverage | None:
        """The parameter of a leaf, out of those that its path fits, if all have the same spec."""
        if len({(owner.shape, owner.spec) for owner in found}) == 1:
            return found[0]
        if found and leaf.names is None and all(owner.shape == leaf.shape for owner in found):
            names = " or ".join(format_path(owner.path) for owner in found)
            self._ambiguous(leaf, f"it may belong to {names}, which have different specs")
        return None

    def _ambiguous(self, leaf: AnnotatedLeaf, text: str) -> None:
        where = format_path(leaf.path)
        self.problems[leaf.path].append(f"{where}  {list(leaf.shape)}: {text}")
        regex = as_python(f"^{re.escape(where)}$")
        self.hints.append(f"specs=[({regex}, P(...))] says how to split it")

    def part_of(self, leaf: AnnotatedLeaf, owner: LeafCoverage) -> Spec:
        """The part of a parameter's spec that is that of its optimizer state."""
        part = matching_part(leaf.path, leaf.shape, owner.shape, owner.spec)
        if not isinstance(part, str):
            return part
        if leaf.names is not None or leaf.saved is not None or any(owner.spec):
            of = f"it belongs to {format_path(owner.path)}, which is {format_spec(owner.spec)}"
            self._ambiguous(leaf, f"{of}, and {part}")
        return ()

    def by_names(self, leaf: AnnotatedLeaf, names: Names) -> tuple[Spec, tuple[int, ...]]:
        """A spec from the names of axes, and the positions of the rules that decided it."""
        semantics = self.semantics or ("nnx" if leaf.kind == "nnx" else "linen")
        passes = leaf.kind == "mesh" or semantics == "nnx"
        rules = self.rules
        if leaf.own_rules:
            known = {name for name, _ in rules}
            rules += tuple(rule for rule in parse_rules(leaf.own_rules, ()) if rule[0] not in known)
        found = resolve_names(names, rules, semantics, passes)
        text, problems = format_path(leaf.path), self.problems[leaf.path]
        if semantics == "linen":
            for name, count in collections.Counter(names).items():
                ruled = not passes or name in {known for known, _ in rules}
                if count > 1 and isinstance(name, str) and ruled:
                    problems.append(f"{text}: its names {names} have '{name}' twice")
        for name in found.unmatched:
            on_mesh = name in self.mesh.axis_names
            if on_mesh and passes:
                continue
            replicates = as_python((name, None))
            if on_mesh:
                problems.append(
                    f"{text}: no rule has the logical name '{name}', which is also an axis of "
                    f"`{self.mesh}`"
                )
                split = as_python((name, name))
                self.hints.append(f"the rule {split} shards this axis, {replicates} replicates it")
            elif passes:
                near = get_close_matches(name, [rule for rule, _ in self.rules], 1)
                says = "".join(f"; the nearest rule is `{rule}`" for rule in near)
                rule = f"the rule {replicates} replicates dimensions named '{name}'"
                self.hints.append(rule + says)
            elif self.without_rules and leaf.own_rules is None:
                problems.append(f"{text}: its axes have logical names {names}, and no rules")
                self.hints.append('rules=[("embed", "data"), ...] gives them, rules=[] replicates')
            self.unmatched.setdefault(name, []).append(leaf.path)
        return found.spec, tuple(place for place in found.used if place < len(self.rules))

    def covered(
        self, leaf: AnnotatedLeaf, spec: Spec, source: str, used: tuple[int, ...]
    ) -> LeafCoverage:
        """The coverage of a leaf with a spec. Notes why the spec does not fit it."""
        text = f"{format_path(leaf.path)}  {list(leaf.shape)}"
        if leaf.names is not None and source == "names":
            text += f" {leaf.names}"
        found = spec_problems(leaf.shape, self.mesh, spec)
        self.problems[leaf.path] += [f"{text}: {problem}" for problem in found]
        parts = _parts(self.mesh, spec)
        nbytes, replicated = math.prod(leaf.shape) * leaf.itemsize, parts == 1 < self.mesh.size
        shared = leaf.path, leaf.shape, leaf.names
        return LeafCoverage(*shared, spec, source, used, nbytes // parts, replicated)


def _parts(mesh: Mesh, spec: Spec) -> int:
    """The number of parts of an array with a spec."""
    return math.prod(mesh.shape.get(axis, 1) for entry in spec for axis in entry)
