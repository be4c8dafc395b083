"""zarr metadata documents, compared with TensorStore's and Orbax's."""

import itertools
import json

import jax.numpy as jnp
import layouts
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import DTYPES, random
from sampling import examples

import reshard
from reshard.arrays import zarr
from reshard.loader.array_metadata import parse_zarr
from reshard.writer.format import _encoding

BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
ZSTD = {"name": "zstd", "configuration": {"checksum": False, "level": 1}}
CRC = {"name": "crc32c"}


def sharded(*inner, codecs=(BYTES, ZSTD)):
    """A codec of zarr v3 that cuts a chunk up."""
    inside = {"chunk_shape": list(inner), "codecs": list(codecs)}
    index = {"index_codecs": [BYTES, CRC], "index_location": "end"}
    return {"name": "sharding_indexed", "configuration": inside | index}


def zarr2(shape, chunks, **fields):
    """A document of zarr v2, as TensorStore writes it."""
    return {
        "chunks": list(chunks),
        "compressor": {"id": "zstd", "level": 1},
        "dimension_separator": ".",
        "dtype": "<f4",
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(shape),
        "zarr_format": 2,
    } | fields


def zarr3(shape, chunks, *codecs, **fields):
    """A document of zarr v3, as TensorStore writes it."""
    return {
        "chunk_grid": {"configuration": {"chunk_shape": list(chunks)}, "name": "regular"},
        "chunk_key_encoding": {"name": "default"},
        "codecs": list(codecs) or [BYTES, ZSTD],
        "data_type": "float32",
        "fill_value": 0.0,
        "node_type": "array",
        "shape": list(shape),
        "zarr_format": 3,
    } | fields


def keys(name, separator):
    return {"name": name, "configuration": {"separator": separator}}


def driver(document):
    return "zarr" if document["zarr_format"] == 2 else "zarr3"


def opened(document):
    """The array of a document in memory, as the writer opens it."""
    spec = {"driver": driver(document), "kvstore": "memory://", "metadata": document}
    spec |= {"assume_metadata": True, "store_data_equal_to_fill_value": True}
    return ts.open(spec).result()


def encoding(document):
    return zarr.parse_encoding(parse_zarr(json.dumps(document), driver(document)).metadata)


def remade(found, shape, chunk, dtype="float32"):
    made = found.document(shape, chunk, jnp.dtype(dtype))
    assert b" " not in made
    return json.loads(made)


def assert_holds(document, values):
    array = opened(document)
    assert (array.shape, array.dtype.numpy_dtype) == (values.shape, values.dtype)
    v2 = "chunks" in document
    grid = document["chunks"] if v2 else document["chunk_grid"]["configuration"]["chunk_shape"]
    assert list(array.chunk_layout.write_chunk.shape or ()) == list(grid)
    array.write(values).result()
    assert layouts.bits(np.asarray(array.read().result())) == layouts.bits(values)


@pytest.mark.parametrize(
    ("document", "chunk", "expected"),
    [
        (zarr2((12, 8), (6, 8)), (4, 4), zarr2((12, 8), (4, 4))),
        (zarr3((12, 8), (6, 8)), (12, 4), zarr3((12, 8), (12, 4))),
        *(
            (zarr3((12, 8), outer, sharded(*inner)), chunk, zarr3((12, 8), chunk, sharded(*kept)))
            for outer, inner, chunk, kept in [
                ((6, 8), (3, 4), (6, 4), (3, 4)),  # they divide the new chunks
                ((6, 8), (3, 4), (4, 8), (4, 8)),  # they do not
                ((6, 8), (6, 8), (12, 8), (12, 8)),  # they were whole chunks
                ((6, 8), (3, 4), (3, 4), (3, 4)),
            ]
        ),
    ],
)
def test_other_chunks(document, chunk, expected):
    made = remade(encoding(document), (12, 8), chunk)
    assert made == expected
    assert_holds(made, random((12, 8)))


@pytest.mark.parametrize(
    ("shape", "chunk"), [((), ()), ((5,), (2,)), ((2, 3, 4), (1, 3, 4)), ((12, 8), (4, 4))]
)
@pytest.mark.parametrize(
    "document",
    [
        zarr2((12, 8), (6, 8)),
        zarr2((), ()),
        zarr3((12, 8), (6, 8), dimension_names=["a", "b"]),
        zarr3((12, 8), (6, 8), sharded(3, 4)),
        zarr3((12, 8), (6, 8), sharded(6, 8), dimension_names=[None, "b"]),
        zarr3((), (), sharded()),
    ],
)
def test_another_shape(document, shape, chunk):
    """Names of dimensions go, and inner chunks are whole ones."""
    made = _encoding(encoding(document), True, False, None, document["zarr_format"])
    expected = zarr2(shape, chunk)
    if document["zarr_format"] == 3:
        expected = zarr3(shape, chunk, *[sharded(*chunk)] * ("sharding_indexed" in str(document)))
    assert remade(made, shape, chunk) == expected
    assert_holds(expected, random(shape))


