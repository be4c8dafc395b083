"""The examples run, each in a process of its own."""

import pathlib
import subprocess
import sys

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def run_quickstart(*arguments: str, cwd: pathlib.Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, EXAMPLES / "quickstart.py", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
    )


def test_quickstart_restores_every_bit(tmp_path):
    ran = run_quickstart(cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    first, *_, last = ran.stdout.splitlines()
    assert first == "Orbax saved 8 arrays on a 2x4 mesh."
    assert last == (
        "Orbax restored 8 arrays on 1x8, with a target and without: every bit is equal."
    )
    assert (
        """
+-----+-----+-----+-----+
| 0,4 | 1,5 | 2,6 | 3,7 |
+-----+-----+-----+-----+
"""
        in ran.stdout
    )
    assert (
        """
+---+---+---+---+---+---+---+---+
| 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
+---+---+---+---+---+---+---+---+
"""
        in ran.stdout
    )
    assert list(tmp_path.iterdir()) == []


def test_quickstart_keeps_a_directory_that_is_in_use(tmp_path):
    (tmp_path / "notes").write_text("mine")
    ran = run_quickstart(str(tmp_path), cwd=tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr) == (1, "", f"{tmp_path} is not empty\n")
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]
