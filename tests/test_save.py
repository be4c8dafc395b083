"""What is saved, as Orbax itself reads it: every layout, every transition, every option."""

import base64
import errno
import functools
import itertools
import json
import os
import re
import shutil

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jobs import FORMATS, assert_pruned, inodes, values
from layouts import LAYOUTS, READERS, STEPS, flat, hashes, metrics
from releases import older
from sampling import few

import reshard
from reshard.units import parse_bytes


@pytest.fixture
def save(tmp_path):
    """`reshard.save` into a new directory; the source must be the same afterwards."""
    count = itertools.count()

    def run(ckpt, **kwargs):
        out = tmp_path / f"out{next(count)}"
        source = (ckpt if isinstance(ckpt, reshard.Checkpoint) else ckpt[0]).source.root
        before = hashes(source)
        run.plan = reshard.save(ckpt, out, **kwargs)
        assert hashes(source) == before
        return out

    return run


def chunk_grid(path):
    return {h.path: h.chunk_shape for h in reshard.open(path).arrays}


def assert_read(got, expected, on):
    layouts.assert_same_tree(got, expected)
    layouts.assert_laid_out(got, expected, on)


# The oracle: every layout, every reader of Orbax.


@pytest.fixture(scope="module")
def resharded(saved, tmp_path_factory):
    """The checkpoint of a layout and its copy for a 1x8 mesh, made once."""

    @functools.cache
    def get(layout):
        source = saved(layout)
        out = tmp_path_factory.mktemp("resharded") / "out"
        before = hashes(source.path)
        reshard.save(reshard.to_mesh(reshard.open(source.path, **source.open), "1x8"), out)
        assert hashes(source.path) == before
        return source, out

    return get


@pytest.mark.parametrize(("layout", "reader"), few(layouts.ORACLES, *layouts.SOME_ORACLES))
def test_orbax_reads_it_without_a_target(resharded, read_by_orbax, layout, reader):
    source, out = resharded(layout)
    assert reader in source.readers
    got = READERS[reader](source, out)
    assert_read(got, read_by_orbax(layout, reader), layouts.mesh((1, 8)))


@pytest.mark.parametrize("sizes", [(1, 8), (2, 4), (1, 2)])
@pytest.mark.parametrize(("layout", "reader"), few(layouts.ORACLES, *layouts.SOME_ORACLES))
def test_orbax_reads_it_with_a_target(resharded, layout, reader, sizes):
    source, out = resharded(layout)
    if reader not in source.target_readers:  # strings: only a target without them is taken
        assert source.tree["text"]
        reader = "pytree"
    on = layouts.mesh(sizes)
    got = READERS[reader](source, out, layouts.abstract(source.tree, on))
    layouts.assert_same_tree(got, layouts.plain_scalars(source.tree))
    layouts.assert_laid_out(got, source.tree, on)


def without_chunks(handle):
    """An array's own document; its codec and level are the source's."""
    document = json.loads(handle.data.metadata)
    document.pop("chunks", None)
    document.pop("chunk_grid", None)
    for codec in document.get("codecs", ()):
        codec["configuration"].pop("chunk_shape", None)
    return document


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_laid_out_on_disk_as_its_source(resharded, layout):
    source, out = resharded(layout)
    one = reshard.open(source.path, **source.open)
    two = reshard.open(out, **source.open)
    assert list(two) == list(one)
    for ckpt in (one, two):  # shapes of shards on a mesh, which are optional there
        rich = ckpt.source.metadata.pop("value_metadata_tree", "null")
        shapes = r', "write_shape": \[[^]]*\]'
        ckpt.source.metadata["rich"] = re.sub(shapes, "", rich)
    for name in ("kind", "format", "v1", "step", "item", "items", "metadata", "metadata_apart"):
        assert getattr(two.source, name) == getattr(one.source, name), name
    assert two.source.steps == one.source.steps[-1:]
    names = {path.name for path in source.directory.iterdir()} | {"reshard_digests.json"}
    if older("orbax-checkpoint", "0.12.3") and not source.inner and layout != "bare":
        names.add("commit_success.txt")
    written = {path.name for path in (out / source.inner).iterdir()}
    found, names = ({n for n in n_ if n != "d" and "process_" not in n} for n_ in (written, names))
    assert found == names
    if "_strings.json" in names:
        ours, theirs = (path / source.inner / "_strings.json" for path in (out, source.path))
        assert json.loads(ours.read_text()) == json.loads(theirs.read_text())
    for handle in two.arrays:
        assert handle.key_impl == one[handle.path].key_impl
        assert without_chunks(handle) == without_chunks(one[handle.path])


def document_of(path):
    return json.loads((path / "_METADATA").read_text())


def test_the_record_of_containers_goes_with_the_tree_that_it_describes(saved, save):
    ckpt = reshard.open(saved("rich").path)
    told = "the record of tuples, namedtuples and classes is left out: it describes the saved tree"
    for made, other in (
        (reshard.select(ckpt, "**"), False),
        (reshard.select(ckpt, drop="opt/**"), True),
        (reshard.rename(ckpt, [("^params/embed$", "params/table")]), True),
    ):
        assert made.retyped == (told in made.notes) == other
        assert bool(document_of(save(made)).get("value_metadata_tree")) != other


# The documents, against the ones that Orbax writes for the same arrays on the new mesh.


