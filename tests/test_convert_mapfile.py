"""Map files: reading, applying, writing, the opposite direction."""

import contextlib
import random

import layouts
import numpy as np
import pytest
from by_numpy import viewed
from converted import refusal, refused
from flax import nnx
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from random_rows import PATHS, arrays_of, bits, random_rows
from sampling import examples

import reshard
from reshard.arrays.operations import (
    Concat,
    Constant,
    Crop,
    Pad,
    Reshape,
    Split,
    Stack,
    Transpose,
    Unstack,
)
from reshard.convert import mapfile
from reshard.convert.leafmap import LeafMap, Row, applied, from_rows
from reshard.convert.map_rules import (
    apply_inverse,
    apply_map,
    inverse,
    parse_pattern,
    parse_template,
    whole_path,
)
from reshard.convert.mapfile import read_map, write_map
from reshard.errors import ArgumentError, TreeMismatchError
from reshard.tree import format_path, glob_text, named_by, split_path

EXAMPLE = """

hint: [[rule]]
      from = '^params/layer_(\\d+)/'
      to = 'layers/\\1/'"""


@pytest.fixture(autouse=True)
def here(tmp_path_factory, monkeypatch):
    """Each test writes to `map.toml` in a directory of its own."""
    monkeypatch.chdir(tmp_path_factory.mktemp("map"))


def read(text):
    with open("map.toml", "w", encoding="utf-8") as file:
        file.write(text)
    return read_map("map.toml")


def tree(shapes):
    return {split_path(text): tuple(shape) for text, shape in shapes.items()}


def printed(shapes):
    return {format_path(path): shape for path, shape in shapes.items()}


def apply(text, shapes):
    return apply_map(read(text), tree(shapes))


def step(before, after, operation=None, origin="map"):
    """A step of printed paths, a text or a list of texts."""
    sides = [[side] if isinstance(side, str) else side for side in (before, after)]
    inputs, outputs = (tuple(map(split_path, side)) for side in sides)
    return Row(inputs, outputs, operation, origin)


def problem(text, shapes):
    return refusal(apply, text, shapes)


def without_opposite(text, shapes):
    return refusal(apply_inverse, read(text), tree(shapes))


def says(mapped, rows):
    """Whether a map of rules is that of some rows, and the rules apply to what those name."""
    found = from_rows(rows, mapped.map.sources())
    return found == LeafMap(mapped.map.values, mapped.map.origin)


def written(rows, dropped, initial, leaves, to=None):
    """The text of the map that rows make of leaves, less those that are dropped."""
    found = from_rows(rows, {path: leaf for path, leaf in leaves.items() if path not in dropped})
    return write_map(LeafMap(found.values, found.origin, tuple(dropped)), initial, to)


def named(globs, paths):
    """The paths that globs name."""
    texts = {glob_text(path): path for path in paths}
    return {texts[text] for glob in globs for text in named_by(texts, glob)}


# What rules do


