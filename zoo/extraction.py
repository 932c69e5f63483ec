"""``zoo.extract``: the features that a model gives for a collection of images."""

from __future__ import annotations

import contextlib
import itertools
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .data.decoding import MAX_PIXELS, Decoding
from .data.open import open_source
from .data.source import ImageSource
from .engine.precision import Precision, choose_device, choose_precision
from .errors import InputError, RunError, did_you_mean
from .extraction_parts import Parts, in_dtype, part_length, working_folder
from .extraction_processes import run_processes
from .feature_files import check_format, write_features
from .feature_identity import digest_of, features_identity
from .loading import load
from .probe.features import eval_mode, source_features, source_labels
from .probe.folded import for_features
from .weights.bundle import weights_digest
from .weights.description import preprocessing_of

__all__ = ["extract"]

log = logging.getLogger("zoo")

SCHEMA = 1
_DTYPES = ("float32", "float16")
_COSINE, _TRIED = 0.999, 8  # of half type to float32, on so many images
_OF_THIS_MACHINE = ("files", "part")  # in the plan of a call, not in what is published


def extract(
    model: Any,
    images: str | ImageSource,
    *,
    out: str | Path | None = None,
    batch_size: int = 64,
    device: str = "auto",
    dtype: str = "float32",
    exact: bool = False,
    processes: int = 1,
    max_pixels: int = MAX_PIXELS,
    progress: bool = True,
) -> dict[str, torch.Tensor]:
    """Pooled features of images, by the test transform that belongs to the model.

    An image's features don't depend on the images that it shares a batch with. Where the hardware is fast in a
    half type (``auto`` in ``zoo.engine.precision``), a copy of the network computes in it, with BatchNorm folded
    into its convolutions, if the first images' features have a cosine above 0.999 to those of float32. Else, or
    with ``exact``, it is the network as it is, in float32. The manifest says which.

    A file is written whole or not at all, with a manifest beside it (``NAME.json``). A call that was killed
    leaves its parts in a hidden folder beside the file; the same call goes on from there and writes the same bytes.
    Those of several processes are what one process with as many threads as each of them writes: the last bits of
    a CPU's sums depend on the number of threads.

    Args:
        model: a reference (see ``zoo.load``), or what ``zoo.load`` returned.
        images: a source, or what ``--data`` accepts.
        out: a file to write, ``.safetensors``, ``.npz`` or ``.parquet``.
        batch_size: images at once.
        device: where to compute; a network that was passed stays where it is.
        dtype: what the features are written in, float32 or float16.
        exact: float32 throughout, whatever the hardware.
        processes: of this machine, each with a share of the images and of the threads (or a GPU of its own).
        max_pixels: larger pictures are refused, where ``images`` is no source.
        progress: say on standard error what is downloaded and what matched.

    Returns:
        ``ids`` int64 (N,), ``labels`` int64 (N,; -1 without) and ``features`` (N, F) of ``dtype``.

    Raises:
        InputError: an unknown model, format or image; or features begun here with other weights or images.
        RunError: features that are no finite numbers or don't fit in float16, a full disk, a killed process.
    """
    path = None if out is None else Path(out)
    if path is not None:
        check_format(path)
    if dtype not in _DTYPES:
        raise InputError(
            f"Features can't be written as {dtype!r}.",
            where="dtype",
            fix=did_you_mean(dtype, _DTYPES) + "known: " + ", ".join(_DTYPES),
        )
    if processes < 1 or (processes > 1 and (path is None or not isinstance(model, str))):
        raise InputError(
            "Several processes write a file, and each loads the model by its reference.",
            where=f"processes={processes}",
            fix="pass a reference and out, or processes=1",
        )
    network = load(model, progress=progress).to(choose_device(device)) if isinstance(model, str) else model
    name = model if isinstance(model, str) else network.zoo_info.get("reference")
    how = preprocessing_of(network.zoo_info, name)
    decoding = Decoding(channels=len(how["mean"]), max_pixels=max_pixels)
    source = open_source(images, how=decoding) if isinstance(images, str) else images
    precision = _precision(network, source, how, exact)
    if path is None:
        trunk, mode = _prepared(network, precision)
        features, labels = source_features(trunk, source, how, batch_size, mode=mode)
        features = in_dtype(features, dtype, source.name)
    else:
        job = _Job(source, how, batch_size, dtype, precision.name)
        features, labels = _into_file(path, model, device, network, job, processes)
    return {"ids": torch.arange(len(source)), "labels": labels, "features": features}


@dataclass(frozen=True)
class _Job:
    """What is computed of which images; it travels to processes."""

    source: ImageSource
    how: Mapping[str, Any]
    batch_size: int
    dtype: str
    precision: str

    def compute(self, network: Any, parts: Parts, chosen: Sequence[int]) -> None:
        """Compute and keep some parts."""
        precision = Precision(self.precision, _device_of(network))
        trunk, mode = _prepared(network, precision)
        for part in chosen:
            rows = parts.rows(part)
            features, _ = source_features(trunk, self.source, self.how, self.batch_size, mode=mode, rows=rows)
            parts.write(part, in_dtype(features, self.dtype, self.source.where(rows.start)))


