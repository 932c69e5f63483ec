"""``zoo data check --task detect``: everything that is wrong with boxes and images, at once."""

from __future__ import annotations

from typing import Any

import typer

from ._output import print_json, print_table

__all__ = ["check_detection"]


def check_detection(
    source: str,
    root: str | None,
    train_split: str | None,
    test_split: str | None,
    max_pixels: int | None,
    as_json: bool,
) -> None:
    """Check a detection data set as a training would, and print what was found (exit code 1 if it can't train)."""
    from transfer.detect.annotations import NAMED
    from transfer.detect.config import DetectConfig
    from transfer.detect.datasets import check_sets, read_sets
    from zoo.data.decoding import MAX_PIXELS, Decoding

    splits = {"train_split": train_split, "test_split": test_split}
    config = DetectConfig.model_validate({key: value for key, value in splits.items() if value is not None})
    how = Decoding(max_pixels=max_pixels or MAX_PIXELS)
    sets = check_sets(read_sets(source, root, config, how), config)
    problems = list(dict.fromkeys(sets.problems))
    parts = {"training": sets.train, "test": sets.test}
    notes = list(dict.fromkeys(note for part in parts.values() for note in part.notes))
    found: dict[str, Any] = {
        name: {
            "set": part.name,
            "images": len(part),
            "objects": sum(len(picture.objects) for picture in part.pictures),
            "difficult": sum(int(picture.objects.difficult.sum()) for picture in part.pictures),
            "crowd": sum(int(picture.objects.crowd.sum()) for picture in part.pictures),
        }
        for name, part in parts.items()
    }
    if as_json:
        print_json(
            {
                "schema": 1,
                "source": source,
                "kind": sets.train.kind,
                "classes": list(sets.train.classes),
                **found,
                "notes": notes,
                "problems": [problem.to_json() for problem in problems],
            }
        )
    else:
        rows = [{"part": name, **values} for name, values in found.items()]
        print_table(f"Boxes of {source} ({sets.train.kind})", ["part", *found["training"]], rows)
        print(f"{len(sets.train.classes)} classes: {', '.join(sets.train.classes)}")
        for note in notes:
            print(f"note: {note}")
        for problem in problems:
            print(f"wrong: {problem.what}\n  where: {problem.where}")
            for name in problem.files[NAMED:]:
                print(f"  and:   {name}")
            if problem.fix:
                print(f"  fix:   {problem.fix}")
        fatal = any(problem.fatal for problem in problems)
        print("A detector can't be trained on this." if fatal else "A detector can be trained on this.")
    if any(problem.fatal for problem in problems):
        raise typer.Exit(1)
