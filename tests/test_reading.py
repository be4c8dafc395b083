"""The values of arrays, box by box: what that takes, and how often a stored chunk is read."""

import jax
import layouts
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from watched import Watched

import reshard
from reshard.arrays.digests import Digest, digest_of
from reshard.units import format_bytes
from reshard.writer import arrays

ROWS, COLUMNS = 64, 1024
SPECS = {"rows": P("data"), "columns": P(None, "data"), "both": P("data", "model")}


@pytest.fixture(scope="module")
def grids(tmp_path_factory):
    """One array, 256 KiB, saved in one chunk and in several; its values, and where."""
    values = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype("f4")
    directory = tmp_path_factory.mktemp("grids")
    paths = {name: save(directory / name, {"w": put(values, name)}) for name in SPECS}
    return values, paths | {"whole": save(directory / "whole", {"w": values})}


def put(values, name):
    on = layouts.mesh((4, 2) if name == "both" else (8, 1))
    return jax.device_put(values, NamedSharding(on, SPECS[name]))


def save(path, tree):
    return layouts.save_pytree(path, tree, use_ocdbt=False)


def stored(path):
    sizes = [size for handle in reshard.open(path).arrays for size in handle.stored_sizes()]
    return sum(sizes) / 1024


def read_by(call):
    """What a call gives, and KiB that TensorStore reads from files for it; less a few documents."""
    before = layouts.bytes_read()
    result = call()
    return result, (layouts.bytes_read() - before) // 4096 * 4


@pytest.mark.parametrize("names", [("rows", "whole"), ("whole", "rows")])
def test_one_chunk_of_each_of_two_arrays_has_to_fit_whichever_is_which(grids, names):
    _, paths = grids
    a, b = (paths[name] for name in names)
    # 256 KiB and an eighth of that, encoded and decoded; a buffer of each, and twice 16 KiB.
    encoded = sum(max(handle.stored_sizes()) for x in (a, b) for handle in reshard.open(x).arrays)
    least = (256 + 32 + 2 * 32 + 2 * 16 << 10) + encoded
    with pytest.raises(reshard.MemoryLimitError) as error:
        reshard.diff(a, b, values=True, max_memory=least - 1)
    assert error.value.least == least
    assert reshard.diff(a, b, values=True, max_memory=least).differences == ()


@pytest.mark.parametrize("names", [("rows", "whole"), ("columns", "rows"), ("both", "columns")])
def test_where_memory_allows_it_the_chunks_of_both_arrays_are_read_once(grids, names):
    _, paths = grids
    a, b = (paths[name] for name in names)
    # All of both, encoded and decoded, and their buffers.
    found, read = read_by(lambda: reshard.diff(a, b, values=True, max_memory="1600KiB"))
    assert (found.differences, found.compared) == ((), 1)
    assert read == pytest.approx(stored(a) + stored(b), abs=4)


@pytest.mark.parametrize("names", [("rows", "whole"), ("whole", "rows")])
def test_with_less_memory_chunks_are_shared_by_as_many_boxes_as_fit(grids, names):
    a, b = (grids[1][name] for name in names)
    # Four small chunks beside the big one.
    found, read = read_by(lambda: reshard.diff(a, b, values=True, max_memory="1200KiB"))
    assert found.differences == ()
    # Two boxes whose reads of it meet share the big one even so.
    once, big = stored(a) + stored(b), stored(grids[1]["whole"])
    assert once - 4 <= read <= once + big + 4


