"""Which of several rates the trunk is trained with: judged on training images that are held out, never on the test.

Source: SwAV's appendix A.5 takes the best of three rates, and doesn't say on what.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from zoo.errors import InputError, RunError
from zoo.keyed import keyed_key, keyed_permutation

from ..annotations import BoxSet
from ..config import DetectConfig
from ..datasets import Sets
from .protocol import DetrProtocol

__all__ = ["choose_rate", "hold_out", "with_best_rate"]

log = logging.getLogger("zoo")

_SHARE = 0.1


def hold_out(images: BoxSet, seed: int) -> tuple[BoxSet, BoxSet]:
    """A set without a tenth of its images, and that tenth.

    Raises:
        InputError: there are not two images with objects.
    """
    order = keyed_permutation(keyed_key(seed, "detr held out"), len(images)).tolist()
    count = max(1, round(_SHARE * len(images)))
    held, kept = images.chosen(sorted(order[:count])), images.chosen(sorted(order[count:]))
    if not all(any(len(picture.objects) for picture in part.pictures) for part in (held, kept)):
        raise InputError(
            f"{images.name} has too few images with objects: a part must be held out to choose a rate by.",
            where="--backbone-lr",
            fix="name one rate",
        )
    name = f"{images.name}, held out"
    return replace(kept, name=f"{images.name} without those held out"), replace(
        held, name=name, expected=None
    )


def with_best_rate(
    protocol: DetrProtocol,
    config: DetectConfig,
    sets: Sets,
    trained: Callable[[DetrProtocol, int, str, Sets, BoxSet], dict[str, Any]],
) -> tuple[DetrProtocol, dict[str, Any] | None]:
    """The protocol with the best of the trunk's rates that were asked for, and how it was chosen (of one: None).

    Args:
        protocol: with any rate.
        config: has the rates.
        sets: the whole training set, and the test set, which is not looked at.
        trained: (protocol, seed, name of a folder, sets, set to score on) -> what came of it.
    """
    if len(config.backbone_lr) < 2:
        return protocol, None

    def judge(rate: float, kept: BoxSet, held: BoxSet) -> dict[str, Any]:
        how = replace(protocol, backbone_lr=rate)
        return trained(how, config.seed, f"backbone-lr-{rate:g}", replace(sets, train=kept, test=held), held)

    rate, said = choose_rate(config.backbone_lr, sets.train, config.seed, judge)
    return replace(protocol, backbone_lr=rate), said


def choose_rate(
    rates: Sequence[float],
    images: BoxSet,
    seed: int,
    judge: Callable[[float, BoxSet, BoxSet], dict[str, Any]],
) -> tuple[float, dict[str, Any]]:
    """Train with each rate without the images held out, and take the one with the highest AP on them.

    Args:
        rates: what there is to choose from; of equals the first is taken.
        images: the whole training set.
        seed: of the images that are held out.
        judge: (rate, set to train on, set to score on) -> ``metrics``; none if the training diverged.

    Returns:
        The rate, and for the result what was chosen by what.

    Raises:
        InputError: too few images.
        RunError: every training diverged.
    """
    kept, held = hold_out(images, seed)
    scores: dict[float, float | None] = {}
    for rate in dict.fromkeys(rates):
        scores[rate] = judge(rate, kept, held)["metrics"].get("AP")
        came = "diverged" if scores[rate] is None else f"AP {scores[rate]} on {len(held)} images held out"
        log.info("backbone lr %g: %s", rate, came)
    known = {rate: score for rate, score in scores.items() if score is not None}
    if not known:
        raise RunError("The training diverged with every rate of the trunk.", fix="lower the lr")
    best = max(known, key=lambda rate: known[rate])
    return best, {
        "what": "backbone_lr",
        "chosen": best,
        "by": f"AP on {len(held)} of the {len(images)} training images, held out; then trained on all of them",
        "AP": {f"{rate:g}": score for rate, score in scores.items()},
        "held_out": held.fingerprint(),
    }
