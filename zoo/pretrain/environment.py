"""What a run was made with: versions and hardware."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from typing import Any

__all__ = ["PACKAGES", "describe_environment", "distribution_version"]

DISTRIBUTION = "vision-model-zoo"
PACKAGES = (
    "torch",
    "torchvision",
    "numpy",
    "pillow",
    "safetensors",
    "huggingface-hub",
    "pydantic",
    "typer",
    "rich",
    "scikit-image",
    "timm",
)


def distribution_version(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def describe_environment() -> dict[str, Any]:
    """Versions, machine and what torch sees of it; imports torch."""
    import torch

    from ..engine.precision import choose_device, choose_precision, processors

    device = choose_device("auto")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "schema": 1,
        "zoo": distribution_version(DISTRIBUTION),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "executable": os.path.basename(sys.executable),
        "processor": _processor(),
        "processors": processors(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "precision": choose_precision("auto", device).name,
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "packages": {name: distribution_version(name) for name in PACKAGES},
    }
