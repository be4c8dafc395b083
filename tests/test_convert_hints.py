"""What a refused conversion says first, and what it offers: the cause before what follows from it,
and nothing that was not tried."""

import functools
import re
import tomllib

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
import pytest
from converted import Compact, Of, filled, map_of, refused
from flax import linen as nn
from flax import nnx
from flax.traverse_util import flatten_dict
from layouts import save_standard as saved

import reshard
from reshard.convert.suggestions import covering_globs

WIDTH, HIDDEN, HEADS = 8, 12, 2
NORM = {"scale": np.ones(WIDTH, "float32"), "bias": np.ones(WIDTH, "float32")}
NONE = "ambiguous: neither names nor classes decide"


def linear(inner=WIDTH, outer=WIDTH, **options):
    return nnx.Linear(inner, outer, rngs=nnx.Rngs(0), **options)


def norm():
    return nnx.LayerNorm(WIDTH, rngs=nnx.Rngs(0))


def attention(heads, width=WIDTH):
    return nnx.MultiHeadAttention(heads, width, decode=False, rngs=nnx.Rngs(0))


def nested():
    """A model with modules in a module."""
    return Of(block=Of(up=linear(), down=linear()), head=linear())


def nested_params():
    return {"block": linears("up", "down"), **linears("head")}


def linears(*names):
    rng = np.random.default_rng(0)
    shapes = {"kernel": (WIDTH, WIDTH), "bias": (WIDTH,)}
    return {n: {k: layouts.random_array(rng, s) for k, s in shapes.items()} for n in names}


def params_of(model, *inputs):
    """Random parameters of a Linen model."""
    return filled(jax.eval_shape(model.init, jax.random.key(0), *inputs)["params"])


def zeros(make):
    """What a model holds, blank."""
    state = nnx.to_pure_dict(nnx.state(nnx.eval_shape(make)))
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state)


# The cause before its consequences


def test_other_heads_are_told_as_such(tmp_path):
    def model():
        return Of(attention=attention(8, 32))

    linen = Compact(lambda x: nn.MultiHeadDotProductAttention(4, name="attention")(x))
    params = params_of(linen, jnp.zeros((1, 3, 32)))
    path = saved(tmp_path / "linen", {"params": params, "opt_state": optax.adam(0.1).init(params)})
    error = refused(reshard.to_nnx, path, model)
    kernels = "[32, 4, 8] in Linen, [32, 8, 4] in NNX"
    biases = "[4, 8] in Linen, [8, 4] in NNX"
    assert {*error.problems} == {
        *(
            f"params/attention/{name}/{leaf} and attention/{name}/{leaf}: {told}"
            for name in ("query", "key", "value")
            for leaf, told in (("kernel", kernels), ("bias", biases))
        ),
        "params/attention/out/kernel and attention/out/kernel: [4, 8, 32] in Linen, "
        "[8, 4, 32] in NNX",
    }
    assert error.hints == ()
    # The other way round the model is Linen's.
    path = saved(tmp_path / "nnx", zeros(model))
    error = refused(reshard.to_linen, path, lambda: {"params": params}, source=model)
    assert f"params/attention/query/kernel and attention/query/kernel: {kernels}" in error.problems
    assert (len(error.problems), error.hints) == (7, ())


def test_modules_of_one_class_with_other_shapes_are_a_mismatch(tmp_path):
    def twice(x):
        return nn.MultiHeadDotProductAttention(HEADS)(nn.MultiHeadDotProductAttention(HEADS)(x))

    params = params_of(Compact(twice), jnp.zeros((1, 3, WIDTH)))
    path = saved(tmp_path / "linen", {"params": params})
    error = refused(reshard.to_nnx, path, lambda: Of(one=attention(4), two=attention(4)))
    assert (
        "params/MultiHeadDotProductAttention_0/query/kernel and one/query/kernel: [8, 2, 4] in "
        "Linen, [8, 4, 2] in NNX"
    ) in error.problems
    assert (len(error.problems), error.hints) == (14, ())


