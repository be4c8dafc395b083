"""Databases of many values: read through a copy of their B-tree in small nodes, in memory."""

import pickle

import layouts
import numpy as np
import pytest
import tensorstore as ts

import reshard
from reshard.arrays.digests import digest_of
from reshard.storage import array_store, ocdbt

COUNT = 60


@pytest.fixture
def many(tmp_path, monkeypatch):
    """A checkpoint of arrays, with values that are inlined and others, of which there are many; and
    the digests of the arrays."""
    rng = np.random.default_rng(0)
    tree = {f"a{i}": rng.standard_normal((4 + i % 3 * 200, 3)) for i in range(COUNT)}
    layouts.save_pytree(tmp_path / "many", tree)
    monkeypatch.setattr(array_store, "_MANY_VALUES", COUNT)
    monkeypatch.setattr(ocdbt, "_SMALL_NODE", 300)
    monkeypatch.setattr(ocdbt, "_PIECE", 7)
    return tmp_path / "many", {(name,): digest_of(values) for name, values in tree.items()}


def nodes(ckpt):
    context = ckpt.source.store.context
    return len(ts.KvStore.open("memory://nodes/", context=context).result().list().result())


def test_arrays_are_read_through_small_nodes(many, tmp_path, monkeypatch):
    """Which stay in their process; few values are read as they are."""
    path, expected = many
    before = layouts.hashes(path)
    ckpt = reshard.open(path)
    assert reshard.digest(ckpt) == reshard.digest(pickle.loads(pickle.dumps(ckpt))) == expected
    assert nodes(ckpt) > COUNT // 7
    reshard.save(ckpt, tmp_path / "out", chunks=100)
    assert reshard.digest(tmp_path / "out") == expected
    assert layouts.hashes(path) == before  # nothing is written into the source
    monkeypatch.setattr(array_store, "_MANY_VALUES", 3 * COUNT)
    ckpt = reshard.open(path)
    assert reshard.digest(ckpt) == expected
    assert nodes(ckpt) == 0
