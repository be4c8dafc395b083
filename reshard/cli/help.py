"""`reshard help`: the reference, which travels with the package as Markdown files."""

import importlib.resources
import os
import sys
from difflib import get_close_matches
from typing import Any

import click

from reshard.errors import ArgumentError

_TOPICS = importlib.resources.files("reshard.cli") / "topics"
_COMPLETION = 'eval "$(_RESHARD_COMPLETE=bash_source reshard)"'


def topics() -> dict[str, str]:
    """The Markdown of each topic, by name, in alphabetical order."""
    files = sorted(_TOPICS.iterdir(), key=lambda file: file.name)
    return {file.name.removesuffix(".md"): file.read_text("utf-8") for file in files}


@click.command("help")
@click.argument(
    "topic",
    required=False,
    shell_complete=lambda ctx, param, start: [name for name in topics() if name.startswith(start)],
)
def command(topic: str | None) -> None:
    """Show a topic of the reference or the help of a command, or list the topics.

    Topics cover what several commands share.

    \b
    Example:
      reshard help meshes
      reshard help ckpt
    """
    texts, program = topics(), click.get_current_context().find_root()
    group: Any = program.command
    commands = group.list_commands(program)
    if topic is None:
        titles = {name: text.partition("\n")[0] for name, text in texts.items()}
        lines = [f"{name:12}{title.removeprefix('# ')}" for name, title in titles.items()]
        lines += [
            "",
            "`reshard help TOPIC` shows a topic, `reshard help COMMAND` the options of a command.",
            f"For shell completion, add to ~/.bashrc (for zsh, zsh_source): {_COMPLETION}",
        ]
        shown = "\n".join(lines)
    elif topic in commands:
        _, found, _ = group.resolve_command(program, [topic])
        shown = click.Context(found, info_name=topic, parent=program).get_help()
    elif topic not in texts:
        lists = [f"topics: {', '.join(texts)}", f"commands: {', '.join(commands)}"]
        near = [f"reshard help {name}" for name in get_close_matches(topic, [*texts, *commands], 1)]
        hints = near or ["reshard help"]
        raise ArgumentError(f"there is no topic or command `{topic}`", lists, hints)
    elif sys.stdout.isatty():
        from rich.console import Console
        from rich.markdown import Markdown

        console = Console()
        with console.capture() as drawn:
            console.print(Markdown(texts[topic]))
        shown = drawn.get()
    else:
        shown = texts[topic]
    os.environ.setdefault("LESS", "-FRX")  # `less` ends if all fits on one screen
    click.echo_via_pager(shown.rstrip("\n"))