def parsed_shardings(path):
    document = json.loads((path / "_sharding").read_text())
    found = {base64.urlsafe_b64decode(k).decode(): json.loads(v) for k, v in document.items()}
    for sharding in found.values():  # P() and P(None) are the same spec
        while sharding.get("partition_spec") and sharding["partition_spec"][-1] is None:
            sharding["partition_spec"].pop()
    return found


def array_metadatas(path):
    document = json.loads((path / "array_metadatas/process_0").read_text())
    entries = [entry["array_metadata"] for entry in document["array_metadatas"]]
    return {entry["param_name"]: entry for entry in entries}


@pytest.mark.parametrize("form", FORMATS)
def test_documents_are_those_of_orbax(resharded, tmp_path, form):
    source, out = resharded({"zarr2": "standalone", "zarr3": "zarr3-ocdbt"}.get(form, form))
    on = layouts.mesh((1, 8))
    tree = jax.tree.map(
        lambda x: jax.device_put(x, layouts.projected(x, on)) if isinstance(x, jax.Array) else x,
        source.tree,
    )
    theirs = layouts.save_pytree(tmp_path / "theirs", tree, **FORMATS[form])
    assert parsed_shardings(out) == parsed_shardings(theirs)
    ours, others = document_of(out), document_of(theirs)
    assert list(ours["tree_metadata"]) == list(others["tree_metadata"])
    # Orbax divides replicated arrays among their replicas; nothing reads that back.
    shards = {
        ".".join(map(str, path)): shard_shape(leaf)
        for path, leaf in layouts.saved_leaves(tree).items()
        if isinstance(leaf, jax.Array)
    }
    for entry in others["tree_metadata"].values():
        name = ".".join(key["key"] for key in entry["key_metadata"])
        if name in shards:
            entry["value_metadata"]["write_shape"] = shards[name]
    assert ours == others
    chunks = {handle.data.name: list(handle.chunk_shape) for handle in reshard.open(out).arrays}
    assert array_metadatas(out) == {
        name: entry | {"write_shape": shards[name], "chunk_shape": chunks[name]}
        for name, entry in array_metadatas(theirs).items()
    }


@pytest.mark.parametrize("layout", ["standalone", "zarr3-files", "v1"])
def test_write_shapes_of_arrays_that_are_copied_on_their_sharding_are_kept(saved, save, layout):
    """Orbax divides replicated arrays among their replicas. A copy has the same chunks."""
    source = saved(layout)
    ckpt, item = reshard.open(source.path), source.inner
    before = array_metadatas(source.directory)
    assert before["params.replicated"]["write_shape"] != [16, 8]  # the shape of its shards
    copy = save(ckpt) / item
    assert array_metadatas(copy) == before
    assert document_of(copy)["tree_metadata"] == document_of(source.directory)["tree_metadata"]
    renamed = array_metadatas(save(reshard.rename(ckpt, [("^params/repl", "model/repl")])) / item)
    moved = before.pop("params.replicated") | {"param_name": "model.replicated"}
    assert renamed.pop("model.replicated") == moved and renamed == before
    cast = reshard.cast(ckpt, "float64", where=["params/replicated", "params/embed"])
    found = array_metadatas(save(cast) / item)
    assert found.pop("params.replicated")["write_shape"] == [16, 8]
    assert found.pop("params.embed")["write_shape"] == [32, 24]
    del before["params.embed"]
    assert found == before


def test_positions_of_lists_ascend_whatever_order_they_were_listed_in(tmp_path):
    """Older Orbax reads lists position by position; other children keep their order."""
    tree = {"z": [jnp.ones(3), {}, {"b": [jnp.ones(2), None], "a": jnp.ones(4)}], "y": jnp.ones(5)}
    tree["z"] += [jnp.ones(2)] * 9
    path = layouts.save_pytree(tmp_path / "reversed", tree)
    document = document_of(path)
    document["tree_metadata"] = dict(reversed(document["tree_metadata"].items()))
    (path / "_METADATA").write_text(json.dumps(document))
    reshard.save(reshard.open(path), tmp_path / "out")
    assert list(document_of(tmp_path / "out")["tree_metadata"]) == [
        "('z', '0')",
        "('z', '1')",
        "('z', '2', 'b', '0')",
        "('z', '2', 'b', '1')",
        "('z', '2', 'a')",
        *(f"('z', '{position}')" for position in range(3, 12)),
        "('y',)",
    ]
    layouts.assert_same_tree(layouts.load_pytree(tmp_path / "out"), tree)


def shard_shape(array):
    shard = list(array.sharding.shard_shape(array.shape))
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        shard += jax.random.key_data(array).shape[array.ndim :]
    return shard


