"""A file that fixes the number of each class, and labels that follow it."""

from __future__ import annotations

import codecs
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError, did_you_mean

__all__ = ["read_class_index", "relabel", "renumber"]

_SHOWN = 5


def read_class_index(path: Path) -> tuple[str, ...]:
    """The class names of a file, in the order of their numbers.

    The file is UTF-8 and one of: a JSON object ``{"name": number}``; a JSON list of names; text with
    one name a line, where the first line is class 0. Text that begins with ``{`` or ``[`` is JSON, and
    so is a file that ends in ``.json``. The names are spelled as ``os.fsdecode`` spells those of folders,
    so that they compare in any locale.

    Raises:
        InputError: a file that can't be read, is not UTF-8, is none of the three forms, or holds no names;
            a name given twice; numbers that are not 0 to n - 1, each once.
    """
    try:
        raw = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise InputError(f"The class index can't be read ({error.strerror}).", where=path) from None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"The class index is not UTF-8 (line {line}).", where=path, fix="save it as UTF-8"
        ) from None
    is_json = path.suffix.lower() == ".json" or text.lstrip()[:1] in ("{", "[")
    names = _names_of_json(text, path) if is_json else _names_of_lines(text, path)
    if not names:
        raise InputError("The class index is empty.", where=path)
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise InputError(f"The class index holds a name more than once: {_some(twice)}.", where=path)
    return tuple(_as_folder(name, path) for name in names)


def _names_of_lines(text: str, path: Path) -> list[str]:
    lines = [line.strip() for line in text.replace("\r\n", "\n").replace("\r", "\n").rstrip().split("\n")]
    blank = [number for number, line in enumerate(lines, 1) if not line]
    if blank and len(lines) > 1:  # skipping it would shift the classes that follow
        raise InputError(
            f"Line {blank[0]} of the class index is blank.", where=path, fix="line n + 1 names class n"
        )
    return [line for line in lines if line]


def _names_of_json(text: str, path: Path) -> list[str]:
    try:
        # Pairs, so that a key given twice isn't lost.
        value = json.loads(text, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError) as error:
        raise InputError(f"The class index is no JSON ({error}).", where=path) from None
    if isinstance(value, _Pairs):
        return _in_order(value, path)
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise InputError(
            "The class index is neither a list of names nor an object of names and numbers.",
            where=path,
            fix='write {"cat": 0, "dog": 1} or ["cat", "dog"]',
        )
    return value


class _Pairs(list[tuple[str, Any]]):
    """The keys and values of a JSON object."""


def _in_order(pairs: _Pairs, path: Path) -> list[str]:
    odd = [name for name, number in pairs if not isinstance(number, int) or isinstance(number, bool)]
    if odd:
        raise InputError(
            f"The number of a class is no whole number: {_some(odd)}.",
            where=path,
            fix='write {"cat": 0, "dog": 1}',
        )
    names: dict[int, list[str]] = {}
    for name, number in pairs:
        names.setdefault(number, []).append(name)
    problems = [
        f"{number} is given to {_some(owners)}" for number, owners in sorted(names.items()) if len(owners) > 1
    ]
    outside = [number for number in sorted(names) if not 0 <= number < len(pairs)]
    missing = [number for number in range(len(pairs)) if number not in names]
    problems += [f"{number} ({_some(names[number])}) is too high or too low" for number in outside]
    if problems:
        raise InputError(
            f"The {len(pairs)} classes must be numbered 0 to {len(pairs) - 1}: "
            f"{_some(problems, '; ')}; {_some(missing)} {'is' if len(missing) == 1 else 'are'} missing.",
            where=path,
        )
    return [names[number][0] for number in range(len(pairs))]


def _as_folder(name: str, path: Path) -> str:
    if not name.strip():
        raise InputError("The class index holds an empty name.", where=path)
    try:
        return os.fsdecode(name.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        raise InputError(f"The class index holds a name that is no text: {name!r}.", where=path) from None


def _some(items: Iterable[object], between: str = ", ") -> str:
    shown = [str(item) for item in items]
    return between.join(shown[:_SHOWN]) + (f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else "")


def relabel(source_classes: Sequence[str], wanted: Sequence[str], where: object = None) -> list[int]:
    """The number in ``wanted`` of each class of a source, in the source's order.

    Args:
        source_classes: names of the source's classes.
        wanted: names of all classes, in the order of their numbers.
        where: what to name in an error: the source.

    Raises:
        InputError: the source has classes that ``wanted`` doesn't know; they are named.
    """
    number = {name: index for index, name in enumerate(wanted)}
    unknown = [name for name in source_classes if name not in number]
    if unknown:
        raise InputError(
            f"The images have {'a class' if len(unknown) == 1 else f'{len(unknown)} classes'} that "
            f"training (or the class index) doesn't know: {_some(unknown)}.",
            where=where,
            fix=f"{did_you_mean(unknown[0], wanted)}known classes: {_some(wanted)}",
        )
    return [number[name] for name in source_classes]


def renumber(
    classes: Sequence[str], named: bool, wanted: Sequence[str], where: object = None
) -> list[int] | None:
    """The number in ``wanted`` of each of a source's classes; None where its numbers are the wanted ones.

    Args:
        classes: the source's, in the order of its numbers.
        named: whether these are names, or just the numbers.
        wanted: names of all classes, in the order of their numbers.
        where: what to name in an error: the source.

    Raises:
        InputError: classes that ``wanted`` doesn't know, or numbers beyond it.
    """
    if named:
        return relabel(classes, wanted, where)
    if len(classes) > len(wanted):
        raise InputError(
            f"The labels go up to {len(classes) - 1}, and there are {len(wanted)} classes.",
            where=where,
            fix="pass the class index that the labels were made with",
        )
    return None
