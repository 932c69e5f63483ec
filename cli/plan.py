"""``zoo plan``: what a run will do, cost and need, before it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ._options import Json, Precision, Sets
from ._output import print_json, print_table, set_up_notes

__all__ = ["plan"]

_GIGA = 2**30
_TINY, _HUGE = 1e-9, 1e12  # what is typed lies in between: days and bytes of the outcome stay numbers


def plan(
    recipe: Annotated[str, typer.Argument(help="A recipe's name or a .yaml file.")],
    data: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="SRC", help="The images, as for zoo pretrain; may be repeated."),
    ] = None,
    images: Annotated[
        int | None, typer.Option("--images", min=1, help="How many images there are, instead of --data.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=1, help="Devices (default: those of this machine).")
    ] = None,
    device_kind: Annotated[
        str | None,
        typer.Option("--device-kind", help="v100, v100-32gb, a100, a100-80gb, h100, h200 or cpu."),
    ] = None,
    img_s: Annotated[
        float | None, typer.Option("--img-s", help="Images a second that one device trains, if you know it.")
    ] = None,
    network_gbit: Annotated[
        float, typer.Option("--network-gbit", help="Gbit/s of each machine of eight devices.")
    ] = 100.0,
    failures: Annotated[
        float | None, typer.Option("--failures", help="Failures of a device, a day, such as 0.001.")
    ] = None,
    restart: Annotated[
        float, typer.Option("--restart", help="Seconds from a failure until the run goes on.")
    ] = 300.0,
    checkpoint_seconds: Annotated[
        float | None,
        typer.Option("--checkpoint-seconds", help="Seconds that training waits for a checkpoint."),
    ] = None,
    epochs: Annotated[int | None, typer.Option("--epochs", help="Passes over the images.")] = None,
    samples: Annotated[
        str | None, typer.Option("--samples", help="Images that the run sees, instead of --epochs.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", help="Images a step, over all processes.")
    ] = None,
    precision: Precision = None,
    sets: Sets = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Train some steps here and measure their speed and memory.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Tell what a run will do, cost and need: steps, operations, memory, exchanges, time, and what doesn't fit."""
    set_up_notes()
    from zoo.errors import InputError
    from zoo.pretrain.forecast import Machines
    from zoo.pretrain.resolve import parse_assignments, resolve

    if data and images is not None:
        raise InputError(
            "--data and --images can't be used together: a source knows how many images it has.",
            where=f"--images {images}",
        )
    if epochs is not None and samples is not None:
        raise InputError(
            "--epochs and --samples can't be used together: each says how long the run is.",
            where=f"--epochs {epochs} --samples {samples}",
        )
    for name, value, low in (
        ("--img-s", img_s, _TINY),
        ("--network-gbit", network_gbit, _TINY),
        ("--failures", failures or None, _TINY),
        ("--restart", restart, 0.0),
        ("--checkpoint-seconds", checkpoint_seconds, 0.0),
    ):
        if value is not None and not low <= value <= _HUGE:  # nor what is no number
            raise InputError(f"This is not from {low:g} to {_HUGE:g}.", where=f"{name} {value:g}")
    options: dict[str, Any] = {
        "epochs": epochs,
        "samples": samples,
        "batch_size": batch_size,
        "precision": precision,
        "data.sources": data or None,
    }
    given = {key: value for key, value in options.items() if value is not None}
    if epochs is not None:
        given["samples"] = None  # a recipe's own number would win otherwise
    resolved = resolve(recipe, parse_assignments(sets or []), given)
    machines = Machines(gpus, device_kind, img_s, network_gbit, failures or None, restart, checkpoint_seconds)
    from zoo.pretrain.plan import make_plan

    trial = None
    if probe:
        from zoo.pretrain.trial import try_steps

        make_plan(resolved, machines, images)  # mistakes show first
        trial = try_steps(resolved, gpus or 1)
    found = make_plan(resolved, machines, images, trial)
    if as_json:
        print_json(found)
        return
    print(resolved.to_yaml())
    for title, rows in _sections(found).items():
        print(title)
        for label, text in rows:
            print(f"  {label:<20}  {text}")
    _print_tables(found)
    count = len(found["warnings"])
    for warning in found["warnings"]:
        print(f"warning: {warning}")
    print(f"{count} warning{'s' * (count != 1)}")


