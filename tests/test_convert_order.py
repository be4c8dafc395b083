"""What may not go by the order of modules: a conversion is right in every leaf, or it abstains."""

import functools

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
import twins
from converted import Compact
from flax import linen as nn
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from layouts import save_standard as saved
from twins import made

import reshard
from reshard.tree import split_path

X = jnp.ones((1, 3))
DENSE = {"kernel": (3, 3), "bias": (3,)}
WIDE = {"kernel": (3, 4), "bias": (4,)}
NORM = {"scale": (3,), "bias": (3,)}
MOVED = "the map puts other leaves of"
RENAME = "[[rule]]\nfrom = '^{}'\nto = '{}'\n"
OTHER_ORDER = "the map pairs other modules beside them in another order than NNX defines them"


linear, norm = functools.partial(twins.linear, 3, 3), functools.partial(twins.norm, 3)


def batch_norm():
    return nnx.BatchNorm(3, rngs=nnx.Rngs(0))


def initialized(function):
    """What makes the variables of a compact method."""
    return functools.partial(Compact(function).init, jax.random.key(0), X)


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
    """Why a conversion abstains; empty if it converts, and every leaf is the one of the truth:
    printed path in the result -> the right array."""
    try:
        ckpt = convert()
    except reshard.TreeMismatchError as error:
        return str(error)
    got = loaded(ckpt, tmp_path / "converted")
    expected = {path: layouts.bits(array) for path, array in truth.items()}
    assert {path: layouts.bits(at(got, path)) for path in truth} == expected
    return ""


def forth(tmp_path, linen, model, rules=None, truth=(), source=None):
    """What comes of a conversion of Linen's variables to a model of NNX's, with a map of which the
    pairs `(from, to)` or the text is given: why it abstains, or nothing."""
    file, path = written(tmp_path, rules, ""), saved(tmp_path / "linen", linen)
    convert = functools.partial(reshard.to_nnx, path, model, source=source, map_file=file)
    return outcome(convert, dict(truth), tmp_path)


def back(tmp_path, trained, linen, model, rules=None, truth=()):
    """The same of the pure dict of a model of NNX's on the way back, with the pairs of a map for
    the way to NNX or the text of one."""
    file, path = written(tmp_path, rules, 'to = "nnx"\n'), saved(tmp_path / "nnx", trained)
    options = {"source": model, "layout": "nnx-pure-dict", "map_file": file}
    return outcome(lambda: reshard.to_linen(path, linen, **options), dict(truth), tmp_path)


def written(tmp_path, rules, beginning):
    """A map file in a directory, if there are rules."""
    tmp_path.mkdir(exist_ok=True)
    file = tmp_path / "map.toml"
    if rules is not None:
        file.write_text(rules if isinstance(rules, str) else beginning + renames(rules))
    return None if rules is None else file


def paired(linen, pairs):
    """Printed path in Linen, and in NNX -> array, of modules of Linen's with theirs in NNX."""
    found = {}
    for path, array in flatten_dict(linen, sep="/").items():
        module, _, name = path.partition("/")[2].rpartition("/")
        if module in pairs:
            found[path, f"{pairs[module]}/{name}"] = array
    return found


def of_modules(linen, pairs):
    """Path of a variable's value in NNX -> array."""
    return {f"{path}/value": array for (_, path), array in paired(linen, pairs).items()}


def both_ways(linen, model, pairs, rules, tmp_path):
    """Why Linen's variables abstain with a map for the way to NNX, with the opposite one run
    backwards, and with both for the way back; "" if they do not. `pairs`: printed path of a module
    of Linen's -> of the NNX model's, the true ones. `rules`: `(from, to)` of those in the map."""
    there = paired(linen, pairs)
    trained = unflatten_dict({path: array for (_, path), array in there.items()}, sep="/")
    truth, linen_truth = of_modules(linen, pairs), {path: x for (path, _), x in there.items()}
    texts = {
        "nnx": 'to = "nnx"\n' + renames(rules),
        "linen": 'to = "linen"\n' + renames([pair[::-1] for pair in rules]),
    }
    return [
        text
        for to, rules in texts.items()
        for text in (
            forth(tmp_path / f"forth-{to}", linen, model, rules, truth),
            back(tmp_path / f"back-{to}", trained, linen, model, rules, linen_truth),
        )
    ]


# One module has one counterpart

