"""Outlines of models: modules, classes and definition order, from paths and from Flax itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from converted import Compact, Of, refusal
from flax import linen as nn
from flax import nnx
from flax.traverse_util import flatten_dict
from hypothesis import given
from hypothesis import strategies as st

from reshard.convert.model import definition_orders, linen_classes, nnx_outline
from reshard.convert.module_tree import linen_outline, unlifted, without
from reshard.errors import ArgumentError
from reshard.restore.pytrees import flatten_state
from reshard.restore.target import state_of
from reshard.tree import natural


def array(*shape, dtype="float32"):
    return np.zeros(shape, dtype)


def classes(module):
    """Nested dicts of the names in a module, each with its class; leaves left out."""
    return {
        (name, child.kind) if child.index is None else (name, child.kind, child.index): classes(
            child
        )
        for name, child in module.children.items()
    }


def leaves(module):
    """Printed path in the outline -> leaf."""
    found = dict(module.leaves)
    for name, child in module.children.items():
        found |= {f"{name}/{inner}": leaf for inner, leaf in leaves(child).items()}
    return found


def variables_of(module, *inputs):
    """Path -> abstract leaf of what `init` returns."""
    made = jax.eval_shape(module.init, jax.random.key(0), *inputs)
    return flatten_dict(nn.meta.unbox(made))


def layer(inner=2, outer=3):
    return nnx.Linear(inner, outer, rngs=nnx.Rngs(0))


class TestLinen:
    """Outlines of Linen models."""

    def test_a_name_that_linen_gave_says_class_and_order(self):
        expected = {
            "Dense_0": ("Dense", 0),
            "Dense_12": ("Dense", 12),
            "Dense_2": ("Dense", 2),
            "ScanCheckpointBlock_0": ("ScanCheckpointBlock", 0),
            "Remat_scanBlock_3": ("Remat_scanBlock", 3),
            "_Private_1": ("_Private", 1),
            "Block2_0": ("Block2", 0),
            "layers_0": ("", None),
            "encoderblock_1": ("", None),
            "Transformer": ("", None),
            "head": ("", None),
            "Dense_x": ("", None),
        }
        made = linen_outline({("params", name, "kernel"): array(2) for name in expected})
        assert {k: (one.kind, one.index) for k, one in made.children.items()} == expected
        assert list(made.children) == sorted(expected, key=lambda name: natural((name,)))

    def test_classes_of_names_that_were_given_come_from_the_module(self):
        class Block(nn.Module):
            def setup(self):
                self.norm = nn.LayerNorm()
                self.dense = [nn.Dense(3), nn.Dense(3)]

            def __call__(self, x, _=None):
                x = self.norm(x)
                for layer in self.dense:
                    x = layer(x)
                return x, None

        def function(x):
            x, _ = nn.remat(Block)(name="first")(x)
            x, _ = Block()(x)
            kwargs = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            x, _ = nn.scan(nn.remat(Block), length=2, **kwargs)()(x, None)
            x, _ = nn.scan(Block, length=2, **kwargs)(name="stack")(x, None)
            return nn.Dense(3, name="LayerNorm_7")(nn.RNN(nn.GRUCell(3), name="rnn")(x))

        with linen_classes() as noted:
            variables = variables_of(Compact(function), array(2, 4, 3))
        variables = {path: leaf for path, leaf in variables.items() if "Cell_0" not in path[1]}
        block = {("dense_0", "Dense"): {}, ("dense_1", "Dense"): {}, ("norm", "LayerNorm"): {}}
        assert noted[()] == "Compact"
        assert classes(linen_outline(variables, noted)) == {
            ("Block_0", "Block", 0): block,
            # A name like one of Linen's own, given to something else.
            ("LayerNorm_7", "Dense"): {},
            ("ScanCheckpointBlock_0", "ScanCheckpointBlock", 0): block,
            ("first", "Block"): block,
            ("stack", "Block"): block,
        }
        assert classes(linen_outline(variables))["first", ""] == {
            ("dense_0", ""): {},
            ("dense_1", ""): {},
            ("norm", ""): {},
        }

    def test_names_of_lifted_classes_are_as_flax_makes_them(self):
        several = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        lifted = {
            "CheckpointDense": nn.remat(nn.Dense),
            "JitDense": nn.jit(nn.Dense),
            "Fold_rngsDense": nn.fold_rngs(nn.Dense),
            "VmapDense": nn.vmap(nn.Dense, axis_size=2, **several),
            "Remat_scanDense": nn.remat_scan(nn.Dense, lengths=(2, 3)),
        }
        for kind, dense in lifted.items():
            model = Compact(lambda x, dense=dense: dense(3)(x))
            made = linen_outline(variables_of(model, array(2, 3)))
            assert classes(made) == {(f"{kind}_0", kind, 0): {}}
            assert unlifted(kind)[-1][0] == "Dense"


class Inner(nnx.Module):
    """Attributes against the alphabet."""

    def __init__(self, *, rngs):
        self.size = 3
        self.second = nnx.LayerNorm(3, rngs=rngs)
        self.mode = "x"
        self.first = nnx.LayerNorm(3, rngs=rngs)


class Model(nnx.Module):
    """With a list and a dict."""

    def __init__(self, *, rngs):
        self.head = nnx.Linear(3, 2, use_bias=False, rngs=rngs)
        self.blocks = nnx.List([Inner(rngs=rngs), nnx.relu, Inner(rngs=rngs)])
        self.by_name = nnx.Dict(z=nnx.Linear(3, 1, rngs=rngs), a=nnx.Linear(3, 1, rngs=rngs))
        self.plain = nnx.data([{"q": nnx.Param(jnp.zeros((4, 5)))}, nnx.Linear(3, 1, rngs=rngs)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


INNER = {("second", "LayerNorm"): {}, ("first", "LayerNorm"): {}}
MODEL = {
    ("head", "Linear"): {},
    ("blocks", "List"): {("0", "Inner"): INNER, ("2", "Inner"): INNER},
    ("by_name", "Dict"): {("z", "Linear"): {}, ("a", "Linear"): {}},
    ("plain", "list"): {("0", "dict"): {}, ("1", "Linear"): {}},
    ("dropout", "Dropout"): {("rngs", "RngStream"): {}},
}


def watched(make):
    """State and outline of what a function makes."""
    with definition_orders() as orders:
        state = state_of(make)
    return state, *nnx_outline(state, orders)


def unordered(module):
    """Paths of modules whose order is not known, of those with several children."""
    found = [] if module.ordered or len(module.children) < 2 else [module.path]
    return found + [path for child in module.children.values() for path in unordered(child)]


class TestNnx:
    """Outlines of NNX models."""

    def test_attributes_are_in_definition_order(self):
        for model in (Model, lambda: Model(rngs=nnx.Rngs(0)), Model(rngs=nnx.Rngs(0))):
            _, prefix, made = watched(model)
            assert (prefix, made.kind, unordered(made)) == ((), "Model", [])
            assert str(classes(made)) == str(MODEL)

    @pytest.mark.parametrize(
        "unflatten",
        [
            lambda model: nnx.merge(*nnx.split(model)),
            lambda model: nnx.eval_shape(lambda: Model(rngs=nnx.Rngs(0))),
            nnx.clone,
        ],
        ids=["merge", "eval_shape", "clone"],
    )
    def test_the_order_in_a_module_that_flax_has_rebuilt_is_not_known(self, unflatten):
        made = nnx_outline(unflatten(Model(rngs=nnx.Rngs(0))))[1]
        assert unordered(made) == [(), ("blocks", "0"), ("blocks", "2"), ("by_name",)]
        assert classes(made) == MODEL

    def test_an_attribute_of_a_rebuilt_module_that_is_set_again_tells_nothing(self):
        model = nnx.merge(*nnx.split(Inner(rngs=nnx.Rngs(0))))
        for name in ("second", "first"):
            delattr(model, name)
            setattr(model, name, nnx.LayerNorm(3, rngs=nnx.Rngs(0)))
        assert unordered(nnx_outline(model)[1]) == [()]

    def test_the_order_in_stacks_is_that_of_their_constructor(self):
        @nnx.split_rngs(splits=4)
        @nnx.vmap
        def stack(rngs):
            return Inner(rngs=rngs)

        def make():
            return Of(layers=stack(nnx.Rngs(0)))

        _, _, made = watched(make)
        assert str(classes(made)) == str({("layers", "Inner"): INNER})
        assert unordered(made) == []
        assert made.children["layers"].children["first"].leaves["scale"][0].shape == (4, 3)
        assert unordered(nnx_outline(make())[1]) == [("layers",)]

    def test_two_orders_of_one_class_are_none(self):
        """Unless one of them is a part of the other's."""

        def found(x, y):
            def make():
                return nnx.Dict(x=Of(**{k: layer() for k in x}), y=Of(**{k: layer() for k in y}))

            return unordered(watched(make)[2])

        assert found("ba", "ba") == []
        assert found("ba", "ab") == [("x",), ("y",)]
        assert found("cba", "ca") == []
        assert found("cba", "ac") == [("y",)]

    def test_watching_leaves_flax_as_it_was(self):
        construct = type(nnx.Module)._pytree_meta_construct
        with pytest.raises(ValueError, match="wrong"), definition_orders():
            raise ValueError("wrong")
        assert type(nnx.Module)._pytree_meta_construct is construct

    def test_without_a_constructor_that_can_be_watched_no_order_is_known(self, monkeypatch):
        monkeypatch.delattr(type(nnx.Pytree), "_pytree_meta_construct")
        with definition_orders() as orders:
            assert orders == {}

    def test_a_module_that_holds_the_one_it_is_in(self):
        parent = Of(child=Of(w=nnx.Param(jnp.zeros(2))))
        parent.child.parent = parent
        made = nnx_outline(parent)[1]
        assert classes(made) == {("child", "Of"): {}}
        assert list(leaves(made)) == ["child/w"]

    def test_a_variable_may_hold_a_tree_and_an_array_be_in_none(self):
        """As the scales of a `WeightNorm` before flax 0.12.12."""

        def make():
            tree = nnx.Param({"u": jnp.zeros(2), "v": [jnp.zeros(3)]})
            return Of(w=tree, scales=nnx.data({("kernel",): jnp.ones(4)}))

        for state in (make(), watched(make)[0]):
            found = leaves(nnx_outline(state)[1])
            assert {path: (x.path, x.shape, x.kind) for path, (x,) in found.items()} == {
                "w/u": (("w", "u"), (2,), "Param"),
                "w/v/0": (("w", "v", "0"), (3,), "Param"),
                "scales/('kernel',)": (("scales", "('kernel',)"), (4,), ""),
            }

    def test_a_model_beside_an_optimizer(self):
        tx = optax.adam(1e-3)
        beside = functools.partial(nnx.Optimizer, tx=tx, wrt=nnx.Param)
        with_own = functools.partial(nnx.ModelAndOptimizer, tx=tx)
        alone = nnx_outline(Model(rngs=nnx.Rngs(0)))[1]
        for wrap, prefix in (
            (lambda model: model, ()),
            (with_own, ("model",)),
            (lambda model: {"model": model, "optimizer": beside(model)}, ("model",)),
            (lambda model: {"a": with_own(model), "step": 3}, ("a", "model")),
            (lambda model: (beside(model), model), (1,)),
            (lambda model: {"net": model, "all": with_own(model)}, ("all", "model")),
        ):

            def make(wrap=wrap):
                return wrap(Model(rngs=nnx.Rngs(0)))

            for state, found, made in (watched(make), (make(), *nnx_outline(make()))):
                assert found == prefix
                assert str(classes(made)) == str(MODEL)
                assert leaves(made) == leaves(alone)
                paths = {leaf.path for leaf in flatten_state(state).leaves}
                assert {(*prefix, *held[0].path) for held in leaves(made).values()} <= paths

    def test_no_model_or_several(self):
        model, other = (Inner(rngs=nnx.Rngs(0)) for _ in range(2))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        for tree, found in (
            ({"a": model, "b": other}, "2: a (Inner), b (Inner)"),
            ({"b": optimizer}, "0: b (Optimizer)"),
        ):
            assert refusal(nnx_outline, tree, of=ArgumentError) == (
                f"one NNX model is needed, not {found}\n\n"
                'hint: give the model alone, or `{"model": model, "optimizer": optimizer}`'
            )

    def test_a_state_has_paths_only(self):
        model = Model(rngs=nnx.Rngs(0))
        whole = {name: held[0].shape for name, held in leaves(nnx_outline(model)[1]).items()}
        for state in (nnx.state(model), nnx.to_pure_dict(nnx.state(model))):
            prefix, made = nnx_outline(state)
            assert prefix == ()
            assert {name: held[0].shape for name, held in leaves(made).items()} == whole
            assert {kind for _, kind in classes(made)} == {""}
            assert not made.ordered


KEYS = st.text("ab_10", min_size=1, max_size=4)


def test_what_is_taken_out_of_a_shared_module_is_gone_everywhere():
    shared = layer()
    made = without(nnx_outline(Of(a=shared, b=shared))[1], [("a", "kernel")])
    assert made.children["a"] is made.children["b"]
    assert list(made.children["b"].leaves) == ["bias"]
    assert made.repeated == {"b"}


@given(st.lists(st.lists(KEYS, max_size=4).map(tuple), max_size=8))
def test_numbers_in_paths_sort_by_their_value(paths):
    assert sorted(map(natural, paths)) == sorted(natural(path) for path in reversed(paths))
    assert natural(("layer_9", "x")) < natural(("layer_10",)) < natural(("layer_10", "a"))
    assert natural(("b",)) < natural(("b1",)) < natural(("b1a",)) < natural(("b2",))
