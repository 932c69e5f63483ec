"""``zoo convert``: a model in the layout of another library, or a foreign file as a model of the zoo."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from zoo.weights.writers import WRITERS

from ._options import Json
from ._output import print_json, set_up_notes

if TYPE_CHECKING:
    from zoo.conversion import Converted

__all__ = ["convert"]


def convert(
    model: Annotated[
        str,
        typer.Argument(
            help="A file of weights of any known layout, or any model: org/name\\[@tag], a run, a folder, "
            "url:ADDRESS, swav_resnet50.800ep, timm:NAME, ..."
        ),
    ],
    to: Annotated[
        str, typer.Option("--to", metavar="LAYOUT", help=f"One of {', '.join(WRITERS)}.")
    ] = "bundle",
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", help="The file or folder to write (detectron2: else MODEL.pkl)."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="ORG/NAME", help="Put the bundle into the local hub instead."),
    ] = None,
    licence: Annotated[
        str | None,
        typer.Option("--licence", "--license", help="Of the weights, if where they come from doesn't say."),
    ] = None,
    legacy: Annotated[
        bool,
        typer.Option(
            "--legacy", help="In the container of torch before 1.6 (layouts torchvision and amdim)."
        ),
    ] = False,
    yaml: Annotated[
        bool,
        typer.Option("--yaml", help="Write detectron2's settings for the weights beside them, as NAME.yaml."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace what an earlier conversion wrote.")] = False,
    as_json: Json = False,
) -> None:
    """Write a model so that another library loads it; says where every tensor went."""
    set_up_notes()
    from zoo.conversion import convert as convert_model

    done = convert_model(
        model, to=to, out=out, name=name, licence=licence, legacy=legacy, yaml=yaml, force=force
    )
    if as_json:
        print_json(done.to_json())
        return
    print("\n".join(_lines(done)))


def _lines(done: Converted) -> list[str]:
    account = done.account
    under = f" under {account.prefix!r}" if account.prefix else ""
    lines = [
        f"read     {done.what} (format {done.format}): {done.network.arch}, method {done.method}, "
        f"licence {done.licence}",
        f"matched  {account.matched} of {account.matched} backbone tensors{under}",
    ]
    for group in account.dropped:
        why = "as a file of this format has" if group.expected else "NOT expected in this format"
        keys = ", ".join((*group.keys[:2], "...") if len(group.keys) > 2 else group.keys)
        lines.append(f"apart    {group.what}: {len(group.keys)} tensors ({keys}), {why}")
    lines += [f"note     {note}" for note in (*account.notes, *done.notes)]
    if done.published is None:
        lines.append(f"wrote    {done.path} ({done.to})")
        if done.yaml is not None:
            lines.append(f"wrote    {done.yaml} (its settings)")
        lines += ["use it with:", *(f"    {line}" for line in done.usage)] if done.usage else []
    else:
        new = "published" if done.published.new else "was published before:"
        lines.append(f"{new} {done.published.name}@{done.published.revision}")
        lines.append(f'load it with: zoo.load("{done.published.name}")')
    return lines
