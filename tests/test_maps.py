"""A map makes another tree without a model; what its rules compute, compared with NumPy."""

import itertools
import json
import os
import re

import fuzz_maps
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import example, given, settings
from hypothesis import strategies as st
from in_process import refused, shown
from jax.sharding import NamedSharding, PartitionSpec
from layouts import save_pytree
from safetensors.numpy import save_file
from sampling import examples
from test_imports import FRAMEWORKS, loaded_after

import reshard
from reshard.arrays.dtypes import cast_once
from reshard.convert.conversion import conversion
from reshard.convert.mapfile import read_map
from reshard.tree import nested


def map_of(folder, text):
    (folder / "map.toml").write_text(text)
    return folder / "map.toml"


def rule(source, *lines):
    return "\n".join(["[[rule]]", f"from = '{source}'", *lines, ""])


def opened(folder, tensors):
    save_file(tensors, folder / "model.safetensors")
    return reshard.open(folder / "model.safetensors")


def remapped(tmp_path, tree, rules, cast=None):
    folder = tmp_path / f"tree{len(os.listdir(tmp_path))}"
    ckpt = reshard.open(save_pytree(folder, tree))
    return reshard.remap(reshard.cast(ckpt, cast) if cast else ckpt, map_of(tmp_path, rules))


def values(ckpt):
    return {"/".join(map(str, a.path)): a.read() for a in ckpt.arrays}


NORM = rule("^norm/weight$", "to = 'params/norm/scale'")


def test_all_problems_are_told_at_once(tmp_path):
    names = ("norm.weight", "lm_head.weight", "rotary.freq")
    ckpt = opened(tmp_path, dict.fromkeys(names, np.zeros(3, "f4")))
    with pytest.raises(reshard.TreeMismatchError) as error:
        reshard.remap(ckpt, map_of(tmp_path, NORM + rule("^no/such$", "to = 'a'")))
    assert error.value.problems == (
        "rule 2, `^no/such$`: matches no leaf",
        "no rule applies to lm_head/weight",
        "no rule applies to rotary/freq",
    )


def test_a_prefix_is_removed_and_comes_back_where_it_is_the_only_one(tmp_path):
    made = remapped(tmp_path, {"aux": {"a": {"w": np.ones(2)}}}, rule("^aux/", "to = ''"))
    assert [*made] == [("a", "w")]
    assert [*reshard.remap(made, tmp_path / "map.toml", reverse=True)] == [("aux", "a", "w")]


def test_only_a_model_has_initial_values(tmp_path):
    told = "`init` has `params/bias`, and only a model has initial values"
    with pytest.raises(reshard.TreeMismatchError, match=told):
        remapped(tmp_path, {"norm": {"weight": np.ones(3)}}, "init = ['params/bias']\n" + NORM)


def test_leaves_are_kept_by_name_and_lists_stay_lists(tmp_path):
    tree = {"params": {"w": np.ones(3)}, "opt": [np.zeros(2), {"mu": np.ones(2)}], "note": "text"}
    rules = rule("^(opt|note)(.*)$", r"to = '\1\2'") + rule("^params/w$", "to = 'model/w'")
    made = remapped(tmp_path, tree, rules)
    assert {*made} == {("model", "w"), ("opt", 0), ("opt", 1, "mu"), ("note",)}
    assert made["note"] == "text"


def test_operations_on_leaves_that_are_no_arrays_are_refused(tmp_path):
    tree = {"a": "text", "b": "other", "c": np.ones(1)}
    rules = "[[rule]]\nfrom = ['^a$', '^b$']\nstack = { axis = 0 }\nto = 'd'\n"
    told = r"a: Stack\(.*\) is for arrays, not for string"
    with pytest.raises(reshard.TreeMismatchError, match=told):
        remapped(tmp_path, tree, rules + rule("^c$", "to = 'c'"))


def test_reverse_needs_a_map(tmp_path):
    opened(tmp_path, {"x": np.ones(1)})
    told = refused(tmp_path, "ckpt", "model.safetensors", "out", "--reverse")
    assert "--reverse requires --map FILE" in told


# Arithmetic, constants, several names, RoPE: compared with NumPy, bit for bit.

WORKED = r"""
[vars]
head_size = 'hidden_size // num_attention_heads'
rows = 24                                           # of the vocabulary, padded

[[rule]]                                            # one source, two names
from = '^embed_tokens/weight$'
pad = { axis = 0, from = 'vocab_size', to = 'rows', value = 0 }
to = ['params/embed/embedding', 'params/head/embedding']

[[rule]]                                            # Gemma's norms are w + 1
from = '^layers/(\d+)/norm/weight$'
add = 1
to = 'params/layers_\1/norm/scale'

[[rule]]                                            # halves of a head -> pairs
from = '^layers/(\d+)/k_proj/weight$'
rope = { axis = 0, head_size = 'head_size', to = 'pairs' }
transpose = [1, 0]                                  # [out, in] -> [in, out]
to = 'params/layers_\1/k/kernel'

[[rule]]
from = '^layers/(\d+)/q_proj/weight$'
scale = 'head_size ** -0.5'
rope = { axis = 0, head_size = 'head_size', to = 'pairs' }
transpose = [1, 0]
to = 'params/layers_\1/query/kernel'

[[rule]]                                            # GPT-OSS has gate and up element by element
from = '^layers/(\d+)/gate_up$'
deinterleave = { axis = -1, parts = 2 }
split = { axis = -1, into = ['params/layers_\1/gate', 'params/layers_\1/up'] }

[[rule]]                                            # nothing of it on the other side
to = 'params/layers_{}/norm/bias'
fill = { value = 0.5, shape = ['hidden_size'], dtype = 'bfloat16', count = 'num_hidden_layers' }
"""
CONFIG = {"hidden_size": 16, "num_attention_heads": 4, "vocab_size": 21, "num_hidden_layers": 2}
BF16 = ml_dtypes.bfloat16