def metadata_of(path):
    """Dtype, shape and sharding of each leaf, as Orbax reads its metadata."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.metadata(path).item_metadata.tree
    leaves = ((name, leaf) for name, leaf in flat(tree).items() if hasattr(leaf, "shape"))
    return {name: (leaf.dtype, leaf.shape, leaf.sharding) for name, leaf in leaves}


@pytest.mark.skipif(
    older("orbax-checkpoint", "0.12"), reason="an older Orbax restores no array without a sharding"
)
@pytest.mark.every_combination
@pytest.mark.parametrize("known", ["none", "some", "all"])
@pytest.mark.parametrize("to", [None, "data=2,model=4"])
def test_arrays_that_were_saved_without_a_sharding(tmp_path, save, known, to):
    """AXLearn writes no `_sharding`. Of some types of shardings, Orbax writes none."""
    on = layouts.mesh((2, 4))
    put = layouts.random_on(on)
    tree = {
        "params": {"w": put((6, 40), "data", "model"), "b": put((8,), "model")},
        "host": layouts.random((3, 5)),
        "step": 3,
    }
    path = layouts.save_pytree(tmp_path / "saved", tree)
    parsed = json.loads((path / "_sharding").read_text())
    names = {base64.urlsafe_b64decode(key).decode(): key for key in parsed}
    if known == "none":
        (path / "_sharding").unlink()
        shardings = dict.fromkeys(flat(tree))
    elif known == "some":
        (path / "_sharding").write_text(json.dumps({names["params.w"]: parsed[names["params.w"]]}))
        shardings = {"['params']['w']": tree["params"]["w"].sharding}
    else:
        shardings = layouts.shardings(tree)
    specs = {"w$": P("data", "model"), "b$": P("model")}
    ckpt = reshard.open(path)
    out = save(ckpt if to is None else reshard.to_mesh(ckpt, to, specs))
    if to is not None:
        shardings = layouts.shardings(tree)
    got = {name: s and s.to_jax_sharding() for name, (_, _, s) in metadata_of(out).items()}
    assert got == {name: shardings.get(name) for name in got} and len(got) == 4
    assert (out / "_sharding").exists() == any(shardings.values())

    # A target may leave out the sharding of one leaf.
    for left_out in (None, "w", "b"):
        target = layouts.abstract(tree, on)
        if left_out is not None:
            target["params"][left_out] = layouts.laid_out(tree["params"][left_out], None)
        found = layouts.load_standard(out, target)
        for name, leaf in tree["params"].items():
            given = name != left_out or shardings.get(f"['params']['{name}']") is not None
            assert isinstance(found["params"][name], jax.Array) == given
            assert np.asarray(found["params"][name]).tobytes() == np.asarray(leaf).tobytes()
            assert not given or found["params"][name].sharding == leaf.sharding
        np.testing.assert_array_equal(found["host"], tree["host"])
    again = reshard.open(out)
    assert {path: leaf.sharding for path, leaf in again.items() if leaf is not None} == {
        path: leaf.sharding for path, leaf in reshard.open(save(again)).items()
    }
    assert (again["params/b"].sharding is None) == (shardings.get("['params']['b']") is None)


# What surrounds the tree.


def test_metrics_and_custom_metadata(resharded):
    source, out = resharded("manager")
    for path in (source.path, out):
        with layouts.open_manager(path) as manager:
            assert manager.metadata().custom_metadata == {"root": "kept"}
            assert manager.best_step() == 20
            assert manager.metadata(20).custom_metadata == layouts.CUSTOM
            assert manager.metrics(20) == metrics(20)
    name = "20/_CHECKPOINT_METADATA"
    assert (out / name).read_bytes() == (source.path / name).read_bytes()
    assert sorted(p.name for p in out.iterdir()) == ["20", "metadata"]
    _, out = resharded("standard")
    with ocp.StandardCheckpointer() as checkpointer:
        assert checkpointer.metadata(out).custom_metadata == layouts.CUSTOM


def test_every_step(saved, save):
    source = saved("manager")
    steps = [reshard.open(source.path, step=step) for step in STEPS]
    out = save([reshard.to_mesh(ckpt, "1x8") for ckpt in steps])
    written = [f"step {step} of `{source.path}` -> `{out}/{step}`" for step in STEPS]
    assert list(save.plan.notes[-2:]) == written and reshard.plan(steps).notes == ()
    assert reshard.plan(reshard.open(source.path / "20"), f"{out}-20").notes == ()
    assert reshard.open(out).source.steps == STEPS
    on = layouts.mesh((1, 8))
    for path in (source.path, out):
        with layouts.open_manager(path) as manager:
            assert manager.all_steps() == list(STEPS)
            assert [manager.metrics(step) for step in STEPS] == [metrics(step) for step in STEPS]
    with ocp.CheckpointManager(source.path) as one, ocp.CheckpointManager(out) as two:
        for step in STEPS:
            got, expected = (m.restore(step, args=ocp.args.StandardRestore()) for m in (two, one))
            assert_read(got, expected, on)
    with ocp.CheckpointManager(out) as manager:
        manager.save(30, args=ocp.args.StandardSave({"a": jnp.arange(3)}))
        assert manager.all_steps() == [*STEPS, 30]


def test_a_manager_s_root_is_not_written_under_the_name_of_a_step(saved, save, tmp_path):
    """A manager of `training` would list step 20, which is a root, and could not restore it."""
    root, out = saved("manager").path, tmp_path / "training"
    latest, every = reshard.open(root), [reshard.open(root, step=step) for step in STEPS]
    renamed = tmp_path / "run"
    shutil.copytree(root / "3", renamed / "ckpt_000003")
    prefixed = reshard.open(renamed)
    for ckpt, name, steps in (
        (every[0], "20", ["3"]),
        (every, "2024", ["3", "20"]),
        (prefixed, "ckpt_000003", ["ckpt_000003"]),
    ):
        named, source = out / name, (ckpt if ckpt is not every else latest).source.root
        text = f"`{named}` is the name of a step, and `{source}` is a manager's root\n"
        for step in steps:
            number = int(step.removeprefix("ckpt_"))
            text += f"  step {number} of `{source}` -> `{named / step}`\n"
        lines = text.splitlines()
        text += f"\nhint: to write one step there, open it alone: {source / steps[0]}\n"
        text += f"hint: to write a root, give it another name: {out / 'root-'}{name}"
        assert layouts.refused(reshard.DestinationError, reshard.save, ckpt, named) == text
        problems = reshard.plan(ckpt, named, overwrite=True).problems
        assert [*problems] == [line.strip() for line in lines]
    assert not out.exists()
    # Both ways to ask.
    reshard.save(reshard.to_mesh(reshard.open(root / "20"), "1x8"), out / "20")
    reshard.save(reshard.to_mesh(latest, "1x8"), out / "root-20")
    for path in (out, out / "root-20"):
        with ocp.CheckpointManager(path) as one, ocp.CheckpointManager(root) as two:
            assert one.all_steps() == [20]
            got, expected = (m.restore(20, args=ocp.args.StandardRestore()) for m in (one, two))
            assert_read(got, expected, layouts.mesh((1, 8)))


# Transitions.

ROW, COLUMN, BOTH = P("data"), P(None, "model"), P("data", "model")
SPECS = {
    "row": ROW,
    "column": COLUMN,
    "both": BOTH,
    "whole": P(),
    "swapped": P("model", "data"),
    "joined": P(("data", "model"), None),
}
FOUR = ("replica", "data", "fsdp", "model")
SPECS4 = {
    "one": P("fsdp", ("data", "model")),
    "two": P(("replica", "fsdp"), "data"),
    "three": P("model"),
    "four": P(None, ("fsdp", "replica")),
    "whole": P(),
}
UNEVEN = (48, 80)
TRANSITIONS = "8x1->2x4 8x1->1x8 1x1->1x8 1x1->8x1 1x8->1x1 8x1->1x1 2x4->2x4 2x4->1x4 2x4->2x2 "
TRANSITIONS += "2x4->4x4 2x4->1x16 2x4->16x1 4x4->2x2 2x3->1x6 6x1->2x5 "
TRANSITIONS += "2x2x2x1->1x2x1x4 1x2x1x4->2x2x2x1"


# In the default run each format, and every third transition of the first.
CASES = [
    *((sizes, "zarr2") for sizes in TRANSITIONS.split()),
    *((sizes, name) for name in [*FORMATS][1:] for sizes in ("2x4->1x8", "2x4->16x1", "8x1->1x1")),
]


@pytest.mark.parametrize(
    ("sizes", "form"), few(CASES, *CASES[1 : -3 * 3 : 3], CASES[-9], CASES[-5], CASES[-1])
)
def test_transitions(tmp_path, save, sizes, form):
    old, new = (tuple(map(int, mesh.split("x"))) for mesh in sizes.split("->"))
    names, specs = (FOUR, SPECS4) if len(old) == 4 else (("data", "model"), SPECS)
    source, target = layouts.mesh(old, names), layouts.mesh(new, names)
    tree = layouts.small_tree(source, specs, (60, 120) if 6 in old + new else UNEVEN)
    path = layouts.save_pytree(tmp_path / "saved", tree, **FORMATS[form])
    out = save(reshard.to_mesh(reshard.open(path), dict(zip(names, new, strict=True))))
    assert_read(layouts.load_pytree(out), tree, target)
    assert_read(layouts.load_standard(out, layouts.abstract(tree, target)), tree, target)
    assert chunk_grid(out) == {a.path: a.chunk for a in save.plan.arrays}
    if sizes == "2x4->1x8":  # of the source's chunks, those stay that divide the new shards
        columns = {"column": (48, 10), "both": (48, 10)}
        assert chunk_grid(out) == {(name,): columns.get(name, (6, 80)) for name in SPECS}


def test_a_mesh_of_jax(saved, read_by_orbax, save):
    source = saved("standalone")
    on = jax.sharding.Mesh(np.array(jax.devices()[15:7:-1]).reshape(4, 2), ("model", "data"))
    out = save(reshard.to_mesh(reshard.open(source.path), on))
    assert_read(layouts.read_pytree(source, out), read_by_orbax("standalone", "pytree"), on)


def test_specs_axes_and_host_arrays(saved, read_by_orbax, save):
    source = saved("standalone")
    ckpt = reshard.to_mesh(
        reshard.open(source.path),
        "x=2,y=4",
        specs=[(r"^params/embed$", P(None, ("x", "y"))), (r"^host$", P()), (r"^params/u", P("x"))],
        axes={"data": "x", "model": ""},
    )
    out = save(ckpt)
    on = layouts.mesh((2, 4), ("x", "y"))
    expected = dict(read_by_orbax("standalone", "pytree"))
    got = layouts.read_pytree(source, out)
    host = got["host"]
    assert isinstance(host, jax.Array) and host.sharding == NamedSharding(on, P())
    got["host"] = np.asarray(host)
    assert host.dtype == "float32"  # jax without x64
    expected["host"] = expected["host"].astype("float32")
    layouts.assert_same_tree(got, expected)
    params = got["params"]
    assert params["embed"].sharding == NamedSharding(on, P(None, ("x", "y")))
    assert params["uneven"].sharding == NamedSharding(on, P("x"))
    assert params["mlp/linear"]["w.0"].sharding.is_equivalent_to(NamedSharding(on, P(None, "x")), 2)
    assert params["column"].sharding.is_equivalent_to(NamedSharding(on, P()), 2)


WIDE = "host arrays of 64 bits {}, where JAX without x64 truncates them: {}".format


def test_host_arrays_of_64_bits_stay_on_the_host(tmp_path, save):
    """A spec for others too would make device arrays of them, and JAX truncate their values."""
    tree = {
        "count": np.array([1099511627781, -3]),
        "data": {"seed": np.array(2**63 + 5, "uint64"), "c": np.array([[1 / 3 + 2j]])},
        "mean": np.array([1 / 3, 1 / 7, 0.1, 0.7]),
        "small": np.arange(4, dtype="int32"),
        "w": layouts.put(np.arange(24, dtype="float32").reshape(6, 4), "data"),
    }
    ckpt = reshard.open(layouts.save_pytree(tmp_path / "saved", tree))
    rules = [("^small$", "data"), ("(an|w)$|a/", ""), (".*", "")]
    laid_out = reshard.to_mesh(ckpt, "1x4", rules)
    left = WIDE("stay off devices", "count, data/c, data/seed, ...")
    assert laid_out.notes == (left,)
    got, on = layouts.load_pytree(save(laid_out)), layouts.mesh((1, 4))
    assert {type(got["count"]), type(got["mean"])} == {np.ndarray}
    assert got["small"].sharding.is_equivalent_to(NamedSharding(on, P("data")), 1)
    assert got["w"].sharding.is_equivalent_to(NamedSharding(on, P()), 2)
    layouts.assert_same_tree(jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, tree))


def test_a_host_array_of_64_bits_that_a_spec_names_alone(tmp_path):
    tree = {"count": np.arange(4), "mean": np.arange(4.0), "w": np.arange(4, dtype="float32")}
    ckpt = reshard.open(layouts.save_pytree(tmp_path / "saved", tree))
    laid_out = reshard.to_mesh(ckpt, "model=2", {"^mean$": "model", ".": ""})
    kinds = {path[0]: leaf.value_type for path, leaf in laid_out.items()}
    assert kinds == {"count": "np.ndarray", "mean": "jax.Array", "w": "jax.Array"}
    told = WIDE("become arrays on devices", "mean")
    assert laid_out.notes == (WIDE("stay off devices", "count"), told)
    cast = reshard.to_mesh(reshard.cast(ckpt, "float32", "mean"), "model=2", {"mean": "model"})
    assert cast["mean"].value_type == "jax.Array" and cast.notes == ()


@pytest.mark.parametrize(
    ("wanted", "helps"), [(("float32", "float32"), False), (("bfloat16", "int32"), True)]
)
def test_a_cast_to_the_dtypes_of_a_target_is_proposed_where_there_is_one(wanted, helps, tmp_path):
    tree = {"f": np.ones(3, "float32"), "i": np.ones(3, "int32")}
    ckpt = reshard.open(layouts.save_pytree(tmp_path / "saved", tree))
    on = NamedSharding(layouts.mesh((1, 2)), P())
    target = {
        name: jax.ShapeDtypeStruct((3,), dtype, sharding=on)
        for name, dtype in zip("fi", wanted, strict=True)
    }
    with pytest.raises(reshard.TreeMismatchError) as error:
        reshard.to_mesh(ckpt, on.mesh, target=target)
    assert error.value.hints == ("reshard.cast(ckpt, ..., ...) casts",) * helps


def test_a_new_mesh_without_any_array_is_told(tmp_path):
    tree = {name: np.ones(3, "float32") for name in "abcd"} | {"step": 3, "count": np.array(2)}
    ckpt = reshard.open(layouts.save_pytree(tmp_path / "saved", tree))
    told = "no array is on the new mesh, as no spec names one: 4 NumPy arrays stay as saved: "
    assert reshard.to_mesh(ckpt, "x=2").notes == (f"{told}a, b, c, ...",)
    assert reshard.to_mesh(ckpt, "x=2", {"^a$": ""}).notes == ()
    layouts.save_pytree(tmp_path / "some", tree | {"w": layouts.put(np.ones(4), "data")})
    assert reshard.to_mesh(reshard.open(tmp_path / "some"), "data=2").notes == ()


def test_a_target_says_that_a_host_array_of_64_bits_is_on_devices(tmp_path):
    ckpt = reshard.open(layouts.save_pytree(tmp_path / "saved", {"n": np.arange(8)}))
    on = NamedSharding(layouts.mesh((2, 4)), P("model"))
    target = {"n": jax.ShapeDtypeStruct((8,), np.dtype("int64"), sharding=on)}
    with jax.enable_x64(True):
        laid_out = reshard.to_mesh(ckpt, on.mesh, target=target)
    assert (laid_out["n"].value_type, laid_out["n"].dtype) == ("jax.Array", "int64")


@pytest.mark.parametrize(("devices", "ids"), [(4096, False), (512, False), (256, True)])
def test_a_mesh_larger_than_this_machine(tmp_path, save, devices, ids):
    source = layouts.mesh((2, 4))
    tree = layouts.small_tree(source, {"both": BOTH, "row": ROW, "whole": P()}, (64, 128))
    layouts.save_pytree(tmp_path / "saved", tree)
    ckpt = reshard.to_mesh(reshard.open(tmp_path / "saved"), f"data=32,model={devices // 32}")
    out = save(ckpt)
    document = parsed_shardings(out)
    for name, spec in {"both": ["data", "model"], "row": ["data"], "whole": []}.items():
        mesh = document[name].pop("device_mesh", None)
        assert document[name] == {
            "sharding_type": "NamedSharding",
            "shape": [32, devices // 32],
            "axis_names": ["data", "model"],
            "axis_types": ["AxisType.Auto"] * 2,
            "partition_spec": spec,
        }
        rows = np.arange(devices).reshape(32, -1).tolist()
        assert mesh == ({"mesh": [[{"id": n} for n in row] for row in rows]} if ids else None)
    assert chunk_grid(out)["both",] == (2, 128 * 32 // devices)
    got = layouts.load_standard(out, layouts.abstract(tree, source))
    layouts.assert_same_tree(got, tree)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Arrays of 1 MiB that are split or read in several passes when memory is short."""

    @functools.cache
    def get(form, old):
        path = tmp_path_factory.mktemp("large") / "saved"
        specs = {"row": P("data"), "both": P("data", "model"), "whole": P()}
        tree = layouts.small_tree(layouts.mesh(old), specs, (256, 1024))
        tree["odd"] = layouts.small_tree(layouts.mesh(old), {"x": P("data")}, (8, 9973))["x"]
        return layouts.save_pytree(path, tree, **FORMATS[form]), tree

    return get


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("old", "options", "splits", "passes"),
    [
        ((8, 1), {"max_memory": "64MiB"}, False, False),
        ((8, 1), {"max_memory": "2MiB"}, True, False),
        ((1, 1), {"max_memory": "3MiB"}, False, True),
        ((8, 1), {"max_memory": "1200KiB"}, True, True),
        ((8, 1), {"max_memory": "600KiB"}, True, True),
        ((8, 1), {"max_memory": "420KiB"}, True, True),
        ((8, 1), {"chunks": "70KiB"}, True, False),
    ],
)
def test_short_memory_and_small_chunks(large, save, form, old, options, splits, passes):
    path, tree = large(form, old)
    # No dimension of `odd` divides by 8 but the first.
    ckpt = reshard.to_mesh(reshard.open(path), "1x8", specs=[("^(row|both)$", P(None, "model"))])
    out = save(ckpt, **options)
    arrays = {a.path[0]: a for a in save.plan.arrays}
    assert (arrays["row"].split > 1) == splits
    assert (save.plan.passes > 1) == passes
    assert save.plan.peak_memory <= parse_bytes(options.get("max_memory", "1GiB"))
    grid = chunk_grid(out)
    assert grid == {a.path: a.chunk for a in save.plan.arrays}
    if "chunks" in options:
        assert max(int(np.prod(chunk)) * 4 for chunk in grid.values()) <= 70 << 10
    layouts.assert_same_tree(layouts.load_pytree(out), tree)


