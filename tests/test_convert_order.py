"""What may not go by the order of modules: a conversion is right in every leaf, or it abstains."""

import functools

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.traverse_util import unflatten_dict
from layouts import save_standard as saved

import reshard
from reshard.tree import split_path

DENSE = {"kernel": (3, 3), "bias": (3,)}
WIDE = {"kernel": (3, 4), "bias": (4,)}
NORM = {"scale": (3,), "bias": (3,)}
MOVED = "the map puts other leaves of"
RENAME = "[[rule]]\nfrom = '^{}'\nto = '{}'\n"
OTHER_ORDER = "the map has others beside them in another order than NNX defines them in"


def linear():
    return nnx.Linear(3, 3, rngs=nnx.Rngs(0))


def batch_norm():
    return nnx.BatchNorm(3, rngs=nnx.Rngs(0))


def random_tree(modules):
    """Path of a module -> its leaves' shapes, as nested dicts of random arrays."""
    rng = np.random.default_rng(0)
    leaves = {
        f"{path}/{name}": layouts.random_array(rng, shape)
        for path, shapes in modules.items()
        for name, shape in shapes.items()
    }
    return unflatten_dict(leaves, sep="/")


def at(tree, path):
    for key in split_path(path):
        tree = tree[key]
    return tree


def loaded(ckpt, path):
    reshard.save(ckpt, path)
    return layouts.load_standard(path)


def renames(pairs, form="[[rule]]\nfrom = '^{}(/|$)'\nto = '{}\\1'\n"):
    return "".join(form.format(*pair) for pair in pairs)


def outcome(convert, truth, tmp_path):
    """Why a conversion abstains; empty if it converts, and every leaf is the one of the truth.

    Args:
      convert: makes the converted checkpoint.
      truth: printed path in the result -> the right array.
      tmp_path: an empty directory.
    """
    try:
        ckpt = convert()
    except reshard.TreeMismatchError as error:
        return str(error)
    got = loaded(ckpt, tmp_path / "converted")
    expected = {path: layouts.bits(array) for path, array in truth.items()}
    assert {path: layouts.bits(at(got, path)) for path in truth} == expected
    return ""


def both_ways(linen, model, pairs, rules, tmp_path):
    """What comes of a map for the way to NNX, of the opposite one run backwards, and of both for
    the way back: "" or why it abstains.

    Args:
      linen: Linen's variables.
      model: the class of the NNX model.
      pairs: printed path of a module of Linen's -> of NNX's, the true ones.
      rules: the pairs `(from, to)` of those that the map has, in text.
      tmp_path: an empty directory.
    """
    truth = {
        (f"{collection}/{one}/{name}", f"{other}/{name}/value"): array
        for one, other in pairs.items()
        for collection in linen
        for name, array in _module(linen[collection], one).items()
    }
    source = saved(tmp_path / "linen", linen)
    forth, back = tmp_path / "forth.toml", tmp_path / "back.toml"
    forth.write_text('to = "nnx"\n' + renames(rules))
    back.write_text('to = "linen"\n' + renames([pair[::-1] for pair in rules]))
    nnx_leaves = {path: array for (_, path), array in truth.items()}
    trained = saved(tmp_path / "nnx", unflatten_dict(nnx_leaves, sep="/"))
    options = {"source": model, "layout": "nnx-state"}
    return [
        outcome(
            lambda make=make, file=file: make(map_file=file),
            {pair[side]: array for pair, array in truth.items()},
            tmp_path / f"{side}-{file.stem}",
        )
        for side, make in enumerate(
            (
                functools.partial(reshard.to_linen, trained, linen, **options),
                functools.partial(reshard.to_nnx, source, model),
            )
        )
        for file in (forth, back)
    ]


def _module(tree, path):
    for key in path.split("/"):
        tree = tree.get(key, {})
    return {name: value for name, value in tree.items() if not isinstance(value, dict)}


# One module has one counterpart


class Block(nnx.Module):
    """The shortcut is made first in Linen, and defined last here."""

    def __init__(self):
        self.conv1, self.bn1 = linear(), batch_norm()
        self.conv2, self.bn2 = linear(), batch_norm()
        self.shortcut = nnx.Sequential(linear(), batch_norm())


