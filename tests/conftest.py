"""What all tests share: the folder of shared facts, and one thread for torch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from golden.cases import shared_folder


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Small tensors gain nothing from threads, and parallel workers would fight for processors."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared facts: ``$ZOO_SHARED``, or ``shared`` beside the checkout.

    Without it a test is skipped; on CI it fails, so that golden tests can't vanish unnoticed.
    """
    folder = shared_folder()
    if (folder / "golden" / "index.json").is_file():
        return folder
    reason = f"no golden/index.json in {folder}; set ZOO_SHARED to the folder of shared facts"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
