"""What all tests share: the folder of shared facts, one thread for torch, commands run in this process."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from cli.main import run as run_command
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


@pytest.fixture()
def restored_logger() -> Iterator[None]:
    """A command sets the library's notes up for itself; other tests listen to them too."""
    logger = logging.getLogger("zoo")
    before = list(logger.handlers), logger.propagate, logger.level
    yield
    logger.handlers[:], logger.propagate = before[0], before[1]
    logger.setLevel(before[2])


@pytest.fixture()
def zoo(
    capfd: pytest.CaptureFixture[str], restored_logger: None
) -> Callable[..., tuple[int | str, str, str]]:
    """Run a command in this process: (exit code, standard output, standard error)."""

    def run(*words: object) -> tuple[int | str, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as caught:
            run_command([str(word) for word in words])
        out, err = capfd.readouterr()
        return caught.value.code or 0, out, err

    return run
