"""From a recipe's name, ``extends`` and ``--set`` to one checked recipe whose values know their source."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from ..data.views.presets import find_preset
from ..errors import InputError, did_you_mean
from .config import Recipe, ViewsConfig
from .methods import METHODS

__all__ = [
    "Resolved",
    "differences",
    "is_packaged",
    "list_recipes",
    "packaged_roots",
    "parse_assignments",
    "resolve",
]

_DEFAULT = "default"
_PRESET = "views.preset"

# A date that is none and a number of thousands of digits are ValueErrors to it, thousands of brackets a recursion.
_NO_YAML = (yaml.YAMLError, ValueError, RecursionError)


@dataclass(frozen=True)
class Resolved:
    """A checked recipe, and for each dotted key where its value came from."""

    recipe: Recipe
    sources: dict[str, str]
    layers: tuple[str, ...] = ()
    """The recipes that it was made of, from the farthest ancestor to itself."""

    def to_yaml(self) -> str:
        """The whole recipe as YAML that can be used again, each value with its source as a comment."""
        lines = [f"# {_readable(self.recipe.name)}: every value, and where it came from"]
        lines += _yaml_lines(self.recipe.to_dict(), "", self.sources)
        return "\n".join(lines) + "\n"


def _readable(text: str) -> str:
    """Text as YAML spells it between quotes: a path may hold characters that YAML refuses, or a line's end."""
    codes = ((char, ord(char)) for char in text)
    return "".join(
        char if char.isprintable() else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
        for char, code in codes
    )


def _yaml_lines(tree: Mapping[str, Any], prefix: str, sources: Mapping[str, str]) -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield f"{indent}{key}:"
            yield from _yaml_lines(value, f"{path}.", sources)
        else:
            text = json.dumps(value, ensure_ascii=False)
            yield f"{indent}{key}: {_readable(text)}  # {_readable(sources.get(path, _DEFAULT))}"


def is_packaged(name: str) -> bool:
    """Whether a recipe of this name comes with the package."""
    return "/" not in name and (resources.files(__package__) / "recipes" / f"{name}.yaml").is_file()


def packaged_roots(method: str) -> list[str]:
    """The packaged recipes of a method that are no variations of others."""
    found = []
    for file in resources.files(__package__).joinpath("recipes").iterdir():
        if file.name.endswith(".yaml"):
            text = file.read_text("utf-8")
            if not re.search("^extends:", text, re.MULTILINE):
                name = file.name.removesuffix(".yaml")
                if _parse(text, name)["method"]["name"] == method:
                    found.append(name)
    return sorted(found)


def list_recipes() -> dict[str, str]:
    """The recipes that come with the package: name -> summary."""
    found = {}
    for file in resources.files(__package__).joinpath("recipes").iterdir():
        if file.name.endswith(".yaml"):
            name = file.name.removesuffix(".yaml")
            found[name] = str(_parse(file.read_text("utf-8"), name).get("summary", ""))
    return dict(sorted(found.items()))


