"""Measures `reshard ckpt`, `restore`, `convert` and `verify`, and prints a table.

    python -m tests.benchmarks

Run at the root of the repository.
"""

import argparse
import functools
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.benchmarks.bench import Bench, FailedError
from tests.benchmarks.machine import describe
from tests.benchmarks.sections import SECTIONS, Row


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks",
        description="Measure `reshard ckpt` from 2x4 to 1x8 against Orbax, `cp` and the bound, and "
        "`reshard.restore` into live arrays on several meshes against Orbax and decoding alone; of "
        "a restore only the call is timed, not the imports before it; and `reshard convert`.",
        epilog="sections: "
        + " ".join(f"{name}: {section.__doc__}" for name, section in SECTIONS.items()),
    )
    parser.add_argument(
        "--only", action="append", choices=SECTIONS, help="a section to run; may be repeated"
    )
    parser.add_argument("--rounds", type=int, default=5, help="how often each program runs")
    parser.add_argument(
        "--scratch",
        type=Path,
        default=Path("build/benchmarks"),
        help="holds the workloads (14 GB, made once) and one output at a time; default %(default)s",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure here")
    return parser


def _table(rows: list[Row]) -> Table:
    table = Table("measure", "floor", "reach for", "measured")
    for row in rows:
        table.add_row(*map(escape, (row.measure, row.floor, row.reach, row.measured)))
    return table


def main() -> None:
    parser = _parser()
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    scratch = arguments.scratch.absolute()
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / ".gitignore").write_text("*\n")
    machine = describe(scratch)
    for name, value in machine.items():
        print(f"{name}: {value}")
    bench = Bench(scratch, arguments.rounds, functools.partial(print, flush=True))
    rows: list[Row] = []
    for name in arguments.only or SECTIONS:
        bench.section = name
        try:
            for row in SECTIONS[name](bench):
                rows.append(row)
        except FailedError as error:
            print(f"{name}: {error}")
            rows.append(Row(name, "", "", f"failed: {error}"))
    console = Console()
    if not console.is_terminal:
        console.width = 120
    console.print(_table(rows))
    if arguments.json:
        document = {"machine": machine, "rounds": arguments.rounds}
        document |= {"rows": [asdict(row) for row in rows], "runs": bench.log}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
