"""The card of a model on the Hugging Face hub: metadata that its pages read, and lines for strangers. No torch here."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import yaml

from ..errors import InputError
from .bundle import Description, timm_builds
from .card import card_body, card_tags, needs_code, plain_text, python_lines

__all__ = ["check_card", "hub_card", "is_number"]

_NAMES = (
    "apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 "
    "bigcode-openrail-m afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc "
    "cc0-1.0 cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 "
    "cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 "
    "cdla-sharing-1.0 cdla-permissive-1.0 cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 "
    "eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0 lgpl lgpl-2.1 lgpl-3.0 isc ms-pl mpl-2.0 odc-by odbl osl-3.0 "
    "postgresql ofl-1.1 ncsa unlicense zlib pddl unknown other"
)
_LICENCES = frozenset(_NAMES.split())
"""Names that the hub knows; another one is published as ``other`` with that name."""
_TASKS = {"detect": "object-detection"}
_TORCHVISION = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "resnext101_32x8d")


def hub_card(name: str, what: Description, *, transformers: bool) -> str:
    """``README.md`` for a repository of the hub.

    Args:
        name: ``org/name``.
        what: the bundle's description; its licence is known.
        transformers: whether the repository has a ``transformers/`` sub-folder.

    Raises:
        InputError: no licence is stated, or the description is not JSON, by field.
    """
    head = yaml.safe_dump(_metadata(name, what), sort_keys=False, allow_unicode=True, width=10_000)
    load = [*needs_code(what), *python_lines(f"hf:{name}", what), *_strangers(name, what, transformers)]
    body = card_body(name, what, load)
    return "\n".join(["---", head.removesuffix("\n"), "---", "", *body, *_lineage(what)])


# --- metadata ---


def _metadata(name: str, what: Description) -> dict[str, Any]:
    if what.licence == "unspecified":
        raise InputError(
            "A model on the hub needs a licence.",
            where=f"hf:{name}",
            fix="--licence NAME, e.g. apache-2.0, or cc-by-nc-4.0 for what comes from SwAV's weights",
        )
    licence = what.licence.lower()
    data: dict[str, Any] = {"license": licence}
    if licence not in _LICENCES:
        data = {"license": "other", "license_name": re.sub(r"[^a-z0-9.]+", "-", licence).strip("-") or "own"}
    base = _base_model(what)
    if base:
        data["base_model"] = base
    data |= {
        "library_name": "timm" if timm_builds(what) else "pytorch",
        "pipeline_tag": "image-feature-extraction",
        "tags": [_words(tag) for tag in card_tags(what)],
    }
    if what.results:
        data["model-index"] = [{"name": name.partition("/")[2], "results": _index(what.results)}]
    return data


def _base_model(what: Description) -> str | None:
    """The repository of the hub that training started from, if it did from one."""
    origin = str(what.lineage.get("init_from") or "")
    if not origin.startswith("hf:"):
        return None
    return origin.removeprefix("hf:").partition("@")[0]


def _index(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The hub's form of results; those of one data set and one protocol would be merged, so none share both."""
    configs = _configs(results)
    rows = []
    for result, config in zip(results, configs, strict=True):
        dataset = _words(result["dataset"])
        metrics = [
            {"type": _words(key), "value": value, "name": _words(key)}
            for key, value in result["metrics"].items()
            if is_number(value)
        ]
        if metrics:
            kind = re.sub(r"[^A-Za-z0-9._-]+", "-", dataset).strip("-") or "images"
            task = _TASKS.get(result["recipe"], "image-classification")
            rows.append(
                {
                    "task": {"type": task},
                    "dataset": {"name": dataset, "type": kind, "config": config, "split": "test"},
                    "metrics": metrics,
                }
            )
    return rows


def is_number(value: Any) -> bool:
    """Whether a metric has a value that a hub can show."""
    return type(value) in (int, float) and math.isfinite(value)


