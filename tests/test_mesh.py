"""Meshes and specs without devices, compared with JAX's own answers on simulated devices."""

import math
from typing import NamedTuple

import jax
import layouts
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from layouts import refused
from sampling import examples

import reshard
from reshard.errors import ShardingError
from reshard.sharding import mesh as mesh_lib
from reshard.sharding.mesh import Mesh, NamedSharding, SingleDeviceSharding

SAVED = Mesh(("data", "model"), (2, 4), ("Auto", "Auto"), tuple(range(8)))
EIGHT = Mesh(("data", "model"), (1, 8))
NAMES = ("replica", "data", "fsdp", "stage", "tensor", "expert")
ONES = ("replica", "data", "stage", "expert")
MANY = Mesh(NAMES, (1, 1, 2, 1, 4, 1))
MANY_OF_ONE = Mesh(NAMES, (1,) * 6)


def device_mesh(sizes, names, order=None, types=None):
    devices = np.array(jax.devices()[: math.prod(sizes)])
    devices = devices if order is None else devices[list(order)]
    return jax.sharding.Mesh(devices.reshape(sizes), names, axis_types=types)


# Forms of a mesh


@pytest.mark.parametrize(
    ("given_mesh", "saved", "expected"),
    [
        (EIGHT, [SAVED], EIGHT),
        (" data = 1 , model=8 ", [SAVED], EIGHT),
        ("model=8,data=1", [], Mesh(("model", "data"), (8, 1))),
        ({"model": 8, "data": 1}, [SAVED], Mesh(("model", "data"), (8, 1))),
        # The short form takes the saved names.
        ("1x8", [SAVED], EIGHT),
        (" 64x64 ", [SAVED, EIGHT], Mesh(("data", "model"), (64, 64))),
        ("4", [Mesh(("x",), (8,))], Mesh(("x",), (4,))),
        # As many sizes as there are axes larger than 1 in any saved mesh.
        ("1x8", [MANY], Mesh(NAMES, (1, 1, 1, 1, 8, 1))),
        ("8", [MANY_OF_ONE, Mesh(NAMES, (1, 4, 1, 1, 1, 1))], Mesh(NAMES, (1, 8, 1, 1, 1, 1))),
        ("2x1x2x1x2x1", [MANY], Mesh(NAMES, (2, 1, 2, 1, 2, 1))),
        # An axis that every saved mesh has with size 1, and that is not named, stays 1.
        ("tensor=4,fsdp=2", [MANY], Mesh((*ONES, "tensor", "fsdp"), (1, 1, 1, 1, 4, 2))),
        ({"other": 2}, [EIGHT, SAVED], Mesh(("other",), (2,))),
        (
            {"stage": 2, "fsdp": 4},
            [MANY],
            Mesh(("replica", "data", "expert", "stage", "fsdp"), (1, 1, 1, 2, 4)),
        ),
        (Mesh(("fsdp",), (4,)), [MANY], Mesh(("fsdp",), (4,))),
        (AbstractMesh((4,), ("fsdp",)), [MANY], Mesh(("fsdp",), (4,), ("Auto",))),
    ],
)
def test_forms_without_devices(given_mesh, saved, expected):
    assert mesh_lib.parse_mesh(given_mesh, iter(saved)) == expected


def test_a_jax_mesh_keeps_its_types_and_the_order_of_its_devices():
    order, names = (3, 0, 2, 1, 7, 6, 5, 4), ("data", "model")
    mesh = device_mesh((2, 4), names, order, (AxisType.Explicit, AxisType.Auto))
    assert mesh_lib.parse_mesh(mesh) == Mesh(names, (2, 4), ("Explicit", "Auto"), order)
    mesh = AbstractMesh((64, 64), names, axis_types=(AxisType.Auto, AxisType.Manual))
    assert mesh_lib.parse_mesh(mesh) == Mesh(names, (64, 64), ("Auto", "Manual"))