# Chunks that stay.


def arrays_of(path, **kwargs):
    """Path -> stored bytes of each key of each array, chunk shape included."""
    ckpt = reshard.open(path, **kwargs)
    return {
        (h.path, key): h.data.store.kvstore(h.data.name).read(key).result().value
        for h in ckpt.arrays
        for key in h.data.store.values[h.data.name]
    }


@pytest.mark.parametrize("relabel", [False, True], ids=["identity", "relabel"])
@pytest.mark.parametrize(
    "layout", few(["standalone", "zarr3-ocdbt", "manager", "items", "v1"], "zarr3-ocdbt", "items")
)
def test_kept_chunks_are_linked(saved, read_by_orbax, save, layout, relabel):
    source = saved(layout)
    ckpt = reshard.open(source.path, **source.open)
    out = save(reshard.to_mesh(ckpt, "1x8") if relabel else ckpt, chunks="keep")
    assert all(array.verbatim for array in save.plan.arrays)
    ours, theirs = inodes(out), inodes(source.path)
    linked = {path for path, inode in ours.items() if inode in theirs.values()}
    assert {path: ours[path] for path in linked} == {path: theirs[path] for path in linked}
    # What is not linked of an item is B-tree nodes: no value is in it.
    item = os.path.join(source.inner, "")
    store = reshard.open(out, **source.open).source.store
    values = {item + v.file for by in store.values.values() for v in by.values() if v.file}
    assert values and values <= linked
    counted = (path for path in linked if path in values or not path.startswith(item))
    assert save.plan.shared_bytes == sum(os.stat(out / path).st_size for path in counted)
    assert arrays_of(out, **source.open) == arrays_of(source.path, **source.open)
    expected = read_by_orbax(layout, "pytree")
    got = layouts.read_pytree(source, out)
    layouts.assert_same_tree(got, expected)
    if relabel:
        layouts.assert_laid_out(got, expected, layouts.mesh((1, 8)))
    else:
        assert layouts.shardings(got) == layouts.shardings(expected)


