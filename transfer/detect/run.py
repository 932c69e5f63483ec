"""The detection recipe: Faster or Mask R-CNN by a published protocol on a trunk of the zoo."""

from __future__ import annotations

import copy
import json
import logging
import math
import shutil
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zoo.engine.collectives import Collectives
from zoo.engine.launch import launch
from zoo.engine.precision import Precision, shared_precision
from zoo.engine.sync_batchnorm import synchronize_batchnorm
from zoo.engine.world import process_world
from zoo.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_SAVED, InputError, RunError, Stopped
from zoo.files import disk_errors, read_json, write_json, write_text
from zoo.keyed import keyed_seed
from zoo.models.factory import is_resnet
from zoo.tensors import seeded

from ..run import open_model
from .batches import Stream
from .coco_scores import coco_results
from .config import DetectConfig
from .datasets import Sets, family_of, open_sets
from .judge import detect_all, judged
from .models.detectors import C4Detector, DetectorSettings, FpnDetector, build_detector
from .models.roi import RoiSettings
from .models.rpn import RpnSettings
from .protocols import Protocol, choose_protocol, rescaled
from .saved import SavedDetector, save_detector
from .training import Normalisation, Plan, train

__all__ = ["Work", "detector_for", "run", "settled", "work"]

log = logging.getLogger("zoo")

_PER_PROCESS = 2
_MOST_IMAGES = 16


@dataclass(frozen=True)
class Work:
    """What was asked for; plain values, so that it can be handed to other processes."""

    reference: str
    dataset: str
    data: str | None
    out: str
    device: str = "auto"
    workers: int = 0
    progress: str = "auto"


def run(asked: Work, config: DetectConfig) -> dict[str, Any]:
    """Train on the training set and score on the test set, as often as was asked for.

    Called again with the same folder it goes on where it was stopped.

    Raises:
        InputError: no such model or data, or everything that is wrong with the data.
        Stopped: a signal came; the state is saved.
    """
    if config.nproc == 1:
        return work(asked, config)
    open_sets(asked.dataset, asked.data, config)  # what can't be is said once, and before anything is started
    request, answer = Path(asked.out) / "request.json", Path(asked.out) / "answer.json"
    write_json(request, {"work": vars(asked), "settings": config.model_dump(mode="json")})
    code = launch(["-m", "transfer.detect.worker", str(request)], config.nproc)
    if code in (EXIT_SAVED, EXIT_INTERRUPTED):
        raise _stopped(asked.out, code)
    if code == EXIT_BAD_INPUT:
        raise InputError("The processes found something wrong, see above.")
    if code:
        raise RunError("The processes failed, see above.", fix="the same command with the same --out goes on")
    found: dict[str, Any] = read_json(answer)
    for file in (request, answer):
        file.unlink()
    return found


def work(asked: Work, config: DetectConfig) -> dict[str, Any]:
    """This process's part; all processes come to the same end."""
    with process_world(asked.device) as (device, world):
        sets = open_sets(asked.dataset, asked.data, config)
        for note in dict.fromkeys((*sets.train.notes, *sets.test.notes)):
            log.warning("%s", note)
        trunk, info, digest = _trunk(asked.reference)
        method = config.method or str(info.get("method") or "")
        protocol, sentence = settled(config, asked.dataset, sets, method, world.world_size)
        log.info("protocol: %s", protocol.name)
        if sentence:
            log.info("%s", sentence)
        scored = sets.train if config.test_on_train else sets.test
        precision = shared_precision(config.precision, device, world)
        done = []
        for number in range(config.runs):
            one = _Training(asked, config, protocol, precision, world, config.seed + number, number)
            done.append(one.finished(trunk, info, digest, sets, scored))
        return _gathered(done, config, protocol, sentence, sets, scored, info, digest)