def _configs(results: list[dict[str, Any]]) -> list[str]:
    """A name for each result's protocol: the recipe, with what tells it from the others of that recipe."""
    names = []
    for result in results:
        alike = [other for other in results if other["recipe"] == result["recipe"]]
        varying = [
            key
            for key in result.get("protocol", {})
            if any(other.get("protocol", {}).get(key) != result["protocol"][key] for other in alike)
        ]
        details = ", ".join(f"{key} {result['protocol'][key]}" for key in varying)
        names.append(_words(f"{result['recipe']} ({details})" if details else result["recipe"])[:200])
    seen: dict[tuple[str, str], int] = {}
    for index, (name, result) in enumerate(zip(names, results, strict=True)):
        key = (name, _words(result["dataset"]))
        seen[key] = seen.get(key, 0) + 1
        if seen[key] > 1:  # the same protocol again
            names[index] = f"{name} #{seen[key]}"
    return names


def _words(value: object) -> str:
    return plain_text(value).replace("\\|", "|").replace("&lt;", "<").strip() or "-"


# --- text ---


def _strangers(name: str, what: Description, transformers: bool) -> list[str]:
    """How those load it who haven't got this toolkit."""
    lines: list[str] = []
    if timm_builds(what):
        lines += [
            "With timm:",
            "",
            "```python",
            "import timm",
            f'model = timm.create_model("hf_hub:{name}", pretrained=True)',
            "```",
            "",
        ]
    if transformers:
        lines += [
            "With transformers; `pooler_output` holds the features:",
            "",
            "```python",
            "from transformers import AutoImageProcessor, AutoModel",
            f'model = AutoModel.from_pretrained("{name}", subfolder="transformers")',
            f'processor = AutoImageProcessor.from_pretrained("{name}", subfolder="transformers")',
            "```",
            "",
        ]
    if what.arch in _TORCHVISION and timm_builds(what) and len(what.preprocessing["mean"]) == 3:
        lines += [
            "With torchvision and safetensors alone:",
            "",
            "```python",
            "import torch",
            "import torchvision",
            "from huggingface_hub import hf_hub_download",
            "from safetensors.torch import load_file",
            f"model = torchvision.models.{what.arch}()",
            "model.fc = torch.nn.Identity()",
            f'model.load_state_dict(load_file(hf_hub_download("{name}", "model.safetensors")))',
            "```",
            "",
        ]
    return lines


def _lineage(what: Description) -> list[str]:
    facts = {
        key: value for key, value in what.lineage.items() if key != "converted_from" and value is not None
    }
    rows = [f"- {plain_text(key.replace('_', ' '))}: {plain_text(value)}" for key, value in facts.items()]
    return ["## Lineage", "", *(rows or ["Converted; see above."]), ""]


# --- checks ---


def check_card(text: str, results: int) -> None:
    """Hold a card against the hub's rules, by the hub's own client, before anything is sent.

    Args:
        text: of the card.
        results: how many results with a number it should tell of.

    Raises:
        InputError: the hub would refuse it, or read something else from it.
    """
    from huggingface_hub import ModelCard
    from huggingface_hub.repocard_data import model_index_to_eval_results

    where = "README.md"
    try:
        data: Mapping[str, Any] = ModelCard(text).data.to_dict()
        index = data.get("model-index") or []
        told = model_index_to_eval_results(index)[1] if index else []
    except (ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise InputError(f"The card's metadata can't be read ({error}).", where=where) from None
    wanted = sum(len(row["metrics"]) for entry in index for row in entry["results"])
    rows = {(e.task_type, e.dataset_type, e.dataset_config, e.metric_type) for e in told}
    if len(told) != wanted or len(rows) != wanted or sum(len(entry["results"]) for entry in index) != results:
        raise InputError(
            "The card's results would be merged or lost: two have the same data and protocol.", where=where
        )
    licence = data.get("license")
    if licence not in _LICENCES or (licence == "other" and not data.get("license_name")):
        raise InputError("The card states no licence that the hub knows.", where=where)
    if re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text):
        raise InputError("The card holds control characters.", where=where)