@pytest.mark.parametrize("relabel", [False, True])
@pytest.mark.parametrize("key", ["stray", "stray/0", "a/stray"])
def test_keys_that_belong_to_no_array_are_not_linked(tmp_path, save, key, relabel):
    rng = np.random.default_rng(0)
    tree = {name: layouts.random_array(rng, (64, 64)) for name in "ab"}
    source = layouts.save_pytree(tmp_path / "source", tree)
    layouts.database(source).write(key, b"s" * 5000).result()
    ckpt = reshard.open(source)
    out = save(reshard.rename(ckpt, {"^b$": "c"}) if relabel else ckpt, chunks="keep")
    assert save.plan.shared_bytes
    names = {f"{h.data.name}/{k}" for h in ckpt.arrays for k in h.data.store.values[h.data.name]}
    if relabel:
        names = {f"c{name[1:]}" if name[0] == "b" else name for name in names}
    assert {name.decode() for name in layouts.database(out).list().result()} == names
    assert_pruned(out)


def test_files_are_copied_where_links_are_refused(saved, save, monkeypatch):
    source, link, linked = saved("standalone"), os.link, []

    def once(file, name, **options):
        if os.fspath(file).startswith(os.fspath(source.path)):
            linked.append(file)
        if len(linked) > 1:
            raise PermissionError(errno.EPERM, "no links")
        link(file, name, **options)

    monkeypatch.setattr(os, "link", once)
    out = save(reshard.open(source.path), chunks="keep")
    assert len(linked) > 1
    assert len({*inodes(source.path).values()} & {*inodes(out).values()}) <= 1
    assert_pruned(out)
    assert arrays_of(out) == arrays_of(source.path)


