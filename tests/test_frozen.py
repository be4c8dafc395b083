"""All output for a corpus of checkpoints, compared with the recordings in `data/frozen`.

Only the entry point of the console script and `import reshard` are used. If output is to change,
record it again, and read the difference in git:

    FREEZE=1 .venv/bin/pytest tests/test_frozen.py

The recordings are of one release of Orbax and JAX. With older releases, only exit statuses are
compared.

Placeholders stand for values that vary: the folder of the corpus, hashes of files that contain a
time, shared bytes, because Orbax distributes chunks to files at random, and bytes of memory, except
in `memory-*.json`. A repeated value is `as in ...`. Lists of objects with equal keys are tables.
"""

import difflib
import functools
import hashlib
import inspect
import json
import os
import pathlib
import re
import shlex
import shutil
from collections.abc import Callable
from typing import Any

import frozen_corpus
import in_process
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from releases import older

import reshard

FROZEN = pathlib.Path(__file__).parent / "data" / "frozen"
WIDTH = 240
OLDER = older("orbax-checkpoint", "0.12")
COMMANDS = ("ckpt", "convert", "diff", "digest", "doctor", "help", "inspect", "verify")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    # Markers hold paths, and count as bytes: all runs have paths of one length.
    folder = tmp_path_factory.mktemp("frozen").resolve()
    folder = folder / "x".rjust(120 - len(str(folder)), "x")
    folder.mkdir()
    return frozen_corpus.Corpus(folder)


@pytest.fixture(autouse=True)
def surroundings(corpus):
    """In the corpus's folder."""
    with in_process.inside(corpus.folder) as patch:
        # for `--source-model`
        patch.setenv("PYTHONPATH", str(pathlib.Path(__file__).parent))
        yield