def test_what_is_a_mismatch_is_no_candidate_for_anything_else(tmp_path):
    def model():
        return Of(table=nnx.Param(jnp.zeros((3, 4))), other=nnx.Param(jnp.zeros(3)))

    tree = {"params": {"table": np.ones((4, 3), "float32"), "odd": np.ones(3, "float32")}}
    error = refused(reshard.to_nnx, saved(tmp_path / "linen", tree), model)
    assert error.problems == (
        "params/table and table: [4, 3] in Linen, [3, 4] in NNX",
        f"params/odd, perhaps other: {NONE}",
    )


# Layers by number


@pytest.mark.parametrize("name, layers", [("layer", 11), ("Block", 3)])
def test_numbered_layers_are_the_members_of_the_list(name, layers, tmp_path):
    """Norms in the layers go by their order: a warning, as for the numbers that Linen gives."""
    layer = linears("up", "down") | dict.fromkeys(("LayerNorm_0", "LayerNorm_1"), NORM)
    params = {f"{name}_{i}": filled(layer, i) for i in range(layers)}
    path = saved(tmp_path / "linen", {"params": params})

    def model():
        def block():
            return Of(norm=norm(), mlp_norm=norm(), up=linear(), down=linear())

        return Of(blocks=nnx.List([block() for _ in range(layers)]))

    ckpt = reshard.to_nnx(path, model)
    for i in range(layers):
        here = params[f"{name}_{i}"]
        for there, value in (
            ("up/kernel", here["up"]["kernel"]),
            ("down/bias", here["down"]["bias"]),
            ("mlp_norm/scale", here["LayerNorm_1"]["scale"]),
        ):
            np.testing.assert_array_equal(value, ckpt[f"blocks/{i}/{there}/value"].read())
    told = [note for note in ckpt.notes if " by number" in note]
    shown = "layer_0, layer_1, layer_2, ... layer_10 (11)"
    text = f"{shown} were matched to blocks/0, blocks/1, blocks/2, ... blocks/10 (11) by number"
    assert told == ([text] if name == "layer" else [])
    count = {"layer": 44, "Block": 24}[name]
    start = f"{count} leaves were matched only by the order"
    assert any(note.startswith(start) for note in ckpt.notes)
    back = reshard.to_linen(ckpt, lambda: {"params": params}, source=model)
    assert reshard.diff(path, back, values=True).equal


def tower(*lists, **others):
    """Lists of two layers each, and other attributes."""
    return Of(**{name: nnx.List([linear(), linear()]) for name in lists}, **others)


def own():
    return Of(kernel=nnx.Param(jnp.zeros((WIDTH, WIDTH))), bias=nnx.Param(jnp.zeros(WIDTH)))


one_list, two_lists = functools.partial(tower, "one"), functools.partial(tower, "one", "two")


@pytest.mark.parametrize(
    "names, model",
    [
        ("x_0 x_1", two_lists),
        ("x_0 x_1 y_0 y_1", one_list),
        ("x_0 x_1 y_0 y_1", two_lists),
        ("x_1 x_2", one_list),
        ("x_0 x_2", one_list),
        ("x_0 x_1 x_2", one_list),
        ("x_0 x_1", lambda: Of(one=nnx.List([linear(), own()]))),
        ("x_0 x_1", lambda: tower("one", other=linear())),
        ("x_0 x_1 extra", one_list),
        ("x_00 x_1", one_list),
        ("Dense_0 Dense_1 x_0 x_1", one_list),
    ],
)
def test_numbers_decide_nothing_where_something_else_may_be_meant(names, model, tmp_path):
    path = saved(tmp_path / "linen", {"params": linears(*names.split())})
    problem = refused(reshard.to_nnx, path, model).problems[0]
    assert problem.startswith(names.split()[0]) and "perhaps" in problem


def test_a_whole_model_may_be_what_is_open(tmp_path):
    """Every layer is several, along no one axis."""

    def several():
        layer = linear(3, 4)
        nnx.update(layer, {"kernel": jnp.zeros((3, 2, 4)), "bias": jnp.zeros((2, 4))})
        return layer

    leaves = {"kernel": np.ones((2, 3, 4), "float32"), "bias": np.ones((4, 2), "float32")}
    path = saved(tmp_path / "linen", {"params": {"Dense_0": leaves, "Dense_1": leaves}})
    error = refused(reshard.to_nnx, path, lambda: Of(first=several(), second=several()))
    why = "no axis of the layers fits all leaves in params"
    assert f"Dense_0 and Dense_1, perhaps first and second: {why}" in error.problems


