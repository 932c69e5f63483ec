"""The command line: registration only. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from typing import Annotated, Any

import typer

from ._errors import report

__all__ = ["command_line", "run"]

# name -> module:attribute, a function or a group; in the order of --help
_COMMANDS = {
    "demo": "demo:demo",
    "plan": "plan:plan",
    "pretrain": "pretrain:pretrain",
    "data": "data:data",
    "views": "data:views",
    "publish": "models:publish",
    "transfer": "transfer:app",
    "results": "transfer:results",
    "table": "table:table",
    "predict": "predict:predict",
    "extract": "extract:extract",
    "assign": "assign:assign",
    "neighbours": "neighbours:neighbours",
    "convert": "convert:convert",
    "list": "models:list_models",
    "show": "models:show",
    "verify": "weights:verify",
    "doctor": "weights:doctor",
    "diff": "weights:diff",
    "tag": "models:tag",
    "pull": "models:pull",
    "rm": "models:rm",
    "runs": "inspect:runs",
    "report": "report:report",
    "recipes": "inspect:recipes",
    "env": "inspect:env",
}


# They are asked often, without any option; typer would take longer to look for options than they take.
_AT_ONCE = ("list", "runs", "results", "env")


def command_line(words: list[str]) -> typer.Typer:
    """The command line, as far as these words need it: typer takes 10 ms to prepare each command.

    All commands are there unless the first word is the name of one.
    """
    app = typer.Typer(
        name="zoo",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_zoo)
    for name in words[:1] if words and words[0] in _COMMANDS else _COMMANDS:
        command = _command(name)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    return app


def _command(name: str) -> Any:
    module, attribute = _COMMANDS[name].split(":")
    return getattr(importlib.import_module(f".{module}", __package__), attribute)


def _tell_version(asked: bool) -> None:
    if asked:
        import importlib.metadata  # 15 ms

        print(f"zoo {importlib.metadata.version('vision-model-zoo')}")
        raise typer.Exit


def _zoo(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks (works anywhere on the line).")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Pretrain, publish, load and judge self-supervised vision backbones."""


def run(arguments: list[str] | None = None) -> None:
    """Run the command line and leave with the exit code of the contract."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # whoever started us closed it
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError):  # what it writes to was replaced below it
                stream.reconfigure(errors="backslashreplace")  # file names can be no text in any encoding
    if any(word.startswith("--local") for word in words):  # old launchers append their local rank
        from zoo.engine.world import strip_local_rank

        words, _ = strip_local_rank(words)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    # Threads that wait should sleep: spinning ones slow a shared machine down several times over.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if words[:1] == ["transfer"]:
        from .transfer import register

        register()  # its commands are built from pydantic configs, which other commands can do without
    try:
        if len(words) == 1 and words[0] in _AT_ONCE:
            _command(words[0])()
            raise SystemExit(0)
        command_line(words)(words, standalone_mode=True, obj=words)
    except Exception as error:
        raise SystemExit(report(error, debug)) from None
    except KeyboardInterrupt as error:
        raise SystemExit(report(error, debug)) from None