@pytest.mark.parametrize(
    "layout", few(["standalone", "zarr2-files", "zarr3-files", "v1"], "standalone", "zarr3-files")
)
def test_kept_chunks_are_copied_without_links(saved, read_by_orbax, save, layout):
    source = saved(layout)
    out = save(reshard.open(source.path), chunks="keep", link=False)
    assert save.plan.shared_bytes == 0
    assert all(array.verbatim for array in save.plan.arrays)
    assert not {*inodes(source.path).values()} & {*inodes(out).values()}
    assert arrays_of(out) == arrays_of(source.path)
    layouts.assert_same_tree(layouts.read_pytree(source, out), read_by_orbax(layout, "pytree"))


@pytest.mark.parametrize(
    "layout", few(["standalone", "zarr3-ocdbt", "zarr2-files"], "standalone", "zarr2-files")
)
def test_what_shares_files_stands_alone(saved, read_by_orbax, save, tmp_path, layout):
    """A source can be deleted; and what is done to one of the two does not touch the other: neither
    by TensorStore in it nor by Orbax in its place."""
    source = saved(layout)
    copy = shutil.copytree(source.path, tmp_path / "copy")
    again = save(reshard.open(copy), chunks="keep")
    shutil.rmtree(copy)
    expected = read_by_orbax(layout, "pytree")
    layouts.assert_same_tree(layouts.read_pytree(source, again), expected)
    third = save(reshard.to_mesh(reshard.open(again), "1x8"), chunks="keep")
    before = hashes(third)
    if "files" not in layout:
        store = layouts.database(again)
        store.write("one_device/0.0", b"x" * 5000).result()
        store.delete_range(ts.KvStore.KeyRange("params", "paramt")).result()
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(again, {"a": jnp.arange(9)}, force=True)
    assert hashes(third) == before
    layouts.assert_same_tree(layouts.read_pytree(source, third), expected)