# The shortcut is made first in Linen, and defined last in NNX.
Block = made(
    conv1=linear,
    bn1=batch_norm,
    conv2=linear,
    bn2=batch_norm,
    shortcut=lambda: nnx.Sequential(linear(), batch_norm()),
)
Residual = made(block=Block)
RESIDUAL = {
    "block/Dense_0": "block/shortcut/layers/0",
    "block/Dense_1": "block/conv1",
    "block/Dense_2": "block/conv2",
    "block/BatchNorm_0": "block/shortcut/layers/1",
    "block/BatchNorm_1": "block/bn1",
    "block/BatchNorm_2": "block/bn2",
}
STATS = {"mean": (3,), "var": (3,)}


def residual():
    return random_tree(
        {f"params/block/Dense_{i}": DENSE for i in range(3)}
        | {f"params/block/BatchNorm_{i}": NORM for i in range(3)}
        | {f"batch_stats/block/BatchNorm_{i}": STATS for i in range(3)}
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


TURNED = "[[rule]]\nfrom = '^params/{}/kernel$'\ntranspose = [1, 0]\nto = '{}/kernel'\n"


def test_what_an_operation_fixes_contradicts_an_order_too(tmp_path):
    linen = pairs()["params"]["Pair_0"]
    turned = made(b=linear, b_norm=norm, a=linear, a_norm=norm)
    moved = [("Dense_0", "a"), ("Dense_1", "b")]
    kernels = renames(moved, TURNED)
    biases = renames(moved, "[[rule]]\nfrom = '^params/{}/bias$'\nto = '{}/bias'\n")
    text = forth(tmp_path, {"params": linen}, turned, kernels + biases)
    assert f"LayerNorm_0 and LayerNorm_1, perhaps b_norm and a_norm: {OTHER_ORDER}" in text
    # The kernels alone: the biases belong to them.
    text = forth(tmp_path / "alone", {"params": linen}, turned, kernels)
    assert f"Dense_0, perhaps a: {MOVED} it there" in text


@pytest.mark.parametrize("known", [False, True])
def test_axes_that_a_map_moves_in_one_layer_are_open_in_its_like(known, tmp_path):
    """Square weights: no shape tells that the others lie as the first one does."""
    names = ("first", "second", "third")
    linen = random_tree({f"params/{name}": DENSE for name in names} | {"params/wide": WIDE})
    wide = {"wide": lambda: twins.linear(3, 4)}
    model = made(first=linear, second=linear, third=linear, **wide)
    rule = TURNED.replace("to = '", "to = 'params/") if known else TURNED
    rules = renames([("first", "first")], rule) + renames([("params/third", "third")])
    text = forth(tmp_path, linen, model, rules)
    why = "the map moves the axes of other leaves of its class and shape"
    assert f"\n  params/second/kernel, perhaps second/kernel: {why}\n" in text
    assert text.count("perhaps") == 1


@pytest.mark.parametrize("between", [False, True])
def test_a_path_does_not_keep_a_leaf_from_the_rest_of_its_module(between, tmp_path):
    """Whether the map gives kernels NNX's paths, or those of Linen's others."""
    linen = random_tree({"params/a": DENSE, "params/b": DENSE})
    if between:
        a, b, c = (f"params/{name}/kernel" for name in "abc")
        rules = renames([(a, c), (b, a), (c, b)])
    else:
        form = "[[rule]]\nfrom = '^params/{}/kernel$'\nto = '{}/kernel'\n"
        rules = renames([("a", "b"), ("b", "a")], form)
    text = forth(tmp_path, linen, made(a=linear, b=linear), rules)
    assert f"a, perhaps b: {MOVED} it there" in text
    assert f"b, perhaps a: {MOVED} it there" in text


Pair = twins.named("Pair", x=linear, x_norm=norm, y=linear, y_norm=norm)
Pairs = made(first=Pair, second=Pair)


def pairs(names=("Pair_0", "Pair_1")):
    inner = {"Dense_0": DENSE, "Dense_1": DENSE, "LayerNorm_0": NORM, "LayerNorm_1": NORM}
    return random_tree({f"params/{n}/{m}": s for n in names for m, s in inner.items()})


def test_what_is_deep_in_a_module_fixes_the_whole_of_it(tmp_path):
    rules = [
        (f"params/Pair_{i}/Dense_{j}", f"{where}/{'xy'[j]}")
        for i, where in enumerate(["second", "first"])
        for j in range(2)
    ]
    text = forth(tmp_path, pairs(), Pairs, rules)
    assert "Pair_0" in text
    assert MOVED in text or OTHER_ORDER in text


@pytest.mark.parametrize("names", [("Pair_0", "Pair_1"), ("first", "second"), None])
def test_an_order_that_is_contradicted_in_one_module_decides_nothing_in_its_like(names, tmp_path):
    """Nor where the map says which module that is (None)."""
    one, other = names or ("Pair_0", "second")
    rules = [
        (f"params/{one}/{kind}_{i}", f"first/{'yx'[i]}{suffix}")
        for kind, suffix in (("Dense", ""), ("LayerNorm", "_norm"))[: 2 if names else 1]
        for i in range(2)
    ]
    rules += [] if names else [("params/Pair_1", "params/second")]
    text = forth(tmp_path, pairs(names or ("Pair_0", "Pair_1")), Pairs, rules)
    for kind, suffix in (("Dense", ""), ("LayerNorm", "_norm")):
        inner = f"second/x{suffix} and second/y{suffix}"
        assert f"{other}/{kind}_0 and {other}/{kind}_1, perhaps {inner}: {OTHER_ORDER}" in text
    assert not names or text.count(OTHER_ORDER) == 2


def test_a_map_that_agrees_leaves_the_rest_to_the_order_in_both_directions(tmp_path):
    true = {
        f"Pair_{i}/{kind}_{j}": f"{where}/{'xy'[j]}{suffix}"
        for i, where in enumerate(["first", "second"])
        for kind, suffix in (("Dense", ""), ("LayerNorm", "_norm"))
        for j in range(2)
    }
    rules = [("params/Pair_0/Dense_0", "first/x"), ("params/Pair_1/LayerNorm_1", "second/y_norm")]
    assert both_ways(pairs(), Pairs, true, rules, tmp_path) == [""] * 4


def test_a_map_that_is_run_backwards_leaves_nothing_out(tmp_path):
    linen, there, more = {"params/a": DENSE}, {"first": DENSE}, {"bias": (3,)}
    source, target = random_tree({**linen, "params/more": more}), random_tree(there)
    rules = 'to = "linen"\n' + renames([("first/", "params/a/")], RENAME)
    assert "more: NNX has no counterpart" in forth(tmp_path, source, target, rules)
    source, target = random_tree({**there, "more": more}), random_tree(linen)
    rules = 'to = "nnx"\n' + renames([("params/a/", "first/")], RENAME)
    assert "more/bias  float32[3]: unexpected" in back(tmp_path, source, target, None, rules)


def test_a_renamed_module_takes_its_statistics_along(tmp_path):
    """A map that gives the parameters alone another name on Linen's side."""
    linen = random_tree(
        {f"params/BatchNorm_{i}": NORM for i in range(2)}
        | {f"batch_stats/BatchNorm_{i}": STATS for i in range(2)}
    )
    rules = [("params/BatchNorm_0", "params/norm"), ("params/BatchNorm_1", "params/a")]
    text = forth(tmp_path, linen, made(a=batch_norm, norm=batch_norm), rules)
    assert "BatchNorm_0" in text


@pytest.mark.parametrize("whole", [True, False])
def test_modules_that_a_map_numbers_anew_go_by_that(whole, tmp_path):
    linen = {"params": pairs()["params"]["Pair_0"]}
    rules = []
    for kind in ("Dense", "LayerNorm") if whole else ("Dense",):
        one, other = f"params/{kind}_0", f"params/{kind}_1"
        rules += [(one, "params/aside"), (other, one), ("params/aside", other)]
    true = {"Dense_1": "x", "Dense_0": "y", "LayerNorm_1": "x_norm", "LayerNorm_0": "y_norm"}
    text = forth(tmp_path, linen, Pair, rules, of_modules(linen, true))
    assert bool(text) == (not whole)
    assert whole or f"LayerNorm_0 and LayerNorm_1, perhaps x_norm and y_norm: {OTHER_ORDER}" in text


def test_a_table_that_a_map_takes_out_of_a_module_leaves_the_rest_where_it_is(tmp_path):
    inner = twins.named("Inner", a=linear, b=linear, cls=lambda: nnx.Param(jnp.zeros(3)))
    linen = random_tree(
        {
            "params/Inner_0": {"pos": (5, 3), "cls": (3,)},
            "params/Inner_0/Dense_0": DENSE,
            "params/Inner_0/Dense_1": DENSE,
        }
    )
    held = linen["params"]["Inner_0"]
    truth = {"table/value": held["pos"], "inner/cls/value": held["cls"]}
    truth |= of_modules(linen, {"Inner_0/Dense_0": "inner/a", "Inner_0/Dense_1": "inner/b"})
    model = made(table=lambda: nnx.Param(jnp.zeros((5, 3))), inner=inner)
    rule = "[[rule]]\nfrom = '^params/Inner_0/pos$'\nto = 'table'\n"
    assert not forth(tmp_path, linen, model, rule, truth)


@pytest.mark.parametrize("to", [r"layers/{}/\1", r"params/layers/{}/\1", r"params/layers_{}/\1"])
@pytest.mark.parametrize("known", [False, True])
def test_layers_of_a_scan_become_those_of_a_list_by_any_name(known, to, tmp_path):
    """Which are parts of the same leaves: none of them is another's."""

    class Inner(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.LayerNorm(name="norm")(nn.Dense(3, name="dense")(x)), None

    def scanned(x):
        axes, rngs = {"params": 0}, {"params": True}
        return nn.scan(Inner, axes, split_rngs=rngs, length=2)(name="layers")(x, None)[0]

    layer = made(norm=norm, dense=linear)
    listed = made(layers=lambda: nnx.List([layer(), layer()]))
    shapes = {"dense": DENSE, "norm": NORM}
    stacked = {f"params/layers/{k}": {n: (2, *s) for n, s in x.items()} for k, x in shapes.items()}
    linen = random_tree(stacked)
    rule = f"[[rule]]\nfrom = '^params/layers/(.*)$'\nunstack = {{ axis = 0, into = '{to}' }}\n"
    there = {
        f"layers/{i}/{k}/{n}": linen["params"]["layers"][k][n][i]
        for i in range(2)
        for k, held in shapes.items()
        for n in held
    }
    model = initialized(scanned) if known else None
    truth = {f"{path}/value": array for path, array in there.items()}
    assert not forth(tmp_path, linen, listed, "to = 'nnx'\n" + rule, truth, model)
    trained = saved(tmp_path / "nnx", unflatten_dict(there, sep="/"))
    file = tmp_path / "map.toml"
    again = reshard.to_linen(trained, model or linen, source=listed, map_file=file)
    layouts.assert_same_tree(loaded(again, tmp_path / "back"), linen)


# Classes are those of flax

# Gates in an order of its own.
GRUCell = twins.named(
    "GRUCell",
    dense_i=lambda: twins.linear(2, 9),
    dense_h=lambda: twins.linear(3, 9, use_bias=False),
)


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
    linen = random_tree({f"params/{name}/{gate}": shapes for gate, shapes in gru().items()})
    text = forth(tmp_path, linen, made(cell=GRUCell))
    assert "does not become the NNX model" in text
    assert f"{name}/hn, " in text or f"{name}, perhaps cell: " in text
    inner = {"cell/dense_i": {"kernel": (2, 9), "bias": (9,)}, "cell/dense_h": {"kernel": (3, 9)}}
    text = back(tmp_path, random_tree(inner), linen, made(cell=GRUCell))
    assert "does not become the Linen model" in text


def test_a_layer_of_the_users_is_no_layer_of_flax(tmp_path):
    linen = random_tree({"params/Dense_0": DENSE})
    told = "Dense_0, perhaps layer: ambiguous: neither names nor classes decide"
    assert told in forth(tmp_path, linen, made(layer=Linear))
    assert told in back(tmp_path, random_tree({"layer": DENSE}), linen, made(layer=Linear))


def test_flaxs_layer_and_the_users_of_one_name_are_kept_apart(tmp_path):
    """Linen's names do not say whose class `Dense` is."""
    linen = random_tree({"params/Dense_0": DENSE, "params/Proj_0": DENSE})
    text = forth(tmp_path, linen, made(proj=linear, mine=Dense))
    assert "Dense_0, perhaps proj: mine in NNX may hold one of them" in text


def test_classes_of_the_users_are_the_same_by_name(tmp_path):
    linen = random_tree({"params/Dense_0": DENSE, "params/Dense_1": DENSE})
    truth = of_modules(linen, {"Dense_0": "one", "Dense_1": "two"})
    assert not forth(tmp_path, linen, made(one=Dense, two=Dense), truth=truth)


@pytest.mark.parametrize("name", ["Dense_0", "Linear_0"])
def test_a_layer_of_the_users_in_linen_is_no_layer_of_flax(name, tmp_path):
    """The model of the source tells whose class it is; without one a name that Linen's layers do
    not have does."""

    class Dense(Proj):
        pass

    known = initialized(lambda x: Dense()(x)) if name == "Dense_0" else None
    linen = random_tree({f"params/{name}": DENSE})
    text = forth(tmp_path, linen, made(layer=linear), source=known)
    assert f"{name}, perhaps layer: ambiguous: neither names nor classes decide" in text


# What a model of the source tells, where a map renames


# Names that say nothing, and one that says something else.
named = initialized(
    lambda x: Proj(name="Dense_0")(nn.LayerNorm(name="inner")(nn.Dense(3, name="head")(x)))
)
RULES = [("params/inner", "params/norm")]


@pytest.mark.parametrize(
    "rules", [RULES, [("params/inner", "params/x"), ("params/head", "params/y")]]
)
def test_the_source_model_tells_classes_where_a_map_renames(rules, tmp_path):
    """A renamed module is still of its class."""
    linen = random_tree({"params/head": DENSE, "params/inner": NORM})
    truth = of_modules(linen, {"head": "out", "inner": "norm"})
    assert not forth(tmp_path, linen, made(norm=norm, out=linear), rules, truth, named)


def test_names_tell_classes_where_a_map_renames_on_the_way_back(tmp_path):
    linen = random_tree({"params/Dense_0": DENSE, "params/inner": NORM})
    there = paired(linen, {"Dense_0": "out", "inner": "norm"})
    trained = unflatten_dict({path: array for (_, path), array in there.items()}, sep="/")
    rules, truth = renames([("norm", "inner")]), {path: array for (path, _), array in there.items()}
    assert not back(tmp_path, trained, linen, made(norm=norm, out=linear), rules, truth)


@pytest.mark.parametrize("backwards", [False, True])
def test_a_name_like_one_of_linens_own_is_none_where_a_map_renames(backwards, tmp_path):
    model = made(norm=norm, proj=linear)
    if backwards:
        trained = random_tree({"norm": NORM, "proj": DENSE})

        def goal():
            return {"params": {k: x for k, x in named()["params"].items() if k != "head"}}

        text = back(tmp_path, trained, goal, model, RULES)
    else:
        linen = random_tree({"params/Dense_0": DENSE, "params/inner": NORM})
        text = forth(tmp_path, linen, model, RULES, source=named)
    assert "Dense_0, perhaps proj: ambiguous: neither names nor classes decide" in text


# What is made first has the name that Linen would give to the second.
numbered = initialized(
    lambda x: nn.LayerNorm(name="inner")(nn.Dense(3)(nn.Dense(3, name="Dense_1")(x)))
)


@pytest.mark.parametrize("rules", [[], [("params/inner", "norm")]])
def test_a_name_that_was_given_has_no_place_in_the_order(rules, tmp_path):
    linen = random_tree({"params/Dense_0": DENSE, "params/Dense_1": DENSE, "params/inner": NORM})
    trained = random_tree({"first": DENSE, "second": DENSE, "norm": NORM})
    model = made(first=linear, second=linear, norm=norm)
    told = "Dense_0 and Dense_1, perhaps first and second: their names do not show their order"
    assert told in forth(tmp_path, linen, model, rules, source=numbered)
    assert told in back(tmp_path, trained, numbered, model, rules)


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


# Flax has rebuilt what is in it.
Stacked = made(inner=lambda: nnx.clone(Late()))


def late(prefix=""):
    return random_tree({f"params/{prefix}Dense_{i}": DENSE for i in range(2)})


@pytest.mark.parametrize("model, prefix", [(Late, ""), (Stacked, "inner/")])
def test_an_attribute_counts_from_when_it_holds_a_layer(model, prefix, tmp_path):
    linen = late(prefix)
    names = {f"{prefix}Dense_{i}": f"{prefix}{name}" for i, name in enumerate("ab")}
    truth = of_modules(linen, names)
    assert not forth(tmp_path, linen, model, truth=truth)
    trained = saved(tmp_path / "nnx", unflatten_dict(truth, sep="/"))
    again = reshard.to_linen(trained, linen, source=model, layout="nnx-state")
    layouts.assert_same_tree(loaded(again, tmp_path / "back"), linen)


@pytest.mark.parametrize("model", [Late(), Again(), Again, lambda: nnx.clone(Again())])
def test_where_an_attribute_is_set_twice_the_order_may_not_be_known(model, tmp_path):
    text = forth(tmp_path, late(), model)
    assert "Dense_0 and Dense_1, perhaps " in text
    assert "the order in which NNX defines them is unknown" in text
