"""`reshard help`: the reference, which travels with the package as Markdown files."""

import importlib.resources
import sys

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
    """Show a topic of the reference, or list the topics.

    What --help is for one command, a topic is for what several share. In a terminal it is
    rendered; piped, it is Markdown.

    \b
    Example:
      reshard help
      reshard help meshes
      reshard help conversion | less
    """
    texts = topics()
    if topic is None:
        for name, text in texts.items():
            click.echo(f"{name:12}{text.partition(chr(10))[0].removeprefix('# ')}")
        click.echo("\n`reshard help TOPIC` shows one; `reshard COMMAND --help`, the options.")
        click.echo(f"Shell completion, a line for ~/.bashrc (zsh: zsh_source): {_COMPLETION}")
    elif topic not in texts:
        raise ArgumentError(
            f"there is no topic `{topic}`", [f"topics: {', '.join(texts)}"], ["reshard help"]
        )
    elif sys.stdout.isatty():
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(texts[topic]))
    else:
        click.echo(texts[topic], nl=False)