CASES = {
    "reshape": (
        r"{ from = '^(q|k)$', reshape = [4, -1], to = 'x/\1' }, { from = '^a$', reshape = [] },"
        "{ from = '^b$', reshape = { from = [4, 3, 2], to = [12, -1] } }",
        {"q": (4, 3, 2), "k": (8, 5), "a": (1, 1), "b": (4, 3, 2)},
        [
            step("q", "x/q", Reshape((4, 6))),
            step("k", "x/k", Reshape((4, 10))),
            step("a", "a", Reshape(())),
            step("b", "b", Reshape((12, 2))),
        ],
    ),
    "pad and crop": (
        "{ from = '^a$', pad = { widths = [[0, 0], [1, 64]], fill = -0.5 }, to = 'b' },"
        "{ from = '^c$', crop = { widths = [[0, 0], [1, 1]] } }",
        {"a": (2, 3), "c": (2, 3)},
        [step("a", "b", Pad(((0, 0), (1, 64)), -0.5)), step("c", "c", Crop(((0, 0), (1, 1))))],
    ),
    "unstack, with arithmetic, into uneven groups": (
        r"{ from = '^blocks/(.*)$', unstack = { axis = 1, into = 'layers/{}/\1' } },"
        "{ from = '^w$', unstack = { axis = 0, into = '{i // 2}/{i % 2}/w' } },"
        "{ from = '^u$', unstack = { axis = 0, into = '{outer}/{inner}/u' },"
        " nest = { sizes = [1, 2], flat = '{}' } }",
        {"blocks/w": (4, 2), "blocks/v": (4, 3, 5), "w": (3,), "u": (3,)},
        [
            step("blocks/w", ["layers/0/w", "layers/1/w"], Unstack(1, 2)),
            step("blocks/v", ["layers/0/v", "layers/1/v", "layers/2/v"], Unstack(1, 3)),
            step("w", ["0/0/w", "0/1/w", "1/0/w"], Unstack(0, 3)),
            step("u", ["0/0/u", "1/0/u", "1/1/u"], Unstack(0, 3)),
        ],
    ),
    "stack by arithmetic over a mesh axis, of uneven groups, in a stated order": (
        r"{ from = '^(?P<stage>\d)/(\d)$', to = 'v',"
        r" stack = { axis = -1, by = '{\g<stage> * 2 + \2}', names = ['stage'] } },"
        r"{ from = '^(\d)/(\d)/', stack = { axis = 0, by = '{flat}' }, to = '',"
        " nest = { sizes = [1, 2], outer = 1, inner = 2 } },"
        r"{ from = '_(\w+)$', stack = { axis = 0, by = 1, order = ['8', '2', 'x'] }, to = '' }",
        dict.fromkeys(
            ["1/0", "1/1", "0/0", "0/1", "1/1/w", "1/0/w", "0/0/w", "u_2", "u_8", "u_x"], (2,)
        ),
        [
            step(["0/0", "0/1", "1/0", "1/1"], "v", Stack(-1, ("stage",))),
            step(["0/0/w", "1/0/w", "1/1/w"], "w", Stack(0)),
            step(["u_8", "u_2", "u_x"], "u", Stack(0)),
        ],
    ),
    "numbers of layers in uneven stages": (
        r"{ from = '^block_(\d+)/', to = 'stages/{outer}/blocks/{inner + 1}/',"
        " nest = { sizes = [3, 2, 4], flat = 1 } },"
        r"{ from = '^stage_(\d+)/(?P<block>\d+)/', to = 'flat_{flat}/',"
        r" nest = { sizes = [3, 2, 4], outer = 1, inner = '{\g<block> - 1}' } }",
        dict.fromkeys(["block_0/w", "block_7/w", "stage_0/1/w", "stage_2/4/w"], (2,)),
        [
            step("block_0/w", "stages/0/blocks/1/w"),
            step("block_7/w", "stages/2/blocks/3/w"),
            step("stage_0/1/w", "flat_0/w"),
            step("stage_2/4/w", "flat_8/w"),
        ],
    ),
    "paths": (
        "{ from = '^stays$', to = 'stays' }, { from = '(?i)DENSE', to = 'x' },"
        r"{ from = '^a$', to = '{{\\1}}' }, { from = '^"
        '"mlp/linear"'
        "/', to = 'mlp/linear/' }",
        {"stays": (2,), "Dense_0": (), "a": (2,), '"mlp/linear"/w': (2,)},
        [
            step("stays", "stays"),
            step("Dense_0", "x_0"),
            step("a", r"{\1}"),
            Row((("mlp/linear", "w"),), (("mlp", "linear", "w"),)),
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_operation(case):
    rules, shapes, steps = CASES[case]
    mapped = apply(f"rule = [{rules}]", shapes)
    assert says(mapped, steps)
    left = {
        path: shape for path, shape in tree(shapes).items() if path not in [*mapped.map.dropped]
    }
    touched = {path for one in steps for path in one.inputs}
    assert mapped.map.sources() == left
    assert mapped.untouched == [path for path in left if path not in touched]


@pytest.mark.parametrize(
    "text, value",
    [
        (r"\1 + \g<n> * i", 17),
        (r"\1-\g<2>- 1", 1),
        (r"(\1 - 9) % 4", 2),
        (r"\1 % 4*2", 6),
        (r"-\1 // -2", 3),
        (r"-\1 // 2 + 5", 1),
        (r"\1 // (\g<n> - i)", 2),
        ("--3", 3),
    ],
)
def test_arithmetic_is_that_of_python(text, value):
    pattern = parse_pattern(r"^(\d+)/(?P<n>\d+)$")
    replacement = parse_template(f"a{{{text}}}b", [pattern], ["i"])
    assert replacement.replaced(pattern, "7/5", lambda match: {"i": 2}) == f"a{value}b"


RENAMES = [
    r"{from = '^params/', to = ''}",
    r"{from = 'layer_(\d+)/', to = 'layers/\1/'}",
    r"{from = 'layer_(\d+)/', to = 'stages/{\1 // 2}/{\1 % 2}/'}",
    r"{from = 'layer_(\d+)/', to = 'layer_{(\1 + 1) % 3}/'}",
    r"{from = 'mlp/', to = 'x/'}",
    r"{from = 'attn/', to = 'mlp/'}",
    r"{from = '^(.*)x/', to = '\1attn/'}",
]
OPERATIONS = [
    r"{from = 'kernel$', transpose = [1, 0]}",
    r"{from = 'kernel$', transpose = [2, 0, 1], to = 'turned'}",
    r"{from = '(kernel|bias)$', reshape = [2, -1]}",
    r"{from = 'kernel$', transpose = [1, 0], reshape = [-1], to = 'flat'}",
    r"{from = '^(.*)kernel$', split = {axis = -1, into = ['\1a', '\1b']}}",
    r"{from = 'kernel$', split = {axis = 0, sizes = [1, 3], into = 'kernel_{}'}}",
    r"{from = 'bias$', unstack = {axis = 0, into = 'bias_{}'}}",
    r"{from = 'kernel$', unstack = {axis = -1, into = ['one', 'two', 'three', 'four']}}",
    r"{from = '(bias|kernel)_(\d+)$', stack = {axis = 0, by = 2}, to = '\1'}",
    r"{from = '^params/layer_(\d+)/', stack = {axis = 1, by = 1}, to = 'params/layers/'}",
    r"{from = 'layer_(\d+)/(\w+)/', stack = {axis = 0, by = 1}, to = '\2/'}",
    r"{from = '/([ab])$', concat = {axis = -1, by = 1, order = ['b', 'a']}, to = '/kernel'}",
    r"{from = ['mlp/kernel$', 'attn/kernel$'], concat = {axis = 0}, to = 'both/kernel'}",
    r"{from = ['mlp/bias$', 'attn/bias$'], reshape = [1, -1], concat = {axis = 0}, to = 'both'}",
    r"{from = 'kernel$', pad = {widths = [[0, 1], [2, 0]], fill = 7.0}}",
]
LEAVES = ["kernel", "bias", "a", "b", "kernel_0", "kernel_1"]
LAYERED = st.builds(
    lambda layers, modules, leaves, prefix: {
        f"{prefix}layer_{n}/{module}/{leaf}": shape
        for n in range(layers)
        for module in modules
        for leaf, shape in leaves.items()
    },
    st.integers(1, 3),
    st.sampled_from([["attn", "mlp"], ["mlp", "attn"], ["mlp"], ["x"]]),
    st.dictionaries(
        st.sampled_from(LEAVES), st.sampled_from([(4,), (4, 4), (2, 4), (2, 3, 4)]), min_size=1
    ),
    st.sampled_from(["params/", ""]),
)


@settings(deadline=None, max_examples=examples(400))
@given(LAYERED.map(tree), st.booleans(), st.integers(0), st.data())
def test_rules_do_together_what_each_does_and_can_be_undone(leaves, drop, seed, data):
    """One of the operations that fit, one of the renames that fit its result, and so on."""
    arrays = arrays_of(leaves, seed)
    made, rules = arrays, []
    for each in [["{from = 'bias$', drop = true}"]] * drop + [OPERATIONS, RENAMES] * 3:
        shapes, fitting = printed({path: value.shape for path, value in made.items()}), {}
        for rule in each:
            with contextlib.suppress(TreeMismatchError):
                fitting[rule] = apply(f"rule = [{rule}]", shapes).map
        if fitting:
            rules.append(data.draw(st.sampled_from([*fitting])))
            one = fitting[rules[-1]]
            made = viewed(one, {path: made[path] for path in one.sources()})
    assume(len(rules) > 1)
    mapped = apply(f"rule = [{', '.join(rules)}]", printed(leaves))
    kept = {path: arrays[path] for path in leaves if path not in mapped.map.dropped}
    assert bits(viewed(mapped.map, kept)) == bits(made)
    assert mapped.map.shapes == {path: value.shape for path, value in made.items()}
    assert mapped.map.sources() == {path: leaves[path] for path in kept}
    assert bits(viewed(mapped.map.inverse(), made)) == bits(kept)

    again = apply(write_map(mapped.map, mapped.initial), printed(leaves))
    assert again.map.values == mapped.map.values
    back = apply_map(inverse(read_map("map.toml")), mapped.map.shapes)
    assert back.map.values == mapped.map.inverse().values
    assert named(back.initial, leaves) == {*mapped.map.dropped}


# Whole maps


def test_the_text_of_a_whole_map():
    leaves = tree(
        {
            "params/Dense_0/kernel": (8, 2, 4),
            "params/Dense_0/bias": (3,),
            "params/cell/ii/kernel": (2, 4),
            "params/cell/if/kernel": (2, 3),
            "params/layer_0/w": (2,),
            "params/layer_1/w": (2,),
            "params/qkv": (6, 2),
            "params/it's": (2, 3),
            "params/table": (5,),
            "cache/index": (),
        }
    )
    kernels = ["params/cell/ii/kernel", "params/cell/if/kernel"]
    long = [f"blocks/with/a/rather/long/name/of/which/there/are/{n}/w" for n in ("one", "two")]
    steps = [
        step("params/Dense_0/kernel", "linear/kernel", Reshape((8, 8)), "path"),
        step("params/Dense_0/bias", "linear/bias", Pad(((0, 2),), 0.0)),
        step(kernels, "cell/dense_i/kernel", Concat(-1), "structure"),
        step(["params/layer_0/w", "params/layer_1/w"], "layers/w", Stack(0, ("stage",))),
        step("params/qkv", ["q", "{kv}"], Split(0, (2, 4))),
        step("{kv}", "{v}", Transpose((1, 0))),
        step("layers/w", long, Unstack(0, 2)),
        step("params/it's", "it's", Crop(((0, 0), (1, 0)))),
    ]
    dropped = [("cache", "index")]
    text = written(steps, dropped, ["rngs/**", "**/count"], leaves)
    assert text == mapfile._HEADER + mapfile._ORIGINS + (
        r"""
init = ['rngs/**', '**/count']

[[rule]]
from = '^cache/index$'
drop = true

[[rule]]  # path
from = '^params/Dense_0/kernel$'
reshape = { from = [8, 2, 4], to = [8, 8] }
to = 'linear/kernel'

[[rule]]
from = '^params/Dense_0/bias$'
pad = { widths = [[0, 2]], fill = 0.0 }
to = 'linear/bias'

[[rule]]  # structure
from = ['^params/cell/ii/kernel$', '^params/cell/if/kernel$']
concat = { axis = -1, sizes = [4, 3] }
to = 'cell/dense_i/kernel'

[[rule]]
from = '^params/qkv$'
split = { axis = 0, sizes = [2, 4], into = ['q', '{{v}}'] }

[[rule]]
from = '^params/layer_(\d+)/w$'
stack = { axis = 0, names = ['stage'], by = 1 }
to = 'blocks/with/a/rather/long/name/of/which/there/are/one/w'

[[rule]]
from = '''^params/it's$'''
crop = { widths = [[0, 0], [1, 0]] }
to = '''it's'''

[[rule]]
from = '^\{v\}$'
transpose = [1, 0]
to = '{{v}}'

[[rule]]
from = '^blocks/with/a/rather/long/name/of/which/there/are/one/w$'
unstack = { axis = 0, into = [
    'blocks/with/a/rather/long/name/of/which/there/are/one/w',
    'blocks/with/a/rather/long/name/of/which/there/are/two/w',
] }
"""
    )
    mapped = apply_map(read(text), leaves)
    # A rule may rename what another has made, but then that is made under the new path.
    assert says(mapped, [Row(one.inputs, one.outputs, one.operation) for one in steps])
    assert [*mapped.map.dropped] == dropped
    assert mapped.initial == ("rngs/**", "**/count")
    assert mapped.untouched == [("params", "table")]


def test_values_that_were_given_have_no_place_in_a_map():
    (scale,) = applied(Constant(np.ones(3)), [])
    found = LeafMap({("scale",): scale}, {("scale",): "map"})
    assert refusal(write_map, found) == "a map file cannot hold these values in memory: scale"


TODO_LEAVES = {("TODO",): (2,), ('TODO"',): (2,)}
TODO_ROWS = [Row((path,), (("x", str(n)),)) for n, path in enumerate(TODO_LEAVES)]
TODO_ROWS += [Row((("x", str(n)),), (path,)) for n, path in enumerate(TODO_LEAVES)]


@settings(deadline=None, max_examples=examples(300))
@example((TODO_LEAVES, TODO_ROWS), ["TODO/*"], random.Random(0))
@given(
    random_rows(),
    st.lists(PATHS.map(lambda path: format_path(("rngs", *path))), max_size=2),
    st.randoms(),
)
def test_a_whole_map_reads_back_and_works_in_both_directions(case, initial, rng):
    leaves, steps = case
    used = {path for one in steps for path in one.inputs}
    named_once = used | {path for one in steps for path in one.outputs}
    dropped = [path for path in leaves if path not in named_once and rng.random() < 0.5]
    rules = read(written(steps, dropped, initial, leaves))
    mapped = apply_map(rules, leaves)
    kept = {path: shape for path, shape in leaves.items() if path not in dropped}
    assert says(mapped, [Row(one.inputs, one.outputs, one.operation) for one in steps])
    assert ({*mapped.map.dropped}, mapped.initial) == ({*dropped}, tuple(initial))
    assert mapped.map.shapes == from_rows(steps, kept).shapes
    assert mapped.untouched == [path for path in kept if path not in used]

    back = apply_map(inverse(rules), mapped.map.shapes)
    assert back.map.shapes == kept
    assert named(back.initial, leaves) == {*dropped}
    arrays = arrays_of(kept)
    assert bits(viewed(back.map, viewed(steps, arrays))) == bits(arrays)


def test_the_opposite_direction_of_what_stays_out():
    text = (
        "init = ['rngs/**', 'count', 'mask']\n"
        "rule = [{ from = '^params/w$', to = 'w' }, { from = '^params/table$', drop = true }]"
    )
    rules = read(text)
    back = inverse(rules)
    mapped = apply_map(
        back, tree({"w": (2,), "rngs/key": (), "rngs/a/b": (), "count": (), "x": ()})
    )
    assert says(mapped, [step("w", "params/w")])
    assert printed(mapped.map.shapes) == {"params/w": (2,), "x": ()}
    assert [*mapped.map.dropped] == [("rngs", "key"), ("rngs", "a", "b"), ("count",)]
    assert mapped.initial == ("params/table",)
    assert mapped.untouched == [("x",)]
    forth = apply_map(inverse(back), tree({"params/w": (2,), "params/table": (3,)}))
    assert ([*forth.map.dropped], forth.initial) == ([("params", "table")], ())
    assert forth.optional == rules.initial
    assert printed(forth.map.shapes) == {"w": (2,)}


def test_rules_with_several_operations_in_the_opposite_direction():
    shapes = {"a": (2, 6), "b": (2, 6), "qkv": (4, 3)}
    rules = read(
        "rule = [{ from = ['^a$', '^b$'], to = 'ab', transpose = [1, 0],"
        " reshape = { from = [6, 2], to = [3, -1] }, pad = { widths = [[1, 0], [0, 0]], fill = 0 },"
        " concat = { axis = 0, sizes = [4, 4] } },"
        "{ from = '^qkv$', transpose = [1, 0], split = { axis = 1, into = ['q', 'kv'] } },"
        "{ from = '^q$', pad = { widths = [[0, 0], [1, 1]], fill = 1 } }]"
    )
    mapped = apply_map(rules, tree(shapes))
    assert printed(mapped.map.shapes) == {"ab": (8, 4), "q": (3, 4), "kv": (3, 2)}
    back = apply_map(inverse(rules), mapped.map.shapes)
    assert back.map.values == mapped.map.inverse().values
    assert printed(back.map.shapes) == shapes
    arrays = arrays_of(tree(shapes))
    assert bits(viewed(back.map, viewed(mapped.map, arrays))) == bits(arrays)


def test_rules_that_have_no_opposite_direction():
    rules = read(
        r"""
        rule = [
            { from = '^[a-z]+/', to = '' },
            { from = '^a$', to = 'b' },
            { from = '^a$', to = '\g<0>/b' },
            { from = '^cache/.*$', drop = true },
            { from = '^a$', reshape = [2, -1] },
            { from = '^a$', crop = { widths = [[0, 1]] } },
            { from = '^a$', transpose = [1, 1] },
            { from = ['^a$', '^b$'], concat = { axis = 0 }, to = 'c' },
            { from = '^a$', stack = { axis = 0, by = 0, order = ['a'] }, to = 'c' },
            { from = '^a$', unstack = { axis = 0, into = ['b', '{1 + 1}'] } },
            { from = '^x_(\d+)/w$', to = 'x/w' },
            { from = '^x_(\d+)/(\d+)$', to = 'x_\1\2' },
            { from = '^x_(\d+)/', to = 'x\1' },
            { from = '^x_(\d+)$', split = { axis = 0, into = ['x/\1', 'y/w'] } },
            { from = '^x_(\d+)/w$', concat = { axis = 0, by = 'a\1', sizes = [1, 2] }, to = 'x/w' },
            { from = ['^x_(\d+)$', '^y/'], stack = { axis = 0 }, to = 'x/w' },
        ]
        """
    )
    message = r"""
map.toml: the map cannot be used in the opposite direction
  rule 1, `^[a-z]+/`: it must be `^...$` or `^.../`, with no wildcard except `(\d+)`
  rule 3, `^a$`: `\g<0>/b` contains more than text and `\1`
  rule 4, `^cache/.*$`: it must be `^...$` or `^.../`, with no wildcard except `(\d+)`
  rule 5, `^a$`: `reshape` lacks `from`, the shape before it
  rule 6, `^a$`: a crop cannot be inverted: the cut elements are lost
  rule 7, `^a$`: axes [1, 1] are not a permutation of the axes
  rule 8, `^a$` + `^b$`: `concat` lacks the `sizes` of the pieces
  rule 9, `^a$`: `concat` with `order` has no inverse: number the pieces with `by` instead
  rule 10, `^a$`: `{1 + 1}` contains more than text and `\1`
  rule 11, `^x_(\d+)/w$`: the new path lacks group 1
  rule 12, `^x_(\d+)/(\d+)$`: two numbers are adjacent, so the end of the first is ambiguous
  rule 13, `^x_(\d+)/`: `x\1` is not for a regex `^.../`: only one ends with `/`
  rule 14, `^x_(\d+)$`: the paths of its parts contain different numbers
  rule 15, `^x_(\d+)/w$`: `a\1` in `by` must be a number and nothing else
  rule 16, `^x_(\d+)$` + `^y/`: some of its regexes are for whole paths, and some for modules

hint: a map file that `reshard convert` has written works in both directions
""".strip("\n")
    assert refusal(inverse, rules) == message


def test_rules_with_numbers_in_the_opposite_direction():
    shapes = {f"params/layer_{n}/{leaf}/w": (2, 3) for n in (0, 1, 10) for leaf in "qk"}
    shapes |= {f"params/x_{n}/{k}/w": (4,) for n in range(2) for k in range(3)}
    shapes |= {"params/blocks/w": (4, 3), "params/blocks/b": (4,)}
    rules = read(
        r"rule = [{ from = ['^params/layer_(\d+)/q/w$', '^params/layer_(\d+)/k/w$'],"
        r" concat = { axis = 1, sizes = [3, 3] }, to = 'layers/\1/qk' },"
        r"{ from = '^params/x_(\d+)/(\d+)/w$', stack = { axis = 0, by = 2 }, to = 'x/\1\\/w' },"
        r"{ from = '^params/blocks/', unstack = { axis = 0, into = 'blocks/{}/' } },"
        r"{ from = '^layers/(\d+)/qk$', transpose = [1, 0] }]"
    )
    mapped = apply_map(rules, tree(shapes))
    back = apply_inverse(rules, mapped.map.shapes)
    assert back.map.values == mapped.map.inverse().values
    assert [(rule.patterns[0].text, str(rule.to[0])) for rule in inverse(rules).rules] == [
        (r"^layers/(\d+)/qk$", r"layers/\1/qk"),
        (r"^blocks/(\d+)/", "params/blocks/"),
        (r"^x/(\d+)\\/w$", r"params/x_\1/{}/w"),
        (r"^layers/(\d+)/qk$", r"params/layer_\1/q/w"),
    ]


def test_leaves_that_would_not_come_back_from_the_opposite_direction():
    text = r"rule = [{ from = '^params/a_(\d+)/', to = 'layers/\1/' }]"
    there = {"layers/0/w": (2,)}
    assert printed(apply_inverse(read(text), tree(there)).map.shapes) == {"params/a_0/w": (2,)}
    assert without_opposite(text, there | {"params/a_1/w": (3,), "other": ()}) == (
        "map.toml: the map cannot be used in the opposite direction on these leaves\n"
        "  params/a_1/w: the map does not make params/a_1/w of it"
    )


@pytest.mark.parametrize("optional", [False, True])
def test_literal_rules_of_which_some_may_match_nothing_must_lead_back_too(optional):
    """Nothing becomes `b`: what does goes on to `c`."""
    also = ", optional = true" if optional else ""
    text = f"rule = [{{ from = '^params/a$', to = 'b'{also} }}, {{ from = '^b$', to = 'c'{also} }}]"
    back = apply_inverse(read(text), tree({"c": (2,)}))
    assert printed(back.map.shapes) == {"params/a": (2,)}
    told = "params/a: the map does not make b of it" if optional else "matches no leaf"
    assert told in without_opposite(text, {"b": (2,)})


@pytest.mark.parametrize(
    "one, other, after, leaf",
    [
        ("^a$", "^b$", "c", "c"),
        (r"^params/a_(\d+)/", r"^params/b_(\d+)/", r"layers/\1/", "layers/3/w"),
    ],
)
def test_which_of_several_rules_has_made_a_leaf_is_not_guessed(one, other, after, leaf):
    """As in a map for several models, which have one of these names each."""
    rule = "{{ from = '{}', to = '{}', optional = true }}"
    text = f"rule = [{rule.format(one, after)}, {rule.format(other, after)}]"
    assert without_opposite(text, {leaf: (2,)}) == (
        "map.toml: the map cannot be used in the opposite direction on these leaves\n"
        f"  {leaf}: several rules may have made it: rule 1 or a later one\n\n"
        "hint: model=..., the model to convert to, decides"
    )


PER_LAYER = [  # what may become of the leaves `a` and `b` of a module in each layer
    "{ from = '^OLD/', to = 'NEWs/' }",
    "{ from = '^OLD/a$', to = 'SAME/c' }, { from = '^OLD/b$', to = 'SAME/a' },"
    "{ from = '^OLD/c$', to = 'SAME/b' }",
    "{ from = '^OLD/a$', transpose = [1, 0] }",
    "{ from = '^OLD/a$', split = { axis = 1, sizes = [1, 3], into = ['NEW/q', 'NEW/k'] } }",
    "{ from = '^OLD/a$', unstack = { axis = 1, into = 'NEW/head_{}/w' } }",
    "{ from = ['^OLD/a$', '^OLD/b$'], concat = { axis = 0 }, to = 'NEWs' }",
    "{ from = '^OLD/a$', stack = { axis = 0, by = 1 }, to = 'stacked/NAME' }",
    "{ from = '^OLD/a$', drop = true }",
]


@settings(deadline=None, max_examples=examples(60))
@given(
    st.lists(st.sampled_from(PER_LAYER), min_size=1, max_size=5),
    st.sampled_from(["params/layer_{}", "params/layers/{}", "params/{}", "params/stage_0/x_{}"]),
    st.sampled_from(["layers/{}", "block{}", "net/layer_{}/inner"]),
    st.permutations(["attn", "mlp", "norm_1", "x", "y2", "z"]),
)
def test_as_many_rules_for_two_layers_as_for_twelve(kinds, outer, inner, names):
    """The last module stays as it is."""
    texts = []
    for name, text in zip(names, kinds, strict=False):
        old, same, new = (f"{x}/{name}" for x in (outer, outer, inner))
        text = text.replace("OLD", old.format(r"(\d+)")).replace("SAME", same.format(r"\1"))
        texts.append(text.replace("NEW", new.format(r"\1")).replace("NAME", name))
    counts = []
    for count in (2, 12):
        places = [f"{outer.format(n)}/{name}" for n in range(count) for name in names]
        leaves = {f"{x}/{leaf}": (rows, 4) for x in places for leaf, rows in (("a", 2), ("b", 3))}
        found = apply(f"rule = [{', '.join(texts)}]", leaves).map
        own = [("rngs", str(n), "key") for n in range(count)]
        rules = read(write_map(found, ["params/x"], "nnx", own))
        counts.append(len(rules.rules))
        forth = apply_map(rules, tree(leaves))
        assert (forth.map.values, {*forth.map.dropped}) == (found.values, {*found.dropped})
        assert forth.map.origin == found.origin
        assert rules.initial == ("params/x", "rngs/*/key")
        back = apply_inverse(rules, {**found.shapes, **dict.fromkeys(own, ())})
        assert back.map.values == found.inverse().values
        assert {*back.map.dropped} == {*own}
        assert named(back.initial, tree(leaves)) == {*found.dropped}
    assert counts[0] == counts[1]


def test_no_rule_is_for_more_leaves_than_it_says():
    shapes = {f"params/{name}_{n}/w": (2,) for name in ("layer", "odd") for n in range(3)}
    rules = r"{ from = '^params/layer_(\d+)/', to = '\1/' }, "
    rules += r"{ from = '^params/odd_([01])/', to = 'odd/\1/' }"
    lines = write_map(apply(f"rule = [{rules}]", shapes).map).splitlines()
    assert [line for line in lines if line.startswith(("from", "to"))] == [
        *(r"from = '^params/layer_(\d+)/w$'", r"to = '\1/w'"),
        *("from = '^params/odd_0/w$'", "to = 'odd/0/w'"),
        *("from = '^params/odd_1/w$'", "to = 'odd/1/w'"),
    ]


def test_where_fewer_rules_would_not_say_the_same_each_leaf_has_its_own(monkeypatch):
    shapes = {f"params/layer_{n}/w": (2,) for n in range(3)}
    found = apply(r"rule = [{ from = '^params/layer_(\d+)/', to = '\1/' }]", shapes).map
    monkeypatch.setattr(mapfile, "_says", lambda *_: False)
    rules = read(write_map(found, own=[("rngs", "0", "key")]))
    assert all(pattern.literal for rule in rules.rules for pattern in rule.patterns)
    assert apply_map(rules, tree(shapes)).map.values == found.values
    assert rules.initial == ("rngs/0/key",)


@pytest.mark.exhaustive
def test_maps_of_many_leaves():
    """Rules for whole paths are looked up: tried on every leaf, they would take minutes."""
    names = [(f"layer_{n}", f"w_{k}") for n in range(200) for k in range(100)]
    leaves = {("params", *name): (2,) for name in names}
    steps = [Row((("params", *name),), (("net", *name),)) for name in reversed(names)]
    rules = read(written(steps, [], ["rngs/**"], leaves))
    mapped = apply_map(rules, leaves)
    assert says(mapped, steps)
    assert apply_map(inverse(rules), mapped.map.shapes).map.shapes == leaves


@settings(deadline=None, max_examples=examples(300))
@given(PATHS, PATHS)
@example(("a\\",), ("a",))
@example(("$",), ("^",))
@example(("it's",), ('"',))
@example(("\x7f\x00\x85\u2028", "é"), ("a",))
def test_a_whole_path_matches_itself_alone(path, other):
    text = format_path(path)
    pattern = whole_path(text)
    assert pattern == parse_pattern(pattern.text)
    assert pattern.literal == text
    assert pattern.regex.search(text)
    assert bool(pattern.regex.search(format_path(other))) == (path == other)


def test_regexes_that_are_no_whole_path():
    texts = r"a ^a a$ ^a.b$ ^a|b$ ^(a)$ ^a*$ ^\d$ ^a\$ ^[a]$ ^a{2}$ ^a$b$"
    assert {text: parse_pattern(text).literal for text in texts.split()} == dict.fromkeys(
        texts.split()
    )


# What is wrong


def test_what_cannot_be_read():
    text = r"""
    x = 1
    init = ['a//b']
    optional = { more = ['a'] }
    to = 'keras'
    rule = [
        { from = 3 },
        { from = 'x(' , to = 'y' },
        {},
        { from = [], to = 'x' },
        { from = 'a', too = 'x' },
        { from = 'a', to = 7 },
        { from = 'a', to = '\1' },
        { from = 'a', to = '\g<x>' },
        { from = 'a', to = '{x}' },
        { from = 'a', to = '{\1}' },
        { from = 'a', to = '{1 ** 2}' },
        { from = 'a', to = '{f(1)}' },
        { from = 'a', to = '{1 +}' },
        { from = 'a', to = '{True}' },
        { from = 'a', to = '{' },
        { from = 'a', to = 'b}' },
        { from = 'a', drop = false },
        { from = 'a', drop = true, to = 'x' },
        { from = 'a', to = 'x', init = ['a'] },
        { from = ['a', 'b'], to = 'x' },
        { from = 'a', transpose = 1, reshape = [-1, -1], pad = 3 },
        { from = 'a', reshape = { to = [-2], of = 1 } },
        { from = 'a', pad = { widths = [[1]] }, crop = { widths = [[-1, 0]], fill = 1 } },
        { from = 'a', split = { axis = 0.5, into = 'x{}' } },
        { from = 'a', split = { axis = 0, sizes = [1, 2], into = ['b'] }, to = 'x' },
        { from = 'a', split = { axis = 0, into = ['a'] }, unstack = { axis = 0, into = [] } },
        { from = 'a', unstack = { axis = 0, into = ['{j}', '{'], sizes = [1] } },
        { from = '(a)', stack = { axis = 0 }, to = 'x' },
        { from = '(a)', stack = { axis = 0, by = 2, order = ['x', 'x'] } },
        { from = ['a', 'b'], concat = { by = 0, names = ['x'], sizes = [-1] }, to = '\1' },
        { from = ['a', 'b'], concat = { axis = 0, order = ['a'] }, to = 'x' },
        { from = '(a)', to = '{inner}', nest = { sizes = 4, flat = 1, inner = 2 } },
        { from = '(a)', to = '{inner}', nest = { sizes = [4], outer = '\1', inner = '{i}' } },
        { from = true, split = { into = '\' } },
        { from = 'a', split = { axis = 0, into = 'x{}' } },
        { from = '(a)', to = 'b', nest = { sizes = [4], flat = 1, inner = 2 } },
        { from = 'a', to = 'b', optional = false },
        { from = 'a', to = 'b', optional = 'yes' },
    ]
    """
    assert (
        refusal(read, text, of=ArgumentError)
        == r"""
map.toml: its rules cannot be read
  the file: `x` is not known
  the file: `optional`: `more` is not known
  the file: `to` must be `nnx` or `linen`, not 'keras'
  `init`: `a//b` is not a path: a key is empty or its quotes do not close
  rule 1: `from` must be a text or a list of texts, not 3
  rule 1: it has no effect: give it `to`, an operation or `drop = true`
  rule 2, `x(`: `x(` is not a regex: missing ), unterminated subpattern at position 1
  rule 3: `from` is missing
  rule 3: it has no effect: give it `to`, an operation or `drop = true`
  rule 4: `from` must be a text or a list of texts, not []
  rule 4: only `concat`, `stack` and `equal` take several regexes
  rule 5, `a`: `too` is not known: did you mean `to`?
  rule 5, `a`: it has no effect: give it `to`, an operation or `drop = true`
  rule 6, `a`: `to` must be a text or a list of texts, not 7
  rule 7, `a`: `to`: `\1`: the regex has no group `1`
  rule 8, `a`: `to`: `\g<x>`: the regex has no group `x`
  rule 9, `a`: `to`: `{x}`: there is no name `x` here
  rule 10, `a`: `to`: `{\1}`: the regex has no group `1`
  rule 12, `a`: `to`: `{f(1)}` is not arithmetic: `+ - * / ** // %` and parentheses are all
  rule 13, `a`: `to`: `{1 +}` is not arithmetic
  rule 14, `a`: `to`: `{True}` is not arithmetic: `+ - * / ** // %` and parentheses are all
  rule 15, `a`: `to`: `{` has no partner; doubled it is the character
  rule 16, `a`: `to`: `}` has no partner; doubled it is the character
  rule 17, `a`: `drop` must be true, not False
  rule 18, `a`: `drop` cannot be combined with `to`
  rule 19, `a`: `init` is not known: put it before the first rule
  rule 20, `a` + `b`: only `concat`, `stack` and `equal` take several regexes
  rule 21, `a`: `transpose` must be a list of whole numbers, not 1
  rule 21, `a`: `reshape`: `to` must be a list of at most 32 sizes; one may be -1, not [-1, -1]
  rule 21, `a`: `pad` must be a table, not 3
  rule 22, `a`: `reshape`: `to` must be a list of at most 32 sizes; one may be -1, not [-2]
  rule 22, `a`: `reshape`: `of` is not known
  rule 23, `a`: `pad`: `widths` must be a list of two sizes for each axis, not [[1]]
  rule 23, `a`: `pad`: `fill` is missing
  rule 23, `a`: `crop`: `widths` must be a list of two sizes for each axis, not [[-1, 0]]
  rule 23, `a`: `crop`: `fill` is not known
  rule 24, `a`: `split`: `axis` must be a whole number, not 0.5
  rule 25, `a`: `split` cannot be combined with `to`
  rule 25, `a`: `split`: `sizes` has 2, `into` has 1
  rule 26, `a`: `unstack`: `into` must be a text or a list of texts, not []
  rule 26, `a`: `split` and `unstack` need two rules
  rule 27, `a`: `unstack`: `sizes` is not known
  rule 27, `a`: `unstack`: `into`: `{j}`: there is no name `j` here; there is `i`
  rule 27, `a`: `unstack`: `into`: `{` has no partner; doubled it is the character
  rule 28, `(a)`: `stack`: `by` is missing, the group with the number of the piece
  rule 29, `(a)`: `stack` needs one path in `to`
  rule 29, `(a)`: `stack`: `order` has a piece twice
  rule 29, `(a)`: `stack`: `by`: `\g<2>`: the regex has no group `2`
  rule 30, `a` + `b`: `concat`: `names` is not known
  rule 30, `a` + `b`: `concat`: `sizes` must be a list of sizes, not [-1]
  rule 30, `a` + `b`: `concat`: `axis` is missing
  rule 30, `a` + `b`: `concat`: `by` cannot be combined with a list in `from`, which has an order
  rule 30, `a` + `b`: `to`: `\1`: the regex has no group `1`
  rule 31, `a` + `b`: `concat`: `order` requires `by`
  rule 32, `(a)`: `nest`: `sizes` must be a list of sizes, not 4
  rule 32, `(a)`: `to`: `{inner}`: there is no name `inner` here
  rule 33, `(a)`: `nest`: `inner`: `{i}`: there is no name `i` here
  rule 33, `(a)`: `to`: `{inner}`: there is no name `inner` here; there is `flat`
  rule 34: `from` must be a text or a list of texts, not True
  rule 34: `split`: `axis` is missing
  rule 35, `a`: `split`: `sizes` is missing, as `into` does not give the number of parts
  rule 36, `(a)`: `nest`: it needs either `flat`, or `outer` and `inner`
  rule 36, `(a)`: `nest`: `inner`: `\g<2>`: the regex has no group `2`
  rule 37, `a`: `optional` must be true, not False
  rule 38, `a`: `optional` must be true, not 'yes'
""".strip("\n")
    )


def test_files_that_cannot_be_read():
    with open("binary.toml", "wb") as file:
        file.write(b"\xff")
    with open("broken.toml", "w") as file:
        file.write("x = [")
    for name, why in (
        ("broken.toml", "Invalid value (at end of document)"),
        ("binary.toml", "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
    ):
        message = f"{name}: it cannot be read\n  {why}{EXAMPLE}"
        assert refusal(read_map, name, of=ArgumentError) == message
    for name, near in (
        ("none.toml", ""),
        ("brokn.toml", "hint: the nearest file is `broken.toml`\n"),
    ):
        assert refusal(read_map, name, of=ArgumentError) == (
            f"{name}: it cannot be read\n  No such file or directory\n\n{near}"
            "hint: the names of ready maps begin with `hf:`, for example hf:llama-tunix"
        )


def test_a_todo_in_a_comment_is_none():
    text = """
        { from = 'a', to = 'x' },  # it was 'TODO'
        # { from = 'b', to = "TODO" },
        { from = "it's # no comment", to = "y 'TODO'" },
    """
    assert len(read(f"rule = [{text}]").rules) == 2
    open_ = [
        r"""{ from = "\"#", to = "TODO" },  # 'x' or 'y'""",
        "{ from = '#', to = ['x', 'TODO'] }, # 'TODO'",
    ]
    error = refused(read, "\n".join([f"rule = [{text}", *open_, "]"]), of=ArgumentError)
    assert error.problems == tuple(f"line {n}: {line}" for n, line in enumerate(open_, 6))


WRONG = {
    "nothing matches": (
        r"""
        { from = '^params/', to = '' },
        { from = 'nowhere/w$', to = 'x' },
        { from = '^params/a/w$', drop = true },
        { from = ['^a/w$', '^a/w2$'], concat = { axis = 0 }, to = 'ab' },
        { from = 'v$', to = 'v' },
        { from = '^c$', to = 'c' },
        """,
        {"params/a/w": (2,), "params/b/v": (2,), "params/c": (2,)},
        """
  rule 2, `nowhere/w$`: matches no leaf
  rule 3, `^params/a/w$`: matches no leaf
  rule 4, `^a/w$` + `^a/w2$`: `^a/w2$`: matches no leaf
  rule 5, `v$`: it changes no path

hint: rule 1 renamed `params/a/w` to `a/w`
hint: the nearest leaf to `^a/w2$` is `a/w`
""",
    ),
    "leaves meet": (
        r"""
        { from = '^[ab]/w$', to = 'w' },
        { from = '^c$', to = 'd' },
        { from = '^(e|f)$', stack = { axis = 0, by = 1, order = ['f', 'e'] }, to = 'd' },
        { from = '^g$', unstack = { axis = 0, into = ['h', 'd', 'h'] } },
        """,
        {"a/w": (2,), "b/w": (2,), "c": (), "d": (), "e": (), "f": (), "g": (3,)},
        """
  rule 1, `^[ab]/w$`: a/w and b/w -> w
  rule 2, `^c$`: c -> d: that leaf exists already
  rule 3, `^(e|f)$`: f + e -> d: that leaf exists already
  rule 4, `^g$`: g -> d: that leaf exists already
  rule 4, `^g$`: g and g -> h
""",
    ),
    "leaves below others": (
        r"""{ from = '^a/w$', to = 'c/w' }, { from = '^d$', to = 'e' },""",
        {"a/w": (2,), "c": (), "d": (), "e/x/y": ()},
        """
  rule 1, `^a/w$`: c/w would be below the leaf c
  rule 2, `^d$`: e/x/y would be below the leaf e
""",
    ),
    "no paths": (
        r"""
        { from = '/w$', to = '/' },
        { from = '^c$', transpose = [0], to = 'a//b' },
        { from = '^a//b$', reshape = [2, 1], to = '"' },
        """,
        {"a/w": (2,), "b/w": (2,), "c": (2,)},
        """
  rule 1, `/w$`: `a/` is not a path: a key is empty or its quotes do not close
  rule 1, `/w$`: `b/` is not a path: a key is empty or its quotes do not close
  rule 3, `^a//b$`: `"` is not a path: a key is empty or its quotes do not close
""",
    ),
    "one path twice, with quotes and without": (
        r"""{ from = '^a/w$', to = '"b"/w' },""",
        {"a/w": (2,), "b/w": (2,)},
        """
  rule 1, `^a/w$`: "b"/w and b/w are the same path
""",
    ),
    "numbers": (
        r"""
        { from = '^(a)/', to = '{\1}' },
        { from = '^c$', to = 'c{1 - 2}' },
        { from = '(d)', to = '{1 // 0}' },
        { from = '(e)', to = '{1 % (2 - 2)}' },
        { from = '^(x)?f', to = '{\1}' },
        { from = '^g$', unstack = { axis = 0, into = '{1 - i}' } },
        { from = '^(\d)$', to = '{outer}', nest = { sizes = [1, 2], flat = 1 } },
        { from = '^(\d)/(\d)$', to = '{flat}', nest = { sizes = [1, 2], outer = 1, inner = 2 } },
        """,
        dict.fromkeys(["a/w", "c", "d", "e", "f", "0", "5", "0/1", "2/0"], ()) | {"g": (3,)},
        """
  rule 1, `^(a)/`: a/w: `a` is not a number
  rule 2, `^c$`: c: `c{1 - 2}` makes a number below zero, -1
  rule 3, `(d)`: d: `{1 // 0}` has no value: integer division or modulo by zero
  rule 4, `(e)`: e: `{1 % (2 - 2)}` has no value: integer modulo by zero
  rule 5, `^(x)?f`: f: `` is not a number
  rule 6, `^g$`: g: `{1 - i}` makes a number below zero, -1
  rule 6, `^g$`: g -> 0: that leaf exists already
  rule 7, `^(\\d)$`: 5: number 5 is beyond the groups of the sizes [1, 2]
  rule 8, `^(\\d)/(\\d)$`: 0/1: groups of [1, 2] have no number 1 in 0
  rule 8, `^(\\d)/(\\d)$`: 2/0: groups of [1, 2] have no number 0 in 2
""",
    ),
    "operations on one leaf": (
        r"""
        { from = '^a/w$', transpose = [0] },
        { from = '^b/w$', reshape = [3, -1] },
        { from = '^c$', reshape = { from = [5], to = [5, 1] } },
        { from = 'd', reshape = [0, -1] },
        { from = 'e', pad = { widths = [[1, 0]], fill = 0 }, to = 'f' },
        { from = 'f', crop = { widths = [[0, 0], [2, 2]] } },
        { from = 'g', crop = { widths = [[0, 0], [2, 2]] } },
        """,
        {"a/w": (2, 3), "b/w": (2, 4), "c": (6,), "d": (0,), "e": (2, 2), "g": (2, 2)},
        """
  rule 1, `^a/w$`: a/w: axes [0] are not an order of all axes of [2, 3], which are [0, 1]
  rule 2, `^b/w$`: b/w: [2, 4] cannot be reshaped to [3, -1]
  rule 3, `^c$`: c: its shape is [6], not [5]
  rule 4, `d`: d: [0] cannot be reshaped to [0, -1]
  rule 5, `e`: e: [(1, 0)] cannot pad [2, 2]: each axis needs two widths, of 0 or more
  rule 7, `g`: g: [2, 2] cannot be the result of padding by [(0, 0), (2, 2)]
""",
    ),
    "parts": (
        r"""
        { from = '^a$', split = { axis = 1, into = ['aa', 'ab'] } },
        { from = '^b$', split = { axis = 1, sizes = [1, 2], into = 'b{}' } },
        { from = '^c$', split = { axis = 1, into = ['d'] } },
        { from = '^e$', unstack = { axis = 1, into = ['ea', 'eb'] } },
        { from = '^f$', unstack = { axis = 0, into = 'f{}' } },
        { from = '^f0$', to = 'f' },
        """,
        {"a": (2, 3), "b": (2, 4), "c": (6,), "e": (2, 3), "f": (0, 3)},
        """
  rule 1, `^a$`: a: axis 1 of [2, 3] does not have 2 equal parts: give `sizes` in the rule
  rule 2, `^b$`: b: axis 1 of [2, 4] cannot be split into [1, 2]: positive sizes must add up to 4
  rule 3, `^c$`: c: an array of [6] has no axis 1
  rule 4, `^e$`: e: axis 1 of [2, 3] makes 3 arrays, not 2
  rule 5, `^f$`: f: axis 0 of [0, 3] cannot be divided into parts
""",
    ),
    "pieces": (
        r"""
        { from = '^(.)/w$', stack = { axis = 0, by = 1 }, to = 'w' },
        { from = '^layer_(\d)/', stack = { axis = 0, by = 1 }, to = 'layers/' },
        { from = '^l_(\d)/', stack = { axis = 7, by = 1 }, to = 'l/' },
        { from = '_(\d)', stack = { axis = 0, by = 1 }, to = '' },
        { from = '^n(\d)(.)$', stack = { axis = 0, by = 1 }, to = 'n' },
        """,
        dict.fromkeys(["a/w", "m_0_0", "n0x", "n0y", "n1x"], ())
        | dict.fromkeys(["layer_1/a", "layer_2/a", "layer_0/b", "l_0/x"], (2,))
        | {"layer_1/b": (3,)},
        """
  rule 1, `^(.)/w$`: a/w: `a` is not a number
  rule 2, `^layer_(\\d)/`: layers/a: its pieces have the numbers 1, 2, not 0 to 1
  rule 2, `^layer_(\\d)/`: layers/b: [2] and [3] cannot be stacked: their shapes must be equal
  rule 3, `^l_(\\d)/`: l/x: an array of [2, 1] has no axis 7
  rule 4, `_(\\d)`: m_0_0: the regex matches this path more than once; anchor it with `^` and `$`
  rule 5, `^n(\\d)(.)$`: n: n0x and n0y would both be its piece 0
""",
    ),
    "named pieces": (
        r"""
        { from = '^([abx])/w$', concat = { axis = 0, by = 1, order = ['a', 'b', 'c'] }, to = 'w' },
        { from = ['^c', 'c$'], concat = { axis = 0 }, to = 'v' },
        { from = ['^g/(.)', '^h/(.)'], concat = { axis = 0 }, to = '\1' },
        { from = ['^i$', '^j$'], concat = { axis = 0, sizes = [1, 4] }, to = 'ij' },
        { from = '^ij$', drop = true },
        """,
        {
            "a/w": (2, 3),
            "b/w": (2, 4),
            "x/w": (3,),
            "c": (3,),
            "g/1": (3,),
            "h/1": (3,),
            "h/2": (3,),
            "i": (2,),
            "j": (3,),
        },
        """
  rule 1, `^([abx])/w$`: x/w: `x` is not in the list `order` of the rule
  rule 1, `^([abx])/w$`: w: there is no piece for `c`
  rule 2, `^c` + `c$`: c: more than one of the regexes match it
  rule 2, `^c` + `c$`: v: there is no piece for `c$`
  rule 3, `^g/(.)` + `^h/(.)`: 2: there is no piece for `^g/(.)`
  rule 4, `^i$` + `^j$`: ij: the sizes of its pieces are [2, 3], not [1, 4]
  rule 5, `^ij$`: ij: an operation made it; drop its inputs
""",
    ),
    "what is initial is made": (
        r"""
        { from = 'a', to = 'b' },
        { from = '^c$', transpose = [0] },
        """,
        {"a/w": (2,), "c": (2,), "d/v": (2,)},
        """
  rule 1, `a`: b/w: this rule makes it, but `init` has `*/w`
  rule 2, `^c$`: c: this rule makes it, but `init` has `c`
""",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit(case):
    rules, shapes, problems = WRONG[case]
    top = "init = ['c', '*/w', 'd/**']" if case == "what is initial is made" else ""
    assert problem(f"{top}\nrule = [{rules}]", shapes) == (
        "map.toml: the map does not fit the leaves\n" + problems.strip("\n")
    )


def test_the_direction_of_a_map():
    text = written([step("params/w", "w")], [], ["rngs/*"], tree({"params/w": ()}), "nnx")
    assert text.endswith(
        "\n\nto = 'nnx'\ninit = ['rngs/*']\n\n[[rule]]\nfrom = '^params/w$'\nto = 'w'\n"
    )
    rules = read(text)
    assert (rules.to, inverse(rules).to) == ("nnx", "linen")
    assert read("").to is inverse(read("")).to is None
    empty = apply_map(read(""), {})
    assert (empty.map, empty.initial, empty.untouched) == (LeafMap({}), (), [])


OPTIONAL = r"""
optional = { init = ['gone/**', 'kept'], drop = ['params/unused/**', 'params/none'] }
rule = [
    { from = '^params/old_(\d)/', to = 'layers/\1/', optional = true },
    { from = '^params/new_(\d)/', to = 'layers/\1/', optional = true },
    { from = '^params/junk$', drop = true, optional = true },
]
"""


def test_one_map_serves_several_models():
    old = apply(OPTIONAL, {"params/old_0/w": (2,), "params/junk": (3,), "params/unused/a": ()})
    assert printed(old.map.shapes) == {"layers/0/w": (2,)}
    assert [format_path(path) for path in old.map.dropped] == ["params/junk", "params/unused/a"]
    assert old.notes == (
        r"rule 2, `^params/new_(\d)/` is optional, and matches no leaf",
        "left out, as `optional` says: params/unused/a",
    )
    new = apply(OPTIONAL, {"params/new_1/w": (2,)})
    assert printed(new.map.shapes) == {"layers/1/w": (2,)}
    assert (new.initial, new.optional) == ((), ("gone/**", "kept"))
    # Only what says so may match nothing.
    required = OPTIONAL.replace(", optional = true", "", 1)
    assert "rule 1, `^params/old_(\\d)/`: matches no leaf" in problem(
        required, {"params/new_1/w": (2,)}
    )
    # Of several pieces all may be missing, and not some.
    stack = "rule = [{ from = ['^a$', '^b$'], to = 'c', stack = { axis = 0 }, optional = true }]"
    assert printed(apply(stack, {"d": ()}).map.shapes) == {"d": ()}
    assert "rule 1, `^a$` + `^b$`: `^b$`: matches no leaf" in problem(stack, {"a": ()})


def test_what_is_optional_is_so_in_the_opposite_direction():
    rules = read(
        "init = ['c']\noptional = { init = ['a'], drop = ['b'] }\n"
        "rule = [{ from = '^x$', to = 'y', optional = true }, { from = '^u$', to = 'v' },"
        " { from = '^d$', drop = true, optional = true }, { from = '^e$', drop = true }]"
    )
    back = inverse(rules)
    assert [(rule.patterns[0].text, rule.optional) for rule in back.rules] == [
        ("^v$", False),
        ("^y$", True),
    ]
    assert (back.initial, back.optional, back.ignored) == (("e",), ("b", "d"), ("c", "a"))


def test_optional_initial_values(tmp_path):
    layouts.save_standard(tmp_path / "linen", {"params": {"kernel": np.ones((2, 3), "f4")}})
    with open("map.toml", "w", encoding="utf-8") as file:
        file.write("optional = { init = ['bias', 'scale'] }\n")
    for use_bias, leaves in ((True, {"bias/value", "kernel/value"}), (False, {"kernel/value"})):

        def model(use_bias=use_bias):
            return nnx.Linear(2, 3, use_bias=use_bias, rngs=nnx.Rngs(0))

        ckpt = reshard.to_nnx(tmp_path / "linen", model, map_file="map.toml")
        assert {format_path(path) for path in ckpt} == leaves
        told = ("the model's own initial value, as `optional` says: bias/value",) * use_bias
        assert ckpt.notes == told
