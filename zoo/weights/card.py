"""The model card: ``README.md`` of a bundle, with loading lines that work."""

from __future__ import annotations

import json
from typing import Any

from .bundle import Description, timm_builds

__all__ = ["model_card"]

_TRAINED = {"supervised": "trained with labels", "unknown": "whose training is not known"}


def model_card(name: str, what: Description) -> str:
    """A card for people, with the metadata block that model hubs read.

    A model that was converted from a foreign file (``lineage`` has ``converted_from``) shows its origin
    where a run shows its recipe.

    Args:
        name: ``org/name``.
        what: the bundle's description.

    Raises:
        InputError: the description is not JSON, by field.
    """
    plain = what.to_json()
    how = what.preprocessing
    standard = timm_builds(what)
    tags = ["image-feature-extraction"]
    if what.method not in _TRAINED:
        tags = ["self-supervised-learning", *tags, what.method]
    head = ["---"]
    if what.licence != "unspecified":
        head.append(f"license: {json.dumps(what.licence.lower(), ensure_ascii=False)}")
    head += [
        f"library_name: {'timm' if standard else 'pytorch'}",
        "pipeline_tag: image-feature-extraction",
        "tags:",
    ]
    head += [f"- {tag}" for tag in tags] + ["---", ""]
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
    kind = "" if what.arch == "amdim" or ":" in what.arch else "a torchvision ResNet; "
    body += ["## Load", ""]
    if ":" in what.arch and not standard:
        body += [
            f"The network is code that isn't here: `{what.arch}`, a function, must be importable, and be allowed "
            f"with `export ZOO_OWN_TRUNKS={what.arch}`.",
            "",
        ]
    body += [
        "```python",
        "import zoo",
        f'model = zoo.load("{name}").eval()    # {kind}model.fc is an Identity',
        "transform = model.transforms()",
        "```",
        "",
        "```python",
        "import torch",
        f'model = torch.hub.load(REPOSITORY, "load", "{name}", source="local")  # REPOSITORY: a checkout',
        "```",
        "",
    ]
    if standard:
        body += ["From this folder with timm:", "", "```python", "import timm"]
        body += ['model = timm.create_model("local-dir:FOLDER", pretrained=True)', "```", ""]
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
        "Not stated by the publisher." if what.licence == "unspecified" else what.licence,
        "",
    ]
    return "\n".join(head + body)


def _network(what: Description) -> str:
    if what.options:
        return f"{what.arch} ({', '.join(f'{key} {value}' for key, value in what.options.items())})"
    if timm_builds(what) or ":" in what.arch:
        return what.arch
    return f"{what.arch} (stem {what.stem}, {what.base_planes or 'usual'} planes)"


def _origin(what: Description) -> str:
    how = _TRAINED.get(what.method, f"trained without labels by {what.method}")
    source = what.lineage.get("converted_from")
    if source is not None:
        return f"{how}, converted from {source.get('what', 'a foreign file')}."
    step, total = what.lineage["step"], what.lineage["total_steps"]
    sources, count = ", ".join(what.data["sources"]), what.data["count"]
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
        how = ", ".join(f"{key} {_short(value)}" for key, value in result.get("protocol", {}).items())
        numbers = {key: value for key, value in result["metrics"].items() if value is not None}
        for metric, value in numbers.items():
            lines.append(f"| {result['recipe']} | {result['dataset']} | {metric} | {value:.4g} | {how} |")
    return lines


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return str(value.get("name"))
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
