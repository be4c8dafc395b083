"""`reshard convert`, as a user runs it: what it prints, how it ends, and what it leaves."""

import itertools
import json
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import types
from typing import NamedTuple

import in_process
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import orbax.checkpoint as ocp
import pytest
from converted import by_path, filled, map_of, sharded
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import reshard
from reshard.cli.model_argument import build_target
from reshard.cli.subprocess_model import run_in_subprocess
from reshard.convert import mapfile
from reshard.tree import format_path

pytestmark = pytest.mark.usefixtures("forked")
RESHARD = pathlib.Path(sysconfig.get_path("scripts")) / "reshard"
MODELS = '''
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from flax.training import train_state

OPTIMIZER = optax.adam(1e-3)


class Mlp(nn.Module):
    """In Linen."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(16)(x))
        x = nn.Dropout(0.1, deterministic=True)(x)
        return nn.Dense(4)(x)


def linen():
    params = Mlp().init(jax.random.key(0), jnp.ones((1, 8)))["params"]
    return train_state.TrainState.create(apply_fn=None, params=params, tx=OPTIMIZER)


class Net(nnx.Module):
    """In NNX."""

    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        self.inner = nnx.Linear(8, 16, kernel_init=init, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.outer = nnx.Linear(16, 4, kernel_init=init, rngs=rngs)

    def __call__(self, x):
        return self.outer(self.dropout(nnx.relu(self.inner(x)), deterministic=True))


def training():
    model = Net(nnx.Rngs(0))
    return {"model": model, "optimizer": nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)}


class Inner:
    Net = Net


class Halves(nnx.Module):
    """Another model, for which a map is needed."""

    def __init__(self, rngs):
        self.left = nnx.Param(jnp.zeros((8, 8)))
        self.right = nnx.Param(jnp.zeros((8, 8)))
        self.bias = nnx.Param(jnp.zeros(16))
        self.outer = nnx.Linear(16, 4, rngs=rngs)

'''
MAP = """\
rule = [
    { from = '^params/Dense_0/kernel$', split = { axis = 1, into = ['left', 'right'] } },
    { from = '^params/Dense_0/bias$', to = 'bias' },
    { from = '^params/Dense_1/', to = 'outer/' },
]
"""
NAMES = """\
to = 'nnx'
rule = [
    { from = '^params/Dense_0/', to = 'inner/' },
    { from = '^params/Dense_1/', to = 'outer/' },
]
"""
OF_ORDER = r"(?m)^Warning: (\d+ lea(?:f was|ves were) matched only by .*)\n"
SPECS = {"kernel": P("data", "model"), "bias": P("model")}


class Ran(NamedTuple):
    """How a command ended."""

    status: int
    out: str
    err: str


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """`models.py`, `map.toml`, `names.toml`; `run`, steps 1 and 2 of a manager."""
    folder = tmp_path_factory.mktemp("convert")
    (folder / "models.py").write_text(MODELS)
    (folder / "map.toml").write_text(MAP)
    (folder / "names.toml").write_text(NAMES)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        import models

        abstract = jax.eval_shape(models.linen)
        sys.modules.pop("models")
    linen = sharded(filled(abstract, bits=False), SPECS, layouts.mesh((2, 4)))
    with ocp.CheckpointManager(folder / "run") as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.StandardSave(linen.replace(step=jnp.int32(step))))
    return folder


