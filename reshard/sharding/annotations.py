"""From a model's annotations and new rules to a partition spec for every leaf, and why. Pure.

A leaf's spec comes from the first of these that says something: a path regex of the caller's; the
parameter that it belongs to, if it is optimizer state and says no more than that parameter does;
the names of its axes, through the rules; the sharding that it has. A leaf that none of them reaches
is replicated, and `Coverage` says so.
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
from reshard.sharding.rules import SEMANTICS, Names, Rule, match_specs, parse_rules, resolve_names
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
      own_rules: rules that the annotation brings along; the caller's come first.
      saved: the spec of the sharding that it has.
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
    """What became of one leaf.

    Attributes:
      source: what its spec comes from: `"specs"`, `"names"`, `"sharding"`, `"optimizer"`, `"none"`.
      rules: positions of the rules that reached it, in the order in which they were given.
      device_bytes: bytes of a shard.
      replicated: every device of the mesh holds all of it.
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
    """Which rule reached what, and what no rule reached. `print()` shows it.

    Attributes:
      unmatched: names that no rule has -> paths of the leaves that use them.
      problems: why specs do not fit: indivisible dimensions, unknown axes, ambiguities.
      hints: what to type about them.
    """

    mesh: Mesh
    rules: tuple[Rule, ...]
    leaves: tuple[LeafCoverage, ...]
    unmatched: Mapping[str, tuple[Path, ...]]
    problems: tuple[str, ...]
    hints: tuple[str, ...]

    @functools.cached_property
    def reached(self) -> tuple[tuple[Path, ...], ...]:
        """For each rule, the paths of the leaves that it reached."""
        paths: list[list[Path]] = [[] for _ in self.rules]
        for leaf in self.leaves:
            for position in dict.fromkeys(leaf.rules):
                paths[position].append(leaf.path)
        return tuple(map(tuple, paths))

    @property
    def notes(self) -> tuple[str, ...]:
        """Names without a rule and rules without a leaf, with the bytes that are replicated."""
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
        """Bytes a device that replicated leaves cost."""
        return sum(leaf.device_bytes for leaf in self.replicated)

    @property
    def device_bytes(self) -> int:
        """Bytes a device of all leaves."""
        return sum(leaf.device_bytes for leaf in self.leaves)

    def document(self) -> dict[str, Any]:
        """The same as JSON has it."""
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
            "sharding": "by the sharding they have",
            "optimizer": "as the parameter they belong to",
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
    specs: Sequence[tuple[str, Any]],
    semantics: str | None,
) -> Coverage:
    """The spec of every leaf; see `reshard.target` for `rules`, `specs` and `semantics`.

    Raises:
      ShardingError: rules or specs that cannot be read, or a regex that matches no leaf. What does
        not fit the mesh is not raised: it is in `Coverage.problems`.
    """
    check_choice("semantics", semantics, (None, *SEMANTICS))
    paths = [leaf.path for leaf in leaves]
    matched = match_specs(paths, specs, {leaf.path for leaf in leaves if leaf.variable})
    return _Cover(leaves, mesh, rules, semantics).run(matched)