def test_layers_that_differ_are_not_paired_by_number(tmp_path):
    params = linears("x_0", "x_1")
    params["x_1"]["scale"] = np.ones(3, "float32")
    error = refused(reshard.to_nnx, saved(tmp_path / "linen", {"params": params}), one_list)
    assert error.problems == (f"x_0 and x_1, perhaps one/0 and one/1: {NONE}",)


def test_a_map_contradicts_numbers(tmp_path):
    path = saved(tmp_path / "linen", {"params": linears("x_0", "x_1")})
    rules = [(f"^params/x_{i}/kernel$", f"one/{1 - i}/kernel") for i in range(2)]
    error = refused(reshard.to_nnx, path, one_list, map_file=map_of(tmp_path, *rules))
    assert "x_0, perhaps one/1: the map puts other leaves of it there" in error.problems


def rules_in(error):
    """What the one hint of a refusal says that shows rules, as the text of a map file."""
    (text,) = [hint.split(":\n", 1)[1] for hint in error.hints if "[[rule]]" in hint]
    return text


def conversion_to(api, folder, tree, model, state):
    """The function that converts a tree of Linen's to a model, or a state of the model to it."""
    source = saved(folder / api, tree if api == "nnx" else state)
    if api == "nnx":
        return functools.partial(reshard.to_nnx, source, model)
    return functools.partial(reshard.to_linen, source, lambda: tree, source=model)


def two_towers():
    """Two lists of as many: which is which, a rule says."""
    return tower("encoder", decoder=nnx.List([gated(), gated()]))


@pytest.mark.parametrize("to", ["nnx", "linen"])
def test_the_rule_that_numbers_suggest_is_shown_if_it_does(to, tmp_path):
    params = linears("enc_0", "enc_1")
    for name in ("x_0", "x_1"):
        parts = {key: {"kernel": layouts.random((WIDTH, HIDDEN))} for key in GATES}
        params[name] = {**parts, "linear": layouts.random((HIDDEN, WIDTH))}
    converted = conversion_to(to, tmp_path, {"params": params}, two_towers, zeros(two_towers))
    error = refused(converted)
    assert NONE in error.problems[0]
    text = rules_in(error)
    assert [tuple(rule.values()) for rule in tomllib.loads(text)["rule"]] == (
        [
            (r"^params/enc_(\d+)/", r"params/encoder/\1/"),
            (r"^params/x_(\d+)/", r"params/decoder/\1/"),
        ]
        if to == "nnx"
        else [(r"^encoder/(\d+)/", r"params/enc_\1/"), (r"^decoder/(\d+)/", r"params/x_\1/")]
    )
    (tmp_path / "map.toml").write_text(text)
    ckpt = converted(map_file=tmp_path / "map.toml")
    if to == "nnx":
        for i, layer in enumerate(reshard.restore(ckpt, two_towers()).encoder):
            np.testing.assert_array_equal(params[f"enc_{i}"]["kernel"], layer.kernel[...])


# One representative


def parts(inner):
    return Of(layers=nnx.List([inner() for _ in range(3)]))


def renamed():
    """Whose second layer has a name that nothing is known of."""
    return Of(same=linear(), there=linear())


def test_what_is_open_in_each_layer_is_shown_once(tmp_path):
    params = {f"layer_{i}": linears("same", "here") for i in range(3)}
    path = saved(tmp_path / "linen", {"params": params})
    model = functools.partial(parts, renamed)
    error = refused(reshard.to_nnx, path, model)
    assert error.problems == (f"layer_*/here, perhaps layers/*/there: {NONE} (3 times)",)
    rule = r"from = '^params/layer_(\d+)/here/', to = 'params/layers/\1/there/'"
    assert error.hints[-1] == f"map_file=... decides, by rules such as: {rule}"
    # It is what it says it is.
    state = reshard.restore(reshard.to_nnx(path, model, map_file=map_of(tmp_path, rule)), model())
    for i, layer in enumerate(state.layers):
        here = params[f"layer_{i}"]
        np.testing.assert_array_equal(here["here"]["kernel"], layer.there.kernel[...])
        np.testing.assert_array_equal(here["same"]["bias"], layer.same.bias[...])


class UpDown(nnx.Module):
    def __init__(self):
        self.up, self.down = linear(), linear()


