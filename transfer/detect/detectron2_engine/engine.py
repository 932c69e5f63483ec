"""``--engine detectron2``: a training there, from our trunk and data to detections and a detector of ours."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zoo.engine.collectives import Collectives
from zoo.engine.precision import Precision
from zoo.errors import InputError
from zoo.files import disk_errors, write_text
from zoo.weights.formats.resnets import fit
from zoo.weights.writers.detectron2_yaml import backbone_settings, flat, merged, suits_c4

from ..annotations import BoxSet
from ..batches import Stream, view_for_test
from ..coco_scores import encode_masks
from ..datasets import Sets
from ..judge import Part, shared_out
from ..protocols import Protocol
from ..scores import Detections
from ..training import Ended, Plan
from .data import register
from .settings import laid_over, protocol_settings
from .training import logged_to, train_model
from .weights import check_features, detector_state, take_over, unfilled, write_backbone

__all__ = ["Detectron2Engine", "Task", "check_network", "precision_for"]

log = logging.getLogger("zoo")

WEIGHTS, TRAINED, SETTINGS, RESULT = "backbone.pkl", "model_final.pth", "train.yaml", "model.yaml"


def precision_for(name: str, device: torch.device) -> str:
    """What detectron2 computes in: float32 by default, on a GPU also float16 by its mixed precision.

    Raises:
        InputError: it has no such precision there.
    """
    if name == "auto":
        return "float32"
    if name != "float32" and (name, device.type) != ("float16", "cuda"):
        raise InputError(
            f"detectron2 doesn't train in {name} on {device.type}.",
            where=f"--precision {name}",
            fix="take float32, or float16 on a GPU; --engine torchvision has the others",
        )
    return name


def check_network(arch: str, trunk: Any, head: str) -> None:
    """Which ResNets detectron2 can build.

    Raises:
        InputError: not this one, or not with this head.
    """
    network = fit(trunk.state_dict()).plan
    if network.kind == "basic" and network.base != 64:
        raise InputError(
            f"detectron2 has {arch} in the usual width only; the stem of this one has {network.base} channels.",
            where="--engine detectron2",
            fix="--engine torchvision takes every width",
        )
    if network.kernel != 7:
        raise InputError(
            "detectron2's ResNets have a stem of 7x7, stride 2, and max pooling; this one has another.",
            where="--engine detectron2",
            fix="--engine torchvision takes every stem",
        )
    if head == "c4" and not suits_c4(network):
        raise InputError(
            f"detectron2's C4 head is made of three bottlenecks; {arch} ends otherwise.",
            where="--head c4",
            fix="take --head fpn, or --engine torchvision",
        )


@dataclass(frozen=True)
class Task:
    """What is trained.

    Args:
        trunk: ours; it is left as it is.
        info: of the model: ``arch`` and ``preprocessing``.
        detector: ours around a copy of the trunk; the training begins with its weights.
        plan: protocol, steps, folder.
        stream: the training views.
        sets: both sets.
        dataset: what they are called.
        seed: of the training.
        yaml: a YAML of the user's, or nothing.
    """

    trunk: Any
    info: Mapping[str, Any]
    detector: Any
    plan: Plan
    stream: Stream
    sets: Sets
    dataset: str
    seed: int
    yaml: str


class Detectron2Engine:
    """One training: its model, data and settings in detectron2.

    Args:
        task: what is trained.
        precision: how it computes.
        world: the processes that train together.

    Raises:
        InputError: a YAML that can't be used.
        RunError: detectron2's model isn't the trunk.
    """

    def __init__(self, task: Task, precision: Precision, world: Collectives) -> None:
        self.task, self.plan, self.precision, self.world = task, task.plan, precision, world
        self.head = task.plan.protocol.head
        self.home = (task.plan.folder / "detectron2").absolute()
        with disk_errors("Making the training's folder", self.home):
            self.home.mkdir(parents=True, exist_ok=True)
        self.changed: dict[str, Any] = {}
        """What a YAML of the user's changed."""
        with logged_to(self.home):
            self.cfg = self._settings()
            self.model, self.differences = self._model()

    def train(self) -> Ended:
        """Train; from the newest checkpoint if there is one."""
        with logged_to(self.home), disk_errors("Training", self.home):
            ended = train_model(self.model, self.cfg, self.plan, self.task.stream, self.precision, self.world)
        if self.world.rank == 0 and not ended.exit_code and not ended.diverged:
            self._write(RESULT, TRAINED)
            for old in self.home.glob("model_[0-9]*.pth"):
                old.unlink()
        return ended

    def detect(self, images: BoxSet) -> Iterator[Part]:
        """The detections on every image, some images at a time; see ``shared_out``."""
        self.model.eval()

        @torch.inference_mode()
        def one(row: int) -> Detections:
            protocol = self.plan.protocol
            view, size = view_for_test(images, row, protocol.test_size, protocol.most)
            with self.precision.autocast():
                found = self.model([{"image": view, "height": size[0], "width": size[1]}])[0]["instances"]
            masks = None
            if found.has("pred_masks"):
                masks = encode_masks(found.pred_masks.cpu().numpy().astype("uint8"))
            boxes, scores = (x.double().cpu().numpy() for x in (found.pred_boxes.tensor, found.scores))
            return Detections(boxes, scores, found.pred_classes.cpu().numpy(), masks)

        return shared_out(images, one, self.world)

    def finished(self) -> Any:
        """Our detector with what was learnt: ``zoo predict`` takes it."""
        detector = self.task.detector
        detector.load_state_dict(detector_state(self.model, detector, self.head))
        return detector

    def facts(self) -> dict[str, Any]:
        """For the result: the version, the features' differences, what a YAML changed."""
        import detectron2

        return {
            "version": detectron2.__version__,
            "feature_differences": self.differences,
            "yaml_changes": self.changed,
        }

    # --- before the training ---

    def _settings(self) -> Any:
        from detectron2.config import get_cfg

        from . import heads  # noqa: F401 - its head gets known by its name

        task, plan = self.task, self.plan
        arch, network = str(task.info["arch"]), fit(task.trunk.state_dict()).plan
        classes = len(task.sets.train.classes)
        assert isinstance(plan.protocol, Protocol)
        protocol = protocol_settings(plan.protocol, plan.steps, classes, network.base)
        ours = self._decided(protocol)
        cfg = get_cfg()
        every = flat(
            merged(merged(protocol, backbone_settings(arch, network, task.info["preprocessing"])), ours)
        )
        cfg.merge_from_list([part for key, value in every.items() for part in (key, value)])
        if task.yaml:
            self.changed = laid_over(cfg, Path(task.yaml).expanduser(), flat(ours))
        return cfg

    def _decided(self, protocol: Mapping[str, Any]) -> dict[str, Any]:
        """What the command decides, whatever a YAML says: data, places, the schedule."""
        task, plan = self.task, self.plan
        sets = {
            name: register(images, task.dataset, name)
            for name, images in (("train", task.sets.train), ("test", task.sets.test))
        }
        return merged(
            {key: protocol[key] for key in ("INPUT", "SOLVER", "TEST")},
            {
                "MODEL": {
                    "DEVICE": str(self.precision.device),
                    "WEIGHTS": str(self.home / WEIGHTS),
                    "ROI_HEADS": {"NUM_CLASSES": len(task.sets.train.classes)},
                },
                "DATASETS": {"TRAIN": [sets["train"]], "TEST": [sets["test"]]},
                "DATALOADER": {"NUM_WORKERS": plan.workers},
                "SOLVER": {
                    "CHECKPOINT_PERIOD": plan.save_every,
                    "AMP": {"ENABLED": self.precision.name == "float16"},
                },
                "SEED": task.seed % 2**31,
                "OUTPUT_DIR": str(self.home),
            },
        )

    def _model(self) -> tuple[Any, dict[str, float]]:
        """detectron2's model with our detector's weights, and how its features differ from the trunk's."""
        from detectron2.modeling import build_model

        task, file = self.task, self.home / WEIGHTS
        if self.world.rank == 0:
            write_backbone(file, task.trunk)
            self._write(SETTINGS, WEIGHTS)
        self.world.barrier()
        on_cpu = self.cfg.clone()
        on_cpu.MODEL.DEVICE = "cpu"  # where float32 is float32: with TF32, features differ as from a mistake
        model = build_model(on_cpu)
        preprocessing, channels = task.info["preprocessing"], self.cfg.INPUT.FORMAT
        differences = check_features(model, task.trunk, preprocessing, channels, file)
        new = unfilled(model)
        log.info(
            "detectron2's model has %d tensors from the trunk, whose features (res2 to res5) it computes to %.1g of the "
            "largest; %d are new, in %s",
            sum(value.is_floating_point() for value in model.state_dict().values()) - len(new),
            max(differences.values()),
            len(new),
            ", ".join(dict.fromkeys(".".join(name.split(".")[:2]) for name in new)),
        )
        take_over(model, task.detector, self.head)
        model.to(self.precision.device)
        model.to(memory_format=self.precision.memory_format)  # faster, and rounds as our engine does
        return model, differences

    def _write(self, name: str, weights: str) -> None:
        """The settings with these weights, whole or not at all."""
        cfg = self.cfg.clone()
        cfg.MODEL.WEIGHTS = str(self.home / weights)
        write_text(self.home / name, cfg.dump())