def resolve(
    recipe: str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Resolved:
    """Read, extend, override and check a recipe.

    Args:
        recipe: a packaged recipe's name, a YAML file, or a mapping.
        overrides: dotted key -> value, from ``--set`` (strings are read as YAML).
        options: dotted key -> value, from a command's own flags; they win.

    Raises:
        InputError: an unknown recipe or key (with the nearest name), or a value that doesn't fit.
    """
    tree: dict[str, Any] = {}
    sources: dict[str, str] = {}
    layers = _layers(recipe, ())
    for source, layer in layers:
        _add_layer(tree, layer, source, sources)
    for label, values in (("--set", overrides or {}), ("option", options or {})):
        # A preset first: the other keys refine it, in whichever order they were typed.
        for key, value in sorted(values.items(), key=lambda item: item[0] != _PRESET):
            _add_layer(tree, _nested(key, _value(key, value)), label, sources)
    _fit_channels(tree, sources)
    try:
        checked = Recipe.model_validate(tree)
    except ValidationError as error:
        raise _explain(error, tree, sources) from None
    return Resolved(checked, sources, tuple(source for source, _ in layers))


def differences(first: Recipe, second: Recipe) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (value in the first, value in the second) where they differ; None where absent."""
    old, new = _flat(first.to_dict(), ""), _flat(second.to_dict(), "")
    keys = dict.fromkeys((*old, *new))
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def _flat(tree: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return out


def parse_assignments(pairs: Iterable[str]) -> dict[str, Any]:
    """``["a.b=1", ...]`` as typed after ``--set`` into a mapping."""
    out = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not key.strip():
            raise InputError("This is not of the form key=value.", where=f"--set {pair}")
        out[key.strip()] = value
    return out


def _value(key: str, value: Any) -> Any:
    try:
        return yaml.safe_load(value) if isinstance(value, str) else value
    except _NO_YAML as error:
        reason = " ".join(str(error).split())
        raise InputError(f"The value {value!r} is not valid YAML ({reason}).", where=key) from None


def _nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value  # type: ignore[no-any-return]


def _merge(
    tree: dict[str, Any], layer: Mapping[str, Any], source: str, sources: dict[str, str], prefix: str
) -> None:
    for key, value in layer.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and isinstance(tree.setdefault(key, {}), dict):
            _merge(tree[key], value, source, sources, f"{path}.")
        else:
            tree[key] = value
            sources[path] = source


def _add_layer(tree: dict[str, Any], layer: Mapping[str, Any], source: str, sources: dict[str, str]) -> None:
    """Merge a layer; a view preset in it replaces all that was said about views and test transform before."""
    views = layer.get("views")
    name = views.get("preset") if isinstance(views, Mapping) else None
    if name is not None:
        try:
            preset = find_preset(str(name))
        except InputError as error:
            raise InputError(
                error.what, where=f"views.preset (from {source}): {name}", fix=error.fix
            ) from None
        for section in ("views", "evaluation"):
            tree.pop(section, None)
            for key in [key for key in sources if key.startswith(f"{section}.")]:
                del sources[key]
        content = {"views": ViewsConfig.keys_of(preset.plan), "evaluation": asdict(preset.test)}
        _merge(tree, content, f"preset {preset.name}", sources, "")
    _merge(tree, layer, source, sources, "")


def _fit_channels(tree: dict[str, Any], sources: dict[str, str]) -> None:
    """For images without three colours: statistics of that many channels, and no operation on colours.

    What the user set is left alone. The statistics of a single channel are the means of the three.
    """
    data, views = tree.get("data"), tree.setdefault("views", {})
    channels = data.get("channels", 3) if isinstance(data, dict) else 3
    if channels == 3 or not isinstance(channels, int) or not isinstance(views, dict):
        return
    # Values of the same file, or typed by the user, are meant; those of other layers were for three channels.
    meant = {"--set", "option", sources.get("data.channels")}
    defaults = ViewsConfig()
    for key in ("mean", "std", "jitter", "gray_p"):
        given = views.get(key, getattr(defaults, key))
        numbers = isinstance(given, list | tuple) and given and all(isinstance(v, int | float) for v in given)
        if sources.get(f"views.{key}") in meant or not (numbers or key == "gray_p"):
            continue  # what doesn't fit is refused with the other mistakes
        if key == "gray_p":
            value: Any = 0.0
        elif key == "jitter":
            value = [*given[:2], 0.0, 0.0]
        elif len(given) == channels:
            continue
        else:
            value = [round(sum(given) / len(given), 4)] * channels
        views[key] = value
        sources[f"views.{key}"] = f"for {channels} channel{'' if channels == 1 else 's'}"


def _layers(
    recipe: str | Path | Mapping[str, Any], seen: tuple[str, ...]
) -> list[tuple[str, dict[str, Any]]]:
    """(source, content) from the farthest ancestor to the recipe itself."""
    if isinstance(recipe, Mapping):
        source, content, folder = "given", dict(recipe), Path()
        content.setdefault("name", "custom")
    else:
        source, text, folder = _find(str(recipe))
        content = _parse(text, source)
        content.setdefault("name", Path(source).stem)
    if os.path.realpath(source) in map(os.path.realpath, seen):
        raise InputError(f"Recipes extend one another in a circle: {' -> '.join((*seen, source))}.")
    parent = content.pop("extends", None)
    if parent is None:
        return [(source, content)]
    beside = folder / str(parent)
    target = beside if beside.suffix in (".yaml", ".yml") else str(parent)
    return [*_layers(target, (*seen, source)), (source, content)]


def _find(name: str) -> tuple[str, str, Path]:
    """(name for messages, text, folder that relative ``extends`` start from)."""
    path = Path(name).expanduser()
    if path.suffix in (".yaml", ".yml"):
        try:
            return str(path), path.read_text("utf-8"), path.parent
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"The recipe can't be read ({error}).", where=path) from None
    if is_packaged(name):
        packaged = resources.files(__package__) / "recipes" / f"{name}.yaml"
        return name, packaged.read_text("utf-8"), Path()
    known = list_recipes()
    raise InputError(
        "There is no recipe of this name.",
        where=name,
        fix=did_you_mean(name, known) + f"Known: {', '.join(known)}; or pass a file that ends in .yaml",
    )


_MERGE = "tag:yaml.org,2002:merge"  # <<: *anchor


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice."""


def _unique_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    plain = [key for key, _ in node.value if key.tag != _MERGE]  # what is merged in may be given again
    keys = [loader.construct_object(key) for key in plain]  # type: ignore[no-untyped-call]
    double = next((key for index, key in enumerate(keys) if key in keys[:index]), None)
    if double is not None:
        raise yaml.constructor.ConstructorError(
            None, None, f"the key {double!r} is given twice", node.start_mark
        )
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


def _parse(text: str, source: str) -> dict[str, Any]:
    try:
        content = yaml.load(text, Loader=_Loader)
    except _NO_YAML as error:
        raise InputError(
            f"The recipe is not valid YAML ({' '.join(str(error).split())}).", where=source
        ) from None
    if not isinstance(content, dict):
        raise InputError("A recipe is a mapping of keys to values.", where=source)
    return content


def _explain(error: ValidationError, tree: Mapping[str, Any], sources: Mapping[str, str]) -> InputError:
    """The first problem, in a sentence with key, source and advice."""
    problems = error.errors()
    problem = problems[0]
    parts = [str(part) for part in problem["loc"]]
    key = ".".join(part for part in parts if not part.isdigit()) or "recipe"
    source = sources.get(key) or next((s for k, s in sources.items() if k.startswith(f"{key}.")), None)
    where = key + (f" (from {source})" if source else "")
    more = f" ({len(problems) - 1} more problems after this one)" if len(problems) > 1 else ""
    if problem["type"] == "extra_forbidden":
        names = _names_at(parts[:-1], tree)
        elsewhere = [path for path in _all_keys(tree) if path.split(".")[-1] == parts[-1]]
        advice = f"did you mean {elsewhere[0]}? " if elsewhere else did_you_mean(parts[-1], names)
        return InputError(
            f"The recipe has an unknown key{more}.",
            where=where,
            fix=f"{advice}Known here: {', '.join(names)}",
        )
    if problem["type"] == "missing" and parts[-1].isdigit():
        return InputError(f"A list in the recipe has too few values{more}.", where=where)
    if problem["type"] == "missing":
        return InputError(
            f"The recipe lacks a key{more}.", where=where, fix="add it, or extend another recipe"
        )
    message = problem["msg"].removeprefix("Value error, ")
    value = "" if isinstance(problem["input"], dict | BaseModel) else f", not {problem['input']!r}"
    return InputError(f"A value in the recipe doesn't fit: {message}{value}{more}.", where=where)


def _names_at(parts: list[str], tree: Mapping[str, Any]) -> list[str]:
    model: Any = Recipe
    for part in parts:
        if part == "method":
            model = METHODS.config(str(tree["method"]["name"]))
        else:
            model = model.model_fields[part].annotation
    return [field.alias or name for name, field in model.model_fields.items()]


def _all_keys(tree: Mapping[str, Any]) -> Iterator[str]:
    for name, field in Recipe.model_fields.items():
        model: Any = field.annotation
        if name == "method":
            model = METHODS.config(str(tree["method"]["name"]))
        if isinstance(model, type) and issubclass(model, BaseModel):
            yield from (f"{name}.{inner}" for inner in model.model_fields)
        else:
            yield name