class Residual(nnx.Module):
    def __init__(self):
        self.block = Block()


RESIDUAL = {
    "block/Dense_0": "block/shortcut/layers/0",
    "block/Dense_1": "block/conv1",
    "block/Dense_2": "block/conv2",
    "block/BatchNorm_0": "block/shortcut/layers/1",
    "block/BatchNorm_1": "block/bn1",
    "block/BatchNorm_2": "block/bn2",
}


def residual():
    return random_tree(
        {f"params/block/Dense_{i}": DENSE for i in range(3)}
        | {f"params/block/BatchNorm_{i}": NORM for i in range(3)}
        | {f"batch_stats/block/BatchNorm_{i}": {"mean": (3,), "var": (3,)} for i in range(3)}
    )


def test_statistics_do_not_leave_their_parameters(tmp_path):
    rules = [
        (f"params/{one}/{name}", f"{other}/{name}")
        for one, other in RESIDUAL.items()
        for name in (NORM if "Norm" in one else DENSE)
    ]
    for text in both_ways(residual(), Residual, RESIDUAL, rules, tmp_path):
        assert f"block/BatchNorm_0, perhaps block/shortcut/layers/1: {MOVED} it there" in text
        assert f"block/BatchNorm_2, perhaps block/bn2: {MOVED} it there" in text


def test_a_map_of_one_class_contradicts_the_order_of_another_at_other_depths(tmp_path):
    rules = [(f"params/{one}", other) for one, other in RESIDUAL.items() if "Dense" in one]
    for text in both_ways(residual(), Residual, RESIDUAL, rules, tmp_path):
        assert (
            "block/BatchNorm_0, block/BatchNorm_1 and block/BatchNorm_2, perhaps block/bn1, "
            f"block/bn2 and block/shortcut/layers/1: {OTHER_ORDER}"
        ) in text


def test_what_an_operation_fixes_contradicts_an_order_too(tmp_path):
    linen = random_tree(
        {f"params/Dense_{i}": DENSE for i in range(2)}
        | {f"params/LayerNorm_{i}": NORM for i in range(2)}
    )

    class Turned(nnx.Module):
        def __init__(self):
            self.b, self.b_norm = linear(), nnx.LayerNorm(3, rngs=nnx.Rngs(0))
            self.a, self.a_norm = linear(), nnx.LayerNorm(3, rngs=nnx.Rngs(0))

    source = saved(tmp_path / "linen", linen)
    rule = "[[rule]]\nfrom = '^params/{}/kernel$'\ntranspose = [1, 0]\nto = '{}/kernel'\n"
    pairs = [("Dense_0", "a"), ("Dense_1", "b")]
    file = tmp_path / "map.toml"
    file.write_text(
        renames(pairs, rule)
        + renames(pairs, "[[rule]]\nfrom = '^params/{}/bias$'\nto = '{}/bias'\n")
    )
    text = outcome(lambda: reshard.to_nnx(source, Turned, map_file=file), {}, tmp_path)
    assert f"LayerNorm_0 and LayerNorm_1, perhaps b_norm and a_norm: {OTHER_ORDER}" in text
    # The kernels alone: the biases belong to them.
    file.write_text(renames(pairs, rule))
    text = outcome(lambda: reshard.to_nnx(source, Turned, map_file=file), {}, tmp_path)
    assert f"Dense_0, perhaps a: {MOVED} it there" in text


@pytest.mark.parametrize("known", [False, True])
def test_axes_that_a_map_moves_in_one_layer_are_open_in_its_like(known, tmp_path):
    """Square weights: no shape tells that the others lie as the first one does."""
    names = ("first", "second", "third")
    linen = random_tree({f"params/{name}": DENSE for name in names} | {"params/wide": WIDE})

    class Turned(nnx.Module):
        def __init__(self):
            self.first, self.second, self.third = linear(), linear(), linear()
            self.wide = nnx.Linear(3, 4, rngs=nnx.Rngs(0))

    source = saved(tmp_path / "linen", linen)
    rule = "[[rule]]\nfrom = '^params/{}/kernel$'\ntranspose = [1, 0]\nto = '{}/kernel'\n"
    if known:
        rule = rule.replace("to = '", "to = 'params/")
    file = tmp_path / "map.toml"
    file.write_text(renames([("first", "first")], rule) + renames([("params/third", "third")]))
    text = outcome(lambda: reshard.to_nnx(source, Turned, map_file=file), {}, tmp_path)
    why = "the map moves the axes of others of its class and shape"
    assert f"\n  params/second/kernel, perhaps second/kernel: {why}\n" in text
    assert text.count("perhaps") == 1