@pytest.fixture
def folder(checkpoints, tmp_path, monkeypatch):
    """The working directory, with copies of them."""
    shutil.copytree(checkpoints, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(folder):
    """Runs `reshard ARGUMENTS` in the working directory. What is warned of, that modules went by
    their order or their values do not say so, is on the list `run.warned`, and not in `err`."""

    def call(*arguments):
        build_target.cache_clear()
        status, out, err = in_process.reshard_in(folder, *arguments)
        call.warned = re.findall(OF_ORDER, err)
        return Ran(status, out, re.sub(OF_ORDER, "", err))

    with in_process.inside(folder):
        yield call


TRAINING = ("--model", "models:training", "--init", "**/rngs/**")
TO_NNX = ("--to", "nnx", *TRAINING)


def convert(run, *arguments):
    """`reshard convert run/1 out ...` to NNX, with all that it needs."""
    return run("convert", "run/1", "out", *TO_NNX, *arguments)


def done(ran):
    """What was printed by a command that had nothing to say against it."""
    assert (ran.status, ran.err) == (0, "")
    return ran.out


def refusal(ran):
    """What a command was refused with."""
    assert (ran.status, ran.out) == (2, "")
    return ran.err


def load(path, target=None):
    return layouts.load_standard(pathlib.Path(path).absolute(), target)


def files(folder):
    found = {p.relative_to(folder).as_posix() for p in folder.rglob("*")}
    return {name for name in found if "__pycache__" not in name}


def masked(text):
    """Without the numbers of bytes, which depend on how Orbax has stored them."""
    return re.sub(r"[\d.]+ (B|KiB)\b", "#", text)


def moved(linen):
    """The leaves of a train state under the names that they have in `training`, by hand."""
    found = {}
    for path, leaf in by_path({**linen, "step": jnp.uint32(linen["step"])}).items():
        path = path.replace("Dense_0", "inner").replace("Dense_1", "outer")
        parameter = path.removeprefix("params/")
        found["optimizer/" + path if parameter == path else "model/" + parameter] = leaf
    return {f"{path}/value": leaf for path, leaf in found.items() if leaf != layouts.bits(None)}


def without_random(tree):
    return {path: leaf for path, leaf in by_path(tree).items() if "/rngs/" not in path}


WARNING = "4 leaves were matched only by the order of modules of one class: "
WARNING += "Dense_0 -> inner, Dense_1 -> outer"
ORDER = {"leaves": 4, "modules": [["Dense_0", "inner"], ["Dense_1", "outer"]]}
PLAN = """\
16 arrays, #: 3 rewritten, 13 copied verbatim
read     # in 88 chunks
write    # in 88 chunks
memory   # in flight at most
device   # before, # after
load     a restore reads exactly the bytes that it needs, before and after the job
"""
EMITTED = f"""\
{mapfile._HEADER}{mapfile._ORIGINS}
to = 'nnx'
init = ['dropout/rngs/count', 'dropout/rngs/key']

[[rule]]  # structure
from = '^params/Dense_0/'
to = 'inner/'

[[rule]]  # structure
from = '^params/Dense_1/'
to = 'outer/'
"""


# What it prints and writes


def test_to_nnx_and_back(run, folder):
    assert masked(done(convert(run))) == f"{PLAN}wrote out\n"
    linen, made = load("run/1/default"), load("out/default")
    assert without_random(made) == moved(linen)
    rngs = made["model"]["dropout"]["rngs"]
    assert (rngs["key"]["value"].dtype, rngs["count"]["value"]) == (jax.random.key(0).dtype, 0)
    shown = done(run("convert", "out", "back", "--to", "linen"))
    assert masked(shown).startswith("14 arrays, #: 1 rewritten, 13 copied verbatim\n")
    layouts.assert_same_tree(load("back/default"), linen)


def test_a_dry_run_shows_what_is_done_then_and_writes_nothing(run, folder):
    before = files(folder)
    ran = convert(run, "--dry-run")
    assert masked(done(ran)).endswith(f"\n{PLAN}")
    assert done(convert(run, "--dry-run", "--quiet")) == ""
    planned = json.loads(done(convert(run, "--json", "--dry-run")))
    assert files(folder) == before
    assert planned["arrays"] and planned["map"] and planned["done"] is False
    made = json.loads(done(convert(run, "--json")))
    assert made == planned | {"done": True}
    assert made["warnings"] == [f"{WARNING}; --check compares outputs"]


def rows_of(run, *arguments):
    """What becomes of the leaves: printed paths -> what decided, and the operation."""
    ran = run(*arguments, "--dry-run", "--json")
    rows = json.loads(ran.out)["rows"]
    found = {(*row["from"], "->", *row["to"]): (row["origin"], row["operation"]) for row in rows}
    assert len(found) == len(rows)
    return ran, rows, found


def test_every_array_is_told_with_what_decided_it(run, folder):
    anew = ("--drop", "step", "--init", "optimizer/step")
    ran, rows, found = rows_of(run, "convert", "run/1", "out", *TO_NNX, *anew)
    document, source = json.loads(ran.out), reshard.open("run/1")
    assert sorted(path for row in rows for path in row["to"]) == sorted(
        array["path"] for array in document["arrays"]
    )
    assert {path for row in rows for path in row["from"]} == {
        format_path(leaf.path) for leaf in source.arrays
    }
    assert {row["problem"] for row in rows} == {None}
    expected = {("step", "->"): ("dropped", None)}
    for old, new in (("Dense_0", "inner"), ("Dense_1", "outer")):
        for name in ("kernel", "bias"):
            pair = f"params/{old}/{name}", "->", f"model/{new}/{name}/value"
            expected[pair] = ("structure", None)
            for moment in ("mu", "nu"):
                state = f"opt_state/0/{moment}/{old}/{name}", "->"
                after = f"optimizer/opt_state/0/{moment}/{new}/{name}/value"
                expected[*state, after] = ("structure", None)
    count = "opt_state/0/count", "->", "optimizer/opt_state/0/count/value"
    expected[count] = ("path", None)
    for leaf in ("model/dropout/rngs/count", "model/dropout/rngs/key", "optimizer/step"):
        expected["->", f"{leaf}/value"] = ("initial", None)
    assert found == expected
    # The way back is on record, and says the same the other way round.
    done(convert(run))
    _, rows, _ = rows_of(run, "convert", "out", "back", "--to", "linen")
    assert {row["origin"] for row in rows} == {"record", "dropped"}
    there = {pair for pair in found if len(pair) == 3} | {("step", "->", "optimizer/step/value")}
    own = {("->", f"model/dropout/rngs/{name}/value") for name in ("count", "key")}
    assert {(*row["to"], "->", *row["from"]) for row in rows} == there | own


UNDECIDED = """
from flax import nnx


class Two(nnx.Module):
    def __init__(self, rngs):
        self.head = nnx.Linear(4, 3, rngs=rngs)
        self.one, self.other = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
"""


def test_a_refused_conversion_tells_what_is_decided_all_the_same(run, folder):
    (folder / "undecided.py").write_text(UNDECIDED)
    params = {
        "head": {"kernel": jnp.ones((4, 5)), "bias": jnp.ones(3), "more": jnp.ones(7)},
        "Dense_0": {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)},
    }
    state = [{"count": jnp.int32(3), "mu": params}]
    layouts.save_standard(folder / "saved", {"params": params, "opt_state": state})
    options = ("--to", "nnx", "--model", "undecided:Two", "--html", "page.html")
    ran, rows, found = rows_of(run, "convert", "saved", "out", *options)
    assert ran.status == 2
    open_ = "ambiguous", "Dense_0, perhaps one and other: 1 in Linen, 2 in NNX"
    differs = "mismatch", "params/head/kernel and head/kernel: [4, 5] in Linen, [4, 3] in NNX"
    expected = {
        ("opt_state/0/count", "->", "optimizer/opt_state/0/count/value"): ("path", None),
        ("->", "model/head/kernel/value"): differs,
        ("->", "model/drop/rngs/count/value"): ("missing", None),
        ("->", "model/drop/rngs/key/value"): ("missing", None),
    }
    for old, new in ("params", "model"), ("opt_state/0/mu", "optimizer/opt_state/0/mu"):
        expected[f"{old}/head/bias", "->", f"{new}/head/bias/value"] = ("path", None)
        expected[f"{old}/head/kernel", "->"] = differs
        more = "params/head/more: NNX has no counterpart"
        expected[f"{old}/head/more", "->"] = ("unexpected", more)
        expected |= {(f"{old}/Dense_0/{name}", "->"): open_ for name in ("bias", "kernel")}
    for module, name in itertools.product(("one", "other"), ("bias", "kernel")):
        expected["->", f"model/{module}/{name}/value"] = open_
    told = {(*row["from"], "->", *row["to"]): (row["origin"], row["problem"]) for row in rows}
    assert told == expected
    assert {operation for _, operation in found.values()} == {None}


