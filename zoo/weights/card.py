"""The model card: ``README.md`` of a bundle, with loading lines that work."""

from __future__ import annotations

import json
from typing import Any

from .bundle import Description, timm_builds

__all__ = ["model_card"]


def model_card(name: str, what: Description) -> str:
    """A card for people, with the metadata block that model hubs read.

    Args:
        name: ``org/name``.
        what: the bundle's description.

    Raises:
        InputError: the description is not JSON, by field.
    """
    recipe = what.to_json()["recipe"]
    how = what.preprocessing
    standard = timm_builds(what)
    tags = ["self-supervised-learning", "image-feature-extraction", what.method]
    head = ["---"]
    if what.licence != "unspecified":
        head.append(f"license: {json.dumps(what.licence.lower(), ensure_ascii=False)}")
    head += [
        f"library_name: {'timm' if standard else 'pytorch'}",
        "pipeline_tag: image-feature-extraction",
        "tags:",
    ]
    head += [f"- {tag}" for tag in tags] + ["---", ""]
    network = what.arch + ("" if standard else f" (stem {what.stem}, {what.base_planes or 'usual'} planes)")
    body = [
        f"# {name}",
        "",
        f"A {network} trained without labels by {what.method}, {what.lineage['step']} of "
        f"{what.lineage['total_steps']} steps, on {', '.join(what.data['sources'])} ({what.data['count']} images). "
        f"It maps an image to {what.num_features} pooled features.",
        "",
        "## Load",
        "",
        "```python",
        "import zoo",
        f'model = zoo.load("{name}").eval()    # a torchvision ResNet; model.fc is an Identity',
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
        "## Training",
        "",
        "```json",
        json.dumps(recipe, indent=1, ensure_ascii=False),
        "```",
        "",
        "## Licence",
        "",
        "Not stated by the publisher." if what.licence == "unspecified" else what.licence,
        "",
    ]
    return "\n".join(head + body)


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
