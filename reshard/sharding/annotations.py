"""From a model's annotations and new rules to a partition spec for every leaf, and why. Pure.

A leaf's spec comes from the first of these that says something: a path regex of the caller's; the
parameter that it belongs to, if it is optimizer state and says no more than that parameter does;
the names of its axes, through the rules; the sharding that it has. A leaf that none of them reaches
is replicated, and `Coverage` says so.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from reshard.errors import check_choice
from reshard.hints import Hint
from reshard.sharding.mesh import Mesh, Spec, format_spec, spec_problems
from reshard.sharding.optimizer_state import Parameters, matching_part
from reshard.sharding.rules import SEMANTICS, Names, Rule, match_specs, parse_rules, resolve_names
from reshard.tree import Path, format_path
from reshard.units import format_bytes

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
      saved: the spec of the sharding that it has, if it has one.
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
      path: its path.
      shape: its shape.
      names: the names of its axes, if it is annotated.
      spec: its partition spec on the mesh.
      source: what it comes from: `"specs"`, `"names"`, `"sharding"`, `"optimizer"` or `"none"`.
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
      mesh: the mesh.
      rules: the rules, in order.
      leaves: what became of each array leaf.
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
            "leaves": [self._leaf_document(leaf) for leaf in self.leaves],
        }

    def _leaf_document(self, leaf: LeafCoverage) -> dict[str, Any]:
        parts = math.prod(self.mesh.shape.get(axis, 1) for axes in leaf.spec for axis in axes)
        fits = not spec_problems(leaf.shape, self.mesh, leaf.spec)
        return {
            "path": format_path(leaf.path),
            "keys": list(leaf.path),
            "shape": list(leaf.shape),
            "bytes": leaf.device_bytes * parts if fits else None,
            "mesh": self.mesh.shape,
            "spec": [list(axes) for axes in leaf.spec],
            "names": leaf.names and list(leaf.names),
            "source": leaf.source,
            "device_bytes": leaf.device_bytes,
            "replicated": leaf.replicated,
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
            lines.append(f"rule        {name} -> {to}: {len(paths)} leaves{first}")
        for name, paths in self.unmatched.items():
            lines.append(
                f"no rule     {name}: {len(paths)} leaves, {format_path(paths[0])} the first"
            )
        lines.append(
            f"replicated  {len(self.replicated)} leaves, {format_bytes(self.replicated_bytes)} a "
            "device"
        )
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
    variables = {leaf.path for leaf in leaves if leaf.variable}
    matched = match_specs([leaf.path for leaf in leaves], specs, variables)
    return _Cover(leaves, mesh, rules, semantics).run(matched)


class _Cover:
    """One run of `cover`: the rules, and what was found out on the way."""

    def __init__(
        self, leaves: Sequence[AnnotatedLeaf], mesh: Mesh, rules: Any, semantics: str | None
    ):
        names = (n for leaf in leaves for n in leaf.names or () if isinstance(n, str))
        self.leaves = leaves
        self.mesh = mesh
        self.without_rules = rules is None
        self.rules = () if rules is None else parse_rules(rules, dict.fromkeys(names))
        self.semantics = semantics
        self.unmatched: dict[str, list[Path]] = {}
        self.problems: list[str] = []
        self.hints: list[str] = []
        self.parsed: dict[int, tuple[Rule, ...]] = {}

    def run(self, matched: Mapping[Path, Spec]) -> Coverage:
        """Parameters first: optimizer state needs their specs."""
        by_path = {leaf.path: leaf for leaf in self.leaves}
        marked = {leaf.path for leaf in self.leaves if leaf.parameter}
        others = [path for path in by_path if path not in marked]
        parameters = Parameters((path for path in by_path if path in marked), others)
        done: dict[Path, LeafCoverage] = {}
        problems: dict[Path, list[str]] = {}
        for leaf in sorted(self.leaves, key=lambda leaf: leaf.path not in marked):
            self.problems = problems[leaf.path] = []
            spec, source, used = matched.get(leaf.path), "specs", ()
            if spec is None and leaf.path not in marked:
                found = [done[path] for path in parameters.followed_by(leaf.path)]
                owner = self._owner(leaf, found)
                if owner is not None and self._is_as(leaf, by_path[owner.path]):
                    spec, source = self._follow(leaf, owner), "optimizer"
                    used = owner.rules if spec else ()
            if spec is None and leaf.names is not None:
                spec, used = self._by_names(leaf)
                source = "names"
            if spec is None:
                spec, source = (leaf.saved, "sharding") if leaf.saved is not None else ((), "none")
            done[leaf.path] = self._covered(leaf, spec, source, used)
        in_order = [text for leaf in self.leaves for text in problems[leaf.path]]
        return Coverage(
            self.mesh,
            self.rules,
            tuple(done[leaf.path] for leaf in self.leaves),
            {name: tuple(paths) for name, paths in self.unmatched.items()},
            tuple(dict.fromkeys(in_order)),
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
        self.problems.append(f"{where}  {list(leaf.shape)}: {text}")
        regex = f"^{re.escape(where)}$"
        self.hints.append(Hint(("split", regex), " says how to split it"))

    def _follow(self, leaf: AnnotatedLeaf, owner: LeafCoverage) -> Spec | None:
        spec = owner.spec
        part = matching_part(leaf.path, leaf.shape, owner.shape, spec)
        if not isinstance(part, str):
            return part
        if leaf.names is None and leaf.saved is None and not any(spec):
            return ()
        self._ambiguous(
            leaf,
            f"it belongs to {format_path(owner.path)}, which is {format_spec(spec)}, and {part}",
        )
        return ()

    def _by_names(self, leaf: AnnotatedLeaf) -> tuple[Spec, tuple[int, ...]]:
        names = leaf.names or ()
        semantics = self.semantics or ("nnx" if leaf.kind == "nnx" else "linen")
        passes = leaf.kind == "mesh" or semantics == "nnx"
        rules = self._rules_for(leaf)
        text = format_path(leaf.path)
        if semantics == "linen":
            strings = [name for name in names if isinstance(name, str)]
            for name in dict.fromkeys(n for n in strings if strings.count(n) > 1):
                if name in {known for known, _ in rules} or not passes:
                    self.problems.append(f"{text}: its names {names} have '{name}' twice")
        found = resolve_names(names, rules, semantics, passes)
        for name in found.unmatched:
            if passes and name in self.mesh.axis_names:
                continue
            self.unmatched.setdefault(name, []).append(leaf.path)
            self._check_unmatched(leaf, name, passes)
        used = tuple(position for position in found.used if position < len(self.rules))
        return found.spec, used

    def _check_unmatched(self, leaf: AnnotatedLeaf, name: str, passes: bool) -> None:
        text, names = format_path(leaf.path), leaf.names
        if name in self.mesh.axis_names:
            self.problems.append(
                f"{text}: no rule has the logical name '{name}', which is also an axis of "
                f"`{self.mesh}`"
            )
            split, whole = ("rule", name, name), ("replicate", name)
            self.hints.append(Hint("the rule ", split, " splits over it, ", whole, " replicates"))
        elif not passes and self.without_rules and leaf.own_rules is None:
            self.problems.append(f"{text}: its axes have logical names {names}, and no rules")
            given, none = ("rules",), ("no_rules",)
            self.hints.append(Hint(given, " gives them, ", none, " replicates"))
        elif passes:
            whole = ("replicate", name)
            self.hints.append(Hint("the rule ", whole, f" replicates what is named '{name}'"))

    def _rules_for(self, leaf: AnnotatedLeaf) -> tuple[Rule, ...]:
        """The caller's rules, and behind them those of the annotation for other names."""
        if not leaf.own_rules:
            return self.rules
        if id(leaf.own_rules) not in self.parsed:
            known = {name for name, _ in self.rules}
            own = parse_rules(leaf.own_rules, ())
            others = (rule for rule in own if rule[0] not in known)
            self.parsed[id(leaf.own_rules)] = (*self.rules, *others)
        return self.parsed[id(leaf.own_rules)]

    def _covered(
        self, leaf: AnnotatedLeaf, spec: Spec, source: str, used: tuple[int, ...]
    ) -> LeafCoverage:
        found = spec_problems(leaf.shape, self.mesh, spec)
        text = f"{format_path(leaf.path)}  {list(leaf.shape)}"
        if leaf.names is not None and source == "names":
            text += f" {leaf.names}"
        self.problems += [f"{text}: {problem}" for problem in found]
        sizes = self.mesh.shape
        parts = math.prod(sizes.get(axis, 1) for entry in spec for axis in entry)
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
