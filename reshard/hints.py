"""Hints: what would help, phrased as calls of the library.

A hint names arguments, and what phrases it otherwise has their values: `reshard.cli.output` does so
for the command line.
"""

from typing import Any

# An argument is typed as `name=value`, if it is not one of these.
_CALLS = {
    "all_rules": 'rules=[("embed", "data"), ("vocab", ("data", "model")), ("kv", None)]',
    "as_linen": "reshard.to_linen(path, model)",
    "as_nnx": "reshard.to_nnx(path, model)",
    "array": "share=(i, n) with i in {}",
    "axes": "axes={{{}: {}}}",
    "cast": "reshard.cast(ckpt, {}, {})",
    "commit": "reshard.commit({})",
    "digest": "reshard.digest(path, write=True)",
    "drop": "drop=[{}]",
    "drop_both": "reshard.select(ckpt, drop=[{}, {}])",
    "emit_map": "reshard convert",
    "init": "init=[{}]",
    "inputs": "check={}",
    "jax_mesh": 'jax.make_mesh((1, 8), ("data", "model"), '
    "axis_types=(jax.sharding.AxisType.Auto,) * 2)",
    "no_rules": "rules=[]",
    "plan": "the plan",
    "model_inputs": "reshard.target(model, inputs=(x,), mesh=mesh)",
    "rename": "reshard.rename(ckpt, [({}, {})])",
    "replicate": "({}, None)",
    "rule": "({}, {})",
    "rules": 'rules=[("embed", "data"), ...]',
    "same": "the same call",
    "select_drop": "reshard.select(ckpt, drop=[{}])",
    "select_layout": 'reshard.rename(reshard.select(ckpt, {}), [({}, "")]) with layout={}',
    "select_rename": "reshard.rename(reshard.select(ckpt, {}), [({}, {})])",
    "share": "share=({}, {})",
    "specs": "specs=[({}, {})]",
    "split": "specs=[({}, P(...))]",
    "the_model": "`model`",
    "the_source": "`source`",
    "to_linen": "reshard.to_linen(ckpt, {})",
    "to_mesh": "reshard.to_mesh(ckpt, {})",
    "to_nnx": "reshard.to_nnx(ckpt, {})",
    "verify": "reshard.verify({})",
    "verify_item": "reshard.verify(reshard.open({}, item={}))",
}


class Hint(str):
    """Text that names arguments, as they are typed in a call.

    Attributes:
      parts: text, and arguments: tuples of a name and values, without any for a value of the
        caller's own.
    """

    parts: tuple[str | tuple[Any, ...], ...]

    def __new__(cls, *parts: str | tuple[Any, ...]) -> "Hint":
        hint = super().__new__(cls, "".join(p if isinstance(p, str) else _typed(*p) for p in parts))
        hint.parts = parts
        return hint

    def __getnewargs__(self) -> tuple[str | tuple[Any, ...], ...]:
        return self.parts


def _typed(name: str, *values: Any) -> str:
    call = _CALLS.get(name, f"{name}={{}}")
    return call.format(*(map(literal, values) if values else ["..."] * 3))


def literal(value: Any) -> str:
    """A value as it is typed in Python: text in double quotes where it has none itself."""
    if not isinstance(value, str) or '"' in value:
        return repr(value)
    if "\\" in value and value.isprintable() and not value.endswith("\\"):
        return f'r"{value}"'
    return '"' + repr("'" + value)[2:]  # what holds a single quote, and no double ones