def hugging_face(dtype=BF16):
    rng = np.random.default_rng(3)
    shapes = {"embed_tokens.weight": (21, 16)}
    for n in range(2):
        shapes |= {f"layers.{n}.norm.weight": (16,), f"layers.{n}.gate_up": (16, 10)}
        shapes |= {f"layers.{n}.{name}_proj.weight": (16, 16) for name in "qk"}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def expected_of(tensors):
    """The worked example, by NumPy."""
    dtype = tensors["embed_tokens.weight"].dtype
    wide = "f4" if dtype == BF16 else "f8"
    embedding = np.concatenate([tensors["embed_tokens.weight"], np.zeros((3, 16), dtype)])
    made = {"embed/embedding": embedding, "head/embedding": embedding}
    for n in range(2):
        layer, gate_up = f"layers_{n}", tensors[f"layers.{n}.gate_up"]
        norm = tensors[f"layers.{n}.norm.weight"].astype(wide) + np.array(1, wide)
        made[f"{layer}/norm/scale"] = norm.astype(dtype)
        made[f"{layer}/norm/bias"] = np.full(16, 0.5, BF16)
        made |= {f"{layer}/gate": gate_up[:, ::2], f"{layer}/up": gate_up[:, 1::2]}
        for name in "qk":
            weight = tensors[f"layers.{n}.{name}_proj.weight"].reshape(4, 2, 2, 16)
            made[f"{layer}/{name}/kernel"] = weight.swapaxes(1, 2).reshape(16, 16).T
        half = made.pop(f"{layer}/q/kernel").astype(wide) * np.array(0.5, wide)
        made[f"{layer}/query/kernel"] = half.astype(dtype)
    return {f"params/{name}": value for name, value in made.items()}


def on_mesh(array):
    """The abstract array, sharded along its last axis if that divides."""
    spec = [None] * (len(array.shape) - 1) + ["data" if array.shape[-1] % 2 == 0 else None]
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def assert_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        assert found[name].tobytes() == np.ascontiguousarray(value).tobytes(), name


@pytest.mark.parametrize("dtype", [BF16, "f2", "f4", "f8"])
def test_the_worked_example_and_back(tmp_path, dtype):
    tensors = hugging_face(dtype)
    opened(tmp_path, tensors)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_type": "worked"}))
    file, source = map_of(tmp_path, WORKED), tmp_path / "model.safetensors"
    told = shown(tmp_path, "ckpt", source, tmp_path / "out", "--map", file)
    itemsize = np.dtype(dtype).itemsize
    assert f"rounded  2 arrays, {2 * 16 * itemsize} B" in told
    made = reshard.open(tmp_path / "out")
    assert_bits(values(made), expected_of(tensors))
    derived = reshard.remap(reshard.open(source), file)
    assert_bits(values(derived), expected_of(tensors))
    assert reshard.diff(made, derived, values=True).equal
    if dtype != "f8":
        target = {path: on_mesh(array) for path, array in sorted(derived.items())}
        restored = reshard.restore(derived, nested(target.items()))
        flat = jax.tree_util.tree_flatten_with_path(restored)[0]
        found = {"/".join(key.key for key in path): np.asarray(array) for path, array in flat}
        assert_bits(found, expected_of(tensors))
    back = reshard.remap(made, file, reverse=True, config=tmp_path)
    plan = reshard.plan(back)
    paths = tuple(f"layers/{n}/norm/weight" for n in range(2))
    assert plan.document()["rounded"] == {
        "arrays": 2,
        "bytes": 2 * 16 * itemsize,
        "paths": paths,
    }
    wide, expected = "f4" if itemsize == 2 else "f8", {}
    for name, value in tensors.items():
        if "norm" in name:
            norm = (value.astype(wide) + np.array(1, wide)).astype(value.dtype)
            value = (norm.astype(wide) - np.array(1, wide)).astype(value.dtype)
        expected[name.replace(".", "/")] = value
    assert_bits(values(back), expected)
    reshard.export(reshard.select(back, "**"), tmp_path / "hf")
    assert_bits(values(reshard.open(tmp_path / "hf")), expected)


def test_neither_flax_nor_jax_is_imported(tmp_path):
    opened(tmp_path, hugging_face())
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    source, out, file = tmp_path / "model.safetensors", tmp_path / "out", map_of(tmp_path, WORKED)
    loaded, _ = loaded_after(
        "from reshard.cli import command\n"
        f"words = ['ckpt', {str(source)!r}, {str(out)!r}, '--map', {str(file)!r}, '--quiet']\n"
        "command(words, standalone_mode=False)"
    )
    assert loaded & FRAMEWORKS == set()
    assert len(reshard.open(out)) == 14