def test_a_leaf_has_one_name_in_every_option(run, folder):
    """That of maps and hints, `model` ahead or not, `value` behind it or not; or its module's."""
    spellings = (
        ("**/rngs/**",),
        ("dropout",),
        ("model/dropout",),
        ("**/rngs/key", "model/dropout/rngs/count/value"),
        ("model/dropout/rngs/key/value", "*/*/rngs/count/value"),
    )

    def rows(option, names, *arguments):
        chosen = [text for name in names for text in (option, name)]
        ran, rows, _ = rows_of(run, "convert", *arguments, *chosen)
        assert ran.status == 0
        return rows

    to_nnx = ("run/1", "out", "--to", "nnx", "--model", "models:training")
    one, *others = (rows("--init", names, *to_nnx) for names in spellings)
    assert others == [one] * len(others)
    specs = ("--mesh", "1x8", "--spec", "^inner/kernel$=,model", "--spec", "(kernel|bias|mu)=")
    done(convert(run, *specs))
    assert without_random(load("out/default")) == moved(load("run/1/default"))
    shardings = {format_path(leaf.path): leaf.sharding for leaf in reshard.open("out").arrays}
    split = [name for name, sharding in shardings.items() if any(sharding.spec)]
    assert split == ["model/inner/kernel/value"]
    # The NNX checkpoint as one that was saved again, without the record.
    layouts.save_standard(folder / "again", load("out/default"))
    back = ("again", "back", "--to", "linen", "--model", "models:linen")
    back += ("--source-model", "models:training")
    one, *others = (rows("--drop", names, *back) for names in spellings)
    assert others == [one] * len(others)
    done(run("convert", *back, "--drop", "dropout"))
    layouts.assert_same_tree(load("back"), load("run/1/default"))


# What went by the order of modules


def test_order_is_a_warning_until_outputs_were_compared(run, folder):
    """With --quiet, too; the result has it on record, and is not verified without it."""
    for options in (["--dry-run"], []):
        assert done(convert(run, "--quiet", *options)) == ""
        assert run.warned == [f"{WARNING}; --check compares outputs"]
    custom = reshard.open("out").source.metadata["custom_metadata"]
    assert custom["reshard.order"] == ORDER
    for one, other in (("out", "run/1"), ("run/1", "out")):
        assert done(run("verify", one, "--against", other, "--quiet")) == ""
        assert run.warned == [f"{WARNING}; equal values do not prove the pairing"]
    # A map says which is which; and the way back has the record of no conversion.
    done(convert(run, "--quiet", "--map", "names.toml", "--overwrite"))
    assert run.warned == []
    assert "reshard.order" not in reshard.open("out").source.metadata["custom_metadata"]
    done(convert(run, "--quiet", "--overwrite"))
    assert done(run("convert", "out", "back", "--to", "linen", "--quiet")) == ""
    assert run.warned == []
    assert not reshard.open("back").source.metadata.get("custom_metadata")


def test_order_stays_on_record_in_what_is_made_of_a_conversion(run, folder):
    """By other names, casts and meshes; by the way back, which says nothing of the way there; and
    where the outputs of the second conversion are equal, which only that is known of then."""

    def order(ckpt):
        custom = reshard.open(ckpt).source.metadata.get("custom_metadata") or {}
        return custom.get("reshard.order")

    done(convert(run, "--quiet"))
    options = ("--select", "model/**", "--rename", "^model/=", "--dtype", "**/kernel/**=bfloat16")
    done(run("ckpt", "out", "elsewhere", "--to", "1x4", *options))
    assert order("elsewhere") == ORDER
    ckpt = reshard.to_mesh(reshard.select(reshard.open("out"), "model/**"), "data=2,model=2")
    reshard.save(ckpt, "saved")
    assert order("saved") == ORDER

    dropped = ("--drop", "model/**/rngs/**")
    back = ("--to", "linen", "--model", "models:linen", "--map", "names.toml", *dropped)
    assert done(run("convert", "out", "back", *back, "--quiet")) == ""
    assert (run.warned, order("back")) == ([], ORDER)
    there = ("--to", "nnx", "--model", "models:training", "--map", "names.toml")
    random = ("--init", "**/rngs/**")
    assert done(run("convert", "back", "again", *there, *random, "--quiet")) == ""
    assert (run.warned, order("again")) == ([], ORDER)
    assert done(run("verify", "again", "--against", "back", "--quiet")) == ""
    assert run.warned == [f"{WARNING}; equal values do not prove the pairing"]
    # What was on record before is so again.
    assert done(run("convert", "again", "as_it_was", "--to", "linen", "--quiet")) == ""
    assert order("as_it_was") == ORDER
    assert done(run("convert", "back", "twice", *there[:4], *random, "--quiet")) == ""
    assert order("twice") == {**ORDER, "leaves": 8}