@pytest.mark.parametrize("names", [("rows", "columns"), ("columns", "both"), ("whole", "both")])
@pytest.mark.parametrize("max_memory", ["1KiB", "80KiB", "150KiB", "300KiB", "600KiB", "900KiB"])
def test_values_are_compared_in_any_memory_that_is_enough(grids, names, max_memory, tmp_path):
    values, paths = grids
    changed = values.copy()
    changed[ROWS - 1, COLUMNS - 1] += 1
    changed[ROWS // 2, 3] += 1
    other = save(tmp_path / "b", {"w": put(changed, names[1])})
    try:
        diff = reshard.diff(paths[names[0]], other, values=True, max_memory=max_memory)
    except reshard.MemoryLimitError as error:
        again = f"{error.least - 1}"
        with pytest.raises(reshard.MemoryLimitError):
            reshard.diff(paths[names[0]], other, values=True, max_memory=again)
        diff = reshard.diff(paths[names[0]], other, values=True, max_memory=f"{error.least}")
    (found,) = diff.differences
    assert (found.elements.count, found.elements.index) == (2, (ROWS // 2, 3))


def layers_of(path):
    ckpt = reshard.rename(reshard.open(path), [("^w$", "layers/w")])
    return reshard.unstack(ckpt, "layers", into="layer_{}", axis=0)


def digests_of(values):
    return {(f"layer_{i}", "w"): digest_of(row) for i, row in enumerate(values)}


def test_arrays_that_are_parts_of_one_chunk_take_what_it_takes(grids):
    values, paths = grids
    layers = layers_of(paths["whole"])
    # The chunk that it is in, encoded and decoded, a row, and 16 KiB.
    encoded = max(next(iter(reshard.open(paths["whole"]).arrays)).stored_sizes())
    least = (256 + 4 + 16 << 10) + encoded
    for call in (reshard.verify, reshard.digest):
        text = layouts.refused(reshard.MemoryLimitError, call, layers, max_memory=least - 1)
        lines = "".join(f"  layer_{i}/w: {format_bytes(least)}\n" for i in range(ROWS))
        assert text == (
            "one chunk, encoded and decoded, takes more than the memory limit of "
            f"{format_bytes(least - 1)}\n{lines}\n"
            f'hint: max_memory="{-(-least // 1024)}KiB" is the least that is enough'
        )
    assert reshard.digest(layers, max_memory=least) == digests_of(values)
    # Beside a chunk of the other.
    other = layers_of(paths["rows"])
    with pytest.raises(reshard.MemoryLimitError) as error:
        reshard.diff(layers, other, values=True, max_memory=least)
    assert len(error.value.problems) == ROWS
    assert reshard.diff(layers, other, values=True, max_memory=error.value.least).differences == ()


def test_arrays_that_are_parts_of_one_chunk_are_read_together(grids):
    values, paths = grids
    layers = layers_of(paths["whole"])
    got, read = read_by(lambda: reshard.digest(layers, max_memory="4MiB"))
    assert got == digests_of(values)
    assert read == pytest.approx(stored(paths["whole"]), abs=4)
    # Two of them, in turn in the tree.
    sides = {"a": layers, "b": layers_of(paths["columns"])}
    both = layers.replace({(*p, name): sides[name][p] for p in layers for name in sides})
    found, read = read_by(lambda: reshard.diff(both, both, values=True, max_memory="6MiB"))
    assert (found.differences, found.compared) == ((), 2 * ROWS)
    assert read == pytest.approx(stored(paths["whole"]) + stored(paths["columns"]), abs=4)


def test_scalars_that_are_parts_of_one_chunk_are_read_together(tmp_path):
    values = np.random.default_rng(1).standard_normal(250)
    path = save(tmp_path / "saved", {"w": values})
    # 16 KiB for each, and 4,000 bytes; one batch may take it all, and a quarter of it not.
    got, read = read_by(lambda: reshard.digest(layers_of(path), max_memory="4MiB"))
    assert got == digests_of(values)
    assert read == pytest.approx(stored(path), abs=4)


def test_large_chunks_of_a_box_are_read_into_buffers_of_their_own(tmp_path, monkeypatch):
    values = np.random.default_rng(2).standard_normal((512, 4096)).astype("f4")
    on = NamedSharding(layouts.mesh((2, 1)), P("data", "model"))
    path = save(tmp_path / "saved", {"w": jax.device_put(values, on)})
    added = []
    add = Digest.add
    # Of files that are mapped, what is read is not counted.
    monkeypatch.setattr("reshard.storage.disk.on_local_disk", lambda place: False)
    monkeypatch.setattr(Digest, "add", lambda *given: (added.append(given[1:]), add(*given)))
    ckpt = reshard.to_mesh(reshard.open(path), "1x2")
    _, read = read_by(lambda: reshard.save(ckpt, tmp_path / "out"))
    assert [(box[1].start, part.flags.c_contiguous) for box, part in added] == [
        (0, True),
        (2048, True),
    ]
    assert read == pytest.approx(stored(path), abs=64)  # both touch both source chunks
    assert reshard.digest(tmp_path / "out") == {("w",): digest_of(values)}
    np.testing.assert_array_equal(layouts.load_pytree(tmp_path / "out")["w"], values)


@pytest.fixture
def several_boxes(tmp_path):
    """A checkpoint whose boxes hold two large chunks each, and its values."""
    values = np.random.default_rng(2).standard_normal((1024, 4096)).astype("f4")
    on = NamedSharding(layouts.mesh((4, 1)), P("data", "model"))
    path = save(tmp_path / "saved", {"w": jax.device_put(values, on)})
    return reshard.to_mesh(reshard.open(path), "2x2"), values


@pytest.mark.parametrize("share_bytes", [1 << 20, 1 << 30])
def test_large_chunks_of_later_boxes(several_boxes, tmp_path, monkeypatch, share_bytes):
    ckpt, values = several_boxes
    monkeypatch.setattr("reshard.writer.plan.SHARE_BYTES", share_bytes)
    (array,) = reshard.save(ckpt, tmp_path / "out", ocdbt=True).arrays
    assert (array.box, array.chunk) == ((512, 4096), (512, 2048))
    np.testing.assert_array_equal(layouts.load_pytree(tmp_path / "out")["w"], values)


@pytest.mark.parametrize("ocdbt", [True, False])
def test_shares_with_the_same_chunk(several_boxes, tmp_path, monkeypatch, ocdbt):
    """The counts of elements agree, and another chunk is missing: nothing is committed."""
    ckpt, _ = several_boxes
    monkeypatch.setattr("reshard.writer.plan.SHARE_BYTES", 1 << 20)
    whole = arrays.grid_boxes((512, 4096), (512, 2048))
    monkeypatch.setattr(arrays, "_chunk_boxes", lambda *_, parts=[*whole]: parts)
    with pytest.raises(reshard.CorruptCheckpointError, match="several shares hold the same chunk"):
        reshard.save(ckpt, tmp_path / "out", ocdbt=ocdbt)
    assert not (tmp_path / "out").exists()


def test_large_chunks_are_not_all_in_flight_at_once(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    path = save(tmp_path / "large", {f"w{i}": rng.random(64 << 10) for i in range(8)})
    seen = Watched(monkeypatch)
    reshard.digest(path, max_memory="2MiB")
    assert seen.peak <= 2 << 20 and len(seen.batches) > 2
