"""Arrays that TensorStore wrote without Orbax, and the values of arrays in NumPy, without JAX."""

import pickle
import re
import shutil

import jax
import layouts
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from flax.traverse_util import flatten_dict
from in_process import shown
from jobs import FORMATS
from layouts import refused

import reshard
from reshard.errors import ArgumentError, CorruptCheckpointError

RNG = np.random.default_rng(0)
ARRAYS = {
    "model/layers/0/w": RNG.standard_normal((20, 30)).astype("f4"),
    "model/layers/10/w": RNG.standard_normal((20, 30)).astype("f4"),
    "model/a.b": RNG.integers(0, 99, 5),
    "opt_state/0/mu/w": RNG.standard_normal((4, 4)),
    "opt_state/0/nu/w": np.zeros((4, 4)),  # of which nothing is stored
    "step": np.array(3),
}
FORMS = [(driver, ocdbt) for driver in ("zarr", "zarr3") for ocdbt in (True, False)]


def write(url, driver, ocdbt, arrays=ARRAYS):
    """As Levanter's serialization does."""
    base = reshard.storage.location.parse_location(url).spec
    for name, values in arrays.items():
        store = base | {"path": f"{base['path']}{name}/"}
        if ocdbt:
            store = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        spec = {"driver": driver, "kvstore": store}
        array = ts.open(spec, create=True, dtype=values.dtype, shape=values.shape).result()
        array.write(values).result()


@pytest.fixture(params=FORMS, ids=str)
def folder(request, tmp_path):
    path = tmp_path / "step-100"
    write(f"file://{path}/", *request.param)
    (path / "metadata.json").write_text("{}")
    return path


def assert_arrays(ckpt, arrays=ARRAYS):
    assert {"/".join(path) for path in ckpt} == arrays.keys()
    for name, values in arrays.items():
        found = ckpt[tuple(name.split("/"))].read()
        assert (found.dtype, found.shape) == (values.dtype, values.shape)
        assert np.array_equal(found, values)


def test_every_array_is_read(folder, tmp_path):
    ckpt = reshard.open(folder)
    assert_arrays(ckpt)
    assert (ckpt.source.kind, ckpt.meshes, ckpt["step"].sharding) == ("zarr", (), None)
    assert "complete" in shown(tmp_path, "doctor", folder)
    assert "model/a.b" in shown(tmp_path, "inspect", folder)
    specs = {r"layers/\d+/w$": jax.sharding.PartitionSpec("data")}
    reshard.save(reshard.to_mesh(ckpt, "data=2", specs), tmp_path / "out", verify=True)
    assert reshard.diff(folder, tmp_path / "out", values=True).equal
    assert {p.name for p in (tmp_path / "out").iterdir()} & {"metadata.json", "model"} == set()
    with ocp.PyTreeCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "out")
    restored = flatten_dict(restored, sep="/")
    for name, values in ARRAYS.items():
        assert np.array_equal(restored[name], values)


@pytest.mark.parametrize(("driver", "ocdbt"), FORMS)
def test_in_a_bucket(stores, driver, ocdbt):
    url = f"{stores.bucket('s3')}/run/step-100"
    write(f"{url}/", driver, ocdbt)
    assert_arrays(reshard.open(url))


def test_groups_of_zarr3_are_not_arrays(tmp_path):
    write(f"file://{tmp_path}/", "zarr3", False)
    for folder in ("", "model", "model/layers"):
        (tmp_path / folder / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    assert_arrays(reshard.open(tmp_path))


def test_both_versions_of_zarr_are_refused(tmp_path):
    for driver in ("zarr", "zarr3"):
        arrays = {f"{driver}/a": np.ones(3), f"b/{driver}/c": np.ones(3)}
        write(f"file://{tmp_path}/", driver, False, arrays)
    text = refused(CorruptCheckpointError, reshard.open, tmp_path)
    assert text.startswith(f"`{tmp_path}` holds arrays of zarr v2 and of zarr v3, but a checkpoint")


DOCUMENTS = ["_METADATA", "_CHECKPOINT_METADATA", "_sharding", "array_metadatas"]
DOCUMENTS += ["commit_success.txt"]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("left", [*DOCUMENTS[2:], None, "all"])
def test_a_damaged_item_of_orbax_is_not_a_zarr_tree(tmp_path, form, left):
    """Whichever of its documents is left, or none; also next to a pickle."""
    tree = {"params": {"a": jax.numpy.arange(3), "b/c" if left else "b": np.ones(2)}}
    path = layouts.save_pytree(tmp_path / "item", tree, **FORMATS[form])
    (path / "commit_success.txt").touch()
    removed = [path / name for name in DOCUMENTS if left not in (name, "all")]
    removed += [] if left else path.glob("ocdbt.process_*")
    for file in (path / "_METADATA", *removed):
        shutil.rmtree(file) if file.is_dir() else file.unlink(missing_ok=True)
    for _ in range(2):
        text = refused(CorruptCheckpointError, reshard.open, path)
        assert re.fullmatch(rf"`{path}(/params.*)?` has no _METADATA: it is incomplete", text)
        (path / "checkpoint").write_bytes(pickle.dumps({"w": [1, 2]}))


def test_boxes_are_those_of_numpy(tmp_path):
    values = RNG.standard_normal((3, 700, 1024)).astype("f4")
    stacked = {"layer_0": RNG.standard_normal((5, 6)), "layer_1": RNG.standard_normal((5, 6))}
    path = layouts.save_pytree(tmp_path / "saved", {"w": values, **stacked, "s": np.array(2.5)})
    ckpt = reshard.open(path)
    end = (slice(None), slice(-3, None))
    for box in [(), slice(1, 2), end, (slice(2, 1),), (slice(0, 99),) * 3]:
        assert np.array_equal(ckpt["w"].read(box), values[box])
    assert (ckpt["s"].read(), ckpt[("s",)].read().shape) == (2.5, ())
    derived = reshard.cast(reshard.stack(ckpt, "layer_{}", into="layers", axis=1), "bfloat16")
    expected = np.stack([*stacked.values()], 1).astype("bfloat16")
    assert np.array_equal(derived["layers"].read((slice(1, 4), slice(1, 2))), expected[1:4, 1:2])
    for box in [(slice(0, 4, 2),), (slice(None),) * 4, (1,)]:
        text = refused(ArgumentError, ckpt["w"].read, box)
        assert text == (
            f"w: {box!r:.80} is not a box of <w: float32[3,700,1024]>\n\n"
            "hint: a box has one slice without a step for each axis, or for the first axes"
        )