# Maps


def test_an_emitted_map_says_the_same_again(run, folder):
    """And backwards; it is emitted by a dry run. Of a refusal it says what is decided, and what is
    to be done."""
    done(convert(run, "--emit-map", "whole.toml", "--dry-run"))
    assert (folder / "whole.toml").read_text() == EMITTED
    assert (
        refusal(convert(run, "--emit-map", "whole.toml", "--overwrite"))
        == "Error: --emit-map whole.toml: the file exists\n"
    )
    ran = convert(run, "--emit-map", "refused.toml", "--drop", "params/Dense_1/bias")
    assert ran.status == 2
    assert "hint: --map refused.toml, after you replace each `TODO` in it" in ran.err
    assert "\ninit = ['TODO outer/bias', 'dr" in (folder / "refused.toml").read_text()
    todo = run("convert", "run/1", "out", *TO_NNX, "--map", "refused.toml")
    assert refusal(todo).startswith("Error: refused.toml: `TODO` must be replaced\n  line ")
    (folder / "refused.toml").unlink()
    options = ("--to", "nnx", "--model", "models:training", "--map", "whole.toml")
    done(run("convert", "run/1", "out", *options))
    assert without_random(load("out/default")) == moved(load("run/1/default"))
    assert refusal(run("convert", "out", "back", "--to", "linen", "--emit-map", "record.toml")) == (
        "Error: --emit-map record.toml: no map is written, because this conversion follows the "
        "record in SRC\n"
        "\n"
        "hint: --model MODULE:NAME, with the Linen model, makes a map\n"
    )
    names = {name for name in files(folder) if name.endswith("toml")}
    assert names == {"map.toml", "names.toml", "whole.toml"}
    layouts.save_standard(folder / "trained", load("out/default"))
    back = ("--to", "linen", "--model", "models:linen", "--map", "whole.toml")
    done(run("convert", "trained", "back", *back))
    layouts.assert_same_tree(load("back"), load("run/1/default"))


def test_what_is_dropped_may_be_left_out_by_the_map_already(run, folder):
    """As it is by the map of the same command."""
    options = ("--drop", "params/Dense_1", "--init", "outer")
    done(convert(run, *options, "--emit-map", "whole.toml"))
    made = by_path(load("out/default"))
    for given in (options, options[2:], options[:2]):
        done(convert(run, *given, "--map", "whole.toml", "--overwrite"))
        assert by_path(load("out/default")) == made
    ran = convert(run, "--drop", "params/Dense_0", "--map", "whole.toml", "--overwrite")
    assert (ran.status, ran.err.splitlines()[:2]) == (
        2,
        [
            "Error: whole.toml: the map does not fit the leaves",
            "  rule 3, `^params/Dense_0/`: matches no leaf",
        ],
    )


def test_a_map_with_operations(run, folder):
    options = ("--to", "nnx", "--model", "models:Halves", "--map", "map.toml")
    ran = run("convert", "run/1", "out", *options, "--emit-map", "whole.toml", "--dry-run")
    shown = """\
linen-train-state: `params` is next to `opt_state`, `step`
linen-train-state: `params/Dense_0` has a name that Linen generates
linen-train-state: `opt_state` has list positions, as in saved optax tuples
map  params/Dense_0/bias -> bias
map  params/Dense_0/kernel -> left + right  part 0-1 of 2 along axis 1
map  params/Dense_1/bias -> outer/bias
map  params/Dense_1/kernel -> outer/kernel
"""
    assert sorted(done(ran).splitlines()[:7]) == sorted(shown.splitlines())
    _, _, found = rows_of(run, "convert", "run/1", "out", *options)
    done(run("convert", "run/1", "out", *options))
    for old, new in (
        ("params", "model"),
        ("opt_state/0/mu", "optimizer/opt_state/0/mu"),
        ("opt_state/0/nu", "optimizer/opt_state/0/nu"),
    ):
        for number, part in enumerate(("left", "right")):
            pair = f"{old}/Dense_0/kernel", "->", f"{new}/{part}/value"
            assert found[pair] == ("map", f"part {number} of 2 along axis 1")
    linen, made = load("run/1/default"), load("out/default")
    left, right = np.split(np.asarray(linen["params"]["Dense_0"]["kernel"]), 2, axis=1)
    np.testing.assert_array_equal(made["model"]["left"]["value"], left)
    np.testing.assert_array_equal(made["model"]["right"]["value"], right)
    done(run("convert", "out", "back", "--to", "linen"))
    layouts.assert_same_tree(load("back/default"), linen)


# Options


