"""The command line: the only place that prints or exits.

Commands are imported when they run, so that `reshard --help` needs click alone.
"""

import importlib
import signal
import sys
from types import FrameType

import click

_COMMANDS = {
    "ckpt": "Rewrite a checkpoint for another mesh.",
    "commit": "Combine the shares that `--shard` wrote into a checkpoint.",
    "convert": "Convert a Linen checkpoint to NNX, or back.",
    "diff": "Compare two checkpoints.",
    "digest": "Show the digests of all arrays, and record them.",
    "doctor": "Show whether a checkpoint is complete, and what to run next.",
    "export": "Write a checkpoint as safetensors files, for Hugging Face.",
    "help": "Show a topic of the reference, or the help of a command.",
    "inspect": "Show the tree, the format, the steps and the saved meshes.",
    "verify": "Check that a checkpoint is complete, undamaged and unchanged.",
}
_LIBRARIES = ("jax", "flax", "orbax-checkpoint", "tensorstore")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Commands(click.Group):
    """Commands that are imported when they run. Help lists the short texts of `_COMMANDS`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, found, rest = super().resolve_command(ctx, args)
        if found is None:
            return name, found, rest
        # An interrupt inside the import of a library would surface as an error of that library.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            return name, importlib.import_module(f"reshard.cli.{name}").command, rest
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _versions(ctx: click.Context, param: click.Parameter, asked: bool) -> None:
    """Prints the versions that a bug report should name."""
    if not asked:
        return
    from importlib.metadata import version

    click.echo(f"reshard {version('reshard')}")
    click.echo(", ".join(f"{name} {version(name)}" for name in _LIBRARIES))
    ctx.exit()


@click.group(
    cls=_Commands,
    commands=[click.Command(name, short_help=text) for name, text in _COMMANDS.items()],
    context_settings={"help_option_names": ["--help", "-h"]},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_versions,
    help="Show the versions of reshard, JAX, Flax, Orbax and TensorStore.",
)
def command() -> None:
    """Rewrite JAX checkpoints for another mesh or for Flax's other API, in bounded memory.

    \b
    Example:
      reshard inspect run/1000
      reshard ckpt run/1000 out/1000 --to 1x8
    """


def main() -> None:
    """The console script. Exits with 0 if done, 1 if the answer is no, 2 after an error."""
    signal.signal(signal.SIGTERM, _stop)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in a shell's background
        signal.signal(signal.SIGINT, _stop)
    buckets = any(word.startswith(("gs://", "s3://")) for word in sys.argv)
    if buckets and sys.stderr is sys.__stderr__:
        from reshard.storage import disk

        # TensorStore logs each place without credentials. Its errors are exceptions.
        sys.stderr = disk.own_stderr()
    try:
        command.main(prog_name="reshard", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt) as error:
        for each in _SIGNALS:  # the process ends already
            signal.signal(each, signal.SIG_IGN)
        notes = _notes(error)
        click.echo(f"Interrupted; {notes}" if notes else "Interrupted.", err=True)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of a pipe has gone; Python must not complain about it when it exits.
        sys.stdout = None
        sys.exit(141)
    except Exception as error:
        from reshard.cli.output import as_flags
        from reshard.errors import KeptFilesError, ReshardError

        if not isinstance(error, ReshardError | MemoryError | OSError):
            raise
        message = error.render(10, as_flags) if isinstance(error, ReshardError) else str(error)
        click.echo(f"Error: {message or 'out of memory'}", err=True)
        if notes := _notes(error):
            click.echo(notes, err=True)
        sys.exit(1 if isinstance(error, KeptFilesError) else 2)


def _notes(error: BaseException) -> str:
    """The notes of a job in an error or in its cause, without those of other libraries."""
    from reshard.cli.output import as_flags

    notes = [*getattr(error, "__notes__", ()), *getattr(error.__cause__, "__notes__", ())]
    return "\n".join(note for note in map(as_flags, notes) if "--resume" in note)


def _stop(number: int, frame: FrameType | None) -> None:
    """Ends a job, which then removes its files. Further signals do not disturb that."""
    for each in _SIGNALS:  # not SIG_IGN: Python complains about a signal while that is set
        signal.signal(each, lambda number, frame: None)
    raise KeyboardInterrupt