def test_a_path_does_not_keep_a_leaf_from_the_rest_of_its_module(tmp_path):
    linen = random_tree({"params/a": DENSE, "params/b": DENSE})

    class Same(nnx.Module):
        def __init__(self):
            self.a, self.b = linear(), linear()

    source = saved(tmp_path / "linen", linen)
    form = "[[rule]]\nfrom = '^params/{}/kernel$'\nto = '{}/kernel'\n"
    (tmp_path / "map.toml").write_text(renames([("a", "b"), ("b", "a")], form))
    text = outcome(
        lambda: reshard.to_nnx(source, Same, map_file=tmp_path / "map.toml"), {}, tmp_path
    )
    assert f"a, perhaps b: {MOVED} it there" in text
    assert f"b, perhaps a: {MOVED} it there" in text


class Pair(nnx.Module):
    def __init__(self):
        self.x, self.x_norm = linear(), nnx.LayerNorm(3, rngs=nnx.Rngs(0))
        self.y, self.y_norm = linear(), nnx.LayerNorm(3, rngs=nnx.Rngs(0))


class Pairs(nnx.Module):
    def __init__(self):
        self.first, self.second = Pair(), Pair()


def pairs(names=("Pair_0", "Pair_1")):
    inner = {"Dense_0": DENSE, "Dense_1": DENSE, "LayerNorm_0": NORM, "LayerNorm_1": NORM}
    return random_tree({f"params/{n}/{m}": s for n in names for m, s in inner.items()})


def test_what_is_deep_in_a_module_fixes_the_whole_of_it(tmp_path):
    source = saved(tmp_path / "linen", pairs())
    rules = [
        (f"params/Pair_{i}/Dense_{j}", f"{where}/{'xy'[j]}")
        for i, where in enumerate(["second", "first"])
        for j in range(2)
    ]
    (tmp_path / "map.toml").write_text(renames(rules))
    text = outcome(
        lambda: reshard.to_nnx(source, Pairs, map_file=tmp_path / "map.toml"), {}, tmp_path
    )
    assert "Pair_0" in text
    assert MOVED in text or OTHER_ORDER in text


@pytest.mark.parametrize("names", [("Pair_0", "Pair_1"), ("first", "second")])
def test_an_order_that_is_contradicted_in_one_module_decides_nothing_in_its_like(names, tmp_path):
    source = saved(tmp_path / "linen", pairs(names))
    rules = [(f"params/{names[0]}/Dense_0", "first/y"), (f"params/{names[0]}/Dense_1", "first/x")]
    rules += [
        (f"params/{names[0]}/LayerNorm_0", "first/y_norm"),
        (f"params/{names[0]}/LayerNorm_1", "first/x_norm"),
    ]
    (tmp_path / "map.toml").write_text(renames(rules))
    text = outcome(
        lambda: reshard.to_nnx(source, Pairs, map_file=tmp_path / "map.toml"), {}, tmp_path
    )
    for kind, inner in (("Dense", "second/x and second/y"), ("LayerNorm", "second/x_norm")):
        assert f"{names[1]}/{kind}_0 and {names[1]}/{kind}_1, perhaps {inner}" in text
    assert text.count(OTHER_ORDER) == 2


def test_an_order_that_is_contradicted_decides_nothing_in_its_like_elsewhere(tmp_path):
    source = saved(tmp_path / "linen", pairs())
    rules = [("params/Pair_0/Dense_0", "first/y"), ("params/Pair_0/Dense_1", "first/x")]
    rules += [("params/Pair_1", "params/second")]
    (tmp_path / "map.toml").write_text(renames(rules))
    text = outcome(
        lambda: reshard.to_nnx(source, Pairs, map_file=tmp_path / "map.toml"), {}, tmp_path
    )
    for inner in ("x and second/y", "x_norm and second/y_norm"):
        kind = "LayerNorm" if "norm" in inner else "Dense"
        told = f"second/{kind}_0 and second/{kind}_1, perhaps second/{inner}: {OTHER_ORDER}"
        assert told in text


