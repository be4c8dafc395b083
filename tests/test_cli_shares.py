"""`--shard` and `commit` as they are typed, and what numbers the tasks of an array job."""

import json
import re

import pytest
from in_process import refused, reshard_in, shown
from jobs import make, unfinished
from layouts import hashes

VARIABLES = [
    *(f"SLURM_ARRAY_TASK_{name}" for name in ("ID", "MIN", "MAX", "COUNT")),
    *("SLURM_PROCID", "SLURM_NTASKS", "PMI_RANK", "PMI_SIZE"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
]


@pytest.fixture(scope="module")
def at(tmp_path_factory):
    folder = tmp_path_factory.mktemp("at")
    make(folder / "run", "ckpt zarr2", 1)
    return folder


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def share(at, out, text, *more):
    return shown(at, "ckpt", "run", out, "--to", "1x8", "--shard", text, *more)


def why_not(at, out, *words):
    told = refused(at, "ckpt", "run", out, "--to", "1x8", "--shard", *words)
    return told.splitlines()[-1].removeprefix("Error: ")


def test_shares_and_their_commit(at):
    plan = reshard_in(at, "ckpt", "run", "typed", "--to", "1x8", "--dry-run")[1]
    for number in (2, 0):
        rest = f"wrote share {number} of 3; when all are written: reshard commit typed\n"
        assert share(at, "typed", f"{number}/3") == plan + rest
    assert "missing share numbers: 1\n" in refused(at, "commit", "typed")
    document = json.loads(share(at, "typed", "1/3", "--json"))
    assert (document["done"], document["share"]) == (False, [1, 3])
    assert reshard_in(at, "commit", "typed") == (0, "committed typed\n", "")
    assert reshard_in(at, "commit", "typed") == (0, "typed is complete already\n", "")
    document = json.loads(shown(at, "commit", "typed", "--json"))
    assert document == {"destination": "typed", "done": True, "committed": False}
    assert reshard_in(at, "ckpt", "run", "whole", "--to", "1x8", "--quiet") == (0, "", "")
    shown(at, "diff", "typed", "whole", "--values")
    assert hashes(at / "typed")["_METADATA"] == hashes(at / "whole")["_METADATA"]


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_ARRAY_TASK_ID": "%", "MIN": "0", "MAX": "1", "COUNT": "2"},
        {"SLURM_PROCID": "%", "SLURM_NTASKS": "2"},
        {"OMPI_COMM_WORLD_RANK": "%", "OMPI_COMM_WORLD_SIZE": "2"},
        {"PMI_RANK": "%", "PMI_SIZE": "2"},
    ],
)
def test_shares_by_the_numbers_of_processes(at, monkeypatch, variables):
    out = f"auto-{next(iter(variables))}"
    for number in (1, 0):
        for name, value in variables.items():
            name = name if "_" in name else f"SLURM_ARRAY_TASK_{name}"
            monkeypatch.setenv(name, value.replace("%", str(number)))
        assert share(at, out, "auto").splitlines()[-1].startswith(f"wrote share {number} of 2;")
    assert reshard_in(at, "commit", out, "--quiet") == (0, "", "")


def test_some_tasks_of_an_array_run_again(at, monkeypatch):
    share(at, "again", "0/10", "--quiet")
    for name, value in {"ID": "7", "MIN": "3", "MAX": "7", "COUNT": "2"}.items():
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    assert share(at, "again", "auto").splitlines()[-1].startswith("wrote share 7 of 10;")
    text = "Invalid value for --shard: an array job must have all tasks from 0, not some of 3-7"
    assert why_not(at, "new", "auto") == text


@pytest.mark.parametrize("last", ["x", "-1", "1.5", "", None])
def test_an_array_with_a_bad_or_no_last_number(at, monkeypatch, last):
    for name, value in {"ID": "0", "MIN": "0", "MAX": last, "COUNT": "1"}.items():
        if value is not None:
            monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    told = f", not some of 0-{last}" if last else ""
    text = f"Invalid value for --shard: an array job must have all tasks from 0{told}"
    assert why_not(at, "none", "auto") == text


def test_a_share_of_another_command_is_refused_with_the_first_command(at):
    share(at, "other", "1/3", "--dtype", "params/w0=bfloat16", "--quiet")
    words = ("ckpt", "run", "other", "--to", "1x8", "--shard", "0/3", "--codec", "none")
    told = refused(at, *words, "--dtype", "params/kept0=bfloat16").splitlines()
    assert told[0] == f"Error: the unfinished job for `{at / 'other'}` is not this job"
    who = "reshard ckpt run other --to 1x8 --shard 1/3 --dtype params/w0=bfloat16 --quiet"
    assert re.fullmatch(rf"  process \d+ on \S+, since .* UTC: {who}", told[2])
    [left] = unfinished(at / "other")
    assert told[-1] == f"hint: rm -r '{left}', then start again"


@pytest.mark.parametrize("text", ["3", "3/3", "1/0", "-1/3", "x/3", "1/3/4"])
def test_no_shares(at, text):
    told = f"`{text}` is not a share: shares are numbered 0/N to N-1/N"
    assert why_not(at, "none", text) == f"Invalid value for --shard: {told}"
    assert unfinished(at / "none") == []


def test_nothing_numbers_them(at):
    assert why_not(at, "none", "auto") == (
        "Invalid value for --shard: auto: none of SLURM_ARRAY_TASK_ID, SLURM_PROCID, "
        "OMPI_COMM_WORLD_RANK, PMI_RANK is set; give --shard I/N, numbered from 0"
    )
    assert why_not(at, "none", "0/2", "--resume") == (
        "--shard cannot be combined with --resume, --workers or --dask: each process writes one "
        "share. Run the same command again if it is stopped"
    )
    assert "no shares exist" in refused(at, "commit", "none")
