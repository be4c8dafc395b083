"""The map that a refused conversion leaves: all that is decided, and `TODO` for what is open."""

import json
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
from converted import Of, map_of, refused
from flax import nnx
from flax.traverse_util import unflatten_dict

import reshard
from reshard.cli.convert import _draft
from reshard.convert.map_rules import parse_pattern
from reshard.convert.mapfile import read_map
from reshard.errors import ArgumentError
from reshard.tree import format_path, split_path

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def finished(draft, true):
    """A draft with the true candidate for each `TODO`; `true`: printed path -> path, or paths.
    Those of one leaf must be among its candidates."""
    lines = draft.splitlines()
    for at, line in enumerate(lines):
        if re.match(r"(to|unstack) = .*'TODO'", line):
            pattern = parse_pattern(re.fullmatch("from = '(.*)'", lines[at - 1])[1])
            rule, candidates = line.split("  # ")
            for path in true[pattern.literal]:
                assert f"'{path}'" in candidates or "..." in candidates
                rule = rule.replace("'TODO'", f"'{path}'", 1)
            lines[at] = rule
    return "\n".join(lines).replace("'TODO ", "'") + "\n"


def refused_map(error, path):
    """The file of its draft, which is no map yet: all that is to be done is told."""
    path.write_text(error.draft())
    todo = [f"line {n}: {x}" for n, x in enumerate(error.draft().splitlines(), 1) if "'TODO" in x]
    told = refused(read_map, path, of=ArgumentError)
    assert told.problems == tuple(todo) != ()
    return error.draft()


@pytest.mark.parametrize("name", ["lm1b", "vit_bigvision_bonsai"])
def test_the_draft_of_a_public_pair_converts_once_it_is_finished(name, data, tmp_path, monkeypatch):
    models = json.loads((data / "pairs" / f"{name}.json").read_text())
    sizes = sorted({n for shape, *_ in models["linen"].values() for n in shape})
    small = {n: place + 2 for place, n in enumerate(sizes)}
    arrays = {
        text: layouts.random(tuple(small[n] for n in shape), seed=place)
        for place, (text, (shape, *_)) in enumerate(models["linen"].items())
    }
    tree = unflatten_dict({split_path(text): value for text, value in arrays.items()})
    path = layouts.save_standard(tmp_path / "linen", tree)

    def model():
        made = {}
        for text, there in models["map"].items():
            made[split_path(there)] = nnx.Param(jnp.zeros(arrays[text].shape))
        return module(unflatten_dict(made))

    monkeypatch.chdir(tmp_path)
    error = refused(reshard.to_nnx, path, model)
    draft = refused_map(error, tmp_path / "draft.toml")
    text = finished(draft, {one: [other] for one, other in models["map"].items()})
    (tmp_path / "map.toml").write_text(text)
    ckpt = reshard.to_nnx(path, model, map_file=tmp_path / "map.toml")
    for one, other in models["map"].items():
        made = ckpt[f"{other}/value"].read()
        np.testing.assert_array_equal(made, arrays[one])


def module(tree):
    """A module of NNX with the variables of a tree, in lists where its keys are numbers."""
    if not isinstance(tree, dict):
        return tree
    inside = {key: module(value) for key, value in tree.items()}
    if all(key.isdigit() for key in inside):
        return nnx.List([inside[str(n)] for n in range(len(inside))])
    return Of(**inside)


def test_the_draft_of_the_example_converts_once_it_is_finished(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import lm_linen
    import lm_nnx

    try:
        state = lm_linen.train_state()
        path = layouts.save_standard(tmp_path / "linen", state.params)
        error = refused(reshard.to_nnx, path, lm_nnx.LanguageModel)
        draft = refused_map(error, tmp_path / "draft.toml")
        true = {}
        for n in range(len(state.params)):
            layer, there = f"params/layer_{n}/mlp", f"layers/{n}/mlp"
            gates = [f"{there}/{name}_proj/kernel" for name in ("gate", "up")]
            true[f"{layer}/gating_einsum"] = gates
            true[f"{layer}/Dense_0/kernel"] = [f"{there}/down_proj/kernel"]
        (tmp_path / "map.toml").write_text(finished(draft, true))
        made = reshard.to_nnx(path, lm_nnx.LanguageModel, map_file=tmp_path / "map.toml")
        (tmp_path / "own.toml").write_text(
            re.search(r'MAP = r"""(.*?)"""', (EXAMPLES / "linen_to_nnx.py").read_text(), re.S)[1]
        )
        own = {"map_file": tmp_path / "own.toml", "init": "**/dropout/rngs/**"}
        expected = reshard.to_nnx(path, lm_nnx.LanguageModel, **own)
        assert reshard.diff(made, expected, values=True).equal
        assert {format_path(leaf) for leaf in made} == {format_path(leaf) for leaf in expected}
    finally:
        for name in ("lm_linen", "lm_nnx"):
            sys.modules.pop(name, None)


def test_keys_have_the_shape_that_the_model_has(tmp_path):
    """Of layers that are stacked, and apart."""
    keys = jax.random.split(jax.random.key(0), 2)
    tree = {"params": {"w": jnp.ones((2, 3)), "key": keys}}
    path = layouts.save_standard(tmp_path / "linen", tree)

    def stacked(key=keys):
        return Of(w=nnx.Param(jnp.zeros((2, 3))), key=nnx.Variable(key))

    rules = map_of(tmp_path, ("^params/w$", "w"), ("^params/key$", "key"))
    made = reshard.restore(reshard.to_nnx(path, stacked, map_file=rules), stacked())
    assert jnp.array_equal(jax.random.key_data(made.key[...]), jax.random.key_data(keys))
    error = refused(reshard.to_nnx, path, lambda: stacked(keys[0]), map_file=rules)
    keys_differ = "threefry2x32 keys[2], the model has threefry2x32 keys[]"
    assert error.problems == (f"params/key -> key: {keys_differ}",)
    apart = map_of(
        tmp_path,
        "from = '^params/(w|key)$', unstack = { axis = 0, into = 'layers/{}/\\1' }",
    )

    def layers():
        return Of(
            layers=nnx.List(
                [Of(w=nnx.Param(jnp.zeros(3)), key=nnx.Variable(key)) for key in keys[::-1]]
            )
        )

    made = reshard.restore(reshard.to_nnx(path, layers, map_file=apart), layers())
    for one, key in zip(made.layers, keys, strict=True):
        assert jnp.array_equal(jax.random.key_data(one.key[...]), jax.random.key_data(key))


def test_a_draft_without_open_leaves_is_no_hint(tmp_path):
    """The conversion was refused for another reason, which no map mends."""
    error = reshard.TreeMismatchError("optimizer state cannot follow")
    error.draft = lambda: "to = 'nnx'\n"
    with pytest.raises(reshard.TreeMismatchError) as raised, _draft(str(tmp_path / "map.toml")):
        raise error
    assert (raised.value.hints, (tmp_path / "map.toml").read_text()) == ((), "to = 'nnx'\n")