def settled(
    config: DetectConfig, dataset: str, sets: Sets, method: str, processes: int
) -> tuple[Protocol, str]:
    """The protocol that is trained by, rescaled to the batch, and a sentence that says how.

    Raises:
        InputError: a batch that can't be shared out, or an unknown name.
    """
    family = family_of(dataset)
    protocol = choose_protocol(dataset, family, method, config.head, config.schedule, sets.train.has_masks)
    batch = config.batch_size or min(_MOST_IMAGES, _PER_PROCESS * processes)
    if batch % processes:
        raise InputError(
            f"{batch} images a step can't be shared out among {processes} processes.",
            where=f"--batch-size {batch}",
            fix=f"take a multiple of {processes}",
        )
    protocol, sentence = rescaled(protocol, batch)
    changes: dict[str, Any] = {}
    if config.lr:
        changes["lr"] = config.lr
    if config.warmup_steps >= 0:
        changes["warmup"] = config.warmup_steps
    if config.min_size:
        changes |= {"sizes": (config.min_size,), "test_size": config.min_size}
    if config.max_size:
        changes["most"] = config.max_size
    if config.precise_batches >= 0:
        changes["precise_batches"] = config.precise_batches
    return replace(protocol, **changes), sentence


def detector_for(trunk: Any, protocol: Protocol, classes: int, seed: int) -> C4Detector | FpnDetector:
    """The protocol's detector around a trunk; the new layers follow from the seed."""
    settings = DetectorSettings(
        protocol.head,
        classes,
        RpnSettings(protocol.rpn_before, protocol.rpn_after, protocol.anchors),
        RoiSettings(protocol.regions),
        protocol.extra_norm,
        protocol.fpn_norm,
    )
    with seeded(keyed_seed(seed, "detector")):
        return build_detector(trunk, settings)