def test_the_model_of_the_source_tells_its_order(run, folder):
    done(convert(run))
    layouts.save_standard(folder / "trained", load("out/default"))
    options = ("--to", "linen", "--model", "models:linen", "--drop", "model/**/rngs/**")
    told = refusal(run("convert", "trained", "back", *options))
    assert "hint: --source-model MODULE:NAME, the NNX model, supplies the classes\n" in told
    done(run("convert", "trained", "back", *options, "--source-model", "models:training"))
    layouts.assert_same_tree(load("back"), load("run/1/default"))
    told = refusal(run("convert", "trained", "back", "--to", "linen"))
    assert told.startswith(f"Error: `{folder}/trained` has no record of a conversion from Linen")


@pytest.fixture
def migrated(folder, monkeypatch):
    """`old/train.py` and `new/train.py` of a repository that was migrated in place: either has
    packages `models` and `utils` of its own."""
    head, _, tail = MODELS.partition("class Mlp")
    linen, _, rest = tail.partition("class Net")
    nets, _, _ = rest.partition("class Inner")
    for name, text in (("old", f"{head}class Mlp{linen}"), ("new", f"{head}class Net{nets}")):
        for package in ("models", "utils"):
            (folder / name / package).mkdir(parents=True)
        (folder / name / "utils/__init__.py").write_text(f"SIZES = {{'{name}': 16}}\n")
        text = f"from utils import SIZES\n{text}".replace("16", f"SIZES['{name}']")
        (folder / name / "models/__init__.py").write_text("print('models are made')\n")
        (folder / name / "models/net.py").write_text(text)
        (folder / name / "train.py").write_text("from models.net import *\n")
    monkeypatch.setattr(in_process, "run_here", run_in_subprocess)
    return folder


IN_PLACE = ("--model", "new/train.py:training", "--source-model", "old/train.py:linen")


def test_two_trees_with_packages_of_the_same_names(run, migrated):
    (migrated / "old" / "models/net.py").open("a").write("assert 'Net' not in globals()\n")
    ran = run("convert", "run/1", "out", "--to", "nnx", *IN_PLACE, "--init", "**/rngs/**")
    assert (ran.status, {*ran.err.splitlines()}) == (0, {"your code: models are made"})
    assert without_random(load("out/default")) == moved(load("run/1/default"))
    ran = run("verify", "out", "--against", "run/1", *IN_PLACE, "--init", "**/rngs/**")
    assert ran.status == 0
    source = ("--model", "old/train.py:linen", "--source-model", "new/train.py:training")
    layouts.save_standard(migrated / "trained", load("out/default"))
    ran = run(
        *("convert", "trained", "back", "--to", "linen", *source, "--drop", "model/**/rngs/**")
    )
    assert ran.status == 0
    layouts.assert_same_tree(load("back"), load("run/1/default"))


ONE_FILE = """
def source():
    from beside import models

    return models.linen()


def target():
    from beside import models

    return models.training()


def inputs():
    from beside import models

    return (models.jnp.ones((2, 8)),), {}
"""


def test_models_import_modules_beside_their_file_when_they_are_made(run, folder):
    (folder / "lib").mkdir()
    (folder / "lib/one.py").write_text(ONE_FILE)
    (folder / "lib/beside.py").write_text("import models\n")
    options = ("--model", "lib/one.py:target", "--source-model", "lib/one.py:source")
    ran = run(
        *("convert", "run/1", "out", "--to", "nnx", *options, "--init", "**/rngs/**"),
        *("--check", "--inputs", "lib/one.py:inputs"),
    )
    assert (ran.status, "outputs equal" in ran.out) == (0, True), ran.err


SCANNED = """
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(4, name="dense")(x), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        axes = {"variable_axes": {"params": 1}, "split_rngs": {"params": True}}
        return nn.scan(Block, length=3, **axes)(name="blocks")(x, None)


def linen():
    return Scanned().init(jax.random.key(0), jnp.ones((2, 4)))


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(4, 4, rngs=rngs)


class Listed(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Layer(rngs) for _ in range(3)])
"""


@pytest.mark.parametrize("name", ["Block", "Layer"])
def test_a_rule_that_is_shown_is_copied_from_the_terminal_into_a_file(name, run, folder):
    """The models are known, and the classes of their layers have the same name or not."""
    (folder / "scanned.py").write_text(f"{SCANNED}\n\nLayer.__name__ = {name!r}\n")
    shapes = {"kernel": (4, 3, 4), "bias": (4, 3)}
    layers = {leaf: jnp.asarray(layouts.random(shape)) for leaf, shape in shapes.items()}
    layouts.save_standard(folder / "stack", {"params": {"blocks": {"dense": layers}}})
    words = ("convert", "stack", "out", "--to", "nnx", "--model", "scanned:Listed")
    words += ("--source-model", "scanned:linen")
    ran = run(*words)
    ((shown, _),) = re.findall(
        r"(?m)^hint: --map FILE decides, by a rule such as:\n(( +.*\n)+)", ran.err
    )
    assert shown == (
        "      [[rule]]\n"
        "      from = '^params/blocks/(.*)$'\n"
        "      unstack = { axis = 1, into = 'params/layers_{}/\\1' }\n"
    )
    (folder / "copied.toml").write_text(shown)
    done(run(*words, "--map", "copied.toml"))
    assert by_path(load("out")) == {
        f"layers/{i}/dense/{leaf}/value": layouts.bits(jnp.take(value, i, 1))
        for leaf, value in layers.items()
        for i in range(3)
    }


