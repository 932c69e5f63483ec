"""``zoo data check``, ``zoo data shard`` and ``zoo views``: look at images, and pack them, before training."""

from __future__ import annotations

import logging
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ._options import Json, MaxPixels, Quiet, Seed, Workers
from ._output import print_json, print_table, set_up_notes

if TYPE_CHECKING:
    from zoo.data.check import CheckReport

__all__ = ["data", "views"]

_SHOWN = 10  # problems on the screen; the report has all
_REFRESH = 0.1  # seconds between two states of the bar

data = typer.Typer(help="Check collections of images, or put them into shards.", no_args_is_help=True)


@data.callback()
def data_main() -> None:
    """Check collections of images, or put them into shards."""


@data.command("check")
def check(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A folder, a text file of paths, tar shards, or a name.")
    ],
    report: Annotated[
        str, typer.Option("--report", help="The file that lists unusable images, one JSON object a line.")
    ] = "bad_files.jsonl",
    max_pixels: MaxPixels = None,
    max_bytes: Annotated[
        int | None, typer.Option("--max-bytes", min=1, help="Refuse larger files (default: 536870912).")
    ] = None,
    max_text_bytes: Annotated[
        int | None,
        typer.Option(
            "--max-text-bytes", min=1, help="Refuse PNGs with larger text blocks (default: 1048576)."
        ),
    ] = None,
    channels: Annotated[
        int, typer.Option("--channels", min=1, help="What the images must have: 3, 1 (gray), or many.")
    ] = 3,
    task: Annotated[
        str,
        typer.Option("--task", help="images, or detect: boxes against images, as before a training on them."),
    ] = "images",
    root: Annotated[
        str | None, typer.Option("--data", metavar="ROOT", help="With --task detect: where a named set lies.")
    ] = None,
    train_split: Annotated[
        str | None, typer.Option("--train-split", help="With --task detect: the set to train on.")
    ] = None,
    test_split: Annotated[
        str | None, typer.Option("--test-split", help="With --task detect: the set to score on.")
    ] = None,
    workers: Workers = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Read every image once, completely, and list the ones that can't be used (exit code 1 if there are any)."""
    set_up_notes(quiet)
    if task == "detect":
        from ._detect import check_detection

        _refuse_of_images(max_bytes=max_bytes, max_text_bytes=max_text_bytes, workers=workers)
        check_detection(source, root, train_split, test_split, max_pixels, as_json)
        return
    if task != "images" or any(value is not None for value in (root, train_split, test_split)):
        from zoo.errors import InputError, did_you_mean

        raise InputError(
            "--data, --train-split and --test-split go with --task detect."
            if task == "images"
            else f"There is no task {task}.",
            where=f"--task {task}",
            fix=did_you_mean(task, ("images", "detect")) + "known: images, detect",
        )
    from zoo.data.check import check_images
    from zoo.data.decoding import PLAIN, Decoding
    from zoo.data.open import open_source

    how = Decoding(
        channels=channels,
        max_pixels=max_pixels or PLAIN.max_pixels,
        max_bytes=max_bytes or PLAIN.max_bytes,
        max_text_bytes=max_text_bytes or PLAIN.max_text_bytes,
    )
    images = open_source(source, how=how)
    with _progress(len(images), quiet or as_json) as update:
        found = check_images(images, report=report, workers=workers, progress=update)
    notes = list(getattr(images, "notes", ()))
    if as_json:
        print_json({**found.to_json(), "source": images.name, "report": report, "notes": notes})
    else:
        print_table(f"Images of {images.name}", ["what", "found"], _rows(found, len(images.classes), notes))
        _print_problems(found, report)
    if found.bad:
        raise typer.Exit(1)


def _refuse_of_images(**given: int | None) -> None:
    """The check of boxes reads the headers of images, one after the other."""
    from zoo.errors import InputError

    for name, value in given.items():
        if value is not None:
            flag = f"--{name.replace('_', '-')}"
            raise InputError(f"{flag} goes with --task images.", where=f"{flag} {value}", fix="leave it out")


