"""The hierarchy of errors, and how they are written out."""

import inspect
import pickle

import pytest

import reshard
from reshard import errors

# Each error: its parent in the hierarchy, and the builtin that callers catch already.
HIERARCHY = {
    "ArgumentError": ("ReshardError", ValueError),
    "CheckpointNotFoundError": ("ReshardError", FileNotFoundError),
    "CheckpointFormatError": ("ReshardError", ValueError),
    "UncommittedCheckpointError": ("CheckpointFormatError", ValueError),
    "CorruptCheckpointError": ("ReshardError", ValueError),
    "TreeMismatchError": ("ReshardError", ValueError),
    "ShardingError": ("ReshardError", ValueError),
    "MemoryLimitError": ("ReshardError", ValueError),
    "DestinationError": ("ReshardError", OSError),
    "DestinationExistsError": ("DestinationError", FileExistsError),
}


def test_the_hierarchy_is_all_there_is():
    defined = {
        name: cls
        for name, cls in inspect.getmembers(errors, inspect.isclass)
        if cls.__module__ == errors.__name__
    }
    assert set(defined) == {"ReshardError", *HIERARCHY}
    assert errors.ReshardError.__bases__ == (Exception,)
    for name, (parent, builtin) in HIERARCHY.items():
        assert defined[name].__bases__[0] is defined[parent]
        assert issubclass(defined[name], builtin)


def test_all_errors_are_public():
    exported = {name for name in dir(reshard) if name.endswith("Error")}
    assert exported == {"ReshardError", *HIERARCHY}
    assert all(getattr(reshard, name) is getattr(errors, name) for name in exported)


@pytest.mark.parametrize("name", ["ReshardError", *HIERARCHY])
def test_every_error_says_all_of_it(name):
    error = getattr(errors, name)(
        "2 leaves are missing from `run/1000`",
        ["params/head/kernel   float32[4,8]", "params/head/bias     float32[8]"],
        hints=["--rename '^params/lm_head/=params/head/'"],
    )
    assert str(error) == (
        "2 leaves are missing from `run/1000`\n"
        "  params/head/kernel   float32[4,8]\n"
        "  params/head/bias     float32[8]\n"
        "\n"
        "hint: --rename '^params/lm_head/=params/head/'"
    )
    assert error.summary == "2 leaves are missing from `run/1000`"
    assert error.problems == (
        "params/head/kernel   float32[4,8]",
        "params/head/bias     float32[8]",
    )
    assert error.hints == ("--rename '^params/lm_head/=params/head/'",)


@pytest.mark.parametrize("name", ["ReshardError", *HIERARCHY])
def test_every_error_survives_another_process(name):
    error = getattr(errors, name)("summary", ["a", "b"], ["try c"])
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == "summary\n  a\n  b\n\nhint: try c"


def test_a_summary_alone_is_one_line():
    assert str(errors.ShardingError("not a mesh")) == "not a mesh"
    assert errors.ShardingError("not a mesh").render(limit=10) == "not a mesh"


def test_a_hint_without_problems_follows_a_blank_line():
    assert str(errors.ShardingError("not a mesh", hints=["`1x8`"])) == "not a mesh\n\nhint: `1x8`"


def test_equal_hints_are_given_once_in_order():
    error = errors.ShardingError("no", hints=["b", "a", "b", "a", "c"])
    assert error.hints == ("b", "a", "c")
    assert str(error) == "no\n\nhint: b\nhint: a\nhint: c"


def test_str_is_never_cut_short():
    problems = [f"leaf {i}" for i in range(1000)]
    error = errors.TreeMismatchError("1000 leaves", problems, [f"hint {i}" for i in range(30)])
    assert str(error) == "\n".join(
        [
            "1000 leaves",
            *(f"  leaf {i}" for i in range(1000)),
            "",
            *(f"hint: hint {i}" for i in range(30)),
        ]
    )


def test_render_caps_problems_and_hints_each():
    error = errors.TreeMismatchError(
        "13 leaves", [f"leaf {i}" for i in range(13)], [f"type {i}" for i in range(11)]
    )
    assert error.render(limit=10) == "\n".join(
        [
            "13 leaves",
            *(f"  leaf {i}" for i in range(10)),
            "  ... and 3 more",
            "",
            *(f"hint: type {i}" for i in range(10)),
            "  ... and 1 more",
        ]
    )
    assert len(error.problems) == 13


def test_render_of_exactly_the_limit_is_whole():
    error = errors.TreeMismatchError("10 leaves", [f"leaf {i}" for i in range(10)], ["type this"])
    assert error.render(limit=10) == str(error)
    assert "more" not in str(error)