def test_what_the_users_code_prints_is_marked_and_on_stderr(run, migrated, capfd):
    """When it is imported and when the model is made, in this process and in that of the source."""
    for name, function, end in (("old", "linen", ""), ("new", "training", "\\n")):
        (migrated / name / "train.py").write_text(
            "import sys\nfrom models.net import *\n"
            "print('loading', end=' ')\n"
            f"print('{name}', flush=True)\n"
            f"made = {function}\n"
            f"def {function}():\n"
            f"    sys.stdout.write('making\\na model{end}')\n"
            "    return made()\n"
        )
    init = ("--init", "**/rngs/**", "--json")
    ran = run("convert", "run/1", "out", "--to", "nnx", *IN_PLACE, *init)
    assert (ran.status, json.loads(ran.out)["done"]) == (0, True)
    models, making = "your code: models are made\n", "your code: making\nyour code: a model\n"
    err = re.sub(r"(?m)^Warning: .*\n", "", ran.err)
    # It is made twice: for its tree, and for its initial values.
    assert err == f"{models}your code: loading new\n{making}{making}"
    # The other process has this one's own stderr.
    out, err = capfd.readouterr()
    assert (out, err) == ("", f"{models}your code: loading old\n{making}")


def test_what_a_function_of_a_map_prints_is_marked_and_on_stderr(run, folder):
    """While values are written and verified: stdout has one document."""
    (folder / "told.py").write_text("def same(x):\n    print('called')\n    return x * 1\n")
    rules = [
        "from = '^params/Dense_0/kernel$', to = 'inner/kernel', apply = 'told.py:same'",
        "from = '^params/Dense_0/', to = 'inner/'",
    ]
    file = map_of(folder, *rules, "from = '^params/Dense_1/', to = 'outer/'")
    words = ("--model", "models:Net", "--init", "**/rngs/**", "--map", file.name, "--json")
    gone = ("--drop", "opt_state/**", "--drop", "step")
    for ran in (
        run("convert", "run/1", "out", "--to", "nnx", *gone, "--codec", "none", *words),
        run("verify", "out", "--against", "run/1", *words),
    ):
        assert (ran.status, {*ran.err.splitlines()}) == (0, {"your code: called"}), ran
        json.loads(ran.out)


FAILS = "def make():\n    inner()\n\ndef inner():\n    raise ValueError('no weights')\n"
IN_TREE = {
    "code that raises": (
        {"old/utils/__init__.py": FAILS, "old/train.py": "from utils import make as linen\n"},
        "--source-model old/train.py:linen: its code raised ValueError\n"
        "  no weights\n"
        "  in FOLDER/old/utils/__init__.py, line 5",
    ),
    "files that are not found": (
        {"new/train.py": "def training():\n    open('weights')\n"},
        "--model new/train.py:training: its code raised FileNotFoundError\n"
        "  [Errno 2] No such file or directory: 'weights'\n"
        "  in FOLDER/new/train.py, line 2",
    ),
    "code that raises when it is imported": (
        {"old/utils/__init__.py": "1 / 0\n"},
        "--source-model old/train.py:linen: importing it raised ZeroDivisionError\n"
        "  division by zero\n"
        "  in FOLDER/old/utils/__init__.py, line 1",
    ),
    "code that ends the process": (
        {"old/utils/__init__.py": "import sys\nsys.exit('usage')\n"},
        "--source-model old/train.py:linen: importing it raised SystemExit\n"
        "  usage\n"
        "  in FOLDER/old/utils/__init__.py, line 2",
    ),
    "an import that fails": (
        {"old/train.py": "import models.nets\n"},
        "--source-model old/train.py:linen: it cannot be imported\n"
        "  No module named 'models.nets'\n"
        "  in FOLDER/old/train.py, line 1\n"
        "\n"
        "hint: modules are looked for in FOLDER/old, the current directory and on PYTHONPATH",
    ),
    "no variables": (
        {"old/train.py": "def linen():\n    pass\n"},
        "`linen` returned None, not a state",
    ),
    "a process that ends": (
        {"old/train.py": "import os\nos._exit(7)\n"},
        "--source-model old/train.py:linen: the process of its code ended with exit status 7",
    ),
}


@pytest.mark.parametrize("name", IN_TREE)
def test_mistakes_in_trees_of_their_own(name, run, migrated):
    changes, error = IN_TREE[name]
    for file, text in changes.items():
        (migrated / file).write_text(text)
    (migrated / "new/models/__init__.py").write_text("")
    (migrated / "old/models/__init__.py").write_text("")
    ran = run("convert", "run/1", "out", "--to", "nnx", *IN_PLACE)
    assert (ran.status, ran.err) == (2, f"Error: {error.replace('FOLDER', str(migrated))}\n")
    assert not (migrated / "out").exists()


def test_what_is_selected_dropped_renamed_and_cast_is_the_source(run, folder):
    (folder / "renamed.toml").write_text("[[rule]]\nfrom = '^params/first/kernel$'\nto = 'w'\n")
    done(
        run(
            *("convert", "run/1", "out", "--to", "nnx", "--map", "renamed.toml"),
            *("--select", "params/**", "--drop", "**/bias", "--rename", "Dense_0=first"),
            *("--drop", "params/Dense_1/**", "--dtype", "params/first/*=bfloat16"),
        )
    )
    kernel = load("run/1/default")["params"]["Dense_0"]["kernel"].astype("bfloat16")
    assert by_path(load("out/default")) == {"w/value": layouts.bits(kernel)}


