"""Changes to the leaves of SRC, by options: select, rename, stack, cast, and maps."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import click

from reshard.checkpoint import Checkpoint
from reshard.cli import options
from reshard.cli.model_argument import look_here
from reshard.errors import ReshardError, ShardingError, raise_all
from reshard.sharding.mesh import parse_mesh
from reshard.transforms import cast, rename, select

CHANGES = options.all_of(
    options.SELECTION,
    options.values("--rename", "REGEX=REPL", "Rename leaves: re.sub on printed paths, in order."),
    options.values(
        "--unstack",
        "PATH=LAYER[@AXIS]",
        "Split stacked layers into their own arrays: 'params/layers=params/layer_{}@1'. `{}` is "
        "the number of a layer. The default axis is 0.",
    ),
    options.values(
        "--stack",
        "LAYER=PATH[@AXIS]",
        "Stack layers along a new axis: 'params/layer_{}=params/layers@1'. `{:24}`, `{1:24:2}` and "
        "`{3,5}` take some layers. `{%6}` in PATH is the position in a cycle of six layers.",
    ),
    options.values("--dtype", "[GLOB=]DTYPE", "Cast floats, rounding to nearest even."),
)


def map_options(text: str) -> Callable[[options.F], options.F]:
    """`--map`, with this help, and the options of ready maps."""
    return options.all_of(
        options.value("--map map_file", "FILE|hf:NAME", text),
        options.value(
            "--config",
            "HF_DIR",
            "Directory of the config.json for the map; SRC or --like by default.",
        ),
        options.value(
            "--vocab", "N", "With a ready map: rows of the embedding in JAX.", type=options.COUNT
        ),
        options.value(
            "--scan-axis",
            "N",
            "With a ready map: axis of the layers in scanned arrays. The default is 1.",
            type=click.IntRange(0),
        ),
    )


MAP = map_options(
    "TOML with rules from leaf to leaf, or a ready map: `reshard help maps`. Every leaf needs a "
    "rule."
)
REVERSE = options.flag("--reverse", "Use the map in the opposite direction.")


def remapped(ckpt: Checkpoint, flags: options.Flags) -> Checkpoint:
    """The checkpoint after the changes and --map."""
    if flags["reverse"] and flags["map_file"] is None:
        raise click.UsageError("--reverse requires --map FILE")
    ckpt = prepared(ckpt, flags)
    try:
        rules = chosen_map(ckpt, flags)
        if rules is None:
            return ckpt
        from reshard.convert.remap import remap

        return remap(ckpt, rules, reverse=flags["reverse"])
    except ReshardError as error:
        ready = flags["map_file"].startswith("hf:") and not flags["reverse"]
        if ready and ckpt.source.kind != "safetensors":
            error.hints += ("--reverse, if SRC has the names of the JAX model",)
        raise


def chosen_map(ckpt: Checkpoint, flags: options.Flags, to: str | None = None) -> Any:
    """The map that --map means, for the model of --config if that is given; None without --map.
    `to`: the API of a conversion."""
    file, config = flags["map_file"], flags["config"]
    given = {n: flags[n] for n in ("vocab", "scan_axis") if flags[n] is not None}
    if given and not (file or "").startswith("hf:"):
        raise click.UsageError("--vocab and --scan-axis require --map hf:NAME")
    if config and file is None:
        raise click.UsageError("--config requires --map")
    if file is None:
        return None
    from reshard.convert.remap import find_map, ready_map

    look_here()  # for the functions of the map
    if flags.get("reverse"):
        config = config or flags.get("like")
    if given:
        return ready_map(file, config or ckpt.source.root, to=to, **given)
    return find_map(file, ckpt, to, config)


def prepared(ckpt: Checkpoint, flags: options.Flags) -> Checkpoint:
    """The checkpoint after the changes. Checks --from first."""
    if flags["saved"] is not None:
        wanted = [*parse_mesh(flags["saved"], ckpt.meshes).split_axes.items()]
        others = [mesh for mesh in ckpt.meshes if [*mesh.split_axes.items()] != wanted]
        if others or not ckpt.meshes:
            raise ShardingError(
                f"--from {flags['saved']}: SRC was not saved on this mesh",
                [f"saved on `{mesh}`" for mesh in others] or ["no leaf was saved on a mesh"],
                [f"--from {mesh}" for mesh in ckpt.meshes[:1]],
            )
    if flags["select"] or flags["drop"]:
        ckpt = select(ckpt, flags["select"] or "**", drop=flags["drop"])
    if flags["rename"]:
        ckpt = rename(ckpt, [pair(text, "--rename") for text in flags["rename"]])
    ckpt = _stacked(ckpt, flags)
    casts: dict[str, str] = {}
    for text in flags["dtype"]:
        where, _, dtype = text.rpartition("=")
        where = where or "**"
        if where in casts:
            message = f"two dtypes for `{where}`: `{casts[where]}` and `{dtype}`"
            raise click.BadParameter(message, param_hint="--dtype")
        casts[where] = dtype
    return cast(ckpt, casts) if casts else ckpt


def _stacked(ckpt: Checkpoint, flags: options.Flags) -> Checkpoint:
    """The checkpoint after --unstack and --stack. Raises the problems of all together."""
    found: list[ReshardError] = []
    for name in ("unstack", "stack"):
        for text in flags[name]:
            from reshard.convert import stacking  # its import takes as long as a small job

            given, indices = _layers(text, f"--{name}")
            axis = re.search(r"@(-?\d{1,5})\Z", given)
            before, after = pair(given[: axis.start()] if axis else given, f"--{name}")
            change, at = getattr(stacking, name), int(axis[1]) if axis else 0
            try:
                ckpt = change(ckpt, before, after, at, indices=indices)
            except ReshardError as error:
                found.append(error)
    raise_all(found)
    return ckpt


def _layers(text: str, option: str) -> tuple[str, Sequence[int] | None]:
    """A path with `{}` for the numbers of layers, and the numbers of `{:24}`, `{1:24:2}` or
    `{3,5}`; None for all layers."""
    match = re.search(r"\{([^{}%]+)\}", text)
    if match is None:
        return text, None
    words = match[1].replace(" ", "")
    if ranged := re.fullmatch(r"(\d{0,5}):(\d{1,5})(?::([1-9]\d{0,4}))?", words):
        numbers: Sequence[int] = range(int(ranged[1] or 0), int(ranged[2]), int(ranged[3] or 1))
    elif re.fullmatch(r"\d{1,5}(,\d{1,5})*", words):
        numbers = [int(number) for number in words.split(",")]
    else:
        message = f"`{match[0]}` has no numbers of layers: `{{:24}}`, `{{1:24:2}}` or `{{3,5}}`"
        raise click.BadParameter(message, param_hint=option)
    return text.replace(match[0], "{}"), numbers


def pair(text: str, option: str) -> tuple[str, str]:
    """The two parts of the value of an option, around its last `=`."""
    left, equals, right = text.rpartition("=")
    if not equals or not left:
        raise click.BadParameter(f"`{text}` needs an `=` with text before it", param_hint=option)
    return left, right