@data.command("shard")
def shard(
    source: Annotated[
        str, typer.Argument(metavar="FOLDER", help="A folder of images, or a text file of paths.")
    ],
    out: Annotated[str, typer.Option("--out", "-o", help="The folder for the shards.")],
    size: Annotated[str, typer.Option("--size", help="Bytes of a shard, at most.")] = "256MB",
    count: Annotated[
        int | None, typer.Option("--count", min=1, help="Images of a shard, instead of --size.")
    ] = None,
    in_order: Annotated[
        bool,
        typer.Option(
            "--in-order", help="Keep the folder's order (default: shuffled, so that a shard has all classes)."
        ),
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Pack images into tar shards (WebDataset's layout) with an index; called again, it goes on where it stopped."""
    set_up_notes(quiet)
    from zoo.data.open import open_source
    from zoo.data.shards.pattern import parse_size
    from zoo.data.shards.write import write_shards

    most = parse_size(size, f"--size {size}")
    images = open_source(source)
    for note in getattr(images, "notes", ()):
        logging.getLogger("zoo").info("%s", note)
    with _progress(len(images), quiet or as_json, "packing") as update:
        made = write_shards(
            images,
            Path(out),
            size=most,
            count=count,
            shuffle=not in_order,
            progress=lambda done: update(done, 0),
        )
    if as_json:
        print_json({**made.to_json(), "source": images.name, "out": out})
        return
    before = f" ({made.kept} were there)" if made.kept else ""
    classes = f" of {len(made.classes)} classes" if made.classes else ""
    print(f"{out}: {made.images} images{classes} in {made.shards} shards{before}, {made.bytes / 1e6:.1f} MB")
    print(f"  train on them: zoo pretrain --data {out}")


def _print_problems(found: CheckReport, report: str) -> None:
    from zoo.errors import in_one_line

    if not found.bad:
        print(f"All {found.images} images can be used ({report} is empty).")
        return
    print(f"{len(found.bad)} of {found.images} images can't be used:")
    for line in found.bad[:_SHOWN]:
        print(f"  {in_one_line(line['file'])}: {line['problem']}")
    if len(found.bad) > _SHOWN:
        print(f"  ... and {len(found.bad) - _SHOWN} more")
    print("What helps:")
    for fix, count in Counter(line["fix"] for line in found.bad if line["fix"]).most_common():
        print(f"  {count} x {fix}")
    print(f"All of them, with what helps, are listed in {report}.")


def _rows(found: CheckReport, classes: int, notes: list[str]) -> list[dict[str, str]]:
    rows = {"images": f"{found.images}", "unusable": f"{len(found.bad)}"}
    if found.smallest and found.largest:
        rows["smallest (height x width)"] = f"{found.smallest[0]} x {found.smallest[1]}"
        rows["largest"] = f"{found.largest[0]} x {found.largest[1]}"
        rows["median shorter side"] = f"{found.median_side:g}"
        rows["without colour"] = f"{found.gray}"
    if found.classes:
        least, most = min(found.classes.values()), max(found.classes.values())
        rows["classes"] = f"{classes}, of {least if least == most else f'{least} to {most}'} images"
        if classes > len(found.classes):
            rows["empty classes"] = f"{classes - len(found.classes)}"
    for note in notes:
        rows.setdefault("notes", "")
        rows["notes"] += ("; " if rows["notes"] else "") + note
    return [{"what": key, "found": value} for key, value in rows.items()]


class _progress:  # noqa: N801 - used like a function
    """A bar on standard error, if that is a terminal; otherwise a line every so often."""

    def __init__(self, total: int, silent: bool, doing: str = "reading") -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._total, self._silent, self._doing = total, silent, doing
        console = Console(stderr=True)
        self._plain = not console.is_terminal
        self._bar = Progress(
            TextColumn(doing),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[bad]}"),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,  # its thread would be there when the reading processes are forked
            disable=silent or self._plain,
        )
        self._task = self._bar.add_task(doing, total=total, bad="")
        self._shown, self._said = 0.0, 0

    def __enter__(self) -> _progress:
        self._bar.start()
        return self

    def __call__(self, done: int, bad: int) -> None:
        if self._plain and not self._silent and done // 10_000 > self._said:
            self._said = done // 10_000
            typer.echo(
                f"{self._doing}: {done} of {self._total}{f', {bad} unusable' if bad else ''}", err=True
            )
        now = time.monotonic()
        if now - self._shown > _REFRESH or done == self._total:
            self._shown = now
            self._bar.update(self._task, completed=done, bad=f"{bad} unusable" if bad else "", refresh=True)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def views(
    source: Annotated[
        str | None,
        typer.Argument(metavar="IMAGE|SRC", help="A picture, a folder, or whatever --data takes."),
    ] = None,
    preset: Annotated[
        str, typer.Option("--preset", help="A view preset, or a recipe's name or .yaml file.")
    ] = "swav",
    out: Annotated[
        str, typer.Option("--out", "-o", help="The picture to write (.png or .jpg).")
    ] = "views.png",
    count: Annotated[int, typer.Option("--count", min=1, help="Images of a folder that are shown.")] = 4,
    epoch: Annotated[int, typer.Option("--epoch", min=0, help="Which epoch's views.")] = 0,
    max_pixels: MaxPixels = None,
    seed: Seed = None,
    show_list: Annotated[bool, typer.Option("--list", help="List the presets.")] = False,
    as_json: Json = False,
) -> None:
    """Show the views that training would see, as a labelled picture; with --list, all presets."""
    from zoo.errors import InputError

    if show_list:
        _list_presets(as_json)
        return
    if source is None:
        raise InputError(
            "Nothing to show.", fix="pass a picture or a folder, e.g. zoo views photos/ -o grid.png"
        )
    from zoo.pretrain.show_views import show_views

    found = show_views(
        source, preset, Path(out), count=count, epoch=epoch, seed=seed or 0, max_pixels=max_pixels
    )
    if as_json:
        print_json(found)
    else:
        print(f"{out}: {len(found['images'])} image(s), {found['views']} views each")


def _list_presets(as_json: bool) -> None:
    from zoo.data.views.presets import PRESETS, SHORT

    if as_json:
        presets = {name: [preset.summary, preset.source] for name, preset in PRESETS.items()}
        print_json({"schema": 1, "presets": presets, "short": SHORT})
        return
    short = {full: name for name, full in SHORT.items()}
    rows = [
        {
            "preset": preset.name,
            "what it is": preset.summary + (f" (short: {short[name]})" if name in short else ""),
            "views": " + ".join(f"{n} x {size}" for size, n in preset.plan.groups),
        }
        for name, preset in PRESETS.items()
    ]
    print_table("View presets (--set views.preset=NAME)", ["preset", "views", "what it is"], rows)