def _sections(found: dict[str, Any]) -> dict[str, list[tuple[str, str]]]:
    sections = {
        f"Plan of {found['name']}: {found['summary']}": _run_rows(found),
        "Costs": _cost_rows(found),
        "Memory of a device": _memory_rows(found),
        "Said between devices, a step": _exchange_rows(found),
        "Checkpoints": _checkpoint_rows(found),
        "Time": _time_rows(found),
        "Published": _paper_rows(found),
    }
    return {title: rows for title, rows in sections.items() if rows}


def _run_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    images, devices, steps, rate = (found[key] for key in ("images", "devices", "steps", "learning_rate"))
    memory = "" if devices["memory"] is None else f" ({_gb(devices['memory'])})"
    parts = "" if steps["parts"] == 1 else f" in {steps['parts']} parts"
    linear = rate["linear_rule"]
    compared = "no linear rule to compare with"
    if linear is not None:
        compared = (
            f"in proportion to {linear['reference']} ({linear['lr']:g} for {linear['batch_size']}): "
            f"{linear['scaled']:.4g}"
        )
    return [
        ("images", f"{images['count']:,} ({images['source']})"),
        ("devices", f"{devices['count']} x {devices['name']}{memory}, {devices['precision']}"),
        ("batch", f"{steps['batch_size']}, {steps['images_each']} on each device{parts}"),
        ("steps", f"{steps['total']:,}: {steps['epochs']} epochs of {steps['an_epoch']:,}"),
        ("images seen", f"{steps['images_seen']:,}"),
        ("learning rate", f"{rate['lr']:g} ({rate['optimizer']}); {compared}"),
    ]


def _cost_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    if found["uncounted"]:
        return [("unknown", found["uncounted"])]
    parameters, flops = found["parameters"], found["flops"]
    parts = ", ".join(f"{name} {count:,}" for name, count in parameters["parts"].items())
    return [
        ("parameters", f"{parameters['total']:,}, of which {parameters['trained']:,} are trained ({parts})"),
        ("operations", f"{flops['an_image'] / 1e9:.1f} GFLOP an image, forward and backward"),
    ]


def _memory_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    memory, trial = found["memory"], found["trial"]
    rows = []
    if memory is not None:
        names = ("weights", "optimizer", "average", "queues_and_buffers", "step")
        rows = [(name.replace("_", " "), _gb(memory[name])) for name in names if memory[name]]
        rows.append(("all tensors", _gb(memory["tensors"])))
        there = "" if memory["of_device"] is None else f"; it has {_gb(memory['of_device'])}"
        rows.append(("in practice about", f"{_gb(memory['in_practice'])} (1.5 times the tensors){there}"))
    if trial is not None and trial["memory"] is not None:
        rows.append(("measured", f"{_gb(trial['memory'])} for {trial['images']} images on {trial['device']}"))
    return rows


def _exchange_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    exchanged = found["exchanged"]
    if exchanged is None or not exchanged["by"]:
        return []
    rows = [
        (name, f"{_mb(one['bytes'])} in {one['calls']} call{'s' * (one['calls'] > 1)}")
        for name, one in exchanged["by"].items()
    ]
    return [*rows, ("each device sends", _mb(exchanged["sent"]))]


def _checkpoint_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    saved = found["checkpoints"]
    if saved is None:
        return []
    every = "at the end" if saved["every_steps"] is None else f"every {saved['every_steps']:,} steps"
    return [
        ("size", f"{_gb(saved['bytes'])}, {every}: {saved['written']:,} in all"),
        ("on disk", f"{_gb(saved['on_disk'])} at most ({saved['kept']} stay, one is being written)"),
    ]