def not_a_mesh(given_mesh, saved=()):
    return refused(ShardingError, mesh_lib.parse_mesh, given_mesh, saved)


def test_wrong_meshes():
    hint = "\n\nhint: a mesh is `data=1,model=8`, or `1x8` for short"
    for text in ("data=1,model", "data=-1", "1x8x", "=8"):
        assert not_a_mesh(text, [SAVED]) == f"not a mesh: `{text}`{hint}"
    for mesh in ({"data": "8"}, {0: 8}, (1, 8), None):
        assert not_a_mesh(mesh) == f"not a mesh: {mesh}{hint}"
    for mesh, shown in (
        ("data=0,model=8", "data=0,model=8"),
        ("0x8", "data=0,model=8"),
        ({"data": 2, "model": -2}, "data=2,model=-2"),
        (Mesh(("a",), (0,)), "a=0"),
        ({}, ""),
    ):
        told = not_a_mesh(mesh, [SAVED])
        assert told == f"every axis of the mesh `{shown}` needs at least one device"
    assert not_a_mesh({}, [MANY]) == "every axis of the mesh `` needs at least one device"
    assert not_a_mesh("data=1,data=2") == "the mesh `data=1,data=2` names an axis twice"


DIFFERENT = "these have different axes"


@pytest.mark.parametrize(
    ("given_mesh", "saved", "why", "names"),
    [
        ("1x8", [], "no mesh was saved", "data=1,model=8"),
        ("2x2x2", [SAVED], "they have 2 axes, not 3\n  data=2,model=4", "data=2,model=2,axis2=2"),
        (
            "1x8",
            [SAVED, Mesh(("x", "y"), (4, 2)), EIGHT],
            f"{DIFFERENT}\n  data=1,model=8\n  data=2,model=4\n  x=4,y=2",
            "data=1,model=1,x=1,y=8",
        ),
        (
            "16",
            [Mesh(("x",), (2,)), Mesh(("x", "y"), (10, 2)), Mesh(("x", "y"), (2, 2))],
            f"{DIFFERENT}\n  x=2\n  x=2,y=2\n  x=10,y=2",
            "x=1,y=16",
        ),
        (
            "2x2x2",
            [MANY],
            f"they have 6 axes, not 3\n  {MANY}",
            "replica=1,data=1,fsdp=1,stage=2,tensor=2,expert=2",
        ),
    ],
)
def test_a_short_mesh_whose_axes_are_not_known(given_mesh, saved, why, names):
    assert not_a_mesh(given_mesh, saved) == (
        f"the mesh `{given_mesh}` takes its axis names from the saved meshes, but {why}\n\n"
        f"hint: name the axes: `{names}`"
    )


# Specs

AXES = st.sampled_from(["data", "model", "x", "y_1", "fsdp"])
SPECS = st.lists(st.lists(AXES, max_size=3, unique=True).map(tuple), max_size=4).map(tuple)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (None, ()),
        ("  ", ()),
        (P(None, "model"), ((), ("model",))),
        (["data", None, ["x", "y"], ()], (("data",), (), ("x", "y"), ())),
        (" data + model , , x , None", (("data", "model"), (), ("x",), ())),
        (" P(None, ('data','model')) ", ((), ("data", "model"))),
        ("PartitionSpec('data', None)", (("data",), ())),
        ("PartitionSpec()", ()),
    ],
)
def test_normalize_spec(spec, expected):
    assert mesh_lib.normalize_spec(spec) == expected


def test_wrong_specs():
    hint = "hint: a spec is `data,model`, or as JAX prints it: `P('data', 'model')`"
    wrong = [[1], "PartitionSpec(data)", [("data", 1)], ["data", {"model": 1}]]
    for spec in (*wrong, P(P.UNCONSTRAINED, "data")):
        told = refused(ShardingError, mesh_lib.normalize_spec, spec)
        assert told == f"not a partition spec: {spec!r}\n\n{hint}"