def test_few_kept_leaves_are_copied(saved, save):
    source = saved("standalone")
    ckpt = reshard.select(reshard.open(source.path), ["params/uneven", "params/column"])
    out = save(ckpt, chunks="keep")
    assert all(array.verbatim for array in save.plan.arrays)
    assert save.plan.shared_bytes == 0
    assert not layouts.data_inodes(out).keys() & layouts.data_inodes(source.path).keys()
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    assert size < sum(f.stat().st_size for f in source.path.rglob("*") if f.is_file()) / 2
    got = layouts.read_pytree(source, out)
    expected = {name: source.tree["params"][name] for name in ("column", "uneven")}
    layouts.assert_same_tree(got, {"params": expected})


def test_a_cast_of_every_kind_of_leaf(saved, save):
    """Floating-point arrays change. Integers, complex numbers, keys, Python scalars and
    float8_e8m0fnu, the dtype of block scales, do not."""
    source = saved("standalone")
    out = save(reshard.cast(reshard.open(source.path), "float64"))
    one, two = reshard.open(source.path), reshard.open(out)
    for handle in one.arrays:
        floating = jnp.issubdtype(handle.dtype, jnp.floating) and handle.value_type != "scalar"
        floating = floating and handle.dtype != "float8_e8m0fnu"
        assert two[handle.path].dtype == ("float64" if floating else handle.dtype), handle
    names = ("int4", "uint32", "complex64", "bool", "host")
    stored = {path: read for path, read in values(out).items() if path[-1] in names}
    assert stored == {p: read for p, read in values(source.path).items() if p in stored}


