"""What a directory holds: the role of each name, and the names of steps. Orbax is the oracle."""

import errno
import itertools
import json
import os
import shutil

import layouts
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import refused, reshard_in, shown

import reshard
from reshard.loader.inventory import Form, Level, Role, roles, step_forms, step_number
from reshard.storage.disk import Entry
from reshard.storage.store_errors import translated_errors

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
STATES = ["whole", "whole", "unfinished", "empty"]


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
    prefix=st.sampled_from([None, "ckpt", "a_b", "1", ""]),
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


# Roots on a disk.


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A step."""
    path = tmp_path_factory.mktemp("whole") / "step"
    layouts.save_pytree(path / "default", {"w": np.arange(6.0)})
    return path


def make_root(root, whole, steps=(), unfinished=(), empty=()):
    """A root with steps of these names, whole or not."""
    root.mkdir()
    for name in steps:
        shutil.copytree(whole, root / name)
    for name in unfinished:
        (root / name / "default.orbax-checkpoint-tmp").mkdir(parents=True)
    for name in empty:
        (root / name).mkdir()
    return root


def forms_by_orbax(root):
    """Form -> its steps by Orbax, for each form of which no other has all names."""
    prefixes = {name.rpartition("_")[0] if "_" in name else None for name in os.listdir(root)}
    found = {Form(p, w): by_orbax(root, (p, w)) for p in prefixes for w in range(1, 11)}
    distinct = {tuple(sorted(steps.values())): form for form, steps in [*found.items()][::-1]}
    return {
        form: found[form]
        for names, form in distinct.items()
        if names and not any({*names} < {*others} for others in distinct)
    }


@settings(deadline=None)
@given(states=st.dictionaries(STEP_NAMES, st.sampled_from(STATES), min_size=1, max_size=6))
def test_the_latest_step_of_a_random_root(tmp_path_factory, whole, states):
    kinds = {k: [n for n in states if states[n] == k] for k in ("whole", "unfinished", "empty")}
    root = make_root(tmp_path_factory.mktemp("random") / "root", whole, *kinds.values())
    forms = forms_by_orbax(root)
    if len(forms) > 1:
        forms = {f: s for f, s in forms.items() if {*s.values()} & {*kinds["whole"]}}
    plain = Form(None, 1)
    if len(forms) > 1 and plain not in forms:
        text = f"the names of the steps of `{root}` have several forms"
        error = layouts.raised(reshard.CheckpointFormatError, reshard.open, root)
        assert error.summary == text and len(error.problems) == len(forms)
        latest = {str(root / steps[max(steps)]) for steps in forms.values()}
        assert {hint.removeprefix("open one of them: ") for hint in error.hints} == latest
        for path in latest & {str(root / name) for name in kinds["whole"]}:
            assert reshard.open(path)["w"].shape == (6,)
        return
    steps = forms.get(plain) or next(iter(forms.values()), {})
    usable = {n: name for n, name in steps.items() if states[name] == "whole"}
    if not usable:
        with pytest.raises(reshard.CheckpointFormatError):
            reshard.open(root)
        return
    ckpt = reshard.open(root)
    assert (ckpt.source.step, ckpt.source.number) == (usable[max(usable)], max(usable))
    assert ckpt.source.steps == tuple(sorted(usable))
    assert {n for n in steps if states[steps[n]] == "unfinished"} == {*ckpt.source.uncommitted}
    for step, name in usable.items():
        assert reshard.open(root, step=step).source.step == name
    # A note names each step that was left out, and nothing that a copy has.
    notes = "\n".join(ckpt.notes)
    for name in states.keys() - steps.values():
        assert (f"`{name}` is left out" in notes) == (states[name] == "whole")
    for step, name in steps.items():
        assert (f"step {step} " in notes) == (step > max(usable) and name not in usable.values())


def test_every_command_reads_the_latest_step(tmp_path, whole):
    at = tmp_path.resolve()
    names = ["100", "200", "backup_20240115", "best_350", "a_b_777", "1_000", "ckpt_٩٩٩"]
    make_root(at / "run", whole, names)
    told = "`backup_20240115` is left out: its name is not of the form of the steps"
    assert told in reshard.open(at / "run").notes
    assert json.loads(shown(at, "inspect", "run", "--json"))["step"] == 200
    assert f"\nnote: {told}\n" in shown(at, "inspect", "run")
    assert "shown: 200" in shown(at, "doctor", "run")
    shown(at, "ckpt", "run", "out", "--quiet")
    assert sorted(os.listdir(at / "out")) == ["200", "ckpt_٩٩٩"]
    assert json.loads(shown(at, "verify", "run", "--json"))["path"] == str(at / "run" / "200")
    assert shown(at, "digest", "run").startswith("step 200 is the latest of 2: ")
    assert "run/200" in shown(at, "diff", "run", "out", "--values")
    shown(at, "export", "run", "hf", "--quiet")
    shown(at, "ckpt", "run", "all", "--step", "all", "--quiet")
    assert sorted(os.listdir(at / "all")) == ["100", "200", "ckpt_٩٩٩"]
    assert shown(at, "inspect", "run", "--step", "all").count("\nsteps: ") == 2


def test_steps_of_several_forms_are_refused_by_every_command(tmp_path, whole):
    at = tmp_path.resolve()
    make_root(at / "run", whole, ["a_20", "b_5", "b_30"])
    text = f"Error: the names of the steps of `{at}/run` have several forms\n"
    text += "  a_N: a_20\n  b_N: b_5, b_30\n\n"
    text += f"hint: open one of them: {at}/run/a_20\nhint: open one of them: {at}/run/b_30\n"
    for words in (
        *(["inspect", "run"], ["ckpt", "run", "out"], ["digest", "run"], ["export", "run", "out"]),
        *(["diff", "run", "run"], ["ckpt", "run", "out", "--step", "all"], ["verify", "run"]),
        ["convert", "run", "out", "--to", "linen"],
        *(["inspect", "run", "--step", "20"], ["verify", "run/a_20", "--against", "run"]),
    ):
        assert refused(at, *words) == text, words
    status, out, err = reshard_in(at, "doctor", "run")
    assert (status, err) == (2, "") and f"next     open one of them: {at}/run/a_20" in out
    shown(at, "ckpt", "run/b_30", "out")


def test_a_job_for_all_steps_names_those_that_it_leaves_out(tmp_path, whole):
    root = make_root(tmp_path / "run", whole, ["5", "7"], unfinished=["6", "10"])
    out = shown(tmp_path, "ckpt", root, "out", "--step", "all")
    notes = [line for line in out.split("\n") if "left out" in line]
    assert notes == [f"note     step {n} was never committed and is left out" for n in (6, 10)]
    assert sorted(os.listdir(tmp_path / "out")) == ["5", "7"]


@pytest.mark.parametrize("empty", [False, True])
def test_a_name_of_a_step_is_never_copied_beside_one(tmp_path, whole, empty):
    """A manager would call it the latest. What is no step is copied."""
    halves = {"empty" if empty else "unfinished": ["10"]}
    root = make_root(tmp_path / "run", whole, ["5", "params_7", "0000009"], **halves)
    (root / "10" / "notes").write_text("half") if not empty else None
    for name in ("logs_2024", "notes"):
        (root / name).mkdir()
        (root / name / "events").write_text(name)
    out = tmp_path / "out"
    why = "it holds no checkpoint" if empty else None
    note = f"step 10 is left out: {why}" if why else "step 10 was never committed and is left out"
    form = "its name is not of the form of the steps"
    others = [f"`{name}` is left out: {form}" for name in ("0000009", "params_7")]
    assert reshard.open(root).notes == (note, *others)
    reshard.save(reshard.open(root), out)
    assert sorted(os.listdir(out)) == ["5", "logs_2024", "notes"]
    with ocp.CheckpointManager(out) as manager:
        assert manager.latest_step() == 5


@pytest.fixture
def touched(monkeypatch):
    """The paths that `os` is asked about. Those below `refused` cannot be read."""
    paths, refused = [], []

    def watch(name):
        original = getattr(os, name)

        def watched(path, *arguments, **keywords):
            text = "" if isinstance(path, int) else os.fspath(path)
            paths.append(text)
            if any(f"{text}/".startswith(f"{each}/") for each in refused) and (
                name in ("listdir", "scandir") or text not in refused
            ):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), text)
            return original(path, *arguments, **keywords)

        monkeypatch.setattr(os, name, watched)

    for name in ("stat", "lstat", "listdir", "scandir", "open"):
        watch(name)
    return paths, refused


def test_opening_a_step_looks_into_no_other_step(tmp_path, whole, touched):
    paths, _ = touched
    root = make_root(tmp_path / "run", whole, map(str, range(300)), ["300"])
    for step in (None, 0, 150, 299):
        paths.clear()
        ckpt = reshard.open(root, step=step)
        number = 299 if step is None else step
        assert ckpt.source.number == number
        inside = {p.removeprefix(f"{root}/").split("/")[0] for p in paths if f"{root}/" in p}
        looked = {name for name in inside if name.isdecimal()}
        assert looked == {str(number)} | ({"300"} if step is None else set())
        assert len(paths) < 100
    assert ckpt.source.steps == tuple(range(300)) and ckpt.source.uncommitted == (300,)


def test_an_unreadable_step_does_not_block_a_root(tmp_path, whole, touched):
    at = tmp_path.resolve()
    root = make_root(at / "run", whole, ["1", "2", "3"])
    _, refusing = touched
    refusing.append(str(root / "2"))
    assert reshard.open(root).source.number == 3 and reshard.open(root, step=1)["w"].shape == (6,)
    assert reshard.open(root).source.steps == (1, 3)
    text = f"`{root}` cannot be read: Permission denied\n  {root}/2/"
    assert layouts.refused(reshard.StoreError, reshard.open, root, step=2).startswith(text)
    reshard.save(reshard.open(root, step=1), at / "one")
    assert shown(at, "inspect", "run", "--step", "1")
    # All steps were asked for: none is silently left out.
    assert "Permission denied" in refused(at, "ckpt", "run", "all", "--step", "all")
    status, out, err = reshard_in(at, "inspect", "run", "--step", "all")
    assert (status, out.count("\nsteps: ")) == (2, 2) and err.count("Permission denied") == 1
    refusing[:] = [str(root / "3")]
    note = "step 3 is left out: it cannot be read: Permission denied"
    assert reshard.open(root).source.number == 2 and note in reshard.open(root).notes
    refusing[:] = [str(root / name) for name in "123"]
    error = layouts.raised(reshard.StoreError, reshard.open, root)
    assert error.summary == f"no step of `{root}` can be read"
    assert error.problems[0] == "`1`: it cannot be read: Permission denied"
    # It is no damage.
    for path in ("run", "run/2"):
        status, out, err = reshard_in(at, "doctor", path)
        assert (status, out) == (2, "") and "Permission denied" in err and "damaged" not in err


def test_what_cannot_be_read_beside_a_step(tmp_path, whole, touched):
    root = make_root(tmp_path / "run", whole, ["1"])
    (root / "notes").mkdir()
    touched[1].append(str(root / "notes"))
    error = layouts.raised(reshard.ReshardError, reshard.save, reshard.open(root), tmp_path / "out")
    assert isinstance(error, reshard.StoreError) and "Permission denied" in str(error)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "inside", ["", 'Error reading "w/0" in OCDBT database at local file "/a/": ']
)
def test_a_data_file_that_tensorstore_may_not_open_is_no_damage(inside):
    """Its own words for such a file: this process may be allowed to read everything."""
    text = f'PERMISSION_DENIED: {inside}Failed to open: "/a/d/12ab": Permission denied [source=...]'

    def read():
        with translated_errors("`/a`", other=reshard.CorruptCheckpointError):
            raise ValueError(text)

    told = "`/a` cannot be read\n  /a/d/12ab: permission denied"
    assert layouts.refused(reshard.StoreError, read) == told


def test_a_damaged_step_blocks_itself_alone(tmp_path, whole):
    root = make_root(tmp_path / "run", whole, ["1", "2", "3"])
    (root / "2" / "_CHECKPOINT_METADATA").write_text("{")
    assert reshard.open(root).source.number == 3 and reshard.open(root).source.steps == (1, 2, 3)
    assert reshard.open(root, step=1).source.number == 1
    layouts.refused(reshard.CorruptCheckpointError, reshard.open, root, step=2)
    (root / "3" / "_CHECKPOINT_METADATA").write_text("{")
    layouts.refused(reshard.CorruptCheckpointError, reshard.open, root)


def test_the_items_of_a_step_are_those_that_its_document_names(tmp_path, whole):
    """A copy that somebody has made of one is none of them."""
    path = tmp_path / "run"
    with ocp.CheckpointManager(path) as manager:
        manager.save(7, args=ocp.args.Composite(state=ocp.args.StandardSave({"w": np.arange(4.0)})))
    shutil.copytree(path / "7" / "state", path / "7" / "state_before")
    ckpt = reshard.open(path)
    assert (ckpt.source.item, ckpt.source.items) == ("state", ("state",))
    (path / "7" / "_CHECKPOINT_METADATA").unlink()
    error = layouts.raised(reshard.CheckpointNotFoundError, reshard.open, path)
    assert error.problems == ("state", "state_before")


@pytest.mark.parametrize("other", ["whole", "unfinished"])
def test_a_folder_with_a_step_and_a_checkpoint_is_neither(tmp_path, other):
    """Their names are of no form of steps, so none of the two is the later one."""
    run = tmp_path.resolve() / "run"
    with ocp.CheckpointManager(tmp_path / "managed") as manager:
        manager.save(2, args=ocp.args.StandardSave({"w": np.arange(4.0)}))
    layouts.save_pytree(run / "step-1", {"w": np.arange(6.0)})
    shutil.copytree(tmp_path / "managed" / "2", run / "step-2")
    if other == "unfinished":
        layouts.edit_document(run / "step-2" / "_CHECKPOINT_METADATA", commit_timestamp_nsecs=None)
    (run / "step-3.orbax-checkpoint-tmp").mkdir()
    error = layouts.raised(reshard.CheckpointNotFoundError, reshard.open, run)
    assert error.summary == f"`{run}` has several checkpoints"
    assert error.problems == ("step-1", "step-2")
    assert error.hints == (f"open one of them: {run}/step-1",)
    assert reshard.open(run / "step-1")["w"].shape == (6,)
