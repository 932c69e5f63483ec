"""``zoo doctor``: what is this file or model, was it ever trained, and what can be done with it?"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .errors import ZooError
from .files import disk_errors, sha256_of
from .models.factory import create_trunk
from .pretrain.resolve import resolve
from .verify import bundle_folder, checked_contents
from .weights.bundle import WEIGHTS
from .weights.catalog import find_card
from .weights.checks import describe_network
from .weights.fill import fill_trunk
from .weights.formats.base import ForeignModel
from .weights.formats.tables import items_of, plain_facts
from .weights.hubs.url import fetch
from .weights.reading.notes import shown
from .weights.reference import Reference, parse_reference
from .weights.safe import look_at, read_content
from .weights.training_signs import SENTENCES, Signs, signs_of

__all__ = ["UNREADABLE", "diagnose"]

UNREADABLE = "unreadable"
_LISTED = 12  # entries of a file
_SMALL = 64  # pixels: pictures of this side have a recipe of their own


def diagnose(reference: str, *, progress: bool = True) -> dict[str, Any]:
    """Look at a file of weights or any model; nothing in it is ever run.

    Args:
        reference: anything that ``zoo.load`` takes but a random model.
        progress: say on standard error what is downloaded.

    Returns:
        Plain JSON, schema 1. Always: ``reference``; ``file`` (``container``, ``size``, ``sha256``,
        ``globals``, ``refused``, ``entries``), or None where there is no single one; ``problem`` and
        ``fix``, why it can't be loaded and what helps, or None; ``verdict``, ``UNREADABLE`` or a key of
        ``zoo.weights.training_signs.SENTENCES``; ``conclusion``, a list of sentences. If it can be loaded
        also ``format``, ``what``, ``network``, ``parameters``, ``num_features``, ``method``, ``licence``,
        ``account``, ``facts``, ``preprocessing``, ``signs`` (``Signs``) and ``load`` (lines to type).

    Raises:
        InputError: there is no such file or model, or it can't be opened.
        RunError: a download failed, or there is not enough memory.
    """
    target = parse_reference(reference)
    path = _file_of(target, progress)
    found: dict[str, Any] = {
        "schema": 1,
        "reference": reference,
        "file": None if path is None else _look(path),
    }
    try:
        model, known = checked_contents(reference, progress=progress)
        trunk = fill_trunk(create_trunk, model.network, model.trunk, target.where, model.preprocessing)
    except ZooError as error:
        if path is None and target.kind not in ("local", "path", "run"):
            raise
        return {**found, **_unreadable(error, found["file"])}
    signs = signs_of(trunk, model.network, model.preprocessing)
    described = {
        "format": model.format,
        "what": model.what,
        "network": describe_network(model.network),
        "parameters": sum(parameter.numel() for parameter in trunk.parameters()),
        "num_features": trunk.num_features,
        "method": model.method,
        "licence": known.get("licence", "unspecified"),
        "account": model.account.sentence(),
        "facts": model.facts,
        "preprocessing": {**model.preprocessing, "from": _source(target)},
        "signs": signs.to_json(),
        "load": _lines(reference, model, trunk.num_features),
    }
    conclusion = _conclusion(described, model, signs)
    verdict = {"problem": None, "fix": None, "verdict": signs.verdict, "conclusion": conclusion}
    return {**found, **described, **verdict}


def _file_of(target: Reference, progress: bool) -> Path | None:
    """The file that the weights are in, fetched if need be; None for those that are in several or in none."""
    folder = bundle_folder(target)
    if folder is not None:
        return folder / WEIGHTS if (folder / WEIGHTS).is_file() else None
    if target.kind in ("file", "path"):
        return Path(target.name).expanduser()
    if target.kind == "catalog":
        return fetch(find_card(target.name), progress=progress)
    return fetch(target.name, progress=progress) if target.kind == "url" else None


def _source(target: Reference) -> str:
    if target.kind in ("file", "url"):
        return "what is usual for weights of this layout; the file doesn't say"
    return "its publisher" if target.kind in ("catalog", "timm", "supervised") else "its own description"


# --- the file ---


def _look(path: Path) -> dict[str, Any]:
    look = look_at(path)
    with disk_errors("Reading the file", path):
        digest = sha256_of(path)
    entries: list[str] = []
    if look.problem is None:
        with contextlib.suppress(ZooError):  # why it can't be read is told by who tries to load it
            entries = _entries(read_content(path).value)
    return {
        "path": str(path),
        "container": look.kind,
        "size": look.size,
        "sha256": digest,
        "globals": list(look.globals),
        "refused": list(look.refused),
        "entries": entries,
    }


def _entries(value: Any) -> list[str]:
    """What stands at the top of a file's content, a line each."""
    if not isinstance(value, Mapping):
        return [f"a {type(value).__name__}"]
    tensors = [str(key) for key, item in value.items() if isinstance(item, torch.Tensor)]
    others = {key: item for key, item in value.items() if not isinstance(item, torch.Tensor)}
    lines = [f"{len(tensors)} tensors, the first is {shown(tensors[0])}"] if tensors else []
    facts = plain_facts(others)
    for key, item in others.items():
        inside = len(items_of({"": item}))
        said = f"{inside} tensors or arrays" if inside else facts.get(str(key), f"a {type(item).__name__}")
        lines.append(f"{shown(key)}: {shown(said)}")
    return lines if len(lines) <= _LISTED else [*lines[:_LISTED], f"and {len(lines) - _LISTED} more"]