def test_short_names_of_dtypes(tmp_path):
    """numpy counts bytes in `f4` and `f8`, and everybody else bits."""
    layouts.save_pytree(tmp_path / "saved", {"a": np.ones(8, "float16"), "b": np.ones(8)})
    ckpt = reshard.open(tmp_path / "saved")
    names = {"bf16": "bfloat16", "fp8_e5m2": "float8_e5m2"}
    names |= {f"{f}{n}": f"float{n}" for f in ("f", "fp") for n in (16, 32, 64, "8_e4m3fn")}
    for short, name in names.items():
        assert {handle.dtype.name for handle in reshard.cast(ckpt, short).arrays} == {name}
    reshard.save(reshard.cast(ckpt, ">f2"), tmp_path / "out")  # stored in one byte order
    assert {x.tobytes() for x in layouts.load_pytree(tmp_path / "out").values()} == {
        np.ones(8, "float16").tobytes()
    }
    for short in ("f4", "f8", "fp8", "float8", "bf", "fp4", "f128"):
        with pytest.raises(reshard.ArgumentError, match=f"^not a dtype: '{short}'\n"):
            reshard.cast(ckpt, short)


@pytest.mark.skipif("float8_e8m0fnu" not in layouts.DTYPES, reason="TensorStore lacks it")
def test_block_scales_are_cast_only_if_a_glob_names_them(tmp_path, save):
    scales = np.arange(256, dtype="uint8").view(jnp.dtype("float8_e8m0fnu"))
    half = np.append(scales[:143], scales[-1])  # what float16 holds
    tree = {
        "mlp": {"kernel": layouts.random((8, 32), "float8_e4m3fn"), "scale": half},
        "scale": scales[::-1].copy(),
        "bias": layouts.held(layouts.random((32,), "float32"), "float16"),
    }
    ckpt = reshard.open(layouts.save_pytree(tmp_path / "quantised", tree))
    told = "arrays that stay float8_e8m0fnu: 2; block scales are cast only if a glob names them: "
    told += 'reshard.cast(ckpt, "bfloat16", "**/scale")'
    everything = reshard.cast(ckpt, "bfloat16")
    hinted = reshard.cast(everything, "bfloat16", "**/scale")
    assert (everything.notes, hinted.notes) == ((told,), ())
    kernel, bias, scale = "['mlp']['kernel']", "['bias']", "['mlp']['scale']"
    for cast, dtype, names in (
        (everything, "bfloat16", {kernel, bias}),
        (hinted, "bfloat16", {kernel, bias, scale, "['scale']"}),
        (reshard.cast(ckpt, "float16", "mlp"), "float16", {kernel, scale}),
        (reshard.cast(ckpt, "float16", ["**", "mlp/scale"]), "float16", {kernel, bias, scale}),
    ):
        found = flat(layouts.load_pytree(save(cast)))
        for path, leaf in flat(tree).items():
            wanted = jnp.dtype(dtype) if path in names else leaf.dtype
            layouts.assert_equal_or_nan(found[path], leaf.astype("float32").astype(wanted))
    with pytest.raises(reshard.TreeMismatchError) as caught:
        reshard.cast(reshard.select(ckpt, "**/scale"), "bfloat16")
    assert str(caught.value) == f"no floating-point array to cast\n  {told}"


@pytest.mark.parametrize(
    "layout", few(["standalone", "zarr3-files", "manager", "items", "v1"], "zarr3-files", "items")
)
@pytest.mark.parametrize("chunks", ["shard", "keep"])
def test_select_drop_and_rename(saved, read_by_orbax, save, layout, chunks):
    source = saved(layout)
    ckpt = reshard.open(source.path, **source.open)
    keys = "keys" in source.tree
    ckpt = reshard.select(
        ckpt,
        ["params/**", "list/**", "empty/dict", *["keys/*"] * keys],
        drop=['params/"two words"/**', *["keys/rbg"] * keys],
    )
    ckpt = reshard.rename(ckpt, [("^params/", "model/"), (r'"mlp/linear"/w\.0', "mlp/w")])
    out = save(reshard.to_mesh(ckpt, "1x8"), chunks=chunks)
    whole = read_by_orbax(layout, "pytree")
    params = whole["params"]
    model = {name: params[name] for name in ("embed", "uneven", "column", "replicated")}
    model["mlp"] = {"w": params["mlp/linear"]["w.0"]}
    model["mlp/linear"] = {"b": params["mlp/linear"]["b"]}
    expected = {"model": model, "list": whole["list"], "empty": {"dict": {}}}
    if keys:
        expected["keys"] = {"one": whole["keys"]["one"], "sharded": whole["keys"]["sharded"]}
    on = layouts.mesh((1, 8))
    for reader in source.readers:
        assert_read(READERS[reader](source, out), expected, on)
        target = layouts.abstract(expected, on)
        layouts.assert_same_tree(READERS[reader](source, out, target), expected)
    names = {".".join(map(str, path)) for path in layouts.saved_leaves(expected)}
    store = reshard.open(out, **source.open).source.store
    assert set(store.values) == names - {"list.2", "empty.dict"}


def test_leaves_of_a_single_device_are_replicated(saved):
    source = saved("standalone")
    ckpt = reshard.to_mesh(reshard.open(source.path), "1x8")
    leaves = layouts.saved_leaves(source.tree).items()
    single = [
        p for p, x in leaves if isinstance(getattr(x, "sharding", None), SingleDeviceSharding)
    ]
    assert ("one_device",) in single
    (note,) = ckpt.notes
    text = f"{len(single)} leaves saved on a single device are replicated on the new mesh"
    assert note.startswith(text)
    assert all(ckpt[path].sharding.spec == () for path in single)
