"""The detection recipe: Faster or Mask R-CNN or DETR by a published protocol on a trunk of the zoo."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import math
import os
import shutil
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zoo.data.decoding import MAX_PIXELS, Decoding
from zoo.engine.collectives import Collectives
from zoo.engine.dashboards import check_trackers
from zoo.engine.launch import launch
from zoo.engine.precision import Precision, shared_precision
from zoo.engine.sync_batchnorm import synchronize_batchnorm
from zoo.engine.world import process_world
from zoo.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_SAVED, InputError, RunError, Stopped
from zoo.files import disk_errors, read_json, write_json
from zoo.models.factory import is_resnet

from ..results import refuse_another_task
from ..run import open_model
from .annotations import BoxSet
from .batches import Stream
from .checks import Size
from .coco_scores import result_file
from .config import DetectConfig
from .datasets import Sets, open_sets, open_together
from .detr.choice import with_best_rate
from .detr.protocol import DetrProtocol, check_objects
from .detr.stream import detr_stream
from .engines import check_engine, engine_claim, precision_for_engine
from .judge import detect_all, judge_for
from .protocols import AnyProtocol
from .saved import SavedDetector, detector_digest, save_detector, start_from
from .scored import DETECTIONS, write_scored
from .settling import detector_for, settled
from .training import Normalisation, Plan, train

__all__ = ["Place", "Work", "detector_for", "entered", "run", "settled", "work"]

log = logging.getLogger("zoo")


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
    max_pixels: int = MAX_PIXELS

    @property
    def decoding(self) -> Decoding:
        """How files become pixels."""
        return Decoding(max_pixels=self.max_pixels)


Place = tuple[torch.device, Collectives]


@contextlib.contextmanager
def entered(config: DetectConfig, device: str) -> Iterator[Place | None]:
    """This process's device and world; None if it is to start ``config.nproc`` processes that enter one."""
    if config.nproc > 1 and "RANK" not in os.environ:
        yield None
        return
    with process_world(device) as place:
        yield place


def run(asked: Work, config: DetectConfig, place: Place | None) -> dict[str, Any]:
    """Train on the training set and score on the test set, as often as was asked for.

    Called again with the same folder it goes on where it was stopped.

    Args:
        asked: for what.
        config: how.
        place: as of ``entered``.

    Raises:
        InputError: no such model or data, or everything that is wrong with the data.
        Stopped: a signal came; the state is saved.
    """
    check_engine(config)
    check_trackers(_trackers(config))
    if place is not None:
        return work(asked, config, place)
    # What can't be is said once, and before anything is started.
    sizes = open_sets(asked.dataset, asked.data, config, how=asked.decoding).sizes
    request, answer = Path(asked.out) / "request.json", Path(asked.out) / "answer.json"
    write_json(request, {"work": vars(asked), "settings": config.model_dump(mode="json"), "sizes": sizes})
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


def work(
    asked: Work, config: DetectConfig, place: Place, sizes: list[list[Size | None]] | None = None
) -> dict[str, Any]:
    """This process's part; all processes come to the same end.

    ``sizes`` are those of the images, if they were looked into already.
    """
    device, world = place
    sets = open_together(asked.dataset, asked.data, config, world, sizes, asked.decoding)
    for note in dict.fromkeys((*sets.train.notes, *sets.test.notes)):
        log.warning("%s", note)
    trunk, info, digest = _trunk(asked.reference)
    refuse_another_task(Path(asked.out), "detect", asked.dataset, digest)
    method = config.method or str(info.get("method") or "")
    protocol, sentence = settled(config, asked.dataset, sets, method, world.world_size)
    log.info("protocol: %s", protocol.name)
    if sentence:
        log.info("%s", sentence)
    scored = sets.train if config.test_on_train else sets.test
    name = precision_for_engine(config, device, trunk, info, protocol.head)
    precision = shared_precision(name, device, world)

    def trained(how: AnyProtocol, seed: int, name: str, using: Sets, on: BoxSet) -> dict[str, Any]:
        told = config if on is scored else config.model_copy(update={"test_on_train": True})
        one = _Training(asked, told, how, precision, world, seed, name)
        return one.finished(trunk, info, digest, using, on)

    selection = None
    if isinstance(protocol, DetrProtocol):
        for note in check_objects(sets.train, protocol.queries):
            log.warning("%s", note)
            sets.train.notes.append(note)
        protocol, selection = with_best_rate(protocol, config, sets, trained)
    done = [
        trained(protocol, config.seed + number, f"run-{number}", sets, scored)
        for number in range(config.runs)
    ]
    found = _gathered(done, config, protocol, sentence, sets, scored, info, digest)
    return found if selection is None else {**found, "selection": selection}


