"""Real photographs, as the views see them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture(scope="session")
def photos(shared: Path) -> list[np.ndarray]:
    """Twelve photographs of about 500 x 375 pixels, uint8, H x W x 3."""
    files = sorted((shared / "data" / "imagenet_like" / "imagen40" / "val").glob("*/*"))[:12]
    return [np.array(Image.open(file).convert("RGB")) for file in files]


@pytest.fixture(scope="session")
def squares(photos: list[np.ndarray]) -> list[np.ndarray]:
    """The same at 224 and at 96 pixels, as a crop leaves them."""
    return [
        np.array(Image.fromarray(photo).resize((side, side), Image.Resampling.BILINEAR))
        for photo in photos
        for side in (224, 96)
    ]