def test_no_rule_by_numbers_is_shown_where_the_map_puts_layers_elsewhere(tmp_path):
    params = {f"layer_{i}": linears("up", "down") for i in range(3)}
    path = saved(tmp_path / "linen", {"params": params})
    file = map_of(tmp_path, *((f"^params/layer_{i}/up/", f"layers/{2 - i}/up/") for i in (0, 2)))
    error = refused(reshard.to_nnx, path, lambda: parts(UpDown), map_file=file)
    assert not [hint for hint in error.hints if "layer_(" in hint]


class Other(UpDown):
    """Of another class, with the same leaves."""


def test_no_rule_by_numbers_is_shown_where_several_layers_fit_the_list(tmp_path):
    """A list, and layers with names of their own."""
    params = {f"{name}_{i}": linears("up", "down") for name in ("enc", "dec") for i in range(2)}

    def model():
        blocks = nnx.List([UpDown(), UpDown()])
        return Of(encoder_blocks=blocks, decoder_first=Other(), decoder_second=Other())

    error = refused(reshard.to_nnx, saved(tmp_path / "linen", {"params": params}), model)
    assert not [hint for hint in error.hints if r"_(\d+)/" in hint]


# One rule for all numbers


def attributes(form, first=0, count=3):
    return Of(**{form.format(first + i): linear() for i in range(count)})


def layers():
    return Of(layers=nnx.List([linear() for _ in range(3)]))


ALIKE = {
    "attributes": ("dense_{}", 0, lambda: attributes("fc_{}"), r"params/fc_\1/"),
    "no underscore": ("dense{}", 0, lambda: attributes("fc{}"), r"params/fc\1/"),
    "from one": ("dense_{}", 0, lambda: attributes("fc{}", 1), r"params/fc{\1 + 1}/"),
    "to zero": ("dense_{}", 1, layers, r"params/layers/{\1 - 1}/"),
    "a text behind": ("a{}_b", 0, lambda: attributes("fc_{}_x"), r"params/fc_\1_x/"),
}


@pytest.mark.every_combination
@pytest.mark.parametrize("to", ["nnx", "linen"])
@pytest.mark.parametrize("name", ALIKE)
def test_one_rule_is_for_all_numbers(name, to, tmp_path):
    form, first, model, into = ALIKE[name]
    params = linears(*(form.format(first + i) for i in range(3)))
    state = filled(zeros(model))
    converted = conversion_to(to, tmp_path, {"params": params}, model, state)
    rule = refused(converted).hints[-1].partition("such as: ")[2]
    if to == "nnx":
        pattern = re.escape(form).replace(r"\{\}", r"(\d+)")
        assert rule == f"from = '^params/{pattern}/', to = '{into}'"
    assert r"(\d+)" in rule
    ckpt = converted(map_file=map_of(tmp_path, rule))
    flat = flatten_dict(state)
    for i in range(3):
        place = into.removeprefix("params/").replace(r"{\1 + 1}", str(i + 1))
        place = place.replace(r"{\1 - 1}", str(i)).replace(r"\1", str(i))
        for leaf in ("kernel", "bias"):
            here = form.format(first + i), leaf
            there = [int(key) if key.isdigit() else key for key in (place + leaf).split("/")]
            if to == "nnx":
                made, expected = ckpt[f"{place}{leaf}/value"], params[here[0]][leaf]
            else:
                made, expected = ckpt["params/" + "/".join(here)], flat[tuple(there)]
            np.testing.assert_array_equal(made.read(), expected)


def test_rules_for_all_numbers_follow_one_another(tmp_path):
    """The layers, then what is in them: each refusal is about something else."""
    params = {f"layer_{i}": linears("dense_0", "dense_1") for i in range(3)}
    path = saved(tmp_path / "linen", {"params": params})
    model = functools.partial(parts, functools.partial(attributes, "fc_{}", 0, 2))
    rules = []
    for expected in (
        r"from = '^params/layer_(\d+)/', to = 'params/layers/\1/'",
        r"from = '^params/layers/(\d+)/dense_(\d+)/', to = 'params/layers/\1/fc_\2/'",
    ):
        error = refused(reshard.to_nnx, path, model, map_file=map_of(tmp_path, *rules))
        assert error.hints[-1] == f"map_file=... decides, by rules such as: {expected}"
        rules.append(expected)
    ckpt = reshard.to_nnx(path, model, map_file=map_of(tmp_path, *rules))
    for i, layer in enumerate(reshard.restore(ckpt, model()).layers):
        np.testing.assert_array_equal(
            params[f"layer_{i}"]["dense_1"]["kernel"], layer.fc_1.kernel[...]
        )