def test_a_map_that_agrees_leaves_the_rest_to_the_order_in_both_directions(tmp_path):
    true = {
        f"Pair_{i}/{kind}_{j}": f"{where}/{'xy'[j]}{suffix}"
        for i, where in enumerate(["first", "second"])
        for kind, suffix in (("Dense", ""), ("LayerNorm", "_norm"))
        for j in range(2)
    }
    rules = [("params/Pair_0/Dense_0", "first/x"), ("params/Pair_1/LayerNorm_1", "second/y_norm")]
    assert both_ways(pairs(), Pairs, true, rules, tmp_path) == [""] * 4


@pytest.mark.parametrize("to", ["nnx", "linen"])
def test_a_map_that_is_run_backwards_leaves_nothing_out(to, tmp_path):
    linen, there = {"params/a": DENSE}, {"first": DENSE}
    extra = "params/more/bias" if to == "nnx" else "more/bias"
    pair = ("params/a/", "first/")[:: 1 if to == "linen" else -1]
    one, other = (linen, there)[:: 1 if to == "nnx" else -1]
    source = random_tree({**one, extra.removesuffix("/bias"): {"bias": (3,)}})
    file = tmp_path / "map.toml"
    file.write_text(f"to = '{'linen' if to == 'nnx' else 'nnx'}'\n" + renames([pair], RENAME))
    convert = reshard.to_nnx if to == "nnx" else reshard.to_linen
    layout = "linen-variables" if to == "nnx" else "nnx-pure-dict"
    text = outcome(
        lambda: convert(
            saved(tmp_path / "source", source), random_tree(other), map_file=file, layout=layout
        ),
        {},
        tmp_path,
    )
    told = "more: NNX has nothing for it" if to == "nnx" else f"{extra}  float32[3]: unexpected"
    assert told in text


def test_a_renamed_module_takes_its_statistics_along(tmp_path):
    """A map that gives the parameters alone another name on Linen's side."""

    class Norms(nnx.Module):
        def __init__(self):
            self.a, self.norm = batch_norm(), batch_norm()

    stats = {"mean": (3,), "var": (3,)}
    linen = random_tree(
        {
            "params/BatchNorm_0": NORM,
            "params/BatchNorm_1": NORM,
            "batch_stats/BatchNorm_0": stats,
            "batch_stats/BatchNorm_1": stats,
        }
    )
    source = saved(tmp_path / "linen", linen)
    rules = [("params/BatchNorm_0", "params/norm"), ("params/BatchNorm_1", "params/a")]
    (tmp_path / "map.toml").write_text(renames(rules))
    text = outcome(
        lambda: reshard.to_nnx(source, Norms, map_file=tmp_path / "map.toml"), {}, tmp_path
    )
    assert "BatchNorm_0" in text


def test_names_that_a_map_gives_on_linens_side_fix_where_the_rest_goes(tmp_path):
    class Same(nnx.Module):
        def __init__(self):
            self.a, self.b = linear(), linear()

    linen = random_tree({"params/a": DENSE, "params/b": DENSE})
    source = saved(tmp_path / "linen", linen)
    rules = [("params/a/kernel", "params/b/kernel"), ("params/b/kernel", "params/a/kernel")]
    (tmp_path / "map.toml").write_text(
        renames([(rules[0][0], "params/c/kernel"), rules[1], ("params/c/kernel", rules[0][1])])
    )
    text = outcome(
        lambda: reshard.to_nnx(source, Same, map_file=tmp_path / "map.toml"), {}, tmp_path
    )
    assert f"a, perhaps b: {MOVED} it there" in text


