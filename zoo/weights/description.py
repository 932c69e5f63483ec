"""Whether ``zoo.json`` says all that it should, each field with its type. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..errors import InputError
from .bundle import SCHEMA

__all__ = ["check_description", "check_preprocessing", "preprocessing_of"]

_FIELDS: dict[str, tuple[type, ...]] = {
    "schema": (int,),
    "arch": (str,),
    "stem": (str,),
    "base_planes": (int, type(None)),
    "num_features": (int,),
    "method": (str,),
    "preprocessing": (dict,),
    "recipe": (dict,),
    "data": (dict,),
    "lineage": (dict,),
    "versions": (dict,),
    "licence": (str,),
    "results": (list,),
}
_OPTIONAL: dict[str, tuple[type, ...]] = {
    "options": (dict,),
    "num_classes": (int,),
    "aliases": (dict,),
    "features": (dict,),
}
_INTERPOLATIONS = ("nearest", "nearest-exact", "bilinear", "bicubic", "box", "hamming", "lanczos")
_PLANES = 1 << 16
_FIX = "publish the model again"


def check_description(info: Mapping[str, Any], where: object) -> list[str]:
    """Check all fields of a description.

    Args:
        info: ``zoo.json``.
        where: the file, for messages.

    Returns:
        Fields that this version doesn't know.

    Raises:
        InputError: fields are missing or of another type; all of them are named.
    """
    problems = [f"{name} is missing" for name in _FIELDS if name not in info]
    known = {**_FIELDS, **_OPTIONAL}
    problems += [
        f"{name} is {_kind(info[name])}, not {' or '.join(map(_name, types))}"
        for name, types in known.items()
        if name in info and type(info[name]) not in types
    ]
    if info.get("schema") != SCHEMA:
        problems.append(f"schema is {info.get('schema')}, not {SCHEMA}")
    if not problems:
        problems = [*_preprocessing_problems(info["preprocessing"]), *_inner_problems(info)]
    if problems:
        raise InputError(
            f"The description is not as it should be: {'; '.join(problems)}.", where=where, fix=_FIX
        )
    return [name for name in info if name not in known]


def preprocessing_of(info: Mapping[str, Any], where: object) -> dict[str, Any]:
    """How images are prepared for a model, of what is known of it.

    Raises:
        InputError: it isn't known, or not as it should be.
    """
    how = info.get("preprocessing")
    if not how:
        raise InputError(
            "It isn't known how images are prepared for this model (mean, std, size).",
            where=where,
            fix="publish it with its preprocessing (zoo publish, zoo convert), and take that",
        )
    check_preprocessing(how, where)
    return dict(how)


def check_preprocessing(how: Mapping[str, Any], where: object, channels: int | None = None) -> None:
    """Check that a preprocessing says everything, and fits a network of so many channels.

    Raises:
        InputError: it doesn't; what is wrong is named.
    """
    problems = _preprocessing_problems(how)
    if not problems and channels not in (None, len(how["mean"])):
        problems = [f"mean and std have {len(how['mean'])} values, the network takes {channels} channels"]
    if problems:
        raise InputError(f"The preprocessing is not as it should be: {'; '.join(problems)}.", where=where)


def _preprocessing_problems(how: Mapping[str, Any]) -> list[str]:
    problems = [
        f"preprocessing.{name} is no list of numbers"
        for name in ("mean", "std")
        if not isinstance(how.get(name), list) or not how[name] or not all(map(_is_number, how[name]))
    ]
    if not problems and len(how["mean"]) != len(how["std"]):
        problems.append("preprocessing.mean and preprocessing.std are not of one length")
    if not problems and min(how["std"]) <= 0:
        problems.append("preprocessing.std is not above 0")
    problems += [
        f"preprocessing.{name} is no whole number above 0"
        for name in ("resize", "crop")
        if type(how.get(name)) is not int or how[name] < 1
    ]
    if how.get("interpolation") not in _INTERPOLATIONS:
        problems.append(f"preprocessing.interpolation is {how.get('interpolation')!r}")
    return problems


def _inner_problems(info: Mapping[str, Any]) -> list[str]:
    problems = []
    if not all(
        isinstance(result, dict) and isinstance(result.get("metrics"), dict) for result in info["results"]
    ):
        problems.append("results holds something that is no result")
    features = info.get("features")
    if features and not (
        isinstance(features.get("picture"), str)
        and _is_number(features.get("norm"))
        and isinstance(features.get("values"), list)
        and all(map(_is_number, features["values"]))
    ):
        problems.append("features lacks picture, norm or values")
    for names in info.get("aliases", {}).values():
        if not isinstance(names, dict) or not all(isinstance(source, str) for source in names.values()):
            problems.append("aliases holds something that is no name of a tensor")
    if not isinstance(info["lineage"].get("converted_from", {}), dict):
        problems.append("lineage.converted_from is no object")
    planes = info["base_planes"]
    if planes is not None and not 0 < planes <= _PLANES:
        problems.append(f"base_planes is {planes}")
    return problems


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _kind(value: Any) -> str:
    return _name(type(value))


def _name(kind: type) -> str:
    names = {str: "a text", int: "a whole number", dict: "an object", list: "a list", float: "a number"}
    return names.get(kind, "null" if kind is type(None) else kind.__name__)