# Layers in one array, and in a list


def of_x(*shape):
    """A module that holds a layer."""
    return Of(x=linear(*shape))


def list_of(count, *shape):
    return nnx.List([of_x(*shape) for _ in range(count)])


def stack(count, inner=WIDTH, outer=WIDTH):
    shapes = {"kernel": (count, inner, outer), "bias": (count, outer)}
    return {"x": {name: layouts.random(shape) for name, shape in shapes.items()}}


def both(scale, mean):
    return {"params": {"blocks": {"bn": scale}}, "batch_stats": {"blocks": {"bn": mean}}}


def norms():
    return nnx.List([Of(bn=nnx.BatchNorm(5, rngs=nnx.Rngs(0))) for _ in range(3)])


def five():
    return layouts.random((3, 5))


PLAIN = ("^params/blocks/(.*)$", r"params/layers_{}/\1")
UNSTACKED = {
    "a list": (
        lambda: {"params": {"blocks": stack(3)}},
        lambda: Of(layers=list_of(3)),
        [PLAIN],
    ),
    "a layer": (lambda: {"params": {"blocks": stack(3)["x"]}}, layers, [PLAIN]),
    "a layer of the same name": (
        lambda: {"params": {"layers": stack(3)["x"]}},
        layers,
        [("^params/layers/(.*)$", PLAIN[1])],
    ),
    "attributes": (
        lambda: {"params": {"blocks": stack(3)["x"]}},
        lambda: attributes("layers_{}"),
        [PLAIN],
    ),
    "the same name": (
        lambda: {"params": {"layers": stack(3)}},
        lambda: Of(layers=list_of(3)),
        [("^params/layers/(.*)$", PLAIN[1])],
    ),
    "two collections": (
        lambda: both({"scale": five(), "bias": five()}, {"mean": five(), "var": five()}),
        lambda: Of(layers=norms()),
        [("^batch_stats/blocks/(.*)$", r"batch_stats/layers_{}/\1"), PLAIN],
    ),
    "a list in a module that Linen lacks": (
        lambda: {"params": {"blocks": stack(3), "head": linears("x")}},
        lambda: Of(trunk=Of(layers=list_of(3)), head=Of(x=linear())),
        [("^params/blocks/(.*)$", r"params/trunk/layers_{}/\1")],
    ),
    "two lists": (
        lambda: {"params": {"first": stack(3), "second": stack(4)}},
        lambda: Of(one=list_of(3), two=list_of(4)),
        [
            ("^params/first/(.*)$", r"params/one_{}/\1"),
            ("^params/second/(.*)$", r"params/two_{}/\1"),
        ],
    ),
    "lists in each layer": (
        lambda: {"params": {f"stage_{i}": {"blocks": stack(3)} for i in range(2)}},
        lambda: Of(stage=nnx.List([Of(layers=list_of(3)) for _ in range(2)])),
        [(r"^params/stage_(\d+)/blocks/(.*)$", r"params/stage_\1/layers_{}/\2")],
    ),
}


def unstacked(leaves, rules):
    """By hand: the path of a leaf of Linen's, a part of it, and the path of NNX's leaf."""
    for path, leaf in leaves.items():
        hits = [(re.fullmatch(one, path), into) for one, into in rules]
        found = [hit.expand(into) for hit, into in hits if hit]
        for i in range(len(leaf)) if found else ():
            yield path, i, found[0].format(i).partition("/")[2]
        if not found:
            yield path, ..., path.partition("/")[2]


