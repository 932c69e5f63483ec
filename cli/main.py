"""The command line: registration only. Nothing here imports torch."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer

from . import convert, data, demo, extract, inspect, models, pretrain, transfer, weights
from ._errors import report

__all__ = ["app", "run"]

app = typer.Typer(
    name="zoo",
    help="Pretrain, publish, load and judge self-supervised vision backbones.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo.demo)
app.command("pretrain")(pretrain.pretrain)
app.add_typer(data.data, name="data")
app.command("views")(data.views)
app.command("publish")(models.publish)
app.add_typer(transfer.app, name="transfer")
app.command("results")(transfer.results)
app.command("extract")(extract.extract)
app.command("convert")(convert.convert)
app.command("list")(models.list_models)
app.command("show")(models.show)
app.command("verify")(weights.verify)
app.command("doctor")(weights.doctor)
app.command("diff")(weights.diff)
app.command("tag")(models.tag)
app.command("pull")(models.pull)
app.command("rm")(models.rm)
app.command("runs")(inspect.runs)
app.add_typer(inspect.recipes, name="recipes")
app.command("env")(inspect.env)


@app.callback()
def main(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks (works anywhere on the line).")
    ] = False,
) -> None:
    """Pretrain, publish, load and judge self-supervised vision backbones."""


def run(arguments: list[str] | None = None) -> None:
    """Run the command line and leave with the exit code of the contract."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # file names can be no text in any encoding
            stream.reconfigure(errors="backslashreplace")
    from zoo.engine.world import strip_local_rank

    words, _ = strip_local_rank(words)  # old launchers append it
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    # Threads that wait should sleep: spinning ones slow a shared machine down several times over.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if words[:1] == ["transfer"]:
        transfer.register()  # its commands are built from pydantic configs, which other commands can do without
    try:
        app(words, standalone_mode=True, obj=words)
    except Exception as error:
        raise SystemExit(report(error, debug)) from None
    except KeyboardInterrupt as error:
        raise SystemExit(report(error, debug)) from None