@dataclass
class _Training:
    """One of the trainings of a work: trained, scored, and kept in a folder of its own."""

    asked: Work
    config: DetectConfig
    protocol: Protocol
    precision: Precision
    world: Collectives
    seed: int
    number: int

    def finished(
        self, trunk: Any, info: dict[str, Any], digest: str, sets: Sets, scored: Any
    ) -> dict[str, Any]:
        """Its scores; those that are in its folder already, if it was finished before."""
        folder = Path(self.asked.out) / f"run-{self.number}"
        steps = self.config.steps or self.protocol.steps
        self._claim(folder, {"weights": digest, "steps": steps, "train": sets.train.fingerprint()})
        scores = folder / "scores.json"
        if self.world.any(scores.is_file()):
            log.info("training %d is finished: its scores are taken from %s", self.number, scores)
            return dict(read_json(scores))
        how = info["preprocessing"]
        plan = Plan(
            self.protocol,
            steps,
            folder,
            Normalisation(*(tuple(255.0 * value for value in how[key]) for key in ("mean", "std"))),
            self.asked.workers,
            self.config.save_every,
            tuple(name for name in self.config.tracker.split(",") if name),
            self.asked.progress,
        )
        detector = detector_for(copy.deepcopy(trunk), self.protocol, len(sets.train.classes), self.seed)
        detector.to(device=self.precision.device, dtype=self.precision.master_dtype)
        detector.to(memory_format=self.precision.memory_format)
        synchronize_batchnorm(detector, self.world)
        masks = self.protocol.head == "mask-fpn"
        stream = Stream(sets.train, self.seed, self.protocol.sizes, self.protocol.most, masks)
        ended = train(detector, stream, plan, self.precision, self.world)
        if ended.exit_code:
            raise _stopped(self.asked.out, ended.exit_code)
        if ended.diverged:
            return {"metrics": {}, "train_loss": None, "diverged": True, "seed": self.seed}
        found = detect_all(detector, scored, plan, self.precision, self.world)
        ap = self.config.ap or scored.ap
        result = {
            **judged(scored, found, ap, self.config.rounding, masks),
            "train_loss": ended.loss if math.isfinite(ended.loss) else None,
            "seed": self.seed,
        }
        if self.world.rank == 0:
            results = json.dumps(coco_results(scored, found), separators=(",", ":"))
            write_text(folder / "detections.json", results)  # COCO's form, under the annotations' own ids
            self._keep(folder, detector, info["arch"], sets, plan, result)
        self.world.barrier()
        return result

    def _claim(self, folder: Path, more: dict[str, Any]) -> None:
        """Whose folder it is: a training that was begun there must be this very one."""
        mine = {
            "protocol": self.protocol.to_json(),
            "seed": self.seed,
            "precision": self.precision.name,
            **more,
        }
        mine = _as_json(mine)
        file = folder / "training.json"
        before = read_json(file) if file.is_file() else None
        if self.world.any(before is not None and before != mine):
            differs = [key for key in mine if before is not None and before.get(key) != mine[key]]
            raise InputError(
                f"Another training was begun in this folder (it differs in {', '.join(differs) or 'its age'}).",
                where=folder,
                fix="pass another --out, or the settings that it was begun with",
            )
        self.world.barrier()
        if self.world.rank == 0 and before is None:
            with disk_errors("Making the training's folder", folder):
                folder.mkdir(parents=True, exist_ok=True)
            write_json(file, mine)
        self.world.barrier()

    def _keep(
        self, folder: Path, detector: Any, arch: str, sets: Sets, plan: Plan, result: dict[str, Any]
    ) -> None:
        saved = SavedDetector(
            detector,
            sets.train.classes,
            sets.train.numbers,
            plan.colours.mean,
            plan.colours.std,
            self.protocol.test_size,
            self.protocol.most,
        )
        shutil.rmtree(folder / "detector", ignore_errors=True)
        save_detector(folder / "detector", saved, arch)
        write_json(folder / "scores.json", result)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def _gathered(
    done: list[dict[str, Any]],
    config: DetectConfig,
    protocol: Protocol,
    sentence: str,
    sets: Sets,
    scored: Any,
    info: dict[str, Any],
    digest: str,
) -> dict[str, Any]:
    first = done[0]
    diverged = any(one.get("diverged") for one in done)
    names = [] if diverged else list(first["metrics"])
    values = {name: [one["metrics"][name] for one in done] for name in names}
    losses = [one["train_loss"] for one in done]
    metrics: dict[str, Any] = {name: statistics.fmean(column) for name, column in values.items()}
    metrics["train_loss"] = None if None in losses else statistics.fmean(losses)
    found = {
        "metrics": metrics,
        "average_precision": first.get("ap"),
        "scored_on": scored.name,
        "trained_by": protocol.to_json(),
        "rescaled": sentence,
        "steps": config.steps or protocol.steps,
        "notes": list(dict.fromkeys((*sets.train.notes, *sets.test.notes))),
        "runs": [{key: one[key] for key in ("seed", "metrics", "train_loss")} for one in done],
        "per_class": first.get("per_class", []),
        "other_ap": first.get("other"),
        "model": {**info, "weights_sha256": digest},
        "data": {
            "classes": len(sets.train.classes),
            "class_names": list(sets.train.classes),
            "category_ids": list(sets.train.numbers),
            "train": sets.train.fingerprint(),
            "test": sets.test.fingerprint(),
        },
        "diverged": diverged,
    }
    if len(done) > 1 and not diverged:
        found["deviation"] = {name: statistics.stdev(column) for name, column in values.items()}
    if config.steps and config.steps < protocol.steps:
        found["flatters"] = f"trained for {config.steps} of the protocol's {protocol.steps} steps"
    return found


def _trunk(reference: str) -> tuple[Any, dict[str, Any], str]:
    trunk, info, digest = open_model(reference)
    arch = info.get("arch")
    if arch is None or not is_resnet(arch) or trunk.conv1.in_channels != 3:
        raise InputError(
            f"A detector stands on the stages of a ResNet for colours; this is {arch or reference}.",
            where=reference,
            fix="judge it by knn, linear or semisup",
        )
    return trunk, info, digest


def _stopped(out: str, code: int) -> Stopped:
    return Stopped(
        f"The training was stopped; its state is saved in {out}.",
        exit_code=code,
        fix=f"the same command with --out {out} goes on",
    )


def _as_json(value: Any) -> Any:
    """As it comes back from a file: tuples are lists there."""
    return json.loads(json.dumps(value))
