"""What any reference holds, tensor by tensor: for converting, verifying and comparing models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .errors import InputError
from .weights.bundle import CLASSIFIER, HEADS, WEIGHTS, Bundle
from .weights.description import check_description
from .weights.formats.base import Account, ForeignModel
from .weights.load import bundle_tensors, open_bundle, read_foreign
from .weights.reference import Reference, parse_reference

__all__ = ["bundle_contents", "contents_of"]


def contents_of(
    reference: str, *, progress: bool = True, verify: bool = False
) -> tuple[ForeignModel, dict[str, Any]]:
    """The backbone, heads and classifier behind a reference, and what is known of them beside.

    Args:
        reference: anything that ``zoo.load`` takes but a random model.
        progress: say on standard error what is downloaded.
        verify: read and hash every byte even if an earlier check left a receipt.

    Returns:
        The tensors, and plain JSON: ``licence``, ``lineage``; of the zoo's own models also ``recipe``,
        ``data``, ``versions`` and ``results``.

    Raises:
        InputError: no such model, or a damaged or refused file.
        RunError: a download failed.
    """
    target = parse_reference(reference)
    if target.kind == "random":
        raise InputError(
            "A random network is drawn from its seed when it is loaded: there is no file of it to look into.",
            where=reference,
            fix="name a file of weights, a run or a published model; zoo.load, --model and --init-from take random "
            "networks",
        )
    if target.kind == "run":
        return _of_run(target)
    bundle = open_bundle(target, progress=progress, verify=verify)
    if bundle is None:
        return read_foreign(target, progress=progress, verify=verify)
    bundle.verify(full=verify)
    return bundle_contents(bundle)


def _of_run(target: Reference) -> tuple[ForeignModel, dict[str, Any]]:
    from .pretrain.publish import read_run, split_classifier

    what, trunk, heads = read_run(Path(target.name).expanduser())
    heads, classifier = split_classifier(heads)
    known = {
        key: getattr(what, key) for key in ("licence", "lineage", "recipe", "data", "versions", "results")
    }
    model = ForeignModel(
        format="zoo_run",
        what=f"a run of {what.recipe['name']}, step {what.lineage['step']}",
        network=what.network,
        trunk=trunk,
        heads=heads,
        classifier=classifier,
        method=what.method,
        preprocessing=what.preprocessing,
        account=Account(len(trunk)),
    )
    return model, known


def bundle_contents(bundle: Bundle) -> tuple[ForeignModel, dict[str, Any]]:
    """``contents_of`` for a bundle whose files were verified."""
    info = bundle.info

    check_description(info, bundle.path / "zoo.json")
    trunk = bundle_tensors(bundle, WEIGHTS)
    model = ForeignModel(
        format="zoo_bundle",
        what="a published model",
        network=bundle.network,
        trunk=trunk,
        heads=bundle_tensors(bundle, HEADS) if HEADS in bundle.sums else {},
        classifier={} if bundle.classifier is None else bundle_tensors(bundle, CLASSIFIER),
        method=info["method"],
        preprocessing=info["preprocessing"],
        account=Account(len(trunk)),
    )
    keys = ("licence", "lineage", "recipe", "data", "versions", "results")
    known = {key: info[key] for key in keys if key in info}
    return model, {**known, "weights_sha256": bundle.weights_sha256}