def test_only_what_is_the_same_becomes_one(tmp_path):
    tensors = hugging_face()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    file = map_of(tmp_path, WORKED)
    made = reshard.remap(opened(tmp_path, tensors), file, config=tmp_path)
    leaves = {"/".join(path): array for path, array in ((a.path, a.read()) for a in made.arrays)}

    def back(**changed):
        tree = nested((tuple(name.split("/")), x) for name, x in (leaves | changed).items())
        ckpt = reshard.open(save_pytree(tmp_path / f"made{len(os.listdir(tmp_path))}", tree))
        return reshard.remap(ckpt, file, reverse=True, config=tmp_path)

    other = leaves["params/head/embedding"].copy()
    other[3, 4] += 1
    with pytest.raises(reshard.ReshardError, match="arrays that must be equal differ"):
        back(**{"params/head/embedding": other})["embed_tokens/weight"].read()
    with pytest.raises(reshard.ReshardError, match="arrays that must be equal differ"):
        reshard.save(back(**{"params/head/embedding": other}), tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    other = np.concatenate([leaves["params/head/embedding"][:-1], np.ones((1, 16), BF16)])
    with pytest.raises(reshard.TreeMismatchError, match="it was padded with 0, but holds other"):
        back(**{"params/head/embedding": other, "params/embed/embedding": other})
    bias = np.full(16, 0.25, BF16)
    told = "params/layers_1/norm/bias: not 0.5"
    with pytest.raises(reshard.TreeMismatchError, match=told):
        back(**{"params/layers_1/norm/bias": bias})


def computed(tmp_path, values, line):
    """What a rule makes of an array, and the path back."""
    made = remapped(tmp_path, {"x": values}, rule("^x$", line, "to = 'y'"))
    return made, lambda: reshard.remap(made, tmp_path / "map.toml", reverse=True)["x"].read()


@pytest.mark.parametrize("dtype", [BF16, "f2", "f4", "f8", ml_dtypes.float8_e4m3fn])
@pytest.mark.parametrize("factor", [0.25, -2.0, 0.3, 11.313708498984761])
def test_scales(tmp_path, dtype, factor):
    rng = np.random.default_rng(5)
    x = np.append(rng.uniform(0.5, 8, (700, 7)), [[0, -0.0, 1, -1, 2, 3, 4]], 0).astype(dtype)
    made, back = computed(tmp_path, x, f"scale = {factor}")
    wide = "f4" if x.dtype.itemsize <= 2 else "f8"
    expected = (x.astype(wide) * np.array(factor, wide)).astype(dtype)
    assert made["y"].read().tobytes() == expected.tobytes()
    exact = factor in (0.25, -2.0)
    assert reshard.plan(made).rounded.arrays == (not exact)
    again = back()
    if exact:
        assert again.tobytes() == x.tobytes()
    else:
        ulps = np.abs(again.astype(wide) - x.astype(wide)) / np.abs(np.spacing(x)).astype(wide)
        assert ulps.max() <= 1
    narrow = reshard.cast(made, BF16)["y"].read()  # in one rounding
    product = x.astype("f8") * np.array(factor, wide).astype("f8")
    assert narrow.tobytes() == cast_once(product, BF16).tobytes()


@pytest.mark.parametrize("dtype", ["f2", BF16])
def test_every_number_times_a_factor_is_rounded_once(tmp_path, dtype):
    """Subnormal results too, which NumPy's float32 product rounds twice."""
    x = np.arange(1 << 16, dtype="u2").view(dtype)
    x = x[np.abs(x.astype("f8")) < 1e4]
    made, _ = computed(tmp_path, x, "scale = { by = 0.3, rounds = true }")
    product = x.astype("f8") * np.float32(0.3)  # exact
    assert made["y"].read().tobytes() == cast_once(product, np.dtype(dtype)).tobytes()


def test_what_under_or_overflows(tmp_path):
    tiny = np.array([2**-14, 1e-7, 0, np.nan, np.inf, -1], "f2")
    told = "elements scaled by 0.125 underflow in float16"
    with pytest.raises(reshard.TreeMismatchError, match=told) as error:
        computed(tmp_path, tiny, "scale = 0.125")[0]["y"].read()
    assert error.value.hints == ("`rounds = true` in the rule's `scale` allows that",)
    made, _ = computed(tmp_path, tiny, "scale = { by = 0.125, rounds = true }")
    assert made["y"].read().tobytes() == (tiny.astype("f4") / 8).astype("f2").tobytes()
    assert reshard.plan(made).rounded.arrays == 1
    for rule in ("scale = 2", "scale = 1.5", "add = 30000"):
        with pytest.raises(reshard.TreeMismatchError, match="overflow in float16"):
            computed(tmp_path, np.array([60000, 1, np.inf], "f2"), rule)[0]["y"].read()
    with pytest.raises(reshard.TreeMismatchError, match="x: int32 cannot be scaled by 2"):
        computed(tmp_path, np.arange(3, dtype="i4"), "scale = 2")
    smallest = np.array([1e-40, 1], BF16)
    with pytest.raises(reshard.TreeMismatchError, match="underflow in bfloat16"):
        computed(tmp_path, smallest, "scale = '2 ** -30'")[0]["y"].read()


def test_state_of_what_is_computed_must_be_dropped(tmp_path):
    weights = {"layer_0": {"w": np.ones(3, "f4")}, "layer_1": {"w": np.ones(3, "f4")}}
    tree = {"params": weights, "opt_state": [{"mu": weights, "count": np.zeros((), "i4")}]}
    ckpt = reshard.open(save_pytree(tmp_path / "saved", tree))
    rules = rule("^(opt_state.*|params/layer_1/w)$", r"to = '\1'")
    rules += rule("^params/layer_0/w$", "add = 1", "to = 'params/layer_0/scale'")
    file = map_of(tmp_path, rules)
    told = "opt_state/0/mu/layer_0/w: it is optimizer state of params/layer_0/w, whose values"
    with pytest.raises(reshard.TreeMismatchError, match=told) as error:
        reshard.remap(ckpt, file)
    assert len(error.value.problems) == 1
    made = reshard.remap(reshard.select(ckpt, drop="opt_state/0/mu/layer_0"), file)
    np.testing.assert_array_equal(made["params/layer_0/scale"].read(), np.full(3, 2, "f4"))


@pytest.mark.parametrize(
    "lines",
    [
        (r"^l_(\d+)/(.)$", "stack = { axis = 0, by = 1 }", r"to = 'l/\2'"),
        (r"^l_(\d+)/(.)$", r"concat = { axis = 0, by = '\1' }", r"to = 'l/\2'"),
        (r"^l_(\d+)/", r"to = 'l/{\1 + 1}/'"),
        (r"^l_(\d+)/", r"to = 'l/{inner}/'", "nest = { sizes = [4], flat = 1 }"),
        (r"^l_(\d+)/(.)$", r"unstack = { axis = 0, into = 'l/{\1}/\2/{}' }"),
    ],
)
def test_numbers_with_zeros_ahead_are_not_made_one(tmp_path, lines):
    """Although the leaves of `l_1` and `l_01` have other names."""
    one = np.ones(2)
    tree = {"l_0": {"a": one, "b": one}, "l_1": {"a": one}, "l_01": {"b": one}}
    with pytest.raises(reshard.TreeMismatchError) as error:
        remapped(tmp_path, tree, rule(*lines))
    told = f"rule 1, `{lines[0]}`: l_01 and l_1 have the same number"
    assert told in error.value.problems
    tree = {"l_00": {"a": one, "b": one}, "l_01": {"a": one, "b": one}}
    assert len(remapped(tmp_path, tree, rule(*lines))) in (2, 4, 8)
    tree = {"l_0": {"a": one}, "l_1": {"a": one}, "l_01": {"b": one}}
    assert len(remapped(tmp_path, tree, rule(r"^l_(\d+)/", r"to = 'm/\1/'"))) == 3


# Operations of one rule: in the order in which they are written, by NumPy.


def flat_only(function):
    """An operation on matrices alone."""

    def checked(x):
        if x.ndim != 2:
            raise ValueError("no matrix")
        return function(x)

    return checked


def interleaved(block, rows):
    """An operation on blocks of the first axis, each of which has so many rows for NumPy."""
    return lambda x: np.moveaxis(
        x.reshape(
            -1, rows(block or len(x)), (block or len(x)) // rows(block or len(x)), *x.shape[1:]
        ),
        *(2, 1),
    ).reshape(x.shape)


EACH = {  # its value in a rule, and NumPy's function
    "apply": ("'numpy:square'", np.square),
    "scale": ("3", lambda x: x * np.float32(3)),
    "add": ("1", lambda x: x + np.float32(1)),
    "interleave": ("{ axis = 0, parts = 2 }", interleaved(0, lambda size: 2)),
    "deinterleave": ("{ axis = 0, parts = 2 }", interleaved(0, lambda size: size // 2)),
    "rope": ("{ axis = 0, head_size = 4, to = 'pairs' }", interleaved(4, lambda size: 2)),
    "transpose": ("[1, 0]", flat_only(np.transpose)),
    "reshape": ("[8, -1]", lambda x: x.reshape(8, -1)),
    "pad": (
        "{ widths = [[4, 0], [0, 0]], fill = 2 }",
        flat_only(lambda x: np.concatenate([np.full((4, x.shape[1]), 2, x.dtype), x])),
    ),
    "crop": ("{ widths = [[0, 4], [0, 0]] }", flat_only(lambda x: x[:-4])),
}
MOVES = {*EACH} - {"apply", "scale", "add", "pad"}
ONE = r"'^m_(\d+)/x$'"
BOTH_LEAVES = "['^m_0/x$', '^m_1/x$']"
FORMS = {  # `from`, `to`, the key that makes several leaves of one or the reverse, and its function
    "a leaf": (ONE, r"'n\1/y'", None, lambda m: {f"n{i}/y": x for i, x in enumerate(m)}),
    "a module": (
        r"'^m_(\d+)/'",
        r"'n/\1/'",
        None,
        lambda m: {f"n/{i}/x": x for i, x in enumerate(m)},
    ),
    "copies": (
        *(ONE, r"['n\1', 'k\1']", None),
        lambda m: {f"{k}{i}": x for i, x in enumerate(m) for k in "nk"},
    ),
    "split": (
        *(ONE, None, r"split = { axis = 0, into = ['n\1/p', 'n\1/q'] }"),
        lambda m: {
            f"n{i}/{k}": half
            for i, x in enumerate(m)
            for k, half in zip("pq", np.split(x, 2), strict=True)
        },
    ),
    "unstack": (
        *(ONE, None, r"unstack = { axis = 0, into = 'n\1/{}' }"),
        lambda m: {f"n{i}/{k}": row for i, x in enumerate(m) for k, row in enumerate(x)},
    ),
    "concat": (BOTH_LEAVES, "'n'", "concat = { axis = 0 }", lambda m: {"n": np.concatenate(m)}),
    "stack": (ONE, "'n'", "stack = { axis = 0, by = 1 }", lambda m: {"n": np.stack(m)}),
    "stack of modules": (
        *(r"'^m_(\d+)/'", "'n/'", "stack = { axis = 0, by = 1 }"),
        lambda m: {"n/x": np.stack(m)},
    ),
    "equal": (BOTH_LEAVES, "'n'", "equal = true", lambda m: {"n": m[0]}),
}


@pytest.fixture(scope="module")
def two_leaves(tmp_path_factory):
    """Of one shape, with other values or the same: whole numbers, so that nothing is rounded."""
    folder, rng = tmp_path_factory.mktemp("two"), np.random.default_rng(0)
    x, y = (rng.integers(-9, 9, (16, 24)).astype("f4") for _ in range(2))
    trees = {"unlike": [x, y], "alike": [x, x]}
    for name, pair in trees.items():
        save_pytree(folder / name, {f"m_{i}": {"x": leaf} for i, leaf in enumerate(pair)})
    return folder, trees


@settings(deadline=None, max_examples=examples(600))
@given(
    st.sampled_from([*FORMS]),
    st.lists(st.sampled_from([*EACH]), min_size=1, max_size=4, unique=True),
    st.integers(0, 4),
)
@example("concat", ["transpose"], 0)
@example("a leaf", ["add", "scale"], 0)
@example("stack of modules", ["reshape", "transpose", "interleave"], 1)
@example("split", ["add", "scale", "apply"], 2)
def test_operations_of_a_rule_are_done_as_they_are_written(two_leaves, form, each, place):
    """Or the rule is refused, and those of the hint do it."""
    folder, trees = two_leaves
    sources, to, regroup, function = FORMS[form]
    tree = "alike" if form == "equal" else "unlike"
    place = min(place, len(each)) if regroup else len(each)
    lines = [f"{key} = {EACH[key][0]}" for key in each]
    lines[place:place] = [regroup] if regroup else []
    lines = [f"from = {sources}", "optional = true", *lines, f"to = {to}" if to else ""]
    text = "\n".join(["[[rule]]", *lines, ""])
    found: dict | None = dict(enumerate(trees[tree]))
    try:
        for number, key in enumerate([*each, None]):
            found = function([*found.values()]) if number == place else found
            found = {name: EACH[key][1](x) for name, x in found.items()} if key else found
    except ValueError:
        found = None
    ckpt, kind = reshard.open(folder / tree), reshard.ArgumentError
    try:
        made = reshard.remap(ckpt, map_of(folder, text))
    except reshard.TreeMismatchError:
        assert found is None
        return
    except kind as error:
        assert error.problems[0].startswith("rule 1, `")
        first, *rules = error.hints[0].splitlines()
        assert first == "rule 1 in the order in which it is written:" and len(error.hints) == 1
        assert rules.count("      [[rule]]") > 1
        text = map_of(folder, "\n".join(rules))
        if found is None:
            with pytest.raises(reshard.TreeMismatchError):
                reshard.remap(ckpt, text)
            return
        made = reshard.remap(ckpt, text)
    assert found is not None
    got = values(made)
    assert got.keys() == found.keys()
    for name, expected in found.items():
        np.testing.assert_array_equal(got[name], expected, name)


def test_operations_that_make_the_same_in_either_order_stand_in_either(tmp_path):
    """A constant and a move; all others in one order."""

    def accepted(*keys):
        lines = [f"{key} = {EACH[key][0]}" for key in keys]
        try:
            read_map(map_of(tmp_path, rule("^x$", *lines, "to = 'y'")))
        except reshard.ArgumentError:
            return False
        return True

    for one, other in itertools.combinations(EACH, 2):
        assert accepted(one, other)
        assert accepted(other, one) == (one in ("scale", "add") and other in MOVES)


def test_a_rule_in_another_order_is_refused_with_two(tmp_path):
    lines = ["when = 1", "reshape = [2, 3]", "transpose = [1, 0]", "add = 1", "scale = 2"]
    with pytest.raises(reshard.ArgumentError) as error:
        read_map(map_of(tmp_path, rule("^x$", *lines, "to = ['y', 'z']")))
    assert str(error.value) == (
        f"{tmp_path}/map.toml: its rules cannot be read\n"
        "  rule 1, `^x$`: it is done in the order `scale`, `add`, `transpose`, `reshape`: write it "
        "so, or write two rules\n\n"
        "hint: rule 1 in the order in which it is written:\n"
        "      [[rule]]\n      from = '^x$'\n      when = 1\n      reshape = [2, 3]\n      \n"
        "      [[rule]]\n      from = '^x$'\n      when = 1\n      transpose = [1, 0]\n"
        "      add = 1\n      \n"
        "      [[rule]]\n      from = '^x$'\n      when = 1\n      scale = 2\n"
        "      to = ['y', 'z']"
    )
    with pytest.raises(reshard.ArgumentError) as error:
        read_map(map_of(tmp_path, rule("(", "add = 1", "scale = 2")))
    assert len(error.value.hints) == 1


def test_a_name_that_the_map_and_the_config_define_has_one_value(tmp_path):
    config = {
        "hidden_size": 48,
        "num_attention_heads": 4,
        "head_dim": 16,
        "layers": 2,
        "tied": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    lines = ["head_dim = 'hidden_size // num_attention_heads'", "layers = 3", "tied = 0", "k = 1"]
    names = rule("^x$", "scale = 'head_dim ** -0.5'", "to = 'y'")
    ckpt = reshard.open(save_pytree(tmp_path / "in", {"x": np.ones(1)}))
    with pytest.raises(reshard.ArgumentError) as error:
        reshard.remap(ckpt, map_of(tmp_path, "\n".join(["[vars]", *lines, names])), config=tmp_path)
    assert error.value.problems == (
        "the file: `vars`: `head_dim` is 12, but config.json has 16",
        "the file: `vars`: `layers` is 3, but config.json has 2",
        "the file: `vars`: `tied` is 0, but config.json has 1",
    )
    same = f"[vars]\nhead_dim = '4 * num_attention_heads'\nlayers = 2.0\n{names}"
    assert reshard.remap(ckpt, map_of(tmp_path, same), config=tmp_path)["y"].read() == [0.25]
    (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": None}))
    own = map_of(tmp_path, "\n".join(["[vars]", lines[0], names]))
    np.testing.assert_array_equal(reshard.remap(ckpt, own, config=tmp_path)["y"].read(), [12**-0.5])


def test_the_example_of_the_help_takes_the_size_of_a_head_from_the_config(tmp_path):
    (example,) = re.findall(
        r"```toml\n(\[vars\].*?)```", shown(tmp_path, "help", "maps"), re.DOTALL
    )
    config = {"hidden_size": 24, "num_attention_heads": 2, "head_dim": 16, "vocab_size": 20}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    embed, query = (rng.normal(size=size).astype("f4") for size in ((20, 24), (32, 24)))
    names = ("model.embed_tokens.weight", "model.layers.3.self_attn.q_proj.weight")
    ckpt = opened(tmp_path, dict(zip(names, (embed, query), strict=True)))
    found = values(reshard.remap(ckpt, map_of(tmp_path, example)))
    pairs = query.reshape(2, 2, 8, 24).swapaxes(1, 2).reshape(32, 24)
    np.testing.assert_array_equal(found.pop("params/layers_3/query/kernel"), pairs.T * 0.25)
    padded = np.concatenate([embed, np.zeros((108, 24), "f4")])
    for name in ("params/embed/embedding", "params/head/embedding"):
        np.testing.assert_array_equal(found.pop(name), padded)
    assert not found


WRONG = r"""
[vars]
a = 3
b = 'c + 1'
[[rule]]
from = '^x$'
scale = 0
[[rule]]
from = '^x$'
interleave = { axis = 0, parts = 'a / 2', whole = true }
rope = { axis = 0, head_size = 'd', to = 'quarters' }
[[rule]]
from = '^x$'
fill = { value = 1, shape = [1], dtype = 'float33' }
to = 'y'
[[rule]]
from = '^x$'
equal = true
to = 'z'
[[rule]]
when = 'a - 3'
from = '('
[[rule]]
from = '^x$'
add = '9 ** 9 ** 9'
pad = { axis = 0, to = 'f("os")' }
[[rule]]
to = 'y'
fill = { value = 1, shape = [1], dtype = 'float32', count = 4611686018427387904 }
"""
TOLD = """
the file: `vars`: `b`: `c + 1`: neither `[vars]` nor the config has `c`
rule 1, `^x$`: `scale`: `by` must be a number other than 0, not 0
rule 2, `^x$`: `interleave`: `parts` must be a whole number, not 1.5
rule 2, `^x$`: `interleave`: `whole` is not known
rule 2, `^x$`: `rope`: `head_size`: `d`: neither `[vars]` nor the config has `d`
rule 2, `^x$`: `rope`: `to` must be `pairs` or `halves`, not 'quarters'
rule 3, `^x$`: `fill`: `dtype` must be a dtype, not 'float33'
rule 3, `^x$`: `fill` needs either `to` or `from`
rule 4, `^x$`: `equal` needs a list in `from`
rule 6, `^x$`: `add`: `9 ** 9 ** 9` has no value: math range error
rule 6, `^x$`: `pad`: `to`: `f("os")` is not arithmetic: `+ - * / ** // %` and parentheses are all
rule 6, `^x$`: `pad`: `value` is missing
rule 7: `fill`: `count` must be a number from 1 to 65536, not 4611686018427387904
"""


def test_what_is_wrong_with_numbers_and_operations(tmp_path):
    with pytest.raises(reshard.ArgumentError) as error:
        remapped(tmp_path, {"x": np.ones(1)}, WRONG)
    assert error.value.problems == tuple(TOLD.strip().splitlines())


BOTH = rule("^y$", "to = 'new'") + rule("^x$", "{}", "to = 'z'")
FILL = "[[rule]]\nto = 'new'\nfill = {{ value = {}, shape = [{}], dtype = '{}' }}\n"
REST = rule("^.$", r"to = 'a\g<0>'")
MISFITS = [
    *(
        (BOTH.format(line), told)
        for line, told in (
            ("pad = { axis = 0, to = 4, value = 0 }", "the size 6, more than 4: `pad` only"),
            ("pad = { axis = 1, from = 3, to = 4, value = 0 }", "axis 1 has the size 2, not 3"),
            ("rope = { axis = 0, head_size = 4, to = 'pairs' }", "of 4, each of 2 equal parts"),
            ("interleave = { axis = 1, parts = 3 }", "cannot be divided into 3 equal parts"),
        )
    ),
    (BOTH.format("") + FILL.format(0, 1, "float32"), "rule 3, `new`: fill -> new: that leaf"),
    *(
        (FILL.format(value, 1, dtype) + REST, f"new: the constant .* does not exist in {dtype}")
        for value, dtype in (("1.5", "int8"), ("300", "int8"), ("1e300", "bfloat16"), ("2", "bool"))
    ),
    (FILL.format(1, 0, "int8") + REST, r"new: a new array of \[0\] has no elements"),
    (FILL.format(1, f"{2**62}, 4", "int8") + REST, "more than any"),
]


def test_sizes_that_do_not_fit(tmp_path):
    ckpt = opened(tmp_path, {"x": np.ones((6, 2), "f4"), "y": np.ones(3, "f4")})
    for rules, told in MISFITS:
        with pytest.raises(reshard.TreeMismatchError, match=told):
            reshard.remap(ckpt, map_of(tmp_path, rules))
    for dtype in ("O", "datetime64[s]", "S3"):
        with pytest.raises(reshard.ArgumentError, match="a dtype"):
            reshard.remap(ckpt, map_of(tmp_path, FILL.format(1, 1, dtype)))
    with pytest.raises(reshard.TreeMismatchError, match="the checkpoint holds no array"):
        reshard.remap(ckpt.replace({}), map_of(tmp_path, FILL.format(1, 1, "int8")))
    twice = rule("^x$", "to = 'x'") + "[[rule]]\nfrom = ['^y$', 'y']\n"
    twice += "fill = { value = 1, shape = [3], dtype = 'float32' }"
    assert [*reshard.remap(ckpt, map_of(tmp_path, twice))] == [("x",)]
    padded = BOTH.format("pad = { axis = 0, to = 8, value = 0 }")
    with pytest.raises(reshard.TreeMismatchError, match="`pad` lacks `from`, the size before it"):
        reshard.remap(ckpt, map_of(tmp_path, padded), reverse=True)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(4, 2, rngs=rngs)
        self.head = nnx.Param(jnp.zeros((4, 2)))
        self.norm = nnx.Param(jnp.zeros(2))
        self.bias = nnx.Param(jnp.zeros(3))


def trained():
    model = Net(nnx.Rngs(0))
    return {"model": model, "optimizer": nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)}


def test_computed_leaves_of_a_model_and_back_by_the_record_and_by_the_map(tmp_path):
    rng = np.random.default_rng(4)
    table, scale, unused = (rng.normal(size=s).astype("f4") for s in ((4, 2), (2,), (2,)))
    unused[:] = 3
    params = {"embed": {"embedding": table}, "norm": {"scale": scale}, "unused": unused}
    rules = [
        {"from": "^params/embed/embedding$", "to": ["embed/embedding", "head"]},
        {"from": "^params/norm/scale$", "scale": -4, "to": "norm"},
        {"to": "bias", "fill": {"value": 2, "shape": [3], "dtype": "float32"}},
        {"from": "^params/unused$", "fill": {"value": 3, "shape": [2], "dtype": "float32"}},
    ]
    (tmp_path / "map.toml").write_bytes(fuzz_maps.document({"to": "nnx", "rule": rules}))
    source = reshard.open(save_pytree(tmp_path / "linen", {"params": params}))
    made = conversion(source, "nnx", Net, map_file=tmp_path / "map.toml")
    expected = {"embed/embedding": table, "head": table, "norm": scale * np.float32(-4)}
    expected["bias"] = np.full(3, 2, "f4")
    expected = {f"{name}/value": value for name, value in expected.items()}
    assert_bits(values(made.checkpoint), expected)
    (tmp_path / "again.toml").write_text(made.map_text())
    again = conversion(source, "nnx", Net, map_file=tmp_path / "again.toml")
    assert_bits(values(again.checkpoint), expected)
    reshard.save(made.checkpoint, tmp_path / "nnx")
    assert reshard.verify(tmp_path / "nnx").ok
    for options in ({}, {"map_file": tmp_path / "again.toml", "layout": "nnx-state"}):
        back = reshard.to_linen(tmp_path / "nnx", **options)
        assert reshard.diff(source, back, values=True).equal
    state = {"params": params, "step": np.int32(3), "opt_state": optax.adam(1).init(params)}
    training = reshard.open(save_pytree(tmp_path / "training", state))
    with pytest.raises(reshard.TreeMismatchError) as error:
        reshard.to_nnx(training, trained, map_file=tmp_path / "map.toml")
    stuck = "opt_state/0/mu/norm/scale: its parameter is scaled by -4, and optimizer state cannot"
    assert any(problem.startswith(stuck) for problem in error.value.problems)
    (hint,) = error.value.hints
    assert "drop=" in hint and "init=" in hint


def pad(value):
    return rule("^x$", f"pad = {{ axis = 0, from = 2, to = 3, value = {value} }}", "to = 'x'")


E4M3, NOT_IN = ml_dtypes.float8_e4m3fn, "x: the constant {} of the map does not exist in {}"


@pytest.mark.parametrize(
    "dtype, cast, value, told",
    [
        ("f4", "float8_e4m3fn", 500, NOT_IN.format(500, "float8_e4m3fn")),
        ("f4", "float16", 1e5, NOT_IN.format("100000.0", "float16")),
        (BF16, "float32", 0.1, "x: padding of 0.1 would be rounded to bfloat16 before the cast"),
        (E4M3, None, 1e-9, NOT_IN.format("1e-09", "float8_e4m3fn")),
        ("f4", "float8_e5m2", 0.125, ""),
        ("f4", "bfloat16", 0.1, ""),
    ],
)
def test_padding_that_is_cast(tmp_path, dtype, cast, value, told):
    tree = {"x": np.ones(2, dtype)}
    if told:
        with pytest.raises(reshard.TreeMismatchError, match=told):
            remapped(tmp_path, tree, pad(value), cast)
    else:
        made = remapped(tmp_path, tree, pad(value), cast)["x"].read()
        assert made[2] == np.array(value).astype(made.dtype)


def test_padding_of_nan_is_cut_off_again(tmp_path):
    made = remapped(tmp_path, {"x": np.ones(2, "f4")}, pad("nan"))
    back = reshard.remap(made, tmp_path / "map.toml", reverse=True)
    assert back["x"].read().tolist() == [1, 1]


@pytest.mark.parametrize(
    "leaf, value, told",
    [
        ("text", 0, "x: it is no array, but string"),
        (None, 0, "x: it is no array, but None"),
        (0.0, 0, "x: it is no array, but a Python scalar"),
        (np.zeros((), "i4"), 0, "x: it is int32[], not float32"),
        (np.array(1e-45, "f4"), 0, "x: not 0"),
    ],
)
def test_only_a_constant_is_dropped(tmp_path, leaf, value, told):
    fill = f"fill = {{ value = {value}, shape = [], dtype = 'float32' }}"
    rules = rule("^x$", fill) + rule("^y$", "to = 'y'")
    with pytest.raises(reshard.TreeMismatchError) as error:
        remapped(tmp_path, {"x": leaf, "y": np.ones(1)}, rules)
    assert error.value.problems == (told,)


@pytest.mark.parametrize("value", [0.0, -0.0])
def test_a_zero_of_either_sign_is_dropped_and_one_of_this_sign_is_filled(tmp_path, value):
    fill = f"fill = {{ value = {value}, shape = [2], dtype = 'float32' }}\n"
    rules = rule("^y$", "to = 'y'") + f"[[rule]]\nto = 'x'\n{fill}"
    made = remapped(tmp_path, {"y": np.ones(1)}, rules)
    np.testing.assert_array_equal(np.signbit(made["x"].read()), np.signbit([value] * 2))
    assert [*reshard.remap(made, tmp_path / "map.toml", reverse=True)] == [("y",)]
    tree = {"x": np.array([0.0, -0.0], "f4"), "y": np.ones(1)}
    assert [*remapped(tmp_path, tree, rule("^y$", "to = 'y'") + rule("^x$", fill))] == [("y",)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2"])
def test_padding_of_a_zero_of_either_sign_is_cut_off(tmp_path, dtype):
    widths = "pad = { axis = 0, from = 2, to = 4, value = 0 }\nto = 'x'"
    made = remapped(tmp_path, {"x": jnp.ones(2, dtype)}, rule("^x$", widths))
    trained = reshard.open(
        save_pytree(tmp_path / "trained", {"x": jnp.array([1, 2, 0.0, -0.0], dtype)})
    )
    np.testing.assert_array_equal(made["x"].read(), jnp.array([1, 1, 0, 0], dtype))
    back = reshard.remap(trained, tmp_path / "map.toml", reverse=True)
    np.testing.assert_array_equal(back["x"].read(), jnp.array([1, 2], dtype))


def test_a_list_in_another_order_stays_a_list(tmp_path):
    tree = {"l": [np.zeros(1), np.ones(1), np.full(1, 2)]}
    made = remapped(tmp_path, tree, rule(r"^l/(\d)$", r"to = 'l/{2 - \1}'"))
    assert [(path, made[path].read()[0]) for path in sorted(made)] == [
        (("l", 0), 2),
        (("l", 1), 1),
        (("l", 2), 0),
    ]
    with pytest.raises(reshard.TreeMismatchError, match="a list would lose positions"):
        remapped(tmp_path, tree, rule(r"^l/(\d)$", r"to = 'l/{1 + \1}'"))


EQUAL = "[[rule]]\nfrom = ['^x$', '^y$']\nequal = true\nto = 'z'\n"


@pytest.mark.parametrize(
    "cut", ["crop = { widths = [[0, 2]] }\nto = 'z'", "unstack = { axis = 0, into = 'z_{}' }"]
)
def test_equal_arrays_are_compared_before_they_are_cut(tmp_path, cut):
    x = np.arange(4.0)
    tree = {"x": x, "y": np.array([0, 1, 2, -3.0])}
    with pytest.raises(reshard.TreeMismatchError, match="must be equal differ") as error:
        remapped(tmp_path, tree, EQUAL + rule("^z$", cut))
    assert error.value.problems == ("x", "y")
    made = remapped(tmp_path, {"x": x, "y": x}, EQUAL + rule("^z$", cut))
    assert sum(made[path].read().sum() for path in made) in (1, 6)


@pytest.mark.parametrize("dtype", ["f2", BF16, "f4"])
def test_no_factor_makes_an_element_zero(tmp_path, dtype):
    x = np.array([1.5, 0, -0.0, 2], dtype)
    with pytest.raises(reshard.TreeMismatchError, match="underflow in"):
        computed(tmp_path, x, "scale = 1e-300")[0]["y"].read()
    made, _ = computed(tmp_path, x, "scale = { by = 1e-300, rounds = true }")
    assert not made["y"].read().any()


def test_a_computed_leaf_is_joined_with_a_stored_one(tmp_path):
    tree = {name: np.array([[1.25, 3]], BF16) for name in "xyuv"}
    rules = "".join(rule(f"^{x}$", "scale = 0.5", f"to = '{x}'") for x in "xu")
    rules += "[[rule]]\nfrom = ['^x$', '^y$']\nconcat = { axis = 0, sizes = [1, 1] }\nto = 'c'\n"
    rules += "[[rule]]\nfrom = ['^v$', '^u$']\nstack = { axis = 0 }\nto = 's'\n"
    made = remapped(tmp_path, tree, rules)
    expected = {
        "c": np.array([[0.625, 1.5], [1.25, 3]], BF16),
        "s": np.array([[[1.25, 3]], [[0.625, 1.5]]], BF16),
    }
    assert_bits(values(made), expected)
    reshard.save(made, tmp_path / "out")
    assert_bits(values(reshard.open(tmp_path / "out")), expected)
    back = reshard.remap(made, tmp_path / "map.toml", reverse=True)
    assert_bits(values(back), tree)


def test_true_in_a_config_is_1_and_a_doubled_brace_is_text(tmp_path):
    (tmp_path / "config.json").write_text('{"tied": true, "untied": false}')
    rules = "[vars]\nk = 3\n" + rule("^x$", "to = ['{{k}}', 'b_{k}']", "when = 'tied'")
    rules += rule("^x$", "to = 'c'", "when = 'untied'")
    ckpt = reshard.open(save_pytree(tmp_path / "in", {"x": np.ones(1)}))
    made = reshard.remap(ckpt, map_of(tmp_path, rules), config=tmp_path)
    assert [*made] == [("{k}",), ("b_3",)]


@pytest.mark.parametrize("name", ["adam", "mu"])
@pytest.mark.parametrize("inside", [True, False])
def test_state_is_known_by_its_structure(tmp_path, name, inside):
    weights = {"a": {"w": np.ones(3, "f4")}, "b": np.ones(2, "f4")}
    tree = {"params": weights, name: {"params": weights} if inside else weights}
    rules = rule("^params/a/w$", "scale = 2", "to = 'params/a/w'")
    stay = rule(f"^({name}/.*|params/b)$", r"to = '\1'")
    path = f"{name}/params/a/w" if inside else f"{name}/a/w"
    told = f"{path}: it looks like optimizer state of params/a/w"
    with pytest.raises(reshard.TreeMismatchError, match=told):
        remapped(tmp_path, tree, rules + stay)
    stay = rule("^params/b$", "to = 'params/b'") + rule(f"^{name}/", "drop = true")
    assert len(remapped(tmp_path, tree, rules + stay)) == 2


def test_towers_do_not_mirror_each_other(tmp_path):
    tree = {"q": {"w": np.ones(3, "f4")}, "k": {"w": np.ones(3, "f4")}}
    rules = rule("^q/w$", "scale = 2", "to = 'q/w'") + rule("^k/w$", "to = 'k/w'")
    assert len(remapped(tmp_path, tree, rules)) == 2