@dataclass
class _Training:
    """One of the trainings of a work: trained, scored, and kept in a folder of its own."""

    asked: Work
    config: DetectConfig
    protocol: AnyProtocol
    precision: Precision
    world: Collectives
    seed: int
    name: str

    def finished(
        self, trunk: Any, info: dict[str, Any], digest: str, sets: Sets, scored: Any
    ) -> dict[str, Any]:
        """Its scores; those that are in its folder already, if it was finished before."""
        folder = Path(self.asked.out) / self.name
        steps = self.config.steps or self.protocol.steps
        start = Path(self.config.init_from).expanduser() if self.config.init_from else None
        more = {} if start is None else {"init_from": detector_digest(start)}
        more |= engine_claim(self.config)
        self._claim(folder, {"weights": digest, "steps": steps, "train": sets.train.fingerprint(), **more})
        scores, ap = folder / "scores.json", self.config.ap or scored.ap
        rules = _as_json({"test": scored.fingerprint(), "ap": ap, "rounding": self.config.rounding})
        if self.world.any(scores.is_file()):
            log.info("%s is finished: its scores are taken from %s", self.name, scores)
            return _kept_scores(scores, rules)
        how = info["preprocessing"]
        plan = Plan(
            self.protocol,
            steps,
            folder,
            Normalisation(*(tuple(255.0 * value for value in how[key]) for key in ("mean", "std"))),
            self.asked.workers,
            self.config.save_every,
            _trackers(self.config),
            self.asked.progress,
        )
        detector = detector_for(copy.deepcopy(trunk), self.protocol, len(sets.train.classes), self.seed)
        if start is not None:
            log.info("%s", start_from(detector, sets.train.classes, plan.colours, start))
        detector.to(device=self.precision.device, dtype=self.precision.master_dtype)
        detector.to(memory_format=self.precision.memory_format)
        synchronize_batchnorm(detector, self.world)
        masks = self.protocol.head == "mask-fpn"
        if isinstance(self.protocol, DetrProtocol):
            stream: Stream = detr_stream(sets.train, self.seed, self.protocol)
        else:
            stream = Stream(sets.train, self.seed, self.protocol.sizes, self.protocol.most, masks)
        there = self._in_detectron2(detector, trunk, info, plan, stream, sets)
        ended = there.train() if there else train(detector, stream, plan, self.precision, self.world)
        if ended.exit_code:
            raise _stopped(self.asked.out, ended.exit_code)
        if ended.diverged:
            return {"metrics": {}, "train_loss": None, "diverged": True, "seed": self.seed}
        parts = (
            there.detect(scored) if there else detect_all(detector, scored, plan, self.precision, self.world)
        )
        judge = judge_for(scored, ap, self.config.rounding, masks)
        with self._detections_file(folder) as keep:
            for images, found in parts:
                judge.add(images, found)
                keep(images, found)
        result = {
            **judge.result(),
            "scored_by": rules,
            "train_loss": ended.loss if math.isfinite(ended.loss) else None,
            "seed": self.seed,
            **({"detectron2": there.facts()} if there else {}),
        }
        if self.world.rank == 0:
            write_scored(folder, scored, self.asked.dataset, self.asked.data, self.config)
            self._keep(folder, there.finished() if there else detector, info["arch"], sets, plan, result)
        self.world.barrier()
        return result

    def _detections_file(self, folder: Path) -> Any:
        """Takes the detections of some images; only the first process has a file for them."""
        if self.world.rank == 0:
            return result_file(folder / DETECTIONS)
        return contextlib.nullcontext(lambda images, found: None)

    def _in_detectron2(
        self, detector: Any, trunk: Any, info: dict[str, Any], plan: Plan, stream: Stream, sets: Sets
    ) -> Any:
        """The training in detectron2, if it was asked for; imported only then."""
        if self.config.engine != "detectron2":
            return None
        from .detectron2_engine.engine import Detectron2Engine, Task

        what = self.asked.dataset, self.seed, self.config.yaml
        task = Task(trunk, info, detector, plan, stream, sets, *what)
        return Detectron2Engine(task, self.precision, self.world)

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


def _kept_scores(file: Path, rules: dict[str, Any]) -> dict[str, Any]:
    """The scores of a finished training, if they are of these images and by these rules."""
    scores = dict(read_json(file))
    before = scores.get("scored_by", rules)
    if before != rules:
        differs = ", ".join(key for key in rules if before.get(key) != rules[key])
        raise InputError(
            f"This training is finished, and was scored otherwise (it differs in {differs}).",
            where=file,
            fix="pass the test set, --ap and --rounding that it was scored with, or another --out",
        )
    return scores


def _gathered(
    done: list[dict[str, Any]],
    config: DetectConfig,
    protocol: AnyProtocol,
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
    if "detectron2" in first:
        found["detectron2"] = first["detectron2"]
    if len(done) > 1 and not diverged:
        found["deviation"] = {name: statistics.stdev(column) for name, column in values.items()}
    unfair = []
    if config.steps and config.steps < protocol.steps:
        unfair.append(f"trained for {config.steps} of the protocol's {protocol.steps} steps")
    if config.init_from:
        unfair.append("started from a trained detector")
    if unfair:
        found["flatters"] = "; ".join(unfair)
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


def _trackers(config: DetectConfig) -> tuple[str, ...]:
    return tuple(name.strip() for name in config.tracker.split(",") if name.strip())


def _as_json(value: Any) -> Any:
    """As it comes back from a file: tuples are lists there."""
    return json.loads(json.dumps(value))
