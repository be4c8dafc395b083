"""Meshes and specs without devices, compared with JAX's own answers on simulated devices."""

import math
from typing import NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from layouts import refused
from sampling import examples

from reshard.errors import ShardingError
from reshard.sharding import mesh as mesh_lib
from reshard.sharding.mesh import Mesh, NamedSharding, SingleDeviceSharding

SAVED = Mesh(("data", "model"), (2, 4), ("Auto", "Auto"), tuple(range(8)))
EIGHT = Mesh(("data", "model"), (1, 8))


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


TEXT = "\n\nhint: a mesh is `data=1,model=8`, or `1x8` for short"
TAKES, WRITE = "takes its axis names from the saved meshes", "hint: write the axes out: "
FORMS = "\n\nhint: a mesh is `data=1,model=8`, `1x8`, a dict, or a jax Mesh or AbstractMesh"


@pytest.mark.parametrize(
    ("given_mesh", "saved", "message"),
    [
        ("data=1,model", [], "not a mesh: `data=1,model`" + TEXT),
        ("data=-1", [], "not a mesh: `data=-1`" + TEXT),
        ("1x8x", [SAVED], "not a mesh: `1x8x`" + TEXT),
        ("=8", [], "not a mesh: `=8`" + TEXT),
        ({"data": "8"}, [], "not a mesh: {'data': '8'}" + FORMS),
        ({0: 8}, [], "not a mesh: {0: 8}" + FORMS),
        ((1, 8), [], "not a mesh: (1, 8)" + FORMS),
        (None, [], "not a mesh: None" + FORMS),
        ("data=0,model=8", [], "every axis of the mesh `data=0,model=8` needs at least one device"),
        ("0x8", [SAVED], "every axis of the mesh `data=0,model=8` needs at least one device"),
        ({"a": 2, "b": -2}, [], "every axis of the mesh `a=2,b=-2` needs at least one device"),
        ({}, [], "every axis of the mesh `` needs at least one device"),
        (Mesh(("a",), (0,)), [], "every axis of the mesh `a=0` needs at least one device"),
        ("data=1,data=2", [], "the mesh `data=1,data=2` names an axis twice"),
        ("1x8", [], f"`1x8` {TAKES}, and none was saved\n\n{WRITE}`axis0=1,axis1=8`"),
        (
            "8",
            [SAVED],
            f"`8` {TAKES}, which have 2, not 1\n  data=2,model=4\n\n{WRITE}`data=1,model=8`",
        ),
        (
            "2x2x2",
            [SAVED],
            f"`2x2x2` {TAKES}, which have 2, not 3\n  data=2,model=4\n\n"
            f"{WRITE}`data=2,model=2,axis2=2`",
        ),
        (
            "1x8",
            [SAVED, Mesh(("x", "y"), (4, 2)), EIGHT],
            f"`1x8` {TAKES}, and they do not agree on them\n"
            f"  data=1,model=8\n  data=2,model=4\n  x=4,y=2\n\n{WRITE}`axis0=1,axis1=8`",
        ),
    ],
)
def test_what_is_not_a_mesh(given_mesh, saved, message):
    assert refused(ShardingError, mesh_lib.parse_mesh, given_mesh, saved) == message


def test_a_mesh_counts_and_prints():
    mesh = Mesh(("a", "b", "c"), (2, 3, 4))
    assert (mesh.size, mesh.shape, str(mesh)) == (24, {"a": 2, "b": 3, "c": 4}, "a=2,b=3,c=4")
    assert mesh_lib.parse_mesh(str(mesh)) == mesh


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
    ],
)
def test_normalize_spec(spec, expected):
    assert mesh_lib.normalize_spec(spec) == expected


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ([1], "not a partition spec: [1]"),
        ([("data", 1)], "not a partition spec: [('data', 1)]"),
        (["data", {"model": 1}], "not a partition spec: ['data', {'model': 1}]"),
        (P(P.UNCONSTRAINED, "data"), f"not a partition spec: {P(P.UNCONSTRAINED, 'data')!r}"),
    ],
)
def test_what_is_not_a_spec(spec, message):
    assert refused(ShardingError, mesh_lib.normalize_spec, spec) == message


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


@pytest.mark.parametrize(
    ("shape", "spec", "problems"),
    [
        ((15, 24), (("data",), ("model",)), ["dimension 0 of 15 does not divide by 2 (data)"]),
        ((16,), (("data",), ()), ["P('data', None) has 2 dimensions, the array 1"]),
        ((), (("data",),), ["P('data') has 1 dimensions, the array 0"]),
        ((16, 24), (("data",), ("data",)), ["P('data', 'data') uses axis 'data' 2 times"]),
        (
            (16, 24),
            (("x",), ("y",)),
            [
                "P('x', 'y') names axis 'x', which `data=2,model=4` lacks",
                "P('x', 'y') names axis 'y', which `data=2,model=4` lacks",
            ],
        ),
        (
            (15, 3),
            (("x", "data"), ("model", "data"), ("data",)),
            [
                "P(('x', 'data'), ('model', 'data'), 'data') has 3 dimensions, the array 2",
                "P(('x', 'data'), ('model', 'data'), 'data') names axis 'x', which "
                "`data=2,model=4` lacks",
                "P(('x', 'data'), ('model', 'data'), 'data') uses axis 'data' 3 times",
                "dimension 0 of 15 does not divide by 2 (x*data)",
                "dimension 1 of 3 does not divide by 8 (model*data)",
            ],
        ),
    ],
)
def test_spec_problems_are_all_of_them(shape, spec, problems):
    assert mesh_lib.spec_problems(shape, SAVED, spec) == problems


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
def test_a_spec_has_problems_where_jax_refuses_it(shape, spec):
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


def test_shard_owners_need_no_devices():
    mesh = Mesh(("data", "model"), (64, 64))
    owners = mesh_lib.shard_owners((128, 64), NamedSharding(mesh, (("model",),)))
    assert owners == {(j, 0): [64 * i + j for i in range(64)] for j in range(64)}