@pytest.mark.every_combination
@pytest.mark.parametrize("to", ["nnx", "linen"])
@pytest.mark.parametrize("name", UNSTACKED)
def test_the_rules_that_unstack_layers_are_shown(name, to, tmp_path):
    make, model, rules = UNSTACKED[name]
    tree, state = make(), filled(zeros(model))
    converted = conversion_to(to, tmp_path, tree, model, state)
    text = rules_in(refused(converted))
    assert tomllib.loads(text) == {
        **({} if to == "nnx" else {"to": "nnx"}),
        "rule": [{"from": one, "unstack": {"axis": 0, "into": into}} for one, into in rules],
    }
    (tmp_path / "map.toml").write_text(text)
    ckpt = converted(map_file=tmp_path / "map.toml")
    before, after = (
        {"/".join(map(str, path)): leaf for path, leaf in flatten_dict(one).items()}
        for one in (tree, state)
    )
    for path, part, keys in unstacked(before, rules):
        there = keys if keys in after else re.sub(r"_(\d+)/", r"/\1/", keys)
        if to == "nnx":
            made, expected = ckpt[f"{there}/value"].read(), before[path][part]
        else:
            made, expected = ckpt[path].read()[part], after[there]
        np.testing.assert_array_equal(made, expected)


def test_the_axis_that_shapes_do_not_tell_is_the_users(tmp_path):
    path = saved(tmp_path / "linen", {"params": {"blocks": stack(3, 3, 3)}})

    def model():
        return Of(layers=list_of(3, 3, 3))

    text = rules_in(refused(reshard.to_nnx, path, model))
    into = r"params/layers_{}/\1"
    assert text.split("\n")[-1].strip() == (
        f"unstack = {{ axis = 0, into = '{into}' }}  # or axis = 1"
    )
    for axis in (0, 1):
        (tmp_path / "map.toml").write_text(text.replace("axis = 0", f"axis = {axis}"))
        ckpt = reshard.to_nnx(path, model, map_file=tmp_path / "map.toml")
        kernel = np.asarray(layouts.load_standard(path)["params"]["blocks"]["x"]["kernel"])
        part = np.take(kernel, 2, axis)
        np.testing.assert_array_equal(ckpt["layers/2/x/kernel/value"].read(), part)


# A gated feed-forward


GATES = ("gate_proj", "up_proj")


def gated():
    """As Gemma has it, whose checkpoints have both gates in one array."""
    gates = {name: linear(WIDTH, HIDDEN, use_bias=False) for name in GATES}
    return Of(**gates, linear=nnx.Param(jnp.zeros((HIDDEN, WIDTH))))


def gated_params():
    shapes = {"gating_einsum": (2, WIDTH, HIDDEN), "linear": (HIDDEN, WIDTH)}
    return {
        f"layer_{i}": {name: layouts.random(shape, seed=i) for name, shape in shapes.items()}
        for i in range(3)
    }


gated_parts = functools.partial(parts, gated)


def swapped(rule):
    """A rule with the parts the other way round."""
    return re.sub(r"(gate|up)(?=_proj)", lambda m: {"gate": "up", "up": "gate"}[m[0]], rule)


@pytest.mark.parametrize("turned", [False, True])
def test_the_rule_for_gates_in_one_array_is_shown(turned, tmp_path):
    params, file = gated_params(), tmp_path / "map.toml"
    path = saved(tmp_path / "linen", {"params": params})
    error = refused(reshard.to_nnx, path, gated_parts)
    assert error.problems == (
        "params/layer_*/gating_einsum, perhaps layers/*/gate_proj/kernel and "
        "layers/*/up_proj/kernel: one array for 2, and the order of its parts is unknown (3 times)",
    )
    (hint,) = error.hints
    said, rule = hint.split(":\n", 1)
    assert said == "map_file=... decides, by a rule such as"
    assert rule == (
        "      [[rule]]\n"
        r"      from = '^params/layer_(\d+)/gating_einsum$'"
        "\n"
        r"      unstack = { axis = 0, into = ['layers/\1/gate_proj/kernel', "
        r"'layers/\1/up_proj/kernel'] }  # or in another order"
    )
    names = GATES[::-1] if turned else GATES
    file.write_text(swapped(rule) if turned else rule)
    state = reshard.restore(reshard.to_nnx(path, gated_parts, map_file=file), gated_parts())
    for i, layer in enumerate(state.layers):
        for part, name in zip(params[f"layer_{i}"]["gating_einsum"], names, strict=True):
            np.testing.assert_array_equal(part, getattr(layer, name).kernel[...])
    # The same rule, run backwards.
    bare = saved(tmp_path / "bare", nnx.to_pure_dict(nnx.state(state)))
    back = functools.partial(reshard.to_linen, bare, lambda: {"params": params}, source=gated_parts)
    (hint,) = refused(back).hints
    rule = hint.split(":\n", 1)[1]
    file.write_text(swapped(rule) if turned else rule)
    assert reshard.diff(path, back(map_file=file), values=True).equal


