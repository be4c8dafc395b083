"""Digests against a walk in plain Python integers: any order of boxes, and every kind of fault."""

import hashlib
import itertools
import json

import layouts
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import random, random_array
from sampling import examples

from reshard.arrays.digests import Digest, digest_of

DTYPES = (*layouts.DTYPES, "float64", "int64", "uint64", "complex128", "uint4", "uint2")
# The first digits of pi, as in Blowfish.
ROWS, WORDS = 0x243F6A8885A308D3, 0x13198A2E03707344


def whole(shape):
    return tuple(slice(0, size) for size in shape)


# What a digest is.


def weight(seed, number):
    """Output `number` of splitmix64, made odd."""
    mask = 2**64 - 1
    x = seed + (number + 1) * 0x9E3779B97F4A7C15 & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return (x ^ x >> 31) | 1


def plain_digest(array):
    """The digest by its definition, a word at a time."""
    axes = array.shape or (1,)
    rows = array.reshape(-1, axes[-1]) if array.size else []
    columns = [weight(WORDS, c) for c in range(-(-axes[-1] * array.dtype.itemsize // 8))]
    low = high = 0
    for number, row in enumerate(rows):
        data = row.tobytes()
        data += bytes(-len(data) % 8)
        words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
        own = weight(ROWS, number)
        low += own * sum(c * x for c, x in zip(columns, words, strict=True))
        high += own * sum(c * (x >> 32) for c, x in zip(columns, words, strict=True))
    known = json.dumps([array.dtype.name, list(array.shape), low % 2**64, high % 2**64])
    return hashlib.blake2b(known.encode(), digest_size=16).hexdigest()


def parts(rng, box, pieces):
    """Boxes that have each element of a box once, cut at random."""
    lengths = [part.stop - part.start for part in box]
    axes = [axis for axis, length in enumerate(lengths) if length > 1]
    if pieces < 2 or not axes:
        return [box]
    axis = int(rng.choice(axes))
    at = box[axis].start + int(rng.integers(1, lengths[axis]))
    first = int(rng.integers(1, pieces))
    cuts = (slice(box[axis].start, at), first), (slice(at, box[axis].stop), pieces - first)
    return [
        part
        for cut, count in cuts
        for part in parts(rng, (*box[:axis], cut, *box[axis + 1 :]), count)
    ]


def by_boxes(rng, array, pieces):
    """The digest of an array whose boxes come in any order."""
    boxes = parts(rng, whole(array.shape), pieces)
    digest = Digest(array.shape, array.dtype)
    for number in rng.permutation(len(boxes)):
        assert not digest.complete
        digest.add(boxes[number], array[boxes[number]])
    assert digest.complete
    return digest.text()


SHAPES = st.lists(st.integers(1, 9), max_size=4)


@settings(deadline=None, max_examples=examples(250))
@given(st.sampled_from(DTYPES), SHAPES, st.integers(1, 20), st.integers(0, 2**32))
def test_any_boxes_in_any_order_give_the_plain_digest(name, shape, pieces, seed):
    rng = np.random.default_rng(seed)
    array = random_array(rng, shape, name)
    expected = plain_digest(array)
    assert digest_of(array) == expected
    assert by_boxes(rng, array, pieces) == expected


# Slabs have 16,384 words: rows longer than one, more rows than one, and ends inside of one.
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *(("float32", (3, 40_001)), ("float32", (40, 1_025)), ("float32", (70_000, 5))),
        *(("uint8", (2, 140_003)), ("bool", (1, 131_073)), ("complex128", (2, 9_001))),
        *(("bfloat16", (70_001,)), ("int8", (33_000, 1)), ("float16", (17, 1_000, 3))),
        ("float64", (16_385, 1)),
    ],
)
def test_arrays_larger_than_a_slab(name, shape):
    rng = np.random.default_rng(0)
    array = random_array(rng, shape, name)
    expected = plain_digest(array)
    assert digest_of(array) == expected
    for pieces in (2, 7, 30):
        assert by_boxes(rng, array, pieces) == expected


def test_arrays_that_are_not_contiguous():
    array = random((24, 20, 16))
    assert digest_of(array.T) == plain_digest(np.ascontiguousarray(array.T))
    assert digest_of(array[::-2, 1:, ::3]) == plain_digest(array[::-2, 1:, ::3].copy())


@pytest.mark.parametrize("name", ["float32", "int8", "complex128"])
def test_scalars_and_arrays_without_elements(name):
    arrays = [random(shape, name) for shape in ((), (1,), (0,), (3, 0))]
    assert [*map(digest_of, arrays)] == [*map(plain_digest, arrays)]
    empty = Digest((3, 0), np.dtype(name))
    assert empty.complete and empty.text() == plain_digest(arrays[3])


@settings(deadline=None, max_examples=examples(30))
@given(st.integers(0, 2**32), st.integers(2, 20))
def test_a_digest_continues_from_an_earlier_state(seed, pieces):
    rng = np.random.default_rng(seed)
    array = random_array(rng, (12, 14))
    boxes = parts(rng, whole(array.shape), pieces)
    digest = Digest(array.shape, array.dtype)
    for box in boxes:
        state = json.loads(json.dumps(digest.state))
        digest = Digest(array.shape, array.dtype)
        digest.merge(state)
        digest.add(box, array[box])
    assert digest.text() == plain_digest(array)


def test_an_incomplete_digest_is_none():
    digest = Digest((4, 6), np.dtype(np.float32))
    digest.add((slice(0, 3), slice(0, 6)), np.zeros((3, 6), np.float32))
    assert (digest.complete, digest.elements) == (False, 18)
    with pytest.raises(AssertionError):
        digest.text()


# What it tells apart.


def test_dtypes_shapes_signs_and_nans():
    data = np.random.default_rng(0).bytes(48)
    names = ("uint8", "int8", "uint16", "float16", "bfloat16", "float32", "int32", "float64")
    arrays = [np.frombuffer(data, np.dtype(name)) for name in names]
    shapes = [(1, 12), (12, 1), (2, 6), (6, 2), (3, 4), (4, 3), (2, 2, 3), (1, 1, 12)]
    arrays += [arrays[5].reshape(shape) for shape in shapes]
    shapes = [(), (1,), (2,), (64,), (8, 8), (1, 64), (64, 1)]
    names = ("float32", "int32", "uint8", "bool")
    arrays += [np.zeros(shape, name) for shape in shapes for name in names]
    bits = np.uint32([1 << 31, 0x7FC00000, 0x7FC00001, 0xFFC00000])
    arrays += [x.reshape(1).view(np.float32) for x in bits]
    assert len({*map(digest_of, arrays)}) == len(arrays)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("uint8", (3, 11)), ("bfloat16", (4, 7)), ("float32", (5, 3)), ("complex128", (2, 3))],
)
def test_every_single_bit(name, shape):
    array = random(shape, name, 1)
    texts = {digest_of(array)} | {digest_of(flipped(array, b)) for b in range(8 * array.nbytes)}
    assert len(texts) == 1 + 8 * array.nbytes


@pytest.mark.parametrize(("name", "shape"), [("uint8", (2, 24)), ("float32", (2, 6))])
def test_every_pair_of_bits(name, shape):
    """Of top bits of two words the first sum alone finds none: each adds 2^63."""
    array = random(shape, name, 1)
    own = digest_of(array)
    top = [bit for bit in range(8 * array.nbytes) if bit % 64 == 63 or bit % 32 == 31]
    for one, other in itertools.combinations(top, 2):
        assert digest_of(flipped(array, one, other)) != own
    last = [bit for bit in top if bit % 64 == 63]
    for count in range(1, len(last) + 1):
        for bits in itertools.combinations(last, count):
            assert digest_of(flipped(array, *bits)) != own


def flipped(array, *bits):
    changed = array.copy()
    for bit in bits:
        changed.reshape(-1).view(np.uint8)[bit // 8] ^= 1 << bit % 8
    return changed