@settings(deadline=None)
@given(SPECS)
def test_specs_survive_jax_and_text(spec):
    assert mesh_lib.normalize_spec(spec) == spec
    assert mesh_lib.normalize_spec(P(*spec)) == spec
    text = mesh_lib.format_spec(spec)
    assert mesh_lib.normalize_spec(text) == mesh_lib.normalize_spec(eval(text, {"P": P})) == spec
    assume(spec != ((),))  # typed as "", which is the empty spec: both shard nothing
    assert mesh_lib.normalize_spec(mesh_lib.spec_text(spec)) == spec


def test_rename_axes_renames_and_replicates():
    spec = (("data", "model"), (), ("model",), ("x",))
    new = mesh_lib.rename_axes(spec, {"data": "model", "model": "data", "x": ""})
    assert new == (("model", "data"), (), ("data",), ())
    assert mesh_lib.rename_axes(spec, {}) == spec


def test_all_spec_problems_are_listed():
    spec = (("x", "data"), ("model", "data"), ("data",))
    text = "P(('x', 'data'), ('model', 'data'), 'data')"
    assert mesh_lib.spec_problems((15, 3), SAVED, spec) == [
        f"{text} is for 3 dimensions, but the array has 2",
        f"{text} names axis 'x', which `data=2,model=4` lacks",
        f"{text} uses axis 'data' 3 times",
        "dimension 0 has size 15, not a multiple of 2 (x*data)",
        "dimension 1 has size 3, not a multiple of 8 (model*data)",
    ]


# Against JAX


class Case(NamedTuple):
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    spec: tuple[tuple[str, ...], ...]
    shape: tuple[int, ...]


@st.composite
def cases(draw, most_devices):
    """A mesh, a spec that splits some dimensions over some of its axes, and a shape that fits."""
    sizes: list[int] = []
    for size in draw(st.lists(st.integers(1, 8), min_size=1, max_size=4)):
        if math.prod(sizes) * size <= most_devices:
            sizes.append(size)
    names = tuple("abcd"[: len(sizes)])
    rank = draw(st.integers(0, 4))
    spec: list[list[str]] = [[] for _ in range(draw(st.integers(0, rank)))]
    for axis in draw(st.permutations(names)):
        dim = draw(st.integers(-1, len(spec) - 1))
        if dim >= 0:
            spec[dim].append(axis)
    size_of = dict(zip(names, sizes, strict=True))
    parts = [math.prod(size_of[axis] for axis in entry) for entry in spec]
    parts += [1] * (rank - len(parts))
    shape = tuple(part * draw(st.integers(1, 5)) for part in parts)
    return Case(names, tuple(sizes), tuple(map(tuple, spec)), shape)


@settings(deadline=None, max_examples=examples(200))
@given(cases(most_devices=4096))
def test_shard_shape_is_jax_shard_shape(case):
    ours = NamedSharding(Mesh(case.names, case.sizes), case.spec)
    theirs = jax.sharding.NamedSharding(AbstractMesh(case.sizes, case.names), P(*case.spec))
    assert mesh_lib.shard_shape(case.shape, ours) == theirs.shard_shape(case.shape)
    assert mesh_lib.spec_problems(case.shape, ours.mesh, case.spec) == []


@settings(deadline=None, max_examples=examples(300))
@given(
    st.lists(st.integers(0, 12), max_size=3).map(tuple),
    st.lists(
        st.lists(st.sampled_from(["data", "model", "x"]), max_size=2).map(tuple), max_size=3
    ).map(tuple),
)
@example((), (("data",),))
def test_a_spec_has_problems_exactly_if_jax_refuses_it(shape, spec):
    def accepted():
        try:
            sharding = jax.sharding.NamedSharding(AbstractMesh((2, 4), ("data", "model")), P(*spec))
            sharding.check_compatible_aval(shape)
            sharding.shard_shape(shape)
        except Exception:  # not all of them are ValueErrors
            return False
        return True

    assert (mesh_lib.spec_problems(shape, SAVED, spec) == []) == accepted()