@pytest.mark.parametrize(
    ("mesh", "options", "kernel", "bias", "others"),
    [
        ("4x2", "", (("data",), ("model",)), (("model",),), {}),
        (
            "2x2",
            "--spec inner/bias/value$= --spec kernel/value$=,data --axis model=data",
            ((), ("data",)),
            (("data",),),
            {"inner/bias": ()},
        ),
        ("2x4", "--rules rules.toml", (("model",), ("data",)), (), {}),
    ],
    ids=["mesh", "specs for the paths of the result", "rules for the axes of the model"],
)
def test_a_new_mesh_in_the_same_pass(mesh, options, kernel, bias, others, run, folder):
    (folder / "rules.toml").write_text('rules = [["embed", "model"], ["mlp", ["data"]]]\n')
    done(convert(run, "--mesh", mesh, *options.split()))
    found = {format_path(x.path): x.sharding for x in reshard.open("out").arrays}
    assert {str(x.mesh) for x in found.values()} == {"data={},model={}".format(*mesh.split("x"))}
    assert {path: x.spec for path, x in found.items() if re.search("(kernel|bias)/", path)} == {
        f"{place}/{layer}/{name}/value": others.get(f"{layer}/{name}", spec)
        for place in ("model", "optimizer/opt_state/0/mu", "optimizer/opt_state/0/nu")
        for layer in ("inner", "outer")
        for name, spec in (("kernel", kernel), ("bias", bias))
    }
    assert without_random(load("out/default")) == moved(load("run/1/default"))


def test_every_step_or_the_latest(run, folder):
    options = (*TO_NNX, "--step", "all", "--emit-map")
    ran = run("convert", "run", "out", *options, "refused.toml", "--drop", "params/Dense_1/bias")
    assert "the file exists" not in ran.err and ran.err.count("hint: --map refused.toml") == 1
    done(run("convert", "run", "out", *options, "whole.toml"))
    assert (folder / "whole.toml").read_text() == EMITTED
    with ocp.CheckpointManager(folder / "out") as manager:
        assert manager.all_steps() == [1, 2]
    done(run("convert", "out", "back", "--to", "linen", "--step", "all"))
    for step in (1, 2):
        linen, made = load(f"run/{step}/default"), load(f"out/{step}/default")
        assert made["optimizer"]["step"]["value"] == step
        assert without_random(made) == moved(linen)
        layouts.assert_same_tree(load(f"back/{step}/default"), linen)
    refused = run("convert", "run", "steps/2", *TO_NNX)
    assert (refused[0], refused[1]) == (2, "")
    assert f"open it alone: {folder}/run/2\n" in refused[2]
    assert not (folder / "steps").exists()
    done(run("convert", "run", "latest", *TO_NNX))
    assert load("latest/2/default")["optimizer"]["step"]["value"] == 2
    assert not (folder / "latest/1").exists()


def test_a_layout_that_is_not_seen(run, folder):
    """`--to nnx` says that it is Linen's, and not where in the tree the parameters are."""
    tree = {"model": {"a": jnp.arange(3.0), "b": {"c": jnp.arange(4.0)}}}
    layouts.save_standard(folder / "bare", tree)
    (folder / "bare.toml").write_text("[[rule]]\nfrom = '^params/'\nto = ''\n")
    options = ("--to", "nnx", "--map", "bare.toml")
    assert refusal(run("convert", "bare", "out", *options)) == (
        "Error: the tree can be read as linen-params or as Linen's parameters below `model`\n"
        "\n"
        "hint: --layout linen-params\n"
        "hint: --rename '^model/=params/'\n"
    )
    leaves = {"a/value": layouts.bits(tree["model"]["a"])}
    leaves["b/c/value"] = layouts.bits(tree["model"]["b"]["c"])
    done(run("convert", "bare", "out/0", *options, "--layout", "linen-params"))
    assert by_path(load("out/0")) == {f"model/{name}": leaf for name, leaf in leaves.items()}
    done(run("convert", "bare", "out/1", *options, "--rename", "^model/=params/"))
    assert by_path(load("out/1")) == leaves


def test_a_model_in_a_file_with_the_name_of_another_module(run, folder):
    (folder / "types.py").write_text("Net = None\n")
    before = files(folder)
    assert refusal(run("convert", "run/1", "out", "--to", "nnx", "--model", "types.py:Net")) == (
        f"Error: --model types.py:Net: another module has the name `types`\n  {types.__file__}\n\n"
        "hint: give the file another name\n"
    )
    assert files(folder) == before


def test_a_destination_that_exists(run, folder):
    """And another format there. The model is found in the current directory, by any name in its
    module."""
    (folder / "out").mkdir()
    assert f"Error: `{folder}/out` exists\n" in refusal(convert(run))
    options = ("--format", "zarr3", "--no-ocdbt", "--codec", "none")
    done(convert(run, "--overwrite", "--model", "models:Inner.Net", *options))
    made = reshard.open("out")
    assert made.source.format == "plain files, zarr3"
    assert {array.data.encoding.compressors for array in made.arrays} == {()}
    assert without_random(load("out/default")) == moved(load("run/1/default"))