class Record:
    """The output for one part of the corpus, compared with a file. `memory`: whether numbers of
    bytes in memory are on record."""

    def __init__(self, corpus: frozen_corpus.Corpus, *, memory: bool = False):
        self._folder = str(corpus.folder)
        self._memory = memory
        self._seen: dict[str, str] = {}
        self.entries: dict[str, Any] = {}

    def run(self, *arguments: object) -> int:
        """Runs a command, and records its output. Returns its exit status."""
        words = [str(argument) for argument in arguments]
        status, *streams = in_process.command(words)
        shown: dict[str, Any] = {"status": status}
        for name, text in zip(("out", "err"), streams, strict=True):
            if text:
                shown[name] = json.loads(text) if text.startswith("{") else text
        self.add(shlex.join(words), shown)
        return status

    def try_(self, name: str, call: Callable[[], Any]) -> None:
        """Records the result of a call, or the error that it raises."""
        try:
            self.add(name, call())
        except reshard.ReshardError as error:
            self.add(name, {"raises": type(error).__name__, "says": str(error)})

    def add(self, name: str, value: Any) -> None:
        """Records a value."""
        assert name not in self.entries, name
        self.entries[name] = self._once(self._plain(value), name)

    def check(self, name: str) -> None:
        """Compares with the file of that name, or with FREEZE, writes the file."""
        text = pretty(self.entries) + "\n"
        path = FROZEN / f"{name}.json"
        if os.environ.get("FREEZE"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            return
        before = path.read_text() if path.exists() else ""
        if OLDER:
            assert statuses(self.entries) == statuses(json.loads(before))
        elif text != before:
            texts = (before.splitlines(), text.splitlines(), "on record", "now")
            lines = difflib.unified_diff(*texts, lineterm="")
            pytest.fail(f"{path}\n" + "\n".join(lines), pytrace=False)

    def _plain(self, value: Any, key: str = "") -> Any:
        """A value with placeholders, and with lists of lines for longer text."""
        if isinstance(value, dict):
            return {k: self._plain(v, k) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._plain(item) for item in value]
        if (key == "peak_memory" and not self._memory) or (key == "shared_bytes" and value):
            return "BYTES"
        if isinstance(value, str):
            value = value.replace(self._folder, "$CORPUS")
            if key in TIMED:
                return "HASH"
            if not self._memory:
                value = re.sub(r"(?m)^memory   .* in flight", "memory   BYTES in flight", value)
            value = re.sub(r"(, and share|, shares) [0-9.]+ \w+", r"\1 BYTES", value)
            lines = value.splitlines()
            return lines if len(lines) > 1 else value.removesuffix("\n")
        return value

    def _once(self, value: Any, where: str) -> Any:
        """A value, or if it was recorded before, the place of that."""
        text = json.dumps(value)
        if len(text) > WIDTH:
            if text in self._seen:
                return f"as in {self._seen[text]}"
            self._seen[text] = where
        if isinstance(value, list) and all(isinstance(item, dict) for item in value):
            columns = {tuple(item) for item in value}
            if len(columns) == 1 and len(value) > 2:
                return [*columns, *(list(item.values()) for item in value)]
        if isinstance(value, dict):
            return {key: self._once(item, f"{where} | {key}") for key, item in value.items()}
        return value


def statuses(entries: dict[str, Any]) -> dict[str, Any]:
    """Command or call -> how it ended."""
    found: dict[str, Any] = {}
    for name, entry in entries.items():
        if isinstance(entry, dict):
            found[name] = entry.get("status", entry.get("raises"))
        elif isinstance(entry, str):
            found[name] = found.get(entry.removeprefix("as in "))
    return found


# Files that contain the time of their creation.
TIMED = ("_CHECKPOINT_METADATA",)


def pretty(value: Any, indent: str = "") -> str:
    """JSON with short values and the rows of tables on one line each."""
    line = json.dumps(value, ensure_ascii=False)
    if not value or not isinstance(value, dict | list) or (indent and len(indent + line) <= WIDTH):
        return line
    inner = indent + " "
    text = functools.partial(json.dumps, ensure_ascii=False)
    opening, closing = "[]"
    if isinstance(value, dict):
        opening, closing = "{}"
        items = [f"{text(k)}: {pretty(v, inner)}" for k, v in value.items()]
    elif isinstance(value[0], tuple):
        items = map(text, value)
    else:
        items = [pretty(item, inner) for item in value]
    return f"{opening}\n{inner}" + f",\n{inner}".join(items) + f"\n{indent}{closing}"


# Trees.


def described(tree: Any) -> dict[str, str]:
    """Printed path -> type, dtype, shape, layout and a hash of the value of each leaf."""
    return {path: _described(leaf) for path, leaf in layouts.flat(tree).items()}


def _described(leaf: Any) -> str:
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return repr(leaf)
    shape = "x".join(map(str, leaf.shape)) or "()"
    if not isinstance(leaf, jax.Array):
        return f"{type(leaf).__name__} {leaf.dtype} {shape} {_hash(leaf)}"
    sharding = leaf.sharding
    where = f"on {sorted(device.id for device in sharding.device_set)}"
    if isinstance(sharding, NamedSharding):
        mesh = ",".join(f"{name}={size}" for name, size in sharding.mesh.shape.items())
        where = f"{sharding.spec} on {mesh}"
    key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return f"{leaf.dtype} {shape} {where} {_hash(jax.random.key_data(leaf) if key else leaf)}"


def _hash(values: Any) -> str:
    return hashlib.sha256(np.asarray(values).tobytes()).hexdigest()[:12]


def read_back(saved: layouts.Saved, path: str) -> dict[str, Any]:
    """What every reader of Orbax's that reads the layout reads at a path, most of them the same."""
    folder = pathlib.Path(path).resolve()
    readers = saved.readers or ("pytree",)
    return {name: described(layouts.READERS[name](saved, folder)) for name in readers}


# What is on record.


@pytest.mark.parametrize(
    "name", [*layouts.LAYOUTS, *frozen_corpus.NEVER_MERGED, *frozen_corpus.OLD]
)
def test_layouts(corpus, name):
    saved, src, record = corpus(name), corpus.path(name), Record(corpus)
    out = f"out/{name}"
    item = [word for key, value in saved.open.items() for word in (f"--{key}", value)]
    alike = name in frozen_corpus.ALIKE
    if alike:
        record.run("inspect", src, *item)
    else:
        record.run("inspect", src, "--json", *item)
        record.run("digest", src, "--json", *item)
        record.run("verify", src, "--json", *item)
        record.run("ckpt", src, out, "--to", "1x8", "--dry-run", "--json", *item)
    status = record.run("ckpt", src, out, "--to", "1x8", "--dry-run", *item)
    record.run("ckpt", src, out, "--to", "1x8", "--verify", *(() if alike else ("--json",)), *item)
    if status == 0:
        record.add("Orbax reads OUT", read_back(saved, out))
        record.run("diff", src, out, "--values", "--json", *item)
        if not alike:
            record.try_("restore(OUT)", lambda: restored(out, (1, 4), **saved.open))
            record.run("verify", out, "--against", src, "--json", *item)
        if name in ("standalone", "v1"):
            record.run("diff", src, out, "--layout", "--json")
    record.check(name.replace("/", "-"))


def restored(path: str, sizes: tuple[int, int], **kwargs: Any) -> dict[str, str]:
    return described(reshard.restore(reshard.open(path, **kwargs), layouts.mesh(sizes)))


JOBS = {
    "keep": ("--chunks", "keep"),
    "1KiB": ("--to", "1x8", "--chunks", "1KiB"),
    "cast": ("--to", "1x8", "--dtype", "params/**=bfloat16", "--dtype", "host=float64"),
    "copied": ("--chunks", "keep", "--no-link"),
    "rename": ("--to", "1x8", "--rename", "^params/=weights/", "--rename", 'w.0"$=w_0"'),
    "select": ("--to", "1x4", "--select", "params/**", "--drop", "**/uneven"),
    "spec": ("--to", "a=2,b=3", "--spec", "embed$=a+b,", "--spec", ".*="),
    "axis": ("--axis", "data=", "--axis", "model=tensor", "--to", "tensor=4"),
    "digest": ("--digest", "--resume"),
}
ON_FILES = ("keep", "1KiB", "cast")


@pytest.mark.parametrize("name", ["standalone", "zarr3-files"])
def test_jobs(corpus, name):
    saved, src, record = corpus(name), corpus.path(name), Record(corpus)
    for job in ON_FILES if name == "zarr3-files" else JOBS:
        options, out = JOBS[job], f"out/jobs/{name}/{job}"
        record.run("ckpt", src, out, *options, "--dry-run")
        if record.run("ckpt", src, out, *options, *(("--json",) if job in ON_FILES else ())) == 0:
            record.add(
                f"Orbax reads {job}", described(layouts.read_pytree(saved, corpus.folder / out))
            )
            record.run("diff", src, out, "--values")
    record.check(f"jobs-{name}")


def test_steps(corpus):
    saved, src, record = corpus("manager"), corpus.path("manager"), Record(corpus)
    record.run("inspect", src)
    record.run("inspect", src, "--step", 3, "--filter", "params/**")
    record.run("diff", f"{src}/3", f"{src}/20", "--values")
    record.run("diff", f"{src}/3", f"{src}/20", "--values", "--json", "--select", "params/**")
    record.run("digest", src, "--step", 3)
    record.run("ckpt", src, "out/steps", "--step", "all", "--to", "1x8", "--dry-run")
    record.run("ckpt", src, "out/steps", "--step", "all", "--to", "1x8", "--json")
    record.add("Orbax reads OUT", read_back(saved, "out/steps"))
    record.add("files", names("out/steps"))
    record.run("ckpt", src, "out/steps", "--to", "1x8")
    record.run("ckpt", src, "out/steps", "--to", "1x8", "--overwrite", "--quiet")
    record.run("inspect", "out/steps", "--filter", "step")
    record.run("ckpt", corpus.path("items"), "out/of-items", "--item", "state", "--to", "1x8")
    record.add("files of a step of several items", names("out/of-items"))
    record.check("steps")


def names(path: str) -> list[str]:
    """Files below a path, except OCDBT's data files, whose names are random."""
    found = [p.relative_to(path).as_posix() for p in pathlib.Path(path).rglob("*") if p.is_file()]
    return sorted(name for name in found if "d" not in name.split("/")[:-1])


def test_shown(corpus):
    """What is read rather than parsed."""
    src, record = corpus.path("standalone"), Record(corpus)
    record.run("inspect", src)
    record.run("inspect", src, "--sharding", "params/embed")
    record.run("inspect", src, "--sharding", "params/embed", "--mesh", "1x8", "--json")
    record.run("inspect", corpus.path("dtypes"))
    record.run("digest", corpus.path("dtypes"))
    record.run("verify", src)
    copy = pathlib.Path(shutil.copytree(src, "out/recorded"))
    record.run("digest", copy, "--write", "--quiet")
    record.add("on record", json.loads((copy / "reshard_digests.json").read_text()))
    record.run("verify", copy)
    record.run("ckpt", copy, "out/of-recorded", "--to", "1x8", "--quiet")
    record.run("diff", copy, "out/of-recorded")
    record.run("diff", src, "out/of-recorded", "--no-values")
    record.run("diff", src, "out/of-recorded")
    ckpt = reshard.to_mesh(reshard.open(src), "1x8")
    record.add("repr of a checkpoint", repr(ckpt))
    record.add("repr of a plan", repr(reshard.plan(ckpt, "out/nowhere")))
    record.add("repr of a diff", repr(reshard.diff(src, "out/of-recorded", values=True)))
    record.check("shown")


@pytest.mark.parametrize("limit", ["1GiB", "128KiB", "64KiB", "1KiB"])
def test_memory(corpus, limit):
    """Bytes of memory, which the other recordings do not have."""
    record = Record(corpus, memory=True)
    for name in ("standalone", "zarr3-files", "dtypes"):
        job = ("ckpt", corpus.path(name), "out/nowhere", "--dry-run", "--max-memory", limit)
        record.run(*job, *(() if name == "dtypes" else ("--to", "1x8")))
    record.check(f"memory-{limit}")


STACK = r"""
[[rule]]
from = '^params/Block_(\d+)/Dense_0/(.*)$'
to = 'layers/linear/\2'
stack = { axis = 0, by = 1 }
"""


def to(api: str, model: str, *options: str) -> tuple[str, ...]:
    return ("--to", api, "--model", f"frozen_corpus:{model}", *options)


INIT, DROP = ("--init", "**/rngs/**"), ("--drop", "**/rngs/**")
OF_MODEL = ("--source-model", "frozen_corpus:Model")
MODEL, VARIABLES = to("nnx", "Model", *INIT), to("linen", "variables", *OF_MODEL, *DROP)
TRAINING, BACK = to("nnx", "training", *INIT), ("--to", "linen")
STACKED = to("nnx", "stacked_training", "--map", "stack.toml")
STATE = to("linen", "train_state", "--source-model", "frozen_corpus:training", *DROP)
CONVERSIONS = {  # name -> source, options there, and back
    "variables": ("linen-variables-boxed", MODEL, VARIABLES),
    "params": ("linen-params", MODEL, BACK),
    "train-state": ("linen-train-state", TRAINING, BACK),
    "stack": ("linen-train-state", STACKED, BACK),
    "nnx-state": ("nnx-state", VARIABLES, MODEL),
    "nnx-pure-dict": ("nnx-pure-dict", (*VARIABLES, "--layout", "nnx-pure-dict"), MODEL),
    "nnx-training": ("nnx-training", STATE, TRAINING),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversions(corpus, name):
    source, there, back = CONVERSIONS[name]
    src, out, record = corpus.path(source), f"out/convert/{name}/there", Record(corpus)
    again, emitted = out.replace("there", "back"), f"{out}.toml"
    pathlib.Path(out).parent.mkdir(parents=True)
    pathlib.Path("stack.toml").write_text(STACK)
    record.run("convert", src, out, *there, "--dry-run")
    record.run("convert", src, out, *there, "--dry-run", "--json")
    assert record.run("convert", src, out, *there, "--mesh", "1x8", "--emit-map", emitted) == 0
    record.add("map", pathlib.Path(emitted).read_text())
    record.add("Orbax reads OUT", read_back(corpus(source), out))
    if name in ("params", "stack"):  # no leaf was made up or left out
        record.run("verify", out, "--against", src)
    assert record.run("convert", out, again, *back) == 0
    if record.run("diff", src, again, "--values", "--json"):
        record.add("Orbax reads what came back", read_back(corpus(source), again))
    record.check(f"convert-{name}")


RULES = [("embed", "data"), ("mlp", "model")]


def test_restored(corpus):
    record = Record(corpus)
    mesh = layouts.mesh((1, 8))
    models = {
        "linen-variables-boxed": frozen_corpus.variables,
        "linen-train-state": frozen_corpus.train_state,
        "nnx-state": lambda: nnx.state(frozen_corpus.Model(nnx.Rngs(0))),
        "nnx-training": frozen_corpus.training,
    }
    for name, model in models.items():
        record.add(f"coverage of {name}", repr(reshard.coverage(model, mesh=mesh, rules=RULES)))
        target = reshard.target(model, mesh=mesh, rules=RULES)

        def restore(name=name, target=target):
            state = reshard.restore(corpus(name).path, target, max_memory="64KiB")
            states = nnx.state(state) if isinstance(state, nnx.Module) else state
            if name == "nnx-training":
                states = frozen_corpus.states(state)
            return described(states)

        record.try_(f"restore({name})", restore)
    path = corpus("linen-params").path
    target = reshard.target(frozen_corpus.variables, mesh=mesh, rules=RULES)
    record.try_("restore of another tree", lambda: described(reshard.restore(path, target)))
    layers = reshard.stack(reshard.open(path), "Block_{}", into="blocks", axis=1)
    record.add("stack", repr(layers))
    reshard.save(reshard.to_mesh(layers, "1x8"), "out/stacked")
    record.add("restore(stacked)", restored("out/stacked", (2, 4)))
    back = reshard.unstack(reshard.open("out/stacked"), "blocks", into="Block_{}", axis=1)
    reshard.save(back, "out/unstacked")
    record.run("diff", corpus.path("linen-params"), "out/unstacked", "--values")
    record.check("restored")


WRONG = """
rules = [[1, "data"], ["embed", "data", "model"], ["mlp", []]]
specs = [["kernel$", [3]], ["bias$", "model,"]]
more = 1
"""


@pytest.fixture
def refused(corpus):
    """Commands that fail, and commands with wrong arguments."""
    src, linen, manager = (corpus.path(each) for each in ("standalone", "linen-params", "manager"))
    for folder in ("occupied", "apart"):
        pathlib.Path(folder).mkdir(exist_ok=True)
    pathlib.Path("rules.toml").write_text('rules = [["embed", "data"], ["mlp", ["model"]]]\n')
    pathlib.Path("wrong.toml").write_text(WRONG)
    pathlib.Path("broken.toml").write_text("rules = ")
    pathlib.Path("map.toml").write_text("rule = [{ from = '^params/head/', to = 'head/' }]")
    model = ("--to", "1x8", "--model", "frozen_corpus:variables")
    return (
        ("inspect", "apart/nowhere"),
        ("inspect", "occupied"),
        ("inspect", src, "--filter", "nothing/**"),
        ("inspect", src, "--filter", "params/embad"),
        ("inspect", src, "--sharding", "params/embe"),
        ("inspect", src, "--sharding", "params/embed", "--mesh", "3x5"),
        ("inspect", src, "--sharding", "params/embed", "--mesh", "model=5"),
        ("inspect", src, "--sharding", 'params/"two words/w.0"', "--mesh", "x=1"),
        ("inspect", corpus.path("dtypes"), "--sharding", "int4"),
        ("inspect", src, "--sharding", "one_device"),
        ("inspect", src, "--mesh", "1x8"),
        ("ckpt", "apart/nowhere", "out/no", "--to", "1x8"),
        ("ckpt", src),
        ("ckpt", src, "occupied", "--to", "1x8"),
        ("ckpt", src, src, "--to", "1x8", "--overwrite"),
        ("ckpt", src, f"{src}/inside", "--to", "1x8"),
        ("ckpt", src, "out/no", "--to", "1x8x2"),
        ("ckpt", src, "out/no", "--to", "1x7"),
        ("ckpt", src, "out/no", "--to", "1x7", "--dry-run", "--json"),
        ("ckpt", src, "out/no", "--to", "other=8"),
        ("ckpt", src, "out/no", "--to", "8"),
        ("ckpt", src, "out/no", "--to", "data=1,modle=8"),
        ("ckpt", src, "out/no", "--to", "replica=2,fsdp=2,tensor=4"),
        ("ckpt", src, "out/no", "--to", "1x8", "--spec", "embed$=modle,"),
        ("ckpt", src, "out/no", "--to", "model=8", "--axis", "data=", "--spec", "embed$=data,"),
        ("ckpt", src, "out/no", "--to", "1x7", "--axis", "model=", "--spec", "embed$=model,"),
        ("ckpt", src, "out/no", "--from", "4x2", "--to", "1x8"),
        ("ckpt", src, "out/no", "--spec", "embed$=model,"),
        ("ckpt", src, "out/no", "--to", "1x8", "--spec", "embad$=model,"),
        ("ckpt", src, "out/no", "--to", "1x8", "--spec", "nothing$=model,"),
        ("ckpt", src, "out/no", "--drop", "nothing"),
        ("ckpt", src, "out/no", "--to", "1x8", "--spec", "embed"),
        ("ckpt", src, "out/no", "--to", "1x8", "--axis", "model"),
        ("ckpt", src, "out/no", "--to", "1x8", "--axis", "modle=tensor"),
        ("ckpt", src, "out/no", "--select", "nothing"),
        ("ckpt", src, "out/no", "--rename", "^params/embed$=host"),
        ("ckpt", src, "out/no", "--rename", "("),
        ("ckpt", src, "out/no", "--dtype", "int8"),
        ("ckpt", src, "out/no", "--dtype", "float12"),
        ("ckpt", src, "out/no", "--chunks", "many"),
        ("ckpt", src, "out/no", "--to", "1x8", "--max-memory", "100B"),
        ("ckpt", src, "out/no", "--to", "1x8", "--max-memory", "lots"),
        ("ckpt", src, "out/no", *model),
        ("ckpt", src, "out/no", "--to", "1x8", "--model", "frozen_corpus:nothing"),
        ("ckpt", src, "out/no", "--to", "1x8", "--model", "nowhere:state"),
        ("ckpt", src, "out/no", "--to", "1x8", "--model", "frozen_corpus.variables"),
        ("ckpt", src, "out/no", *model, "--rules", "rules.toml", "--axis", "data=x"),
        ("ckpt", src, "out/no", "--to", "1x8", "--rules", "rules.toml"),
        ("ckpt", src, "out/no", "--to", "1x8", "--rules", "wrong.toml"),
        ("ckpt", src, "out/no", "--to", "1x8", "--rules", "broken.toml"),
        ("ckpt", manager, "out/no", "--step", "last"),
        ("convert", linen, "out/no"),
        ("convert", linen, "out/no", "--to", "torch"),
        ("convert", linen, "out/no", "--to", "nnx"),
        ("convert", linen, "out/no", *to("nnx", "Model", "--layout", "flax")),
        ("convert", linen, "out/no", *to("nnx", "Model", *INIT), "--spec", "kernel$=model"),
        ("convert", linen, "out/no", "--to", "nnx", "--model", "nowhere/models.py:Net"),
        ("convert", linen, "out/no", *to("nnx", "Model", "--source-model", "nowhere:Mlp")),
        ("convert", linen, "out/no", *to("nnx", "Linen.Mlp")),
        ("convert", linen, "out/no", *to("nnx", "filled")),
        ("convert", linen, "out/no", "--to", "nnx", "--map", "map.toml", "--init", "left"),
        ("convert", linen, "out/no", "--to", "nnx", "--map", "map.toml", "--drop", "**/head/**"),
        ("convert", linen, "out/no", *to("nnx", "Model"), "--map", "broken.toml"),
        ("convert", corpus.path("nnx-pure-dict"), "out/no", *to("linen", "variables", *DROP)),
        ("convert", linen, "out/no", "--to", "linen"),
        ("convert", linen, "out/no", "--to", "nnx", "--model", "frozen_corpus:Model"),
        ("convert", linen, "out/no", *to("nnx", "Stacked"), "--dry-run", "--json"),
        ("convert", linen, "out/no", *to("nnx", "Model", *INIT), "--map", "nowhere.toml"),
        ("convert", src, "out/no", *to("nnx", "Model", *INIT)),
        ("diff", src, linen),
        ("diff", src, corpus.path("standard"), "--no-values", "--json"),
        ("diff", src, src, "--rtol", "1"),
        ("verify", src, "--against", linen),
        ("digest", src, "--max-memory", "100B"),
        ("digest", src, "--step", "3"),
        ("frobnicate",),
    )


def test_refusals(corpus, refused):
    """The errors of these commands, and of damaged checkpoints."""
    src, record = corpus.path("standalone"), Record(corpus)
    for command in refused:
        record.run(*command)
    record.add("left behind", [name for name in names("out") if name.startswith("no")])
    shutil.copytree(src, "damaged")
    os.remove("damaged/manifest.ocdbt")
    shutil.copytree(corpus.path("zarr3-files"), "truncated")
    chunk = pathlib.Path("truncated/host/c/0/0")
    chunk.write_bytes(chunk.read_bytes()[:-1])
    for path in ("damaged", "truncated"):
        record.run("verify", path)
        record.run("ckpt", path, "out/no", "--to", "1x8")
    record.check("refusals")


# Options that may be typed several times; of any other the last counts.
SEVERAL = ("--axis", "--drop", "--init", "--rename", "--select", "--spec")
# Hints of which nothing can be typed into the same command.
PROSE = (
    "` has: ",
    "write to another path",
    "modules are looked for in the current directory",
    "saved axes: ",
    "the mesh has the axes ",
    "use a function without arguments",
    "`to = ",
    "--layout with the right layout",
    "reshard.stack(",
    "--emit-map FILE",
    "reshard inspect PATH",
    "the names of ready maps",
)


# Hints with which a command is done.
DONE = ("any array", "name the axes", "did you mean", "is the least", "comes first", "--from")
OPTION = r"--[a-z-]+ (?:'[^']*'|[^'\s]\S*)"


def typed(command: list[str], said: str, hint: str) -> list[list[str]]:
    """The commands that a hint asks for, of one that was refused with these words."""
    if hint.startswith("--overwrite"):
        return [[*command, "--overwrite"]]
    if whole := re.match(r"reshard ([a-z].*)", hint):
        words = shlex.split(whole[1])
        return [[{"SRC": command[1], "DST": command[2]}.get(word, word) for word in words]]
    if left_out := re.match(r"leave out (--\w+)", hint):
        place = command.index(left_out[1])
        return [command[:place] + command[place + 2 :]]
    if mesh := re.search(r"(?:name the axes:|did you mean) `(.*?)`", hint):
        return [with_option(command, "--to", mesh[1])]
    if entries := in_file(hint):
        return [with_option(command, *entries)]
    hint = filled(hint, "linen" in command)
    options = re.findall(rf"{OPTION}(?: {OPTION})*", hint)
    first = "comes first" in hint
    if options:
        return [with_option(command, *shlex.split(o.rstrip(",")), first=first) for o in options]
    found = map("".join, re.findall(r"`(.+?)`|'(.+?)'|cast to (\w+):", said))
    if near := re.match("the nearest leaf to `(.*?)` is `(.*?)`", hint):
        text = pathlib.Path("map.toml").read_text().replace(near[1].strip("/"), near[2])
        pathlib.Path("typed.toml").write_text(text)
        return [with_option(command, "--map", "typed.toml")]
    wrong = next(w for w in found if any(w in word for word in command[1:]))
    values = re.findall(r"`([^`]+)`", hint)
    return [[word.replace(wrong, value) for word in command] for value in values]


def in_file(hint: str) -> tuple[str, str] | None:
    """The option that names a file of what a hint says, which is written; None if it says none."""
    pathlib.Path("typed.toml").unlink(missing_ok=True)
    rules = re.findall(r'\["\w+", \[.*?\]\]', hint)
    name, text = "--rules", hint if re.match("(rules|specs) = ", hint) else f"rules = {rules}"
    if "[[rule]]" in hint or "such as: " in hint:
        name, text = "--map", "[[rule]]" + hint.rpartition(" such as: ")[2].replace("[[rule]]", "")
        text = text.replace("[[rule]]", "[[rule]]\n").replace("', to", "'\nto")
    elif not rules and text != hint:
        return None
    pathlib.Path("typed.toml").write_text(text.replace("'[", "[").replace("]'", "]"))
    return name, "typed.toml"


def filled(hint: str, to_linen: bool) -> str:
    """A hint with names of the corpus in the places of those that are the user's own."""
    model, source = "frozen_corpus:Model", "frozen_corpus:variables"
    if to_linen:
        model, source = source, model
    hint = hint.replace("--source-model MODULE:NAME", f"--source-model {source}")
    hint = hint.replace("--model MODULE:NAME", f"--model {model}")
    hint = hint.replace("my_project.model:create_train_state", "frozen_corpus:train_state")
    return hint.replace("--map FILE", "--map map.toml")


def with_option(command: list[str], *options: str, first: bool = False) -> list[str]:
    """A command with options: in place of their values, or behind or ahead of what is there."""
    for name, value in zip(options[::2], options[1::2], strict=True):
        if name in command and name not in SEVERAL:
            place = command.index(name) + 1
            command = [*command[:place], value, *command[place + 1 :]]
        else:
            given = (name, value)
            command = [*command[:3], *given, *command[3:]] if first else [*command, *given]
    return command


def test_what_a_hint_says_is_answered_otherwise_once_it_is_typed(refused):
    """No command is refused again for the same, and no option is unknown."""
    failed, seen = [], 0
    for command in (list(words) for words in refused):
        status, _, err = in_process.command(command)
        said, _, hints = err.partition("\n\nhint: ")
        for hint in hints.removesuffix("\n").split("\nhint: ") if hints else ():
            hint = re.sub(r"\n  \.\.\. and \d+ more$", "", hint)
            again = [] if any(text in hint for text in PROSE) else typed(command, said, hint)
            assert again or any(text in hint for text in PROSE), hint
            for words in again:
                seen += 1
                answer, _, text = in_process.command(words)
                same = (answer, text.partition("\n\nhint: ")[0]) == (status, said)
                if same or "No such" in text or (answer and any(each in hint for each in DONE)):
                    failed.append((shlex.join(words), hint, text))
                shutil.rmtree("out/no", ignore_errors=True)
            if "--overwrite" in hint:
                shutil.rmtree("occupied")
                pathlib.Path("occupied").mkdir()
    assert failed == []
    assert seen > 50


def test_surface():
    """What can be called and typed."""
    entries: dict[str, Any] = {}
    for name in sorted(dir(reshard)):
        value = getattr(reshard, name)
        parameters = inspect.signature(value).parameters.values()
        entries[name] = ", ".join(str(p.replace(annotation=p.empty)) for p in parameters)
        if isinstance(value, type):
            bases = [base.__name__ for base in value.__mro__[1:-1]]
            attributes = [each for each in dir(value) if not each.startswith("_")]
            entries[name] = {"arguments": entries[name], "bases": bases, "attributes": attributes}
    record = Record(frozen_corpus.Corpus(FROZEN))
    record.add("import reshard", entries)
    for command in ((), *((name,) for name in COMMANDS)):
        record.run(*command, "--help")
    record.check("surface")
