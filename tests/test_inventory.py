"""What a directory holds: the role of each name, and the names of steps. Orbax is the oracle."""

import itertools

import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.loader.inventory import Form, Level, Role, roles, step_forms, step_number
from reshard.storage.disk import Entry

NUMBERS = st.one_of(st.integers(0, 30), st.integers(0, 10**9))
PREFIXES = st.sampled_from(["", "params_", "a_b_", "1_", "best_", "_", "x__"])
DIGITS = st.one_of(
    NUMBERS.map(str),
    st.tuples(NUMBERS, st.integers(1, 9)).map(lambda each: f"{each[0]:0{each[1]}d}"),
    st.text("0123456789", min_size=1, max_size=10),
)
STEP_NAMES = st.builds("".join, st.tuples(PREFIXES, DIGITS))
_ODD = "metadata notes _METADATA ١٢ ckpt_٣ 1.0 -1 12a 1_000x ckpt-12 backup_20240115 d default "
_ODD += "10.orbax-checkpoint-tmp 5.orbax-checkpoint-tmp-17 .reshard-5.0123456789abcdef .DS_Store "
_ODD += "out.replaced-by-reshard.0123456789abcdef reshard_commit.json _CHECKPOINT_METADATA "
_ODD += "manifest.ocdbt array_metadatas reshard_digests.json ocdbt.process_0 commit_success.txt"
ODD_NAMES = st.sampled_from([*_ODD.split(), "a\n5"])
NAMES = st.one_of(STEP_NAMES, ODD_NAMES)


def folders(names):
    return [Entry(name, False, True) for name in names]


def by_orbax(root, form):
    """Number -> name of the steps of a form."""
    prefix, width = form
    found = ocp.path.step.standard_name_format(
        step_prefix=prefix, step_format_fixed_length=None if width == 1 else width
    )
    return {step.step: step.path.name for step in found.find_all(root)}


@given(st.sets(NAMES, max_size=8))
def test_the_steps_of_each_form_are_those_that_orbax_finds(tmp_path_factory, names):
    root = tmp_path_factory.mktemp("listing") / "root"
    for name in names:
        (root / name).mkdir(parents=True)
    forms = step_forms(names)
    for form, steps in forms.items():
        assert steps == by_orbax(root, form) and [*steps] == sorted(steps)
    # Each name of a step is in a form, and no form has only names of another one.
    listed = [{*steps.values()} for steps in forms.values()]
    assert set().union(*listed) == {name for name in names if step_number(name) is not None}
    assert not any(one <= other for one, other in itertools.permutations(listed, 2))


@given(
    prefix=st.sampled_from([None, "ckpt", "a_b", "1"]),
    width=st.integers(1, 9),
    steps=st.sets(NUMBERS, min_size=1, max_size=6),
)
def test_the_steps_of_one_manager_have_one_form(tmp_path_factory, prefix, width, steps):
    root = tmp_path_factory.mktemp("manager")
    form = ocp.path.step.standard_name_format(
        step_prefix=prefix, step_format_fixed_length=None if width == 1 else width
    )
    names = {step: form.build_name(step) for step in sorted(steps)}
    for name in names.values():
        (root / name).mkdir()
    (found,) = step_forms(names.values()).values()
    assert found == names == by_orbax(root, Form(prefix, width))


@pytest.mark.parametrize(
    ("names", "forms"),
    [
        (["1", "00000002"], {"N": [1], "0000000N": [2]}),
        (["5", "005"], {"N": [5], "00N": [5]}),
        (["005", "050", "500", "1000"], {"00N": [5, 50, 500, 1000]}),
        (["params_1", "1"], {"N": [1], "params_N": [1]}),
        (["100", "200", "backup_20240115"], {"N": [100, 200], "backup_N": [20240115]}),
        (["best_150", "a_b_77"], {"a_b_N": [77], "best_N": [150]}),
        (["1_000", "1_005"], {"1_00N": [0, 5]}),
        (["١٢", "notes", "5.orbax-checkpoint-tmp"], {}),
    ],
)
def test_forms_of_names(names, forms):
    assert {str(form): [*steps] for form, steps in step_forms(names).items()} == forms


@given(
    names=st.sets(NAMES, max_size=12),
    level=st.sampled_from(Level),
    known=st.sets(NAMES, max_size=6),
    files=st.sets(NAMES, max_size=6),
)
def test_every_name_has_one_role(names, level, known, files):
    entries = [Entry(name, name in files, name not in files) for name in names]
    found = roles(entries, level, known)
    assert [each.name for each in found] == sorted(names)
    assert [each.entry for each in found] == sorted(entries)
    allowed = {
        Level.ROOT: {Role.STEP, Role.DOCUMENT},
        Level.STEP: {Role.ITEM, Role.DOCUMENT, Role.MARKER},
        Level.ITEM: {Role.CHUNKS, Role.DOCUMENT, Role.MARKER},
    }[level]
    for name, role, entry, why in found:
        assert role in allowed | {Role.JOB, Role.TEMPORARY, Role.OTHER}
        # Nothing but what the checkpoint itself knows is of a step, an item or an array.
        if role in (Role.STEP, Role.ITEM):
            assert name in known and entry.is_dir
        if role is Role.CHUNKS:
            assert name in known or name.startswith("ocdbt.process_") or name == "d"
        if (role is Role.TEMPORARY) != (".orbax-checkpoint-tmp" in name):
            raise AssertionError(name)
        if why and role is Role.OTHER:
            assert step_number(name) is not None and level is Level.ROOT


def test_roles_of_each_level():
    def of(level, known, *names):
        return {each.name: each.role.value for each in roles(folders(names), level, known)}

    assert of(Level.ROOT, {"5"}, "5", "05", "metadata", "notes", "6.orbax-checkpoint-tmp") == {
        "5": "step",
        "05": "other",
        "metadata": "document",
        "notes": "other",
        "6.orbax-checkpoint-tmp": "temporary",
    }
    step = ("state", "extra", "_CHECKPOINT_METADATA", "commit_success.txt", "reshard_commit.json")
    assert of(Level.STEP, {"state"}, *step) == {
        "state": "item",
        "extra": "other",
        "_CHECKPOINT_METADATA": "document",
        "commit_success.txt": "marker",
        "reshard_commit.json": "job",
    }
    item = ("_METADATA", "w", "d", "ocdbt.process_3", "manifest.ocdbt", "config.yaml", "README")
    assert of(Level.ITEM, {"w"}, *item) == {
        "_METADATA": "document",
        "manifest.ocdbt": "document",
        "w": "chunks",
        "d": "chunks",
        "ocdbt.process_3": "chunks",
        "config.yaml": "other",
        "README": "other",
    }