def test_without_a_named_sharding_a_shard_is_the_whole():
    assert mesh_lib.shard_shape((3, 5), None) == (3, 5)
    assert mesh_lib.shard_shape((3, 5), SingleDeviceSharding("cpu:0")) == (3, 5)
    assert mesh_lib.shard_shape([16, 5], NamedSharding(SAVED, (("model",),))) == (4, 5)


@settings(deadline=None, max_examples=examples(200))
@given(cases(most_devices=8), st.randoms(use_true_random=False))
def test_shard_owners_are_jax_devices_indices_map(case, random):
    order = list(range(math.prod(case.sizes)))
    random.shuffle(order)
    devices = device_mesh(case.sizes, case.names, order)
    theirs = jax.sharding.NamedSharding(devices, P(*case.spec))
    ours = NamedSharding(mesh_lib.parse_mesh(devices), case.spec)
    shard = theirs.shard_shape(case.shape)
    expected: dict[tuple[int, ...], list[int]] = {}
    for device, box in theirs.devices_indices_map(case.shape).items():
        starts = [part.indices(size)[0] for part, size in zip(box, case.shape, strict=True)]
        index = tuple(start // step for start, step in zip(starts, shard, strict=True))
        expected.setdefault(index, []).append(device.id)
    assert mesh_lib.shard_owners(case.shape, ours) == expected


# A checkpoint on another mesh


LAYERS = {f"layer_{i}": {"bias": ((24,), "model")} for i in (1, 2, 10)}
WEIGHTS = {"embed": ((8, 40), None, "model"), "wi": ((8, 80), "data", "model"), **LAYERS}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Parameters and two moments of each, on 2x4; and what has neither name nor shape of those."""
    place = layouts.random_on(layouts.mesh((2, 4)))
    specs = {
        "params": WEIGHTS,
        "opt_state": {"0": {"mu": WEIGHTS, "nu": WEIGHTS}, "sums": {"wi": ((8,), "data")}},
        "wi": ((16,), "model"),
    }
    tree = jax.tree.map(lambda x: place(*x), specs, is_leaf=lambda x: isinstance(x, tuple))
    return reshard.open(layouts.save_pytree(tmp_path_factory.mktemp("trained") / "run", tree))


def told(ckpt, mesh, *arguments, **keywords):
    """The problems and the hints of a mesh that is refused."""
    with pytest.raises(ShardingError) as caught:
        reshard.to_mesh(ckpt, mesh, *arguments, **keywords)
    assert caught.value.summary.startswith("specs that do not fit the mesh `")
    return [*caught.value.problems], [*caught.value.hints]


def test_every_leaf_that_does_not_fit_is_named_and_specs_that_fit(trained):
    ckpt = reshard.select(trained, ["params", "opt_state/0/mu/wi", "wi"])
    problems, hints = told(ckpt, "2x9")
    assert all(problem.endswith(", not a multiple of 9 (model)") for problem in problems)
    biases = (f"params/layer_{i}/bias" for i in (1, 2, 10))
    leaves = ["opt_state/0/mu/wi", "params/embed", *biases, "params/wi", "wi"]
    assert [problem.split()[0] for problem in problems] == leaves
    assert hints == [
        'axes={"model": ""} replicates dimensions split over it',
        'specs=[("(^|/)mu/wi$", "data,")] fits',
        'specs=[("(^|/)embed$", ",")] fits',
        'specs=[("(^|/)bias$", "")] fits',
        'specs=[("^params/wi$", "data,")] fits',
        'specs=[("^wi$", "")] fits',
    ]
    fits = [("(^|/)embed$", ","), ("(^|/)bias$", ""), ("^wi$", "")]
    fits += [(f"(^|/){name}/wi$", "data,") for name in ("params", "mu")]
    assert reshard.to_mesh(ckpt, "2x9", fits)["params/wi"].sharding.spec == (("data",), ())


def test_axes_that_the_mesh_lacks_are_paired_in_order_if_there_are_as_many(trained):
    replicates = 'axes={{"{0}": ""}} replicates dimensions split over it'
    renames = f'axes={{{{"{{0}}": "{{1}}"}}}} renames, {replicates}'
    for mesh, expected in (
        ("fsdp=1,tensor=8", [("data", "fsdp"), ("model", "tensor")]),
        ("fsdp=2,model=4", [("data", "fsdp")]),
        ("other=8", [("data",), ("model",)]),
        ("replica=2,fsdp=2,tensor=4", [("data",), ("model",)]),
    ):
        _, hints = told(trained, mesh)
        texts = {1: replicates, 2: renames}
        assert hints[: len(expected)] == [texts[len(axes)].format(*axes) for axes in expected]
        if all(len(axes) == 2 for axes in expected):
            embed = reshard.to_mesh(trained, mesh, axes=dict(expected))["params/embed"]
            assert embed.sharding.spec == ((), (dict(expected).get("model", "model"),))


def test_an_axis_is_not_renamed_where_it_would_not_help(trained):
    # `data` is in no spec that was saved; it is in one that was given.
    _, hints = told(reshard.select(trained, "params/embed"), "model=8", [("embed", "data,")])
    assert hints == ["the mesh has the axes model"]
    # `data` divides, and `model` is renamed already.
    ckpt = reshard.select(trained, "params/wi")
    _, hints = told(ckpt, "data=4,model=3")
    assert hints == [
        'axes={"model": ""} replicates dimensions split over it',
        'specs=[("(^|/)wi$", "data,")] fits',
    ]
    _, hints = told(ckpt, "rows=4,columns=3", axes={"data": "rows", "model": "columns"})
    assert hints == ['specs=[("(^|/)wi$", "rows,")] fits']


def test_an_axis_of_size_one_is_needed_by_no_mesh(tmp_path):
    names = ("replica", "data", "expert", "tensor")
    on = device_mesh((1, 2, 1, 4), names)
    spec = P(("replica", "data"), ("tensor", "expert"))
    tree = {"w": layouts.random_on(on)((8, 16), *spec)}
    ckpt = reshard.open(layouts.save_pytree(tmp_path / "run", tree))
    for text in ("2x2", "data=2,tensor=2"):
        moved = reshard.to_mesh(ckpt, text)["w"]
        assert sorted(moved.sharding.mesh.shape.items()) == [
            *(("data", 2), ("expert", 1), ("replica", 1), ("tensor", 2))
        ]
        assert moved.sharding.spec == mesh_lib.normalize_spec(spec)
        assert mesh_lib.shard_shape(moved.shape, moved.sharding) == (4, 8)
    # A mesh of JAX's stays what it is.
    mine = device_mesh((2, 2), ("data", "tensor"))
    restored = reshard.restore(ckpt, mine)["w"]
    assert restored.sharding == jax.sharding.NamedSharding(mine, P("data", "tensor"))
    assert np.array_equal(restored, tree["w"])
    # One that is larger is needed.
    problems, _ = told(ckpt, "data=2")
    assert problems == [
        "w  float32[8, 16]: P(('replica', 'data'), ('tensor', 'expert')) names axis 'tensor', "
        "which `replica=1,expert=1,data=2` lacks"
    ]


def test_leaves_that_a_target_lacks_are_hinted_by_their_numbers(trained):
    ckpt = reshard.select(trained, "params/**")
    on = device_mesh((2, 4), ("data", "model"))
    state = {name: jax.ShapeDtypeStruct(WEIGHTS[name][0], "float32") for name in ("embed", "wi")}
    target = reshard.target({"params": state}, mesh=on)
    with pytest.raises(reshard.TreeMismatchError) as caught:
        reshard.to_mesh(ckpt, on, target=target)
    assert [*caught.value.hints] == [
        f'reshard.select(ckpt, drop=["params/layer_{i}/**"])' for i in (1, 2, 10)
    ]
