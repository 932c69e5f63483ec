"""From a run to a published model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from ..addresses import without_credentials
from ..engine.checkpoint import CheckpointFolder
from ..errors import InputError
from ..models.factory import create_trunk
from ..weights.bundle import Description, write_bundle
from ..weights.card import model_card
from ..weights.fill import fill_trunk
from ..weights.fingerprint import record_features
from ..weights.formats.base import Network
from ..weights.hubs.local import LocalHub, Published
from .resolve import resolve
from .rundir import RunFolder, list_runs, runs_root

__all__ = ["newest_run", "publish_run", "read_run", "split_classifier"]


def newest_run() -> Path:
    """The newest run below ``runs_root()`` that has a checkpoint.

    Raises:
        InputError: there is none.
    """
    runs = [run for run in list_runs(runs_root()) if CheckpointFolder(run.checkpoints).steps()]
    if not runs:
        raise InputError(
            "There is no run with a checkpoint.",
            where=runs_root(),
            fix="train one (zoo pretrain), or name a run",
        )
    return runs[-1].path


def read_run(path: str | Path) -> tuple[Description, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What a run's newest whole checkpoint holds: its description, the trunk and the heads.

    Raises:
        InputError: not a run, or one without a whole checkpoint.
    """
    path = Path(path)
    folder = RunFolder(path)
    info = folder.read()
    recipe = resolve(folder.recipe).recipe
    checkpoint, problems = CheckpointFolder(folder.checkpoints).newest()
    if checkpoint is None:
        raise InputError(
            "The run has no whole checkpoint" + (f" ({problems[0]})" if problems else " yet") + ".",
            where=path,
        )
    learner = checkpoint.shared["learner"]
    trunk = {k.removeprefix("trunk."): v for k, v in learner.items() if k.startswith("trunk.")}
    average = checkpoint.shared.get("average")
    if average is not None:  # engine.ema_decay: the average is what the run is after
        trunk = dict(average)
    heads = {k: v for k, v in learner.items() if not k.startswith("trunk.")}
    classifier = heads.get("classifier.weight")
    versions = folder.environment().get("packages", {})
    evaluation, views = recipe.evaluation, recipe.views
    # Paths on this machine are nobody else's business: sources are published by their last part.
    public = recipe.to_dict()
    public["checkpoint"]["copy_to"] = None
    index = recipe.data.class_index
    public["data"]["class_index"] = None if index is None else _public_name(index)
    public["data"]["sources"] = [_public_name(source) for source in recipe.data.sources]
    public["probe"]["data"] = [_public_name(source) for source in recipe.probe.data]
    network = Network(recipe.trunk.arch, recipe.trunk.stem, recipe.trunk.base_planes, recipe.trunk.options)
    preprocessing = {
        "mean": list(views.mean),
        "std": list(views.std),
        "resize": evaluation.resize,
        "crop": evaluation.crop,
        "interpolation": evaluation.interpolation,
    }
    description = Description(
        arch=network.arch,
        stem=network.stem,
        base_planes=network.base_planes,
        options=network.options,
        num_features=fill_trunk(create_trunk, network, trunk, path, preprocessing).num_features,
        method=recipe.method.name,
        preprocessing=preprocessing,
        recipe=public,
        data={"sources": public["data"]["sources"], **folder.data()},
        lineage={
            "run": path.resolve().name,
            "created": info["created"],
            "step": checkpoint.step,
            "averaged": average is not None,
            "total_steps": info["total_steps"],
            "init_from": None if info["init_from"] is None else _public_name(info["init_from"]),
        },
        versions=versions,
        num_classes=0 if classifier is None else len(classifier),
    )
    return description, trunk, heads


def split_classifier(
    heads: dict[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The heads without the classifier of supervised training, and that (``weight``, ``bias``), or nothing."""
    prefix = "classifier."
    classifier = {k.removeprefix(prefix): v for k, v in heads.items() if k.startswith(prefix)}
    return {k: v for k, v in heads.items() if not k.startswith(prefix)}, classifier


def _public_name(source: str) -> str:
    source = without_credentials(source)
    if source.startswith("hf:"):  # public, and what a card names as the base
        return source
    return Path(source).name if "/" in source else source


def publish_run(
    run: str | Path | None = None,
    *,
    name: str | None = None,
    tag: str | None = None,
    licence: str = "unspecified",
    results: list[dict[str, Any]] | None = None,
    force: bool = False,
    hub: LocalHub | None = None,
) -> Published:
    """Publish a run's newest checkpoint to the local hub.

    Args:
        run: the run's folder; the newest run by default.
        name: ``org/name``; ``me/<recipe>`` by default.
        tag: a fixed name for this revision, e.g. ``v1``.
        licence: of the weights.
        results: transfer results to put into the card.
        force: move the tag if it points at another revision.
        hub: where to; the user's local hub by default.

    Raises:
        InputError: not a run, a bad name or tag, or weights that give no finite features.
        RunError: the disk is full or read-only; what was published before is untouched.
    """
    path = newest_run() if run is None else Path(run)
    what, trunk, heads = read_run(path)
    heads, classifier = split_classifier(heads)
    # A momentum encoder and a dictionary are of use in training alone, and large; a bank tells of each image.
    left_out = ("momentum_encoder.", "queue", "memory_bank")
    heads = {k: v for k, v in heads.items() if not k.startswith(left_out)}
    features = record_features(what.network, trunk, what.preprocessing, path)
    what = dataclasses.replace(what, licence=licence, results=results or [], features=features)
    target = name or f"me/{what.recipe['name']}"
    card = model_card(target, what)
    return (hub or LocalHub()).publish(
        target,
        lambda folder: write_bundle(folder, what, trunk, heads, card, classifier),
        tag=tag,
        force=force,
    )