def parts_of(count):
    return Of(**{f"part{i}": linear(WIDTH, HIDDEN, use_bias=False) for i in range(count)})


def gates_of(count):
    return {"gating_einsum": np.ones((count, WIDTH, HIDDEN), "float32")}


BY_NUMBER = [
    ("x_0 x_1 y_0 y_1", lambda: attributes("fc_{}", 0, 4)),  # whose are the first?
    ("x_0 x_1 y_0 y_1", lambda: attributes("fc_{}", 0, 2)),
    ("x_0 x_2", lambda: attributes("fc_{}", 0, 2)),
    ("x_0 x_1 extra", lambda: attributes("fc_{}", 0, 3)),
    ("x_0 x_1", lambda: Of(fc_0=linear(), fc_1=linear(WIDTH, HIDDEN))),
]
OF_PARTS = [  # several fit, or none
    ({"b1": stack(3), "b2": stack(3)}, lambda: Of(l1=list_of(3), l2=list_of(3))),
    ({"b1": stack(3)}, lambda: Of(l1=list_of(3), l2=list_of(3))),
    ({"b1": stack(3), "b2": stack(3)}, lambda: Of(l1=list_of(3))),
    ({"b1": stack(4)}, lambda: Of(l1=list_of(3))),
    ({"b1": stack(3, WIDTH, HIDDEN)}, lambda: Of(l1=list_of(3))),
    (gates_of(2), lambda: parts_of(3)),
    (gates_of(3), lambda: parts_of(2)),
]


@pytest.mark.parametrize(
    "params, model", [*((linears(*names.split()), m) for names, m in BY_NUMBER), *OF_PARTS]
)
def test_no_rule_is_shown_unless_it_decides_all(params, model, tmp_path):
    error = refused(reshard.to_nnx, saved(tmp_path / "linen", {"params": params}), model)
    for part in (r"(\d+)", "NAME", "unstack"):
        assert not [hint for hint in error.hints if part in hint]
    if "gating_einsum" in params:
        (problem,) = error.problems
        assert problem.startswith("params/gating_einsum, perhaps part0")


# A level above the model


def slashed(params, *above):
    """As Gemma was released: the levels of modules in one key."""
    made = {}
    for path, leaf in flatten_dict(params).items():
        made.setdefault("/".join((*above, *path[:-1])), {})[path[-1]] = leaf
    return made


LEVELS = {
    "collection": (lambda p: {"params": {"transformer": p}}, "transformer"),
    "bare": (lambda p: {"transformer": p}, "transformer"),
    "two": (lambda p: {"params": {"net": {"lm.1": p}}}, "net/lm.1"),
    "slashes": (lambda p: slashed(p, "transformer"), "transformer"),
    "slashes in a collection": (lambda p: {"params": slashed(p, "a", "b")}, "a/b"),
    "slashes alone": (slashed, ""),
}


@pytest.mark.parametrize("name", LEVELS)
def test_a_level_above_the_model_is_told_and_how_to_do_without(name, tmp_path):
    wrap, level = LEVELS[name]
    plain = saved(tmp_path / "plain", {"params": nested_params()})
    path = saved(tmp_path / "linen", wrap(nested_params()))
    error = refused(reshard.to_nnx, path, nested)
    call, told = error.hints[0].split("]) ")
    assert ("which hold several levels" in told) == ("slashes" in name)
    assert (f"removes `{level}`, if the model lacks that level" in told) == bool(level)
    call += "])"
    ckpt = reshard.to_nnx(eval(call, {"reshard": reshard, "ckpt": reshard.open(path)}), nested)
    assert reshard.diff(reshard.to_nnx(plain, nested), ckpt, values=True).equal


