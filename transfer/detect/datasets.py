"""Which images are trained and tested on: by the name of a published set, or a folder in any known layout."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from zoo.data.decoding import PLAIN, Decoding
from zoo.errors import InputError, ZooError, did_you_mean

from ..voc import VOC_CLASSES
from .annotations import BoxSet, Problem
from .checks import Size, check_boxes, check_overlap, check_twice, measure, require_none
from .coco import coco_parts, find_coco, packed_files, read_coco
from .coco_scores import need_hotcoco
from .config import DetectConfig
from .photos import photos_voc
from .suspicions import check_meaning
from .table import find_table, read_table
from .voc import find_voc, is_voc, read_voc

if TYPE_CHECKING:
    from zoo.engine.collectives import Collectives

__all__ = [
    "BUILTIN",
    "NAMES",
    "Sets",
    "check_sets",
    "family_of",
    "open_sets",
    "open_together",
    "read_sets",
]

BUILTIN = "builtin:photos-voc"
NAMES = ("voc07+12", "voc07", "coco2017", BUILTIN)
_HOME = "DETECTRON2_DATASETS"
_TESTS = ("test", "val", "valid")


@dataclass
class Sets:
    """A training and a test set, and what is wrong with them."""

    train: BoxSet
    test: BoxSet
    problems: list[Problem]
    sizes: list[list[Size | None]] = field(default_factory=list)
    """Of all images of both sets as they were read, once they were looked into."""


def family_of(dataset: str) -> str:
    """``voc``, ``coco`` or ``own``: whose protocol belongs to the data."""
    if dataset in ("voc07", "voc07+12"):
        return "voc"
    return "coco" if dataset == "coco2017" else "own"


def open_sets(
    dataset: str,
    data: str | None,
    config: DetectConfig,
    sizes: list[list[Size | None]] | None = None,
    how: Decoding = PLAIN,
) -> Sets:
    """Read and check both sets.

    Args:
        dataset: a name or a folder.
        data: the folder that holds a named set.
        config: what of it is asked for.
        sizes: ``Sets.sizes`` of the same sets that were found to be in order: no image is looked into again.
        how: how files become pixels.

    Raises:
        InputError: no such data, or everything that is wrong with it.
    """
    sets = read_sets(dataset, data, config, how)
    _refuse_voc_scoring(sets.test, config)
    sets = check_sets(sets, config, sizes)
    require_none(sets.problems)
    if sets.test.kind == "coco":
        need_hotcoco()  # else it would be missed when the training is over
    return sets


def open_together(
    dataset: str,
    data: str | None,
    config: DetectConfig,
    world: Collectives,
    sizes: list[list[Size | None]] | None = None,
    how: Decoding = PLAIN,
) -> Sets:
    """``open_sets`` in each of several processes: the first looks into the images, the others take its word.

    Raises:
        InputError: in every process; what is wrong is said by the first.
    """
    sets, error = None, None
    if world.rank == 0:
        try:
            sets = open_sets(dataset, data, config, sizes, how)
        except ZooError as found:
            error = found
    told = world.gather_values(None if sets is None else sets.sizes)[0]
    if error is not None:
        raise error
    if told is None:
        raise InputError("The first process can't use the data: see what it says.", where=data or dataset)
    return sets or open_sets(dataset, data, config, told, how)


def check_sets(sets: Sets, config: DetectConfig, sizes: list[list[Size | None]] | None = None) -> Sets:
    """Compare annotations with images; then leave out what was asked to be left out.

    ``sizes`` as of ``open_sets``.
    """
    sets.sizes = sizes or [measure(part, sets.problems) for part in (sets.train, sets.test)]
    for part, found in zip((sets.train, sets.test), sets.sizes, strict=True):
        check_twice(part, sets.problems)
        check_meaning(part, found, sets.problems)
    keep_empty = config.keep_empty or config.head == "detr"  # whose reference trains on all images
    check_boxes(sets.train, sets.sizes[0], sets.problems, training=True, keep_empty=keep_empty)
    check_boxes(sets.test, sets.sizes[1], sets.problems, training=False)
    if sizes is None and not config.allow_overlap and not config.test_on_train:
        check_overlap(sets.train, sets.test, sets.problems)
    if config.limit:
        kept = range(config.limit)
        sets.train = sets.train.chosen(kept[: len(sets.train)])
        sets.test = sets.test.chosen(kept[: len(sets.test)])
    return sets


def read_sets(dataset: str, data: str | None, config: DetectConfig, how: Decoding = PLAIN) -> Sets:
    """Read the annotations of both sets; what is wrong with them is listed, not raised.

    Raises:
        InputError: an unknown name, or a folder in which nothing can be found.
    """
    sets = _read(dataset, data, config)
    sets.train.decoding = sets.test.decoding = how
    return sets


def _read(dataset: str, data: str | None, config: DetectConfig) -> Sets:
    problems: list[Problem] = []
    if dataset in (BUILTIN, "builtin:photos") and data is None:
        return _voc(find_voc(photos_voc()), "", config, problems)
    _refuse_splits(dataset, config)
    if dataset == "coco2017":
        return _coco(find_coco(_home(dataset, data)), "train2017", "val2017", problems)
    if dataset in ("voc07", "voc07+12"):
        return _published_voc(_home(dataset, data), dataset == "voc07+12", problems)
    folder = Path(data or dataset).expanduser()
    known = dataset in (data, *NAMES) or os.path.isdir(Path(dataset).expanduser())
    if not known or not os.path.isdir(folder):  # with --data the name may be misspelt, too
        raise InputError(
            "There is no such data set or folder.",
            where=data if data and known else dataset,
            fix=did_you_mean(dataset, NAMES)
            + f"known: {', '.join(NAMES)}; or pass a folder in VOC's or COCO's layout, or with train.csv and test.csv",
        )
    return _own(folder, config, problems)


def _refuse_splits(dataset: str, config: DetectConfig) -> None:
    """A published name says what is trained and tested on."""
    if family_of(dataset) == "own":
        return
    for name in ("train_split", "test_split"):
        if getattr(config, name) != DetectConfig.model_fields[name].default:
            raise InputError(
                f"{dataset} has its published split, and no other.",
                where=f"--{name.replace('_', '-')} {getattr(config, name)}",
                fix="leave it out, or pass the folder itself as --dataset",
            )


def _refuse_voc_scoring(test: BoxSet, config: DetectConfig) -> None:
    """How VOC scores is not asked of COCO, which has rules of its own."""
    given = {f"--ap {config.ap}": config.ap, "--no-rounding": not config.rounding}
    for option, value in given.items():
        if value and test.kind == "coco":
            raise InputError(
                f"{test.name} is scored by COCO's rules: {option.split()[0]} is of VOC's.",
                where=option,
                fix="leave it out",
            )


def _own(folder: Path, config: DetectConfig, problems: list[Problem]) -> Sets:
    """A folder tells by its content what it is."""
    if is_voc(folder):
        return _voc(_voc_root(folder), "", config, problems)
    for test in dict.fromkeys((config.test_split, *_TESTS)):
        table = find_table(folder, "train"), find_table(folder, test)
        if table[0] is not None and table[1] is not None:
            train = read_table(table[0], "train", None, problems)
            return Sets(train, read_table(table[1], test, train.classes, problems), problems)
    trains = dict.fromkeys((config.train_split, "train2017", "train"))
    tests = dict.fromkeys((config.test_split, "val2017", *_TESTS))
    found = (
        [split for split in trains if coco_parts(folder, split)],
        [split for split in tests if coco_parts(folder, split)],
    )
    if found[0] and found[1]:
        return _coco(folder, found[0][0], found[1][0], problems)
    raise _nothing_in(folder, config, found)


def _nothing_in(folder: Path, config: DetectConfig, found: tuple[list[str], list[str]]) -> InputError:
    """What to do about a folder of which nothing can be made: half of a data set, or none."""
    halves = [
        part + [split] * (find_table(folder, split) is not None)
        for part, split in zip(found, ("train", config.test_split), strict=True)
    ]
    if any(halves):
        there, lacks = ("training", "test") if halves[0] else ("test", "training")
        return InputError(
            f"Only a {there} set is there ({(halves[0] or halves[1])[0]}), and no {lacks} set.",
            where=folder,
            fix=f"add one in the same layout, named {'test or val' if halves[0] else 'train'}, or name it with "
            f"--{'test' if halves[0] else 'train'}-split",
        )
    packed = packed_files(folder)
    tried = [folder / "Annotations", folder / "VOC2007", folder / "annotations" / "instances_train2017.json"]
    return InputError(
        "No boxes are there in a layout that is known.",
        where=", ".join(str(path) for path in (*tried, folder / "train.csv")),
        fix=(f"unpack {', '.join(packed)} there; or " if packed else "")
        + "pass the folder that holds VOC2007, or annotations, train2017 and val2017, or train.csv and test.csv "
        "(or .jsonl)",
    )


def _voc_root(folder: Path) -> Path:
    """Whatever year it is: the folder itself, or the newest below it that people score on."""
    if all((folder / part).is_dir() for part in ("Annotations", "ImageSets/Main")):
        return folder
    has_2007 = any((path / "VOC2007").is_dir() for path in (folder, folder / "VOCdevkit"))
    return find_voc(folder, "2007" if has_2007 else "2012")


def _coco(folder: Path, train_split: str, test_split: str, problems: list[Problem]) -> Sets:
    parts = {split: coco_parts(folder, split) for split in (train_split, test_split)}
    missing = [
        str(folder / "annotations" / f"instances_{split}.json")
        for split, part in parts.items()
        if part is None
    ]
    if missing:
        raise InputError(
            "An annotation file is missing: " + ", ".join(missing) + ".",
            where=folder,
            fix="unpack COCO's annotations there",
        )
    first, second = parts[train_split], parts[test_split]
    assert first is not None and second is not None
    train = read_coco(*first, train_split, None, problems)
    return Sets(train, read_coco(*second, test_split, train, problems), problems)


def _voc(root: Path, year: str, config: DetectConfig, problems: list[Problem]) -> Sets:
    train = read_voc(root, [config.train_split], None, problems, year)
    return Sets(train, read_voc(root, [config.test_split], train.classes, problems, year), problems)


def _published_voc(home: Path, both_years: bool, problems: list[Problem]) -> Sets:
    root = find_voc(home)
    train = read_voc(root, ["trainval"], VOC_CLASSES, problems, "2007")
    test = read_voc(root, ["test"], VOC_CLASSES, problems, "2007")
    train.name, test.name = "voc2007 trainval", "voc2007 test"
    if both_years:
        more = read_voc(find_voc(root.parent, "2012"), ["trainval"], VOC_CLASSES, problems, "2012")
        train.pictures += more.pictures
        train.notes += more.notes
        train.expected = (train.expected or 0) + (more.expected or 0)
        train.name = "voc2007+2012 trainval"
        for number, picture in enumerate(train.pictures):
            picture.number = number
    return Sets(train, test, problems)


def _home(dataset: str, data: str | None) -> Path:
    named = data or os.environ.get(_HOME)
    if not named:
        raise InputError(
            f"Where {dataset} lies is not known.",
            where=dataset,
            fix=f"pass --data FOLDER, or set {_HOME}",
        )
    folder = Path(named).expanduser()
    if not os.path.isdir(folder):
        raise InputError("There is no such folder.", where=named, fix="check --data")
    return folder