# --- what follows ---


def _unreadable(error: ZooError, file: Mapping[str, Any] | None) -> dict[str, Any]:
    conclusion = [error.what]
    if file is not None and not file["refused"] and file["entries"]:
        conclusion.insert(0, f"The file itself is whole and safe to read ({file['container']}).")
    if error.fix is not None:
        conclusion.append(f"What helps: {error.fix}.")
    return {"problem": error.what, "fix": error.fix, "verdict": UNREADABLE, "conclusion": conclusion}


def _conclusion(described: Mapping[str, Any], model: ForeignModel, signs: Signs) -> list[str]:
    said = [
        f"It is {_with_article(described['network'])} of {described['parameters']:,} parameters: {model.what}.",
        SENTENCES[signs.verdict],
    ]
    new = [stage.name for stage in signs.stages if stage.initial]
    if signs.verdict == "partly untrained":
        said.append(f"As in a new network: {', '.join(new)}.")
    if signs.non_finite:
        count = len(signs.non_finite)
        said.append(f"They are in {count} of {len(model.trunk)} tensors, the first is {signs.non_finite[0]}.")
    if signs.verdict not in ("untrained", "only statistics"):
        for count, what in (
            (signs.zero_scales, "norms have a scale of nothing but zeros: what they follow has no effect"),
            (signs.zero_filters, "filters hold nothing but zeros"),
            (signs.still_channels, "channels never change: the norms' running variance there is zero"),
        ):
            if count:
                said.append(f"{count} {what}.")
    if model.classifier:
        said.append(f"A classifier of {len(model.classifier['weight'])} classes comes with it.")
    if signs.verdict != "broken":
        said.append("It loads: every tensor of the network is there and fits.")
    return said


def _with_article(network: str) -> str:
    """A network as a sentence names it: ``a resnet18 (base_planes 8)``, ``an AMDIM encoder (ndf 64)``."""
    name = re.sub(r"^amdim(?= |$)", "AMDIM encoder", network)
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def _lines(reference: str, model: ForeignModel, features: int) -> dict[str, list[str]]:
    """What to type, in Python and on the command line, to use it."""
    quoted, word = json.dumps(reference, ensure_ascii=False), shlex.quote(reference)
    python = [
        "import zoo",
        f"model = zoo.load({quoted}).eval()  # images -> {features} features",
        "transform = model.transforms()",
    ]
    if model.classifier:
        python.append(f'classifier = zoo.load({quoted}, classifier="imagenet1k").eval()')
    commands = [f"zoo extract {word} FOLDER --out features.safetensors"]
    network, how = model.network, model.preprocessing
    if network.arch != "amdim":  # it takes views of one size, and not every recipe has such
        recipe = "swav_tiny" if how["crop"] <= _SMALL else "swav_rn50_bs256"
        usual = resolve(recipe).recipe.trunk
        wanted = {name: getattr(network, name) for name in ("arch", "stem", "base_planes")}
        sets = [
            f"--set trunk.{name}={json.dumps(value) if value is None else value}"
            for name, value in wanted.items()
            if getattr(usual, name) != value
        ]
        sets += [
            shlex.quote(f"--set=trunk.options.{name}={json.dumps(value)}")
            for name, value in network.options.items()
        ]
        channels = [f"--channels {len(how['mean'])}"] if len(how["mean"]) != 3 else []
        commands.append(
            " ".join((f"zoo pretrain {recipe} --data FOLDER --init-from {word}", *channels, *sets))
        )
    return {"python": python, "commands": commands}