class _Cover:
    """One run of `cover`: the rules, and what was found out on the way."""

    def __init__(
        self, leaves: Sequence[AnnotatedLeaf], mesh: Mesh, rules: Any, semantics: str | None
    ):
        names = (n for leaf in leaves for n in leaf.names or () if isinstance(n, str))
        self.leaves = {leaf.path: leaf for leaf in leaves}
        self.mesh = mesh
        self.without_rules = rules is None
        self.rules = () if rules is None else parse_rules(rules, dict.fromkeys(names))
        self.semantics = semantics
        self.unmatched: dict[str, list[Path]] = {}
        self.problems: dict[Path, list[str]] = {path: [] for path in self.leaves}
        self.hints: list[str] = []

    def run(self, matched: Mapping[Path, Spec]) -> Coverage:
        """Parameters first: optimizer state needs their specs."""
        others = [path for path, leaf in self.leaves.items() if not leaf.parameter]
        marked = [path for path, leaf in self.leaves.items() if leaf.parameter]
        parameters = Parameters(marked, others)
        done: dict[Path, LeafCoverage] = {}
        for path in (*marked, *others):
            leaf, spec, source, used = self.leaves[path], matched.get(path), "specs", ()
            if spec is None and not leaf.parameter:
                owner = self._owner(leaf, [done[at] for at in parameters.followed_by(path)])
                if owner is not None and self._is_as(leaf, self.leaves[owner.path]):
                    spec, source = self._follow(leaf, owner), "optimizer"
                    used = owner.rules if spec else ()
            if spec is None and leaf.names is not None:
                spec, used = self._by_names(leaf, leaf.names)
                source = "names"
            if spec is None:
                spec, source = (leaf.saved, "sharding") if leaf.saved is not None else ((), "none")
            done[path] = self._covered(leaf, spec, source, used)
        return Coverage(
            self.mesh,
            self.rules,
            tuple(done[path] for path in self.leaves),
            {name: tuple(paths) for name, paths in self.unmatched.items()},
            tuple(dict.fromkeys(itertools.chain(*self.problems.values()))),
            tuple(dict.fromkeys(self.hints)),
        )

    def _is_as(self, leaf: AnnotatedLeaf, parameter: AnnotatedLeaf) -> bool:
        """Whether a leaf says no more of itself than its parameter does: annotations are copied
        from parameters to optimizer state, whether they fit it or not."""
        if leaf.names is not None:
            return leaf.names == parameter.names or len(leaf.names) > len(leaf.shape)
        return leaf.saved is None or leaf.saved == parameter.saved

    def _owner(self, leaf: AnnotatedLeaf, found: list[LeafCoverage]) -> LeafCoverage | None:
        """The parameter that a leaf belongs to, of those that its path fits; any of them if they
        are split alike."""
        if len({(owner.shape, owner.spec) for owner in found}) == 1:
            return found[0]
        if found and leaf.names is None and all(owner.shape == leaf.shape for owner in found):
            names = " or ".join(format_path(owner.path) for owner in found)
            self._ambiguous(leaf, f"it may belong to {names}, which are split otherwise")
        return None

    def _ambiguous(self, leaf: AnnotatedLeaf, text: str) -> None:
        where = format_path(leaf.path)
        self.problems[leaf.path].append(f"{where}  {list(leaf.shape)}: {text}")
        regex = as_python(f"^{re.escape(where)}$")
        self.hints.append(f"specs=[({regex}, P(...))] says how to split it")

    def _follow(self, leaf: AnnotatedLeaf, owner: LeafCoverage) -> Spec:
        spec = owner.spec
        part = matching_part(leaf.path, leaf.shape, owner.shape, spec)
        if not isinstance(part, str):
            return part
        if leaf.names is not None or leaf.saved is not None or any(spec):
            of = f"it belongs to {format_path(owner.path)}, which is {format_spec(spec)}"
            self._ambiguous(leaf, f"{of}, and {part}")
        return ()

    def _by_names(self, leaf: AnnotatedLeaf, names: Names) -> tuple[Spec, tuple[int, ...]]:
        semantics = self.semantics or ("nnx" if leaf.kind == "nnx" else "linen")
        passes = leaf.kind == "mesh" or semantics == "nnx"
        rules = self.rules
        if leaf.own_rules:  # for names that the caller's rules lack
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
            whole = as_python((name, None))
            if name in self.mesh.axis_names:
                if passes:
                    continue
                problems.append(
                    f"{text}: no rule has the logical name '{name}', which is also an axis of "
                    f"`{self.mesh}`"
                )
                split = as_python((name, name))
                self.hints.append(f"the rule {split} splits over it, {whole} replicates")
            elif passes:
                near = get_close_matches(name, [rule for rule, _ in self.rules], 1)
                says = "".join(f"; the nearest rule is `{rule}`" for rule in near)
                self.hints.append(f"the rule {whole} replicates dimensions named '{name}'{says}")
            elif self.without_rules and leaf.own_rules is None:
                problems.append(f"{text}: its axes have logical names {names}, and no rules")
                self.hints.append('rules=[("embed", "data"), ...] gives them, rules=[] replicates')
            self.unmatched.setdefault(name, []).append(leaf.path)
        return found.spec, tuple(place for place in found.used if place < len(self.rules))

    def _covered(
        self, leaf: AnnotatedLeaf, spec: Spec, source: str, used: tuple[int, ...]
    ) -> LeafCoverage:
        found = spec_problems(leaf.shape, self.mesh, spec)
        text = f"{format_path(leaf.path)}  {list(leaf.shape)}"
        if leaf.names is not None and source == "names":
            text += f" {leaf.names}"
        self.problems[leaf.path] += [f"{text}: {problem}" for problem in found]
        parts = _parts(self.mesh, spec)
        nbytes = math.prod(leaf.shape) * leaf.itemsize
        return LeafCoverage(
            path=leaf.path,
            shape=leaf.shape,
            names=leaf.names,
            spec=spec,
            source=source,
            rules=used,
            device_bytes=nbytes // parts,
            replicated=parts == 1 and self.mesh.size > 1,
        )


def _parts(mesh: Mesh, spec: Spec) -> int:
    """In how many parts a spec divides an array."""
    return math.prod(mesh.shape.get(axis, 1) for entry in spec for axis in entry)