@pytest.mark.parametrize("whole", [True, False])
def test_modules_that_a_map_numbers_anew_go_by_that(whole, tmp_path):
    linen = pairs()["params"]["Pair_0"]
    source = saved(tmp_path / "linen", {"params": linen})
    rules = []
    for kind in ("Dense", "LayerNorm") if whole else ("Dense",):
        one, other = f"params/{kind}_0", f"params/{kind}_1"
        rules += [(one, "params/aside"), (other, one), ("params/aside", other)]
    (tmp_path / "map.toml").write_text(renames(rules))
    true = {"Dense_1": "x", "Dense_0": "y", "LayerNorm_1": "x_norm", "LayerNorm_0": "y_norm"}
    truth = {f"{true[m]}/{n}/value": x for m, held in linen.items() for n, x in held.items()}
    text = outcome(
        lambda: reshard.to_nnx(source, Pair, map_file=tmp_path / "map.toml"), truth, tmp_path
    )
    assert bool(text) == (not whole)
    assert whole or f"LayerNorm_0 and LayerNorm_1, perhaps x_norm and y_norm: {OTHER_ORDER}" in text


def test_a_table_that_a_map_takes_out_of_a_module_leaves_the_rest_where_it_is(tmp_path):
    class Inner(nnx.Module):
        def __init__(self):
            self.a, self.b = linear(), linear()
            self.cls = nnx.Param(jnp.zeros(3))

    class Outer(nnx.Module):
        def __init__(self):
            self.table = nnx.Param(jnp.zeros((5, 3)))
            self.inner = Inner()

    linen = random_tree(
        {
            "params/Inner_0": {"pos": (5, 3), "cls": (3,)},
            "params/Inner_0/Dense_0": DENSE,
            "params/Inner_0/Dense_1": DENSE,
        }
    )
    source = saved(tmp_path / "linen", linen)
    (tmp_path / "map.toml").write_text("[[rule]]\nfrom = '^params/Inner_0/pos$'\nto = 'table'\n")
    inner = linen["params"]["Inner_0"]
    truth = {"table/value": inner["pos"], "inner/cls/value": inner["cls"]}
    truth |= {f"inner/a/{n}/value": x for n, x in inner["Dense_0"].items()}
    truth |= {f"inner/b/{n}/value": x for n, x in inner["Dense_1"].items()}
    assert not outcome(
        lambda: reshard.to_nnx(source, Outer, map_file=tmp_path / "map.toml"), truth, tmp_path
    )


