"""The model card: ``README.md`` of a bundle, with loading lines that work."""

from __future__ import annotations

import json
from typing import Any

from .bundle import Description, timm_builds

__all__ = ["card_body", "card_tags", "model_card", "needs_code", "plain_text", "python_lines"]

_TRAINED = {"supervised": "trained with labels", "unknown": "whose training is not known"}


def model_card(name: str, what: Description, reference: str | None = None) -> str:
    """A card for people, with the metadata block that model hubs read.

    A model that was converted from a foreign file (``lineage`` has ``converted_from``) shows its origin
    where a run shows its recipe.

    Args:
        name: ``org/name``.
        what: the bundle's description.
        reference: what to load it by, if not by its name in the local hub.

    Raises:
        InputError: the description is not JSON, by field.
    """
    standard = timm_builds(what)
    head = ["---"]
    if what.licence != "unspecified":
        head.append(f"license: {json.dumps(what.licence.lower(), ensure_ascii=False)}")
    head += [
        f"library_name: {'timm' if standard else 'pytorch'}",
        "pipeline_tag: image-feature-extraction",
        "tags:",
    ]
    head += [f"- {tag}" for tag in card_tags(what)] + ["---", ""]
    load = [*needs_code(what), *python_lines(reference or name, what)]
    if standard:
        load += ["From this folder with timm:", "", "```python", "import timm"]
        load += ['model = timm.create_model("local-dir:FOLDER", pretrained=True)', "```", ""]
    return "\n".join(head + card_body(name, what, load))


def card_tags(what: Description) -> list[str]:
    """What model hubs let people search by."""
    tags = ["image-feature-extraction"]
    return tags if what.method in _TRAINED else ["self-supervised-learning", *tags, what.method]


def card_body(name: str, what: Description, load: list[str]) -> list[str]:
    """The card's text in lines, after its block of metadata.

    Args:
        name: ``org/name``.
        what: the bundle's description.
        load: the lines of the section on loading.

    Raises:
        InputError: the description is not JSON, by field.
    """
    plain = what.to_json()
    how = what.preprocessing
    article = "An" if what.arch[0] in "aeiou" else "A"
    body = [
        f"# {name}",
        "",
        f"{article} {_network(what)} {_origin(what)} It maps an image to {what.num_features} pooled features.",
        "",
    ]
    if what.num_classes:
        body += [
            f"A linear classifier of {what.num_classes} classes lies beside it, in `classifier.safetensors`.",
            "",
        ]
    body += ["## Load", "", *load]
    body += [
        "## Preprocessing",
        "",
        f"Shorter side to {how['resize']} pixels ({how['interpolation']}), central {how['crop']} x {how['crop']}; "
        f"values in 0..1 normalised by mean {how['mean']} and std {how['std']}.",
        "",
        "## Results",
        "",
        *_results(what.results),
        "",
        *_history(plain),
        "",
        "## Licence",
        "",
        "Not stated by the publisher." if what.licence == "unspecified" else plain_text(what.licence),
        "",
    ]
    return body


def needs_code(what: Description) -> list[str]:
    """What to tell of a network that is a user's function."""
    if ":" not in what.arch or timm_builds(what):
        return []
    return [
        f"The network is code that isn't here: `{what.arch}`, a function, must be importable, and be allowed "
        f"with `export ZOO_OWN_TRUNKS={what.arch}`.",
        "",
    ]


def python_lines(reference: str, what: Description) -> list[str]:
    """How our own loader and torch.hub load it."""
    kind = "" if what.arch == "amdim" or ":" in what.arch else "a torchvision ResNet; "
    return [
        "```python",
        "import zoo",
        f'model = zoo.load("{reference}").eval()    # {kind}model.fc is an Identity',
        "transform = model.transforms()",
        "```",
        "",
        "```python",
        "import torch",
        f'model = torch.hub.load(REPOSITORY, "load", "{reference}", source="local")  # REPOSITORY: a checkout',
        "```",
        "",
    ]


def plain_text(value: object) -> str:
    """A value inside a line of the card: no line breaks, nothing that is a table's or a page's own sign."""
    words = str(value).encode("utf-8", "backslashreplace").decode()
    words = "".join(sign if sign.isprintable() else " " for sign in words)
    return words.replace("|", "\\|").replace("<", "&lt;")


def _network(what: Description) -> str:
    if what.options:
        return f"{what.arch} ({', '.join(f'{key} {value}' for key, value in what.options.items())})"
    if timm_builds(what) or ":" in what.arch:
        return what.arch
    return f"{what.arch} (stem {what.stem}, {what.base_planes or 'usual'} planes)"


def _origin(what: Description) -> str:
    how = _TRAINED.get(what.method, f"trained without labels by {plain_text(what.method)}")
    source = what.lineage.get("converted_from")
    if source is not None:
        return f"{how}, converted from {plain_text(source.get('what', 'a foreign file'))}."
    step, total = what.lineage["step"], what.lineage["total_steps"]
    sources, count = plain_text(", ".join(what.data["sources"])), what.data["count"]
    return f"{how}, {step} of {total} steps, on {sources} ({count} images)."


def _history(plain: dict[str, Any]) -> list[str]:
    title, content = "Training", plain["recipe"]
    if "converted_from" in plain["lineage"]:
        title, content = "Origin", plain["lineage"]["converted_from"]
    return [f"## {title}", "", "```json", json.dumps(content, indent=1, ensure_ascii=False), "```"]


def _results(results: list[dict[str, Any]]) -> list[str]:
    if not results:
        return ["None recorded yet (`zoo transfer`, then `zoo publish --with-results`)."]
    lines = ["| recipe | data | metric | value | protocol |", "|---|---|---|---|---|"]
    for result in results:
        how = plain_text(
            ", ".join(f"{key} {_short(value)}" for key, value in result.get("protocol", {}).items())
        )
        numbers = {key: value for key, value in result["metrics"].items() if value is not None}
        for metric, value in numbers.items():
            recipe, dataset = plain_text(result["recipe"]), plain_text(result["dataset"])
            lines.append(f"| {recipe} | {dataset} | {plain_text(metric)} | {value:.4g} | {how} |")
    return lines


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return str(value.get("name"))
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
