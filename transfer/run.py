"""Run one transfer recipe: model and data in, ``result.json`` out."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from zoo.data.class_index import read_class_index
from zoo.data.decoding import MAX_PIXELS, Decoding
from zoo.data.source import ImageSource
from zoo.data.views.maker import PlannedViews
from zoo.data.views.presets import crop_and_flip
from zoo.engine.precision import choose_device
from zoo.errors import InputError, RunError, did_you_mean
from zoo.feature_identity import features_identity, is_own_code
from zoo.files import disk_errors, sha256_of
from zoo.loading import load
from zoo.pretrain.environment import describe_environment
from zoo.probe.feature_cache import kept_features
from zoo.probe.features import PooledStages, source_features, source_labels
from zoo.probe.linear import FINAL
from zoo.weights.bundle import weights_digest
from zoo.weights.description import preprocessing_of
from zoo.weights.fill import STANDARD_PREPROCESSING
from zoo.weights.reference import parse_reference

from . import RECIPES
from .config import TransferConfig
from .datasets import Labelled, ViewOfImages, open_labelled
from .intervals import intervals
from .labels import split_sha256
from .multilabel import open_multilabel, refuse_multilabel
from .results import alone_in, new_result_path, refuse_another_task, short_name, write_result
from .trained import trained_as

__all__ = ["Context", "judge", "open_context", "open_model", "settings_of", "sized", "transfer"]

log = logging.getLogger("zoo")

_BATCH = 64  # images of a pass


@dataclass
class Context:
    """What the recipes work on: a frozen trunk, and the data. Features are computed once for all of them."""

    model: str
    info: dict[str, Any]
    weights_sha256: str
    trunk: Any
    preprocessing: dict[str, Any]
    labelled: Labelled
    workers: int = 0
    cache: bool = False
    """Features are kept for later calls (``zoo.probe.feature_cache``)."""
    _features: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @property
    def train(self) -> ImageSource:
        return self.labelled.train

    @property
    def val(self) -> ImageSource:
        return self.labelled.val

    @property
    def classes(self) -> int:
        return len(self.labelled.classes)

    def staged(self, stages: Sequence[str] = (FINAL,)) -> Any:
        """The trunk, with the pooled maps of these stages side by side for its output (``PooledStages``)."""
        return self.trunk if tuple(stages) == (FINAL,) else PooledStages(self.trunk, stages)

    def features(
        self, part: str, stages: Sequence[str] = (FINAL,), view: int | None = None, seed: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Frozen features and labels of ``train`` or ``val``.

        Args:
            part: which.
            stages: whose features, side by side.
            view: None for the test transform; else the random crop and flip that training sees in this epoch.
            seed: of the crop.
        """
        key = (part, tuple(stages), view, None if view is None else seed)
        source = self.train if part == "train" else self.val
        how = self.preprocessing
        if view is not None:
            maker = PlannedViews(crop_and_flip(int(how["crop"])))
            source, how = ViewOfImages(source, maker, seed, view), {**how, "resize": how["crop"]}
        return self.features_of(key, self.staged(stages), source, how, stages=tuple(stages))

    def features_of(
        self, key: tuple[Any, ...], network: Any, source: ImageSource, how: dict[str, Any], **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Features that a network made of the trunk gives for images, and their labels; computed at most once.

        Args:
            key: what tells them from the context's others.
            network: a module whose ``trunk`` is the context's, or that itself.
            source: the images; those that it makes them of are its ``source``.
            how: preprocessing.
            more: what of the network neither its weights nor its layers say, as JSON.
        """
        if key in self._features:
            return self._features[key]
        if not self.cache:
            self._features[key] = source_features(network, source, how, _BATCH)
            return self._features[key]
        if is_own_code(self.trunk):
            raise InputError(
                "Features of a network of your own are not kept: its code may change unseen.",
                where=self.model,
                fix="leave out --cache-features",
            )
        facts = {"model": features_identity(network, source, how, _BATCH), "dtype": "float32", **more}
        found = kept_features(facts, len(source), lambda: source_features(network, source, how, _BATCH)[0])
        self._features[key] = found, source_labels(source)
        return self._features[key]


class RawPixels(nn.Flatten):
    """No network at all: an image's normalised pixels are its features."""


def open_model(reference: str) -> tuple[Any, dict[str, Any], str]:
    """A model, what is known of it, and the SHA-256 of its weights.

    Besides what ``zoo.load`` accepts: ``pixels:SIDE``, raw pixels of the image at that size.
    """
    kind, _, side = reference.partition(":")
    if kind == "pixels":
        if not side.isdigit() or int(side) < 1:
            raise InputError("Raw pixels need a side in pixels.", where=reference, fix="e.g. pixels:48")
        how = {**STANDARD_PREPROCESSING, "resize": int(side), "crop": int(side)}
        return RawPixels(), {"reference": reference, "preprocessing": how}, f"pixels-{side}"
    model = load(reference, progress=log.isEnabledFor(logging.INFO))
    preprocessing_of(model.zoo_info, reference)
    digest = model.zoo_info.get("weights_sha256") or weights_digest(model.state_dict())
    return model, model.zoo_info, digest


def transfer(
    recipe: str,
    *,
    model: str,
    dataset: str = "builtin:photos",
    data: str | None = None,
    settings: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    workers: int = 0,
    resize: int | None = None,
    crop: int | None = None,
    device: str = "auto",
    max_pixels: int = MAX_PIXELS,
    class_index: str | None = None,
    cache_features: bool = False,
) -> dict[str, Any]:
    """Judge a model by one recipe.

    Args:
        recipe: a name in ``transfer.RECIPES``.
        model: a reference (``zoo.load``), or ``pixels:SIDE``.
        dataset: a data set's name, or a folder.
        data: the folder that holds the data set.
        settings: values of the recipe's config.
        out: folder of ``result.json``; a fresh one below ``results`` by default.
        workers: data processes.
        resize: shorter side of test images in pixels, if not the model's own.
        crop: side of their central crop, if not the model's own.
        device: where to compute: auto, cpu, cuda, ...
        max_pixels: larger pictures are refused.
        class_index: a file that numbers the classes (``zoo.data.class_index``).
        cache_features: keep the trunk's features for later calls, and use those that are kept. Off, since small
            sets are done before their files are looked through, and the views of large ones fill disks.

    Returns:
        The content of ``result.json`` with its ``path``.

    Raises:
        InputError: an unknown recipe, setting, model or data set.
        RunError: training diverged; the result is written and says so.
    """
    config = settings_of(recipe, settings or {})
    if recipe == "detect":
        _refuse_options(resize=resize, crop=crop, class_index=class_index)
        if cache_features:
            raise InputError(
                "Detection trains the trunk: no features are kept.",
                where="--cache-features",
                fix="leave it out",
            )
        return _detect(model, dataset, data, config, out, workers, device, max_pixels)
    with _result_folder(recipe, dataset, out) as folder:
        context = open_context(
            model,
            dataset,
            data,
            workers=workers,
            resize=resize,
            crop=crop,
            device=device,
            allow_overlap=config.allow_overlap,
            max_pixels=max_pixels,
            class_index=class_index,
            train_only=bool(getattr(config, "leave_one_out", False)),
            image_sets=config.image_sets,
            cache_features=cache_features,
        )
        refuse_another_task(folder, recipe, dataset, context.weights_sha256)
        return judge(recipe, context, config, folder)


@contextlib.contextmanager
def _result_folder(recipe: str, dataset: str, out: str | Path | None) -> Iterator[Path]:
    """The result's folder, made before the work, not after it; gone if nothing came of that."""
    was_there = out is not None and Path(out).exists()
    folder = Path(out) if out is not None else new_result_path(recipe, dataset)
    with disk_errors("Making the result's folder", folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    except BaseException:
        if not was_there:
            with contextlib.suppress(OSError):  # it holds a result all the same
                folder.rmdir()
        raise


def _detect(
    model: str,
    dataset: str,
    data: str | None,
    config: Any,
    out: str | Path | None,
    workers: int,
    device: str,
    max_pixels: int,
) -> dict[str, Any]:
    """Detection: in processes that it starts, or that torchrun or SLURM started; the first one writes."""
    from .detect.run import Work, entered, run

    began = time.monotonic()
    progress = "auto" if log.isEnabledFor(logging.INFO) else "quiet"
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(entered(config, device))
        first = place is None or place[1].rank == 0
        folder = stack.enter_context(_result_folder("detect", dataset, out)) if first else None
        if place is not None:
            folder = Path(place[1].gather_values(None if folder is None else str(folder))[0])
        if first:
            assert folder is not None
            stack.enter_context(alone_in(folder))
        asked = Work(model, dataset, data, str(folder), device, workers, progress, max_pixels)
        found = run(asked, config, place)
        what, evidence = found.pop("model"), found.pop("data")
        assert folder is not None
        return _conclude("detect", model, what, dataset, evidence, config, found, began, folder, first)


def _refuse_options(**options: int | str | None) -> None:
    for name, given in options.items():
        if given:
            raise InputError(
                f"Detection has no {name}: images are resized by min_size and max_size, classes are those of "
                "the annotations.",
                where="--" + name.replace("_", "-"),
                fix="leave it out",
            )


def open_context(
    model: str,
    dataset: str,
    data: str | None = None,
    *,
    workers: int = 0,
    resize: int | None = None,
    crop: int | None = None,
    device: str = "auto",
    allow_overlap: bool = False,
    max_pixels: int = MAX_PIXELS,
    class_index: str | None = None,
    train_only: bool = False,
    image_sets: tuple[str, str] | None = None,
    cache_features: bool = False,
) -> Context:
    """Open a model and a labelled data set for several recipes; arguments as of ``transfer``.

    ``train_only``: no test part is needed (``open_labelled``). ``image_sets``: the images have several classes
    each, and these are the names of VOC's sets (``open_multilabel``).
    """
    names = None if class_index is None else read_class_index(Path(class_index))

    def opened(how: Decoding) -> Labelled:
        if image_sets is None:
            refuse_multilabel(data or dataset)
            return open_labelled(dataset, data, allow_overlap, how, names, train_only)
        if names is not None:
            raise InputError("Images with several classes have them by name.", where="--class-index")
        return open_multilabel(dataset, data, allow_overlap, how, *image_sets)

    labelled = opened(Decoding(max_pixels=max_pixels))
    trunk, info, digest = open_model(model)
    trunk.to(choose_device(device))
    how = sized(info["preprocessing"], resize, crop)
    if len(how["mean"]) != 3:  # what the model was trained on
        labelled = opened(Decoding(channels=len(how["mean"]), max_pixels=max_pixels))
    return Context(model, info, digest, trunk, how, labelled, workers, cache_features)


def judge(recipe: str, context: Context, config: TransferConfig, out: Path) -> dict[str, Any]:
    """Run one recipe on an open context and write its result; a recipe that trains the trunk comes last.

    Raises:
        RunError: training diverged, or a recipe that doesn't train the trunk changed it.
    """
    began = time.monotonic()
    state = context.trunk.state_dict()
    before = weights_digest(state) if config.frozen_trunk and state else None
    found = RECIPES.code(recipe)(context, config)
    config = found.pop("settled", config)
    if context.labelled.part_of:  # numbers of a part are no numbers of the whole
        found["flatters"] = "; ".join(filter(None, (found.get("flatters"), context.labelled.part_of)))
    if before is not None:
        after = weights_digest(context.trunk.state_dict())
        found["trunk_sha256"] = {"before": before, "after": after}
        if before != after:
            raise RunError("The frozen trunk is not what it was.", where=f"{recipe}: {context.model}")
    what = {**context.info, "preprocessing": context.preprocessing, "weights_sha256": context.weights_sha256}
    parts = {"train": context.train, "val": context.val}
    evidence = {
        "classes": context.classes,
        "class_names": list(context.labelled.classes),  # the test part's labels were mapped to these
        **{name: part.fingerprint() for name, part in parts.items()},
        "split_sha256": {name: split_sha256(part) for name, part in parts.items()},
        "overlap": context.labelled.overlap,
    }
    return _conclude(recipe, context.model, what, context.labelled.name, evidence, config, found, began, out)


def _conclude(
    recipe: str,
    model: str,
    what: Mapping[str, Any],
    dataset: str,
    evidence: Mapping[str, Any],
    config: TransferConfig,
    found: dict[str, Any],
    began: float,
    out: Path,
    write: bool = True,
) -> dict[str, Any]:
    """Gather a result with its evidence and write it; then stop if it says that training diverged.

    Of a recipe's answer, ``metrics`` are taken as they are, ``hits`` (which test images each accuracy counts as
    right) make their intervals unless it gives ``intervals`` itself, and the rest are details.
    """
    environment = describe_environment()
    hits = found.pop("hits", {})
    result = {
        "recipe": recipe,
        "model": model if model.startswith("pixels:") else str(parse_reference(model)),
        "weights_sha256": what["weights_sha256"],
        "trained": trained_as(what),
        "dataset": short_name(dataset),
        "metrics": found.pop("metrics"),
        "intervals": {**intervals(hits, config.seed), **found.pop("intervals", {})},
        "protocol": _public(config),
        "preprocessing": what["preprocessing"],
        "seeds": [config.seed],
        "data": evidence,
        "details": found,
        "versions": {"zoo": environment["zoo"], **environment["packages"]},
        "machine": {key: environment[key] for key in ("processor", "processors", "threads")},
        "seconds": round(time.monotonic() - began, 2),
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    path = write_result(out, result) if write else out / "result.json"
    if found.get("diverged"):
        raise RunError(
            "The training diverged; the result is written and marked as diverged.",
            where=path,
            fix="lower the lr (of fine-tuning lr_head, too), or train longer",
        )
    return {**result, "path": str(path)}


def _public(config: TransferConfig) -> dict[str, Any]:
    """The settings, a file by its name and content: results are published, this machine's paths are not."""
    values = config.model_dump(mode="json")
    for name in config.folders:
        values[name] = Path(values[name]).name
    for name in config.files:
        if values[name]:
            path = Path(values[name]).expanduser()
            values[name] = {"name": path.name, "sha256": sha256_of(path)}
    return values


def sized(how: Mapping[str, Any], resize: int | None, crop: int | None) -> dict[str, Any]:
    """A preprocessing with another size of the resized image or of its central crop.

    Raises:
        InputError: the crop is larger than the image.
    """
    found = {**how, "resize": resize or how["resize"], "crop": crop or how["crop"]}
    if found["crop"] > found["resize"]:
        raise InputError(
            f"The crop ({found['crop']}) is larger than the resized image ({found['resize']}).",
            where="--crop",
        )
    return found


def settings_of(recipe: str, settings: Mapping[str, Any]) -> TransferConfig:
    """A recipe's config of these values.

    Raises:
        InputError: an unknown recipe or setting, or a value that doesn't fit.
    """
    kind = RECIPES.config(recipe)
    try:
        return kind.model_validate(dict(settings))  # type: ignore[no-any-return]
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            raise InputError(
                "There is no such setting.",
                where=f"{recipe}: {key}",
                fix=f"{did_you_mean(key, kind.model_fields)}known settings: {', '.join(kind.model_fields)}",
            ) from None
        which = f"The value {problem['input']!r} doesn't" if problem["loc"] else "These settings don't"
        raise InputError(
            f"{which} fit: {problem['msg'].removeprefix('Value error, ')}.",
            where=f"{recipe}: {key}",
            fix=f"zoo transfer {recipe} --help says what it means",
        ) from None