@pytest.mark.parametrize("to", [r"layers/{}/\1", r"params/layers/{}/\1", r"params/layers_{}/\1"])
@pytest.mark.parametrize("known", [False, True])
def test_layers_of_a_scan_become_those_of_a_list_by_any_name(known, to, tmp_path):
    """Which are parts of the same leaves: none of them is another's."""

    class Inner(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.LayerNorm(name="norm")(nn.Dense(3, name="dense")(x)), None

    class Scanned(nn.Module):
        @nn.compact
        def __call__(self, x):
            axes, rngs = {"params": 0}, {"params": True}
            return nn.scan(Inner, axes, split_rngs=rngs, length=2)(name="layers")(x, None)[0]

    class Layer(nnx.Module):
        def __init__(self):
            self.norm, self.dense = nnx.LayerNorm(3, rngs=nnx.Rngs(0)), linear()

    class Listed(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([Layer(), Layer()])

    shapes = {"dense": DENSE, "norm": NORM}
    stacked = {f"params/layers/{k}": {n: (2, *s) for n, s in x.items()} for k, x in shapes.items()}
    linen = random_tree(stacked)
    source = saved(tmp_path / "linen", linen)
    file = tmp_path / "map.toml"
    rule = f"[[rule]]\nfrom = '^params/layers/(.*)$'\nunstack = {{ axis = 0, into = '{to}' }}\n"
    file.write_text(f"to = 'nnx'\n{rule}")
    truth = {
        f"layers/{i}/{k}/{n}/value": linen["params"]["layers"][k][n][i]
        for i in range(2)
        for k, held in shapes.items()
        for n in held
    }
    model = None
    if known:
        model = lambda: Scanned().init(jax.random.key(0), jnp.ones((1, 3)))  # noqa: E731
    assert not outcome(
        lambda: reshard.to_nnx(source, Listed, map_file=file, source=model),
        truth,
        tmp_path / "forth",
    )
    there = {p.removesuffix("/value"): x for p, x in truth.items()}
    trained = {}
    for path, array in there.items():
        *keys, last = path.split("/")
        node = trained
        for key in keys:
            node = node.setdefault(key, {})
        node[last] = array
    back = reshard.to_linen(
        saved(tmp_path / "nnx", trained), model or linen, source=Listed, map_file=file
    )
    layouts.assert_same_tree(loaded(back, tmp_path / "back"), linen)


# Classes are those of flax


class GRUCell(nnx.Module):
    """Gates in an order of its own."""

    def __init__(self):
        self.dense_i = nnx.Linear(2, 9, rngs=nnx.Rngs(0))
        self.dense_h = nnx.Linear(3, 9, use_bias=False, rngs=nnx.Rngs(0))


class Linear(nnx.Module):
    """A kernel with the other axis first."""

    def __init__(self):
        self.kernel, self.bias = nnx.Param(jnp.zeros((3, 3))), nnx.Param(jnp.zeros(3))


class Dense(Linear):
    """Of the name that Linen's layer has."""


class Proj(nn.Module):
    """A layer of the user's, with the leaves of a `Dense`."""

    @nn.compact
    def __call__(self, x):
        ones = nn.initializers.ones
        return x @ self.param("kernel", ones, (3, 3)).T + self.param("bias", ones, (3,))


def gru():
    gates = {f"i{gate}": {"kernel": (2, 3), "bias": (3,)} for gate in "rzn"}
    gates |= {f"h{gate}": {"kernel": (3, 3)} for gate in "rzn"}
    return gates


@pytest.mark.parametrize("name", ["GRUCell_0", "cell"])
def test_a_cell_of_the_users_has_no_gate_order_of_flax(name, tmp_path):
    class Model(nnx.Module):
        def __init__(self):
            self.cell = GRUCell()

    linen = random_tree({f"params/{name}/{gate}": shapes for gate, shapes in gru().items()})
    source = saved(tmp_path / "linen", linen)
    text = outcome(lambda: reshard.to_nnx(source, Model), {}, tmp_path)
    assert "does not become the NNX model" in text
    assert f"{name}/hn, " in text or f"{name}, perhaps cell: " in text
    trained = saved(
        tmp_path / "nnx",
        random_tree(
            {
                "cell/dense_i/kernel": {"value": (2, 9)},
                "cell/dense_i/bias": {"value": (9,)},
                "cell/dense_h/kernel": {"value": (3, 9)},
            }
        ),
    )
    options = {"source": Model, "layout": "nnx-state"}
    text = outcome(lambda: reshard.to_linen(trained, linen, **options), {}, tmp_path)
    assert "does not become the Linen model" in text


def test_a_layer_of_the_users_is_no_layer_of_flax(tmp_path):
    class Model(nnx.Module):
        def __init__(self):
            self.layer = Linear()

    linen = random_tree({"params/Dense_0": DENSE})
    source = saved(tmp_path / "linen", linen)
    text = outcome(lambda: reshard.to_nnx(source, Model), {}, tmp_path)
    assert "Dense_0, perhaps layer: no name and no class tells which" in text
    trained = saved(
        tmp_path / "nnx",
        random_tree({"layer/kernel": {"value": (3, 3)}, "layer/bias": {"value": (3,)}}),
    )
    options = {"source": Model, "layout": "nnx-state"}
    text = outcome(lambda: reshard.to_linen(trained, linen, **options), {}, tmp_path)
    assert "Dense_0, perhaps layer: no name and no class tells which" in text


def test_flaxs_layer_and_the_users_of_one_name_are_kept_apart(tmp_path):
    """Linen's names do not say whose class `Dense` is."""

    class Model(nnx.Module):
        def __init__(self):
            self.proj, self.mine = linear(), Dense()

    source = saved(
        tmp_path / "linen", random_tree({"params/Dense_0": DENSE, "params/Proj_0": DENSE})
    )
    text = outcome(lambda: reshard.to_nnx(source, Model), {}, tmp_path)
    assert "Dense_0, perhaps proj: mine in NNX may hold one of them" in text


def test_classes_of_the_users_are_the_same_by_name(tmp_path):
    class Model(nnx.Module):
        def __init__(self):
            self.one, self.two = Dense(), Dense()

    linen = random_tree({"params/Dense_0": DENSE, "params/Dense_1": DENSE})
    source = saved(tmp_path / "linen", linen)
    truth = {
        f"{name}/{leaf}/value": array
        for name, inner in zip(("one", "two"), linen["params"].values(), strict=True)
        for leaf, array in inner.items()
    }
    assert not outcome(lambda: reshard.to_nnx(source, Model), truth, tmp_path)


@pytest.mark.parametrize("name", ["Dense_0", "Linear_0"])
def test_a_layer_of_the_users_in_linen_is_no_layer_of_flax(name, tmp_path):
    """The model of the source tells whose class it is; without one a name that Linen's layers do
    not have does."""

    class Dense(Proj):
        pass

    class Own(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Dense()(x)

    class Model(nnx.Module):
        def __init__(self):
            self.layer = linear()

    source = saved(tmp_path / "linen", random_tree({f"params/{name}": DENSE}))
    known = None
    if name == "Dense_0":
        known = lambda: Own().init(jax.random.key(0), jnp.ones((1, 3)))  # noqa: E731
    text = outcome(lambda: reshard.to_nnx(source, Model, source=known), {}, tmp_path)
    assert f"{name}, perhaps layer: no name and no class tells which" in text


# What a model of the source tells, where a map renames


class Named(nn.Module):
    """Names that say nothing, and one that says something else."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(3, name="head")(x)
        x = nn.LayerNorm(name="inner")(x)
        return Proj(name="Dense_0")(x)


def named():
    return Named().init(jax.random.key(0), jnp.ones((1, 3)))


class NamedTwin(nnx.Module):
    def __init__(self, other=False):
        self.norm = nnx.LayerNorm(3, rngs=nnx.Rngs(0))
        if other:
            self.proj = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        else:
            self.out = nnx.Linear(3, 3, rngs=nnx.Rngs(0))


def test_the_source_model_tells_classes_where_a_map_renames(tmp_path):
    linen = random_tree({"params/head": DENSE, "params/inner": NORM})
    source = saved(tmp_path / "linen", linen)
    file = tmp_path / "map.toml"
    file.write_text(renames([("params/inner", "params/norm")]))
    truth = {f"out/{name}/value": array for name, array in linen["params"]["head"].items()}
    truth |= {f"norm/{name}/value": array for name, array in linen["params"]["inner"].items()}
    assert not outcome(
        lambda: reshard.to_nnx(source, NamedTwin, map_file=file, source=named),
        truth,
        tmp_path / "forth",
    )
    # A renamed module is still of its class.
    file.write_text(renames([("params/inner", "params/x"), ("params/head", "params/y")]))
    assert not outcome(
        lambda: reshard.to_nnx(source, NamedTwin, map_file=file, source=named),
        truth,
        tmp_path / "both",
    )


@pytest.mark.parametrize("backwards", [False, True])
def test_a_name_like_one_of_linens_own_is_none_where_a_map_renames(backwards, tmp_path):
    source_file = tmp_path / "map.toml"
    rules = [("params/inner", "params/norm")]
    linen = random_tree({"params/Dense_0": DENSE, "params/inner": NORM})
    model = lambda: NamedTwin(other=True)  # noqa: E731
    if backwards:
        trained = saved(
            tmp_path / "nnx",
            random_tree(
                {
                    "norm/scale": {"value": (3,)},
                    "norm/bias": {"value": (3,)},
                    "proj/kernel": {"value": (3, 3)},
                    "proj/bias": {"value": (3,)},
                }
            ),
        )
        source_file.write_text('to = "nnx"\n' + renames(rules))
        options = {"source": model, "layout": "nnx-state", "map_file": source_file}

        def goal():
            made = dict(named()["params"])
            del made["head"]
            return {"params": made}

        text = outcome(lambda: reshard.to_linen(trained, goal, **options), {}, tmp_path)
    else:
        source = saved(tmp_path / "linen", linen)
        source_file.write_text(renames(rules))
        text = outcome(
            lambda: reshard.to_nnx(source, model, map_file=source_file, source=named), {}, tmp_path
        )
    assert "Dense_0, perhaps proj: no name and no class tells which" in text


def test_the_source_model_tells_classes_where_a_map_renames_on_the_way_back(tmp_path):
    trained_tree = random_tree(
        {
            "norm/scale": {"value": (3,)},
            "norm/bias": {"value": (3,)},
            "out/kernel": {"value": (3, 3)},
            "out/bias": {"value": (3,)},
        }
    )
    trained = saved(tmp_path / "nnx", trained_tree)
    linen = random_tree({"params/Dense_0": DENSE, "params/inner": NORM})
    (tmp_path / "map.toml").write_text(renames([("norm", "inner")]))
    truth = {f"params/Dense_0/{n}": held["value"] for n, held in trained_tree["out"].items()}
    truth |= {f"params/inner/{n}": held["value"] for n, held in trained_tree["norm"].items()}
    options = {"source": NamedTwin, "layout": "nnx-state", "map_file": tmp_path / "map.toml"}
    assert not outcome(lambda: reshard.to_linen(trained, linen, **options), truth, tmp_path)


class Numbered(nn.Module):
    """What is made first has the name that Linen would give to the second."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(3)(nn.Dense(3, name="Dense_1")(x))
        return nn.LayerNorm(name="inner")(x)


def numbered():
    return Numbered().init(jax.random.key(0), jnp.ones((1, 3)))


class NumberedTwin(nnx.Module):
    def __init__(self):
        self.first, self.second = linear(), linear()
        self.norm = nnx.LayerNorm(3, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("rules", [[], [("params/inner", "norm")]])
def test_a_name_that_was_given_has_no_place_in_the_order(rules, tmp_path):
    linen = random_tree({"params/Dense_0": DENSE, "params/Dense_1": DENSE, "params/inner": NORM})
    there = random_tree({"first": DENSE, "second": DENSE, "norm": NORM})
    file = tmp_path / "map.toml"
    file.write_text('to = "nnx"\n' + renames(rules))
    source, trained = saved(tmp_path / "linen", linen), saved(tmp_path / "nnx", there)
    options = {"layout": "nnx-pure-dict", "source": NumberedTwin, "map_file": file}
    for convert in (
        lambda: reshard.to_nnx(source, NumberedTwin, source=numbered, map_file=file),
        lambda: reshard.to_linen(trained, numbered, **options),
    ):
        told = "Dense_0 and Dense_1, perhaps first and second: they have names of their own"
        assert told in outcome(convert, {}, tmp_path)


# Definition order


class Late(nnx.Module):
    """The attribute is there before the layer."""

    def __init__(self):
        self.b = nnx.data(None)
        self.a = linear()
        self.b = linear()


class Again(nnx.Module):
    """A layer takes the place of another."""

    def __init__(self):
        self.b = linear()
        self.a = linear()
        self.b = linear()


class Stacked(nnx.Module):
    """Flax has rebuilt what is in it."""

    def __init__(self):
        self.inner = nnx.clone(Late())


def late(prefix=""):
    linen = random_tree({f"params/{prefix}Dense_0": DENSE, f"params/{prefix}Dense_1": DENSE})
    inner = linen["params"]
    for key in prefix.split("/")[:-1]:
        inner = inner[key]
    truth = {
        f"{prefix}{name}/{leaf}/value": array
        for name, held in zip("ab", inner.values(), strict=True)
        for leaf, array in held.items()
    }
    return linen, truth


@pytest.mark.parametrize("model, prefix", [(Late, ""), (Stacked, "inner/")])
def test_an_attribute_counts_from_when_it_holds_a_layer(model, prefix, tmp_path):
    linen, truth = late(prefix)
    source = saved(tmp_path / "linen", linen)
    assert not outcome(lambda: reshard.to_nnx(source, model), truth, tmp_path)
    trained = saved(tmp_path / "nnx", unflatten_dict(truth, sep="/"))
    back = reshard.to_linen(trained, linen, source=model, layout="nnx-state")
    layouts.assert_same_tree(loaded(back, tmp_path / "back"), linen)


@pytest.mark.parametrize("model", [Late(), Again(), Again, lambda: nnx.clone(Again())])
def test_where_an_attribute_is_set_twice_the_order_may_not_be_known(model, tmp_path):
    source = saved(tmp_path / "linen", late()[0])
    text = outcome(lambda: reshard.to_nnx(source, model), {}, tmp_path)
    assert "Dense_0 and Dense_1, perhaps " in text
    assert "the order in which NNX defines them is not known" in text