def test_optimizer_state_below_the_same_level_comes_along(tmp_path):
    params, tx = nested_params(), optax.adam(0.1)
    path, plain = (
        saved(tmp_path / str(i), {"params": p, "opt_state": tx.init(p), "step": jnp.int32(3)})
        for i, p in enumerate([{"transformer": params}, params])
    )
    error = refused(reshard.to_nnx, path, nested)
    rule = "from = '^params/transformer/', to = 'params/'"
    assert error.hints == (
        r'reshard.rename(ckpt, [("(^|/)transformer/", r"\1")]) removes `transformer`, if the model '
        "lacks that level",
        f"map_file=... also works in the opposite direction: {rule}",
    )
    expected = reshard.to_nnx(plain, nested)
    renamed = reshard.rename(reshard.open(path), [(r"(^|/)transformer/", r"\1")])
    by_rule = reshard.to_nnx(path, nested, map_file=map_of(tmp_path, rule))
    for made in (reshard.to_nnx(renamed, nested), by_rule):
        assert reshard.diff(made, expected, values=True).equal
    reshard.save(by_rule, tmp_path / "by_rule")
    back = reshard.to_linen(tmp_path / "by_rule")
    assert reshard.diff(back, path, values=True).equal


def test_a_level_above_an_nnx_model(tmp_path):
    def wrapped():
        return Of(inner=nested())

    path = saved(tmp_path / "nnx", zeros(wrapped))
    linen = {"params": nested_params()}
    error = refused(reshard.to_linen, path, lambda: linen, source=wrapped)
    call = r'reshard.rename(ckpt, [("(^|/)inner/", r"\1")])'
    assert error.hints == (f"{call} removes `inner`, if the model lacks that level",)


def nnx_odd():
    return Of(layers=nnx.List([one_list(), one_list()]))


def test_a_rule_that_is_shown_is_for_the_names_that_it_is_written_of(tmp_path):
    odd = r"it's.(a)+{b}\n_"
    params = {f"{odd}{i}": linears("one_0", "[1]") for i in range(2)}
    path = saved(tmp_path / "linen", {"params": params})
    error = refused(reshard.to_nnx, path, nnx_odd)
    (rule,) = [hint.partition("such as:")[2] for hint in error.hints if "from = " in hint]
    assert rule.strip() == (
        r"from = '''^params/it's\.\(a\)\+\{b\}\\n_(\d+)/\[1\]/''', to = 'params/layers/\1/one/1/'"
    )
    ckpt = reshard.to_nnx(path, nnx_odd, map_file=map_of(tmp_path, rule))
    for i, layer in enumerate(reshard.restore(ckpt, nnx_odd()).layers):
        for j, name in enumerate(("one_0", "[1]")):
            here = params[f"{odd}{i}"][name]
            np.testing.assert_array_equal(here["kernel"], layer.one[j].kernel[...])


def test_a_glob_for_a_key_with_a_star_names_that_alone():
    paths = [("params", "a*", "w"), ("params", "ab", "w"), ("params", "q?"), ("params", "qr")]
    names = {path: path for path in paths}
    assert covering_globs(paths[::2], names) == [(r"params/a\*/w", 1), (r"params/q\?", 1)]
    assert covering_globs(paths[:2], names) == [("**/w", 2)]


def test_hints_are_for_all_that_is_missing_and_not_for_each_leaf(tmp_path):
    """The globs name it and nothing else: typed, they are all that was needed."""

    def part():
        drop = functools.partial(nnx.Dropout, 0.1, rngs=nnx.Rngs(0))
        blocks = nnx.List([Of(attention=linear(), drop=drop()) for _ in range(4)])
        cache = nnx.Dict(a=nnx.Param(jnp.zeros(2)), b=nnx.Param(jnp.zeros(5)))
        return Of(pe=nnx.Param(jnp.zeros((3, 4))), blocks=blocks, cache=cache)

    def model():
        return Of(lam=part(), tokenizer=part(), codes=nnx.Param(jnp.zeros((7, 4))))

    layers = {f"blocks_{i}": linears("attention") for i in range(4)}
    path = saved(tmp_path / "linen", {"params": {"lam": layers, "tokenizer": layers}})
    error = refused(reshard.to_nnx, path, model)
    assert len(error.problems) == 2 * (1 + 8 + 2) + 1
    globs = {"codes": "1 leaf", "**/rngs": "16 leaves", "**/cache": "4 leaves", "**/pe": "2 leaves"}
    assert error.hints == tuple(
        f'init=["{glob}"] keeps the model\'s own initial value: {count}'
        for glob, count in globs.items()
    )
    reshard.to_nnx(path, model, init=list(globs))