@pytest.mark.parametrize("layout", ["standalone", "zarr3-ocdbt", "zarr3-files"])
def test_another_dtype_is_as_orbax_writes_it(saved, layout):
    """From the document of an array of any dtype to that of any other one."""
    ckpt = reshard.open(saved(layout).path)
    handles = {name: ckpt["dtypes", name] for name in DTYPES}
    for one, other in itertools.product(handles.values(), handles.values()):
        made = _encoding(one.data.encoding, False, True, None, one.data.encoding.zarr_format)
        expected = other.data.encoding.document(one.shape, one.chunk_shape, other.dtype)
        assert made.document(one.shape, one.chunk_shape, other.dtype) == expected
        same = other.data.encoding.document(other.shape, other.chunk_shape, other.dtype)
        assert same == other.data.metadata


TRANSPOSED = {"name": "transpose", "configuration": {"order": [1, 0]}}
MOVABLE = [
    zarr2((6, 4), (3, 4)),
    zarr2((6, 4), (3, 4), compressor=None),
    zarr2((6, 4), (3, 4), dtype="bfloat16"),
    zarr2((6, 4), (3, 4), dimension_separator="/"),
    zarr2((6, 4), (3, 4), fill_value=0.0),
    zarr2((6, 4), (3, 4), compressor={"id": "zstd", "level": 2}),
    zarr3((6, 4), (3, 4)),
    zarr3((6, 4), (3, 4), BYTES),
    zarr3((6, 4), (3, 4), {"name": "bytes", "configuration": {"endian": "big"}}),
    zarr3((6, 4), (3, 4), sharded(3, 4)),
    zarr3((6, 4), (3, 4), sharded(3, 4, codecs=[BYTES])),
    zarr3((6, 4), (3, 4), data_type="uint32", fill_value=0),
    zarr3((6, 4), (3, 4), fill_value=1.0),
    zarr3((6, 4), (3, 4), chunk_key_encoding=keys("default", ".")),
    zarr3((6, 4), (3, 4), chunk_key_encoding={"name": "v2"}),
]
UNMOVABLE = [
    zarr2((6, 4), (3, 4), order="F"),
    zarr3((6, 4), (3, 4), sharded(3, 2)),
    zarr3((6, 4), (3, 4), TRANSPOSED, BYTES),
    zarr3((6, 4), (3, 4), sharded(3, 4, codecs=[TRANSPOSED, BYTES])),
]


def test_when_chunks_can_be_copied_verbatim():
    """Equal codecs. Keys, versions of zarr and spellings of a zero fill value may differ."""
    assert all(encoding(document).ignores_unit_axes for document in MOVABLE)
    assert not any(encoding(document).ignores_unit_axes for document in UNMOVABLE)
    same: dict = {}
    for number, document in enumerate(MOVABLE):
        same.setdefault(encoding(document).codecs, []).append(number)
    plain = [1, 7]  # without a codec, of zarr v2 and v3
    level_1 = [0, 2, 3, 4, 6, 11, 13, 14]
    assert sorted(same.values()) == [level_1, plain, [5], [8], [9], [10], [12]]


@pytest.mark.parametrize("document", MOVABLE + UNMOVABLE)
def test_a_document_is_reproduced(document):
    found = encoding(document)
    dtype = document.get("data_type") or document["dtype"].removeprefix("<")
    assert remade(found, (6, 4), (3, 4), dtype) == document
    assert encoding(dict(reversed(document.items()))) == found
    if document in MOVABLE:
        assert encoding(remade(found, (2, 9), (1, 5), dtype)) == found


KEYS = [(zarr2, {"dimension_separator": separator}) for separator in "./"]
KEYS += [(zarr3, {"chunk_key_encoding": keys("default", separator)}) for separator in "./"]
KEYS += [(zarr3, {"chunk_key_encoding": keys("v2", ".")}), (zarr3, {})]


@settings(deadline=None, max_examples=examples(60))
@given(st.data(), st.sampled_from(KEYS))
def test_keys_are_those_of_tensorstore(data, kind):
    shape = tuple(data.draw(st.lists(st.integers(1, 12), max_size=3)))
    chunk = tuple(data.draw(st.integers(max(1, size // 3), size)) for size in shape)
    document = kind[0](shape, chunk, **kind[1])
    array = opened(document)
    array.write(random(shape)).result()
    grid = [range(-(-size // step)) for size, step in zip(shape, chunk, strict=True)]
    places = list(itertools.product(*grid))
    made = [encoding(document).chunk_key(place) for place in places]
    assert {key.encode() for key in made} == set(array.kvstore.list().result())
    assert [encoding(document).chunk_index(key, len(shape)) for key in made] == places
    pattern = encoding(document).chunk_keys(len(shape))
    assert [tuple(map(int, pattern.fullmatch(key).groups())) for key in made] == places
    for key in ("", "x", "c/x", ".zarray", "-1", "0.0.__lock", "1e0", "٣"):
        assert pattern.fullmatch(key) is None


@pytest.mark.parametrize("lost", ["codecs", "chunk_key_encoding", "order"])
def test_a_document_without_a_part_that_tensorstore_requires(lost):
    """In a specification, TensorStore would take a default for it, and read other values."""
    document = zarr2((4, 4), (2, 2)) if lost == "order" else zarr3((4, 4), (2, 2))
    del document[lost]
    with pytest.raises(ValueError, match=lost):
        encoding(document)


def test_a_fill_value_stays_as_it_is_stored():
    """TensorStore would write this one, which is NaN, as another NaN."""
    document = zarr2((4,), (2,), dtype="float8_e4m3fn", fill_value="-Infinity")
    assert json.loads(encoding(document).fill) == "-Infinity"
