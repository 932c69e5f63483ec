"""The demonstration: pretrain, publish, load through torch.hub in a fresh process, judge."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import zoo
from zoo.errors import RunError
from zoo.files import read_json
from zoo.pretrain.publish import publish_run
from zoo.pretrain.run import start

from .config import TransferConfig
from .knn.config import KnnConfig
from .linear.config import LinearConfig
from .run import judge, open_context

__all__ = ["run_demo"]

log = logging.getLogger("zoo")

_RECIPE = "swav_tiny"
_DATA = "builtin:photos"
_NAME = "demo/swav_tiny"
_SIDE = 48
_LINEAR_EPOCHS = 30

# What a stranger types. It runs in a process of its own, where nothing of this one is imported yet.
_STRANGER = """
import sys, torch
repository, name = sys.argv[1:]
model = torch.hub.load(repository, "load", name, source="local", progress=False).eval()
features = model(torch.zeros(2, 3, 48, 48))
assert features.shape == (2, model.fc.in_features), features.shape
print(f"torch.hub.load gave a {type(model).__module__}.{type(model).__name__} with {features.shape[1]} features")
"""


def run_demo(seed: int = 0, out: str | Path | None = None, progress: str = "auto") -> dict[str, Any]:
    """Pretrain on the training patches of photographs; publish; load; kNN and linear accuracy.

    Args:
        seed: of the initialisation and of every draw.
        out: the run's folder; a fresh one below ``runs`` by default.
        progress: see ``zoo.pretrain.run.start``.

    Returns:
        JSON: ``rows`` (features, knn, linear in 0..1), ``run``, ``model``, ``seconds``.
    """
    began = time.monotonic()
    run = start(_RECIPE, data=_DATA, out=out, options={"seed": seed}, progress=progress)
    run.require_finished()
    pretrain_seconds = time.monotonic() - began
    published = publish_run(run.path, name=_NAME)
    reference = f"{published.name}@{published.revision}"
    log.info("published %s", reference)
    _load_as_a_stranger(reference)
    models = (
        ("raw pixels", f"pixels:{_SIDE}"),
        ("random backbone", f"random:resnet18@{seed}"),
        ("pretrained", reference),
    )
    configs: dict[str, TransferConfig] = {
        "knn": KnnConfig(seed=seed),
        "linear": LinearConfig(seed=seed, epochs=_LINEAR_EPOCHS),
    }
    rows = []
    folder = run.path / "transfer"
    for label, model in models:
        row: dict[str, Any] = {"features": label}
        context = open_context(model, _DATA, resize=_SIDE, crop=_SIDE)
        for recipe, config in configs.items():
            result = judge(recipe, context, config, folder / f"{recipe}-{label.replace(' ', '-')}")
            row[recipe] = result["metrics"]["top1"]
        rows.append(row)
    evidence = read_json(folder / "knn-pretrained" / "result.json")
    return {
        "schema": 1,
        "rows": rows,
        "run": str(run.path),
        "model": reference,
        "pretrain_seconds": round(pretrain_seconds, 1),
        "seconds": round(time.monotonic() - began, 1),
        "seed": seed,
        "classes": evidence["data"]["classes"],
        "train_images": evidence["data"]["train"]["count"],
        "val_images": evidence["data"]["val"]["count"],
    }


def _load_as_a_stranger(reference: str) -> None:
    repository = Path(zoo.__file__).resolve().parent.parent
    if not (repository / "hubconf.py").is_file():
        raise RunError("hubconf.py is missing from the installation.", where=repository)
    command = [sys.executable, "-c", _STRANGER, str(repository), reference]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"Loading through torch.hub failed: {done.stderr.strip()[-500:]}", where=reference)
    log.info("%s", done.stdout.strip())