@dataclass(frozen=True)
class _Share:
    """What one of several processes does."""

    job: _Job
    parts: Parts
    chosen: tuple[int, ...]
    reference: str
    device: str
    weights_sha256: str
    threads: int

    def __call__(self) -> None:
        torch.set_num_threads(self.threads)
        network = load(self.reference, progress=False)
        if weights_digest(network.state_dict()) != self.weights_sha256:
            raise RunError("The model changed since this call began.", where=self.reference, fix="call again")
        self.job.compute(network.to(choose_device(self.device)), self.parts, self.chosen)


def _into_file(
    path: Path, model: Any, device: str, network: Any, job: _Job, processes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute what isn't there yet, write the file, give the features and labels."""
    count = len(job.source)
    plan = features_identity(network, job.source, job.how, job.batch_size, job.precision)
    length, threads = part_length(count, job.batch_size), max(1, torch.get_num_threads() // processes)
    if plan["threads"] is not None:
        plan["threads"] = threads
    plan = {"schema": SCHEMA, "count": count, "dtype": job.dtype, "part": length, **plan}
    with working_folder(path, plan) as folder:
        parts = Parts(folder, digest_of(plan), count, length)
        missing = parts.missing()
        if len(missing) < len(parts):
            log.info(
                "%s: %d of %d parts are there; going on", path.name, len(parts) - len(missing), len(parts)
            )
        if processes == 1:
            job.compute(network, parts, missing)
        else:
            shares = _shares(missing, processes)
            shared = {"reference": model, "weights_sha256": plan["weights_sha256"], "threads": threads}
            run_processes(
                [
                    _Share(job, parts, share, device=place, **shared)
                    for share, place in zip(shares, _devices(device, len(shares)), strict=True)
                ]
            )
        features, labels = parts.gathered(), source_labels(job.source)
        found = {"ids": torch.arange(count), "labels": labels, "features": features}
        manifest = {key: value for key, value in plan.items() if key not in _OF_THIS_MACHINE}
        write_features(path, found, {**manifest, "width": features.shape[1]})
        shutil.rmtree(folder, ignore_errors=True)
    return features, labels


def _shares(missing: Sequence[int], processes: int) -> list[tuple[int, ...]]:
    """Neighbouring parts to each process, as evenly as can be."""
    count = min(processes, len(missing))
    ends = [len(missing) * number // count for number in range(count + 1)] if count else [0]
    return [tuple(missing[a:b]) for a, b in itertools.pairwise(ends)]


def _devices(device: str, processes: int) -> list[str]:
    """Several GPUs are dealt out in turn."""
    gpus = torch.cuda.device_count() if device in ("auto", "cuda") else 0
    return [f"cuda:{number % gpus}" if gpus > 1 else device for number in range(processes)]


def _device_of(network: Any) -> torch.device:
    return next(network.parameters(), torch.empty(0)).device


def _precision(network: Any, source: ImageSource, how: Mapping[str, Any], exact: bool) -> Precision:
    """What ``auto`` says, if this network bears it; one in another type than float32 computes in its own.

    Most trained networks do. Some, and random ones with BatchNorm's statistics of images, lose more than half
    types round off: what is promised of the features is looked at on the first images.
    """
    device, types = _device_of(network), {parameter.dtype for parameter in network.parameters()}
    plain = Precision("float32", device)
    chosen = plain if exact or types != {torch.float32} else choose_precision("auto", device)
    if chosen.name == "float32":
        return plain
    rows = range(min(_TRIED, len(source)))
    expected, _ = source_features(network, source, how, len(rows), rows=rows)
    trunk, mode = _prepared(network, chosen)
    found, _ = source_features(trunk, source, how, len(rows), finite=False, mode=mode, rows=rows)
    least = float(F.cosine_similarity(found, expected).min())
    if least > _COSINE:
        return chosen
    log.info("%s gives this network's features to a cosine of %.4f only: float32 it is", chosen.name, least)
    return plain


def _prepared(
    network: Any, precision: Precision
) -> tuple[Any, Callable[[nn.Module], contextlib.AbstractContextManager[None]]]:
    """The network to pass images through, and the mode that it is in meanwhile."""
    if precision.name == "float32":
        return network, eval_mode
    half = {"bfloat16": torch.bfloat16, "float16": torch.float16}[precision.name]

    @contextlib.contextmanager
    def mode(trunk: nn.Module) -> Iterator[None]:
        with eval_mode(trunk), precision.autocast():
            yield

    return for_features(network, half), mode
