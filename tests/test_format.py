"""The format of the destination as an argument: as Orbax reads it, and what is decoded for it."""

import json

import layouts
import pytest
from layouts import READERS

import reshard

STORES = {
    "standalone": {"format": "zarr2", "ocdbt": True},
    "zarr2-files": {"format": "zarr2", "ocdbt": False},
    "zarr3-ocdbt": {"format": "zarr3", "ocdbt": True},
    "zarr3-files": {"format": "zarr3", "ocdbt": False},
}
WORDS = {
    "standalone": "OCDBT, zarr2",
    "zarr2-files": "plain files, zarr2",
    "zarr3-ocdbt": "OCDBT, zarr3",
    "zarr3-files": "plain files, zarr3",
}
PAIRS = [(one, other) for one in STORES for other in STORES if one != other]


def digests(path):
    return {
        name: entry["digest"]
        for name, entry in json.loads((path / "reshard_digests.json").read_text())["arrays"].items()
    }


def compressors(path):
    """What the arrays of a checkpoint are compressed with, once each."""
    texts = {c for array in reshard.open(path).arrays for c in array.data.encoding.compressors}
    return [json.loads(text) for text in texts]


def assert_read(source, out, on=None):
    """All of Orbax's readers read what the source has, with and without a target."""
    for reader in source.readers:
        expected = READERS[reader](source, source.path)
        layouts.assert_same_tree(READERS[reader](source, out), expected)
        if reader in source.target_readers:
            target = layouts.abstract(source.tree, on or source.mesh)
            got = READERS[reader](source, out, target)
            layouts.assert_same_tree(got, layouts.plain_scalars(source.tree))


@pytest.mark.parametrize(("layout", "target"), PAIRS)
def test_another_store_is_read_by_orbax(saved, tmp_path, layout, target):
    source, out = saved(layout), tmp_path / "out"
    before = layouts.hashes(source.path)
    plan = reshard.save(reshard.open(source.path), out, digest=True, **STORES[target])
    assert layouts.hashes(source.path) == before
    note = f"the arrays are stored as {WORDS[target]}, and not {WORDS[layout]}"
    assert note in plan.notes
    written = reshard.open(out)
    assert written.source.format == WORDS[target]
    document = json.loads((out / "_METADATA").read_text())
    assert (document["use_ocdbt"], document["use_zarr3"]) == (
        "OCDBT" in WORDS[target],
        "zarr3" in target,
    )
    assert reshard.diff(source.path, out, values=True).equal
    assert reshard.verify(out).ok
    assert_read(source, out)
    for array in written.arrays:
        assert array.chunk_shape == reshard.open(source.path)[array.path].chunk_shape


@pytest.mark.parametrize("layout", ["manager", "items", "v1", "rich"])
def test_other_layouts_become_plain_files(saved, tmp_path, layout):
    source, out = saved(layout), tmp_path / "out"
    ckpt = reshard.open(source.path, **source.open)
    reshard.save(reshard.to_mesh(ckpt, "1x8"), out, format="zarr3", ocdbt=False)
    assert not (out / source.inner / "manifest.ocdbt").exists()
    assert not [*(out / source.inner).glob("ocdbt.process_*")]
    assert_read(source, out, layouts.mesh((1, 8)))