def _time_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    time, lost, trial = found["time"], found["failures"], found["trial"]
    if time["step_seconds"] is None:
        return [("unknown", time["why"])]
    rows = [
        ("one device", f"{time['of_one_device']:.4g} images/s, {time['from']}: {time['why']}"),
        (
            "a step",
            f"{_duration(time['step_seconds'])}, {100 * time['communication_share']:.1f} % of it communication; "
            f"{time['images_per_second']:,.4g} images/s",
        ),
        ("an epoch", _duration(time["epoch_seconds"])),
        ("the run", f"{_duration(time['run_seconds'])}, {time['device_hours']:,.4g} device hours"),
    ]
    if trial is not None:
        share = 100 * trial["data_wait_share"]
        rows.append(("waiting for images", f"{share:.0f} % of the measured steps ({trial['data']})"))
    if lost is not None:
        rows += [
            ("a failure", f"every {_duration(lost['seconds_between'])}"),
            (
                "lost by failures",
                f"{100 * lost['lost_share']:.2f} % (a checkpoint every {_duration(lost['checkpoint_seconds'])}, "
                f"{_duration(lost['restart_seconds'])} to restart)",
            ),
            (
                "with failures",
                "never ends" if lost["run_seconds"] is None else _duration(lost["run_seconds"]),
            ),
            ("best interval", f"{_duration(lost['best_checkpoint_seconds'])} between checkpoints"),
        ]
    return rows


def _paper_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    paper = found["paper"]
    if paper is None:
        return []
    epochs = f"{paper['epochs']} epoch{'s' * (paper['epochs'] > 1)}"
    memory = "" if paper["memory"] is None else f", {paper['memory']} GB a device"
    rows = [
        (
            f"{paper['devices']} devices",
            f"{epochs} in {_duration(3600 * paper['hours'])}{memory} ({paper['source']})",
        )
    ]
    if paper["planned_hours"] is None:
        rows.append(("this plan", f"with --gpus {paper['devices']} --device-kind v100 it stands beside that"))
    else:
        ours = f"{epochs} in {_duration(3600 * paper['planned_hours'])}"
        if paper["planned_tensors"] is not None:
            ours += f", {_gb(paper['planned_tensors'])} of tensors"
            if paper["memory"] is not None:
                ours += f" (there {paper['memory'] * _GIGA / paper['planned_tensors']:.2f} times as much)"
        rows.append(("this plan", ours))
        if paper["calibrates"] and found["time"]["from"] == "assumed":
            rows.append(("", "the assumed speed comes from this very run; see zoo/pretrain/scaling.py"))
    return rows


def _print_tables(found: dict[str, Any]) -> None:
    if found["crops"]:
        rows = [
            {
                "crops": f"{crop['count']} x {crop['size']}",
                "GFLOP each, forward": crop["flops"] / 1e9,
                "share": f"{100 * crop['share']:.0f} %",
            }
            for crop in found["crops"]
        ]
        print_table("Crops", list(rows[0]), rows)
    rows = [_scaling_row(row) for row in found["scaling"] if row["impossible"] is None]
    columns = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    print_table("The same batch on other numbers of devices", columns, rows)
    others = [row for row in found["scaling"] if row["impossible"] is not None]
    if others:
        counts = ", ".join(str(row["devices"]) for row in others)
        print(f"Not on {counts}: {others[0]['impossible']}")


def _scaling_row(row: dict[str, Any]) -> dict[str, Any]:
    def percent(key: str) -> str | None:
        return None if row[key] is None else f"{100 * row[key]:.1f} %"

    return {
        "devices": row["devices"],
        "images each": row["images_each"],
        "tensors": None if row["memory"] is None else _gb(row["memory"]),
        "a step": None if row["step_seconds"] is None else _duration(row["step_seconds"]),
        "images/s": row["images_per_second"],
        "communication": percent("communication_share"),
        "the run": None if row["run_seconds"] is None else _duration(row["run_seconds"]),
        "lost by failures": percent("lost_share"),
    }


def _gb(size: float) -> str:
    return f"{size / _GIGA:.2f} GB" if size >= _GIGA / 10 else _mb(size)


def _mb(size: float) -> str:
    for unit, name in ((2**20, "MB"), (2**10, "kB")):
        if size >= unit / 10:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} bytes"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
    if seconds < 1800:
        return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"
    minutes = round(seconds / 60)
    days, minutes = divmod(minutes, 24 * 60) if minutes >= 72 * 60 else (0, minutes)
    hours, minutes = divmod(minutes, 60)
    if days:
        return f"{days} days {hours} h"
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"