def test_the_examples_of_the_help(run, folder):
    """The first shows what is missing; the second gives it, and the third goes back."""
    text = run("convert", "--help").out
    prose = [line for line in text.splitlines() if not line.startswith("    reshard ")]
    assert max(map(len, prose)) <= 80
    block = re.search(r"^  Example:\n((?:    .*\n)+)", text, re.MULTILINE)[1]
    examples = [shlex.split(line) for line in re.sub(r"\\\n", "", block).splitlines()]
    (folder / "my_project").mkdir()
    (folder / "my_project/model.py").write_text(MODELS.replace("Net", "Transformer"))
    (folder / "map.toml").write_text("[[rule]]\nfrom = '^params/Dense_0/'\nto = 'inner/'\n")
    linen = load("run/1/default")
    tree = {"params": jax.tree.map(jnp.asarray, jax.device_get(linen["params"]))}
    on = layouts.mesh((2, 4))
    layouts.save_standard(folder / "run/1000", jax.device_put(tree, NamedSharding(on, P())))
    assert [example[0] for example in examples] == ["reshard"] * 3
    ran = [run(*example[1:]) for example in examples]
    assert [(status, err) for status, _, err in ran] == [
        (
            2,
            f"Error: `{folder}/run/1000` does not become the NNX model\n"
            "  dropout/rngs/count  uint32[]: missing\n"
            "  dropout/rngs/key  threefry2x32 keys[]: missing\n"
            "\n"
            "hint: --init '**/rngs' keeps the model's own initial value: 2 leaves\n",
        ),
        (0, ""),
        (0, ""),
    ]
    layouts.assert_same_tree(load("back/1000"), load("run/1000"))


def test_a_signal_while_the_model_is_made(folder):
    (folder / "slow.py").write_text(
        "import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(600)\n"
    )
    before = files(folder)
    process = subprocess.Popen(
        [RESHARD, "convert", "run/1", "out", "--to", "nnx", "--model", "slow:Net"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and not (folder / "begun").exists():
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    assert process.communicate() == ("", "\nInterrupted.\n")
    assert process.returncode == 130
    assert files(folder) == before | {"begun"}


def test_verified_against_what_it_was_made_of(run, folder):
    """By its record or by the model; and by the model again once it has none."""

    def same(path, count):
        told = f"{count} arrays read, {count} compared with digests, nothing is wrong"
        return 0, f"`{folder}/{path}`: {told}\n", ""

    done(run("convert", "run/2", "out", *TO_NNX, "--quiet"))
    for how in ((), TRAINING):
        assert run("verify", "out", "--against", "run/2", *how) == same("out", 16)
    assert run("verify", "run/2", "--against", "out") == same("run/2", 14)
    # The step before it has another counter, and Orbax's own copy has no record.
    assert run("verify", "out", "--against", "run/1") == (
        1,
        f"`{folder}/out`: 16 arrays read, 16 compared with digests, 1 problem\n"
        f"  optimizer/step/value: its values are not those of `{folder}/run/1`\n",
        "",
    )
    layouts.save_standard(folder / "again", load("out/default"))
    assert run("verify", "again", "--against", "run/2", *TRAINING) == same("again", 16)


BIASLESS = """

class Biasless(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(8, 16, rngs=rngs)
        self.outer = nnx.Linear(16, 4, use_bias=False, rngs=rngs)
"""


@pytest.mark.parametrize("by_a_map", [False, True])
def test_what_was_dropped_is_not_needed_to_verify_the_rest(by_a_map, run, folder):
    """The record says what that was: not what the source has got since then, nor other values. So
    it is with a model, too."""
    flags, arrays = ("--model", "models:Net", "--init", "**/rngs/**"), 6
    if by_a_map:
        (folder / "models.py").write_text(MODELS + BIASLESS)
        drop = "[[rule]]\nfrom = '^params/Dense_1/bias$'\ndrop = true\n"
        (folder / "drop.toml").write_text(drop)
        flags, arrays = ("--model", "models:Biasless", "--map", "drop.toml"), 3
    gone = ("--drop", "opt_state/**", "--drop", "step")
    done(run("convert", "run/1", "out", "--to", "nnx", *flags, *gone, "--quiet"))
    told = f"`{folder}/out`: {arrays} arrays read, {arrays} compared with digests"
    for more in ((), flags):
        for other in ("run/1", "run/2"):  # with another counter, which was dropped
            ran = run("verify", "out", "--against", other, *more)
            assert ran == (0, f"{told}, nothing is wrong\n", ""), ran
    tree = load("run/1/default")
    tree["params"]["Dense_0"]["bias"] = tree["params"]["Dense_0"]["bias"] + 1
    layouts.save_standard(folder / "changed", tree)
    layouts.save_standard(folder / "more", tree | {"ema": tree["params"]})
    problem = f"inner/bias/value: its values are not those of `{folder}/changed`"
    ran = run("verify", "out", "--against", "changed")
    assert ran == (1, f"{told}, 1 problem\n  {problem}\n", "")
    assert "  ema/Dense_0/bias: not in the record of the conversion\n" in refusal(
        run("verify", "out", "--against", "more")
    )
    # What was dropped has no way back.
    assert run("verify", "run/1", "--against", "out").status == 1


def test_verified_against_something_else_in_the_other_api(run, folder):
    done(run("convert", "run/2", "out", "--to", "nnx", *TRAINING, "--quiet"))
    done(run("ckpt", "run/2", "less", "--to", "2x4", "--drop", "params/Dense_0/bias", "--quiet"))
    assert refusal(run("verify", "out", "--against", "less")) == (
        f"Error: `{folder}/less` is not the Linen checkpoint that the record of `{folder}/out` "
        "describes\n"
        "  params/Dense_0/bias: only in the record\n"
        "\n"
        "hint: --model MODULE:NAME, the model of the result, converts without the record\n"
    )
