"""Dashboards that a run's figures can be sent to beside ``metrics.jsonl``: TensorBoard, trackio, wandb.

Each is an extra of this package and imported only when a run uses it. None can stop a run.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import logging
import os
import re
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import InputError, did_you_mean
from ..files import read_json, write_json
from .loop import Loop, StepRecord
from .trackers import Guarded, step_line, without_secrets

__all__ = ["TRACKERS", "TensorBoard", "Tracker", "Trackio", "Wandb", "check_trackers", "choose_trackers"]

PROJECT = "vision-model-zoo"
SCHEMA = 1
_NOT_FIGURES = ("schema", "step", "time")
_COLOURS = re.compile("\x1b\\[[0-9;]*m")

log = logging.getLogger("zoo")


class Tracker(Guarded):
    """Sends the figures of each step to a dashboard; pass it to the first process alone.

    The first failure costs one warning and switches it off for the rest of the run. Subclasses say how
    to ``_open`` at a step (not 0 after a resume), ``_write`` figures and ``_finish``.

    Args:
        label: the dashboard's name.
        folder: the run's folder.
        run_name: what people call the run.
        config: the resolved recipe; dashboards show it.
    """

    def __init__(self, label: str, folder: Path, run_name: str, config: Mapping[str, Any]) -> None:
        super().__init__(label)
        self.folder = folder
        self.run_name = run_name
        self.config: dict[str, Any] = json.loads(json.dumps(config, default=str))
        self._opened = False
        self._ended = False

    def on_start(self, loop: Loop) -> None:
        self._opened = True
        with _greetings_as_notes(self.label):
            self.guard("starting", self._open, loop.step)

    def on_step(self, record: StepRecord) -> None:
        line = step_line(record)
        self.log(record.step, {key: value for key, value in line.items() if key not in _NOT_FIGURES})

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Send more figures of a step, for example what a monitor found."""
        self.guard("logging", self._write, step, figures)

    def on_end(self, loop: Loop) -> None:
        self._ended = True

    def close(self) -> None:
        if not self._opened:
            return
        self._opened = False
        with _greetings_as_notes(self.label):
            if self.failed:  # it said so already
                with contextlib.suppress(Exception):
                    self._finish()
            else:
                self.guard("closing", self._finish)

    def _open(self, step: int) -> None:
        raise NotImplementedError

    def _write(self, step: int, figures: Mapping[str, float]) -> None:
        raise NotImplementedError

    def _finish(self) -> None:
        raise NotImplementedError


@contextlib.contextmanager
def _greetings_as_notes(label: str) -> Iterator[None]:
    """Standard output is for a command's data; what a dashboard says there becomes notes."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            yield
    finally:
        for line in without_secrets(_COLOURS.sub("", said.getvalue())).splitlines():
            if line.strip():
                log.info("%s: %s", label, line.strip())


class TensorBoard(Tracker):
    """Event files in the run's folder, ``tensorboard/``. After a resume the steps that will be done again vanish."""

    _writer: Any = None

    def _open(self, step: int) -> None:
        # TensorBoard would import all of TensorFlow if it is installed, only to open files with it; a
        # module of this name is its own switch to the small replacement.
        if "tensorflow" not in sys.modules:
            sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self.folder / "tensorboard"), purge_step=step, flush_secs=30)
        log.info("%s: tensorboard --logdir %s", self.label, self.folder)
        self._writer.add_text("recipe", _as_markdown(self.config), global_step=step)

    def _write(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, global_step=step)

    def _finish(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _as_markdown(config: Mapping[str, Any]) -> str:
    import yaml

    text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
    return "\n".join(f"    {line}" for line in text.splitlines())


class Trackio(Tracker):
    """trackio: a local database (``$TRACKIO_DIR``) unless the user's own settings name a place for it.

    After a resume it goes on with the same run; steps that are done again are there twice, with the same
    figures.
    """

    _trackio: Any = None

    def _open(self, step: int) -> None:
        trackio = importlib.import_module("trackio")
        trackio.init(
            project=PROJECT,
            name=f"{self.run_name}-{_run_id(self.folder)}",
            config=self.config,
            resume="allow",
        )
        self._trackio = trackio

    def _write(self, step: int, figures: Mapping[str, float]) -> None:
        self._trackio.log(dict(figures), step=step)

    def _finish(self) -> None:
        if self._trackio is not None:
            self._trackio.finish()


class Wandb(Tracker):
    """Weights & Biases, online or, with ``WANDB_MODE=offline``, in files below the run's folder (``wandb/``).

    After a resume it goes on with the same run. Figures are plotted over ``global_step``, not over
    wandb's own counter, which can't go back. Console output, code and the git remote stay here.
    """

    _run: Any = None

    def _open(self, step: int) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            dir=str(self.folder),
            id=_run_id(self.folder),
            name=self.run_name,
            config=self.config,
            resume="allow",
            allow_val_change=True,  # a resumed run may have another number of epochs
            reinit="create_new",  # a run that the user has going stays theirs
            settings=wandb.Settings(
                console="off",
                disable_git=True,
                save_code=False,
                silent=True,
                init_timeout=30,  # seconds that a server that can't be reached holds up the run
                login_timeout=60,
            ),
        )
        self._run.define_metric("global_step", hidden=True)
        self._run.define_metric("*", step_metric="global_step")
        log.info("%s: %s", self.label, self._run.dir if self._run.offline else self._run.url)

    def _write(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log({**figures, "global_step": step})

    def _finish(self) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if self._ended else 1)


def _run_id(folder: Path) -> str:
    """The id that dashboards know the run by, the same after a resume: ``trackers.json`` keeps it."""
    file = folder / "trackers.json"
    if file.exists():
        return str(read_json(file)["id"])
    made = uuid.uuid4().hex[:8]
    write_json(file, {"schema": SCHEMA, "id": made})
    return made


# Name on the command line (also that of the extra) -> label, module that must be there, class.
TRACKERS: dict[str, tuple[str, str, Callable[..., Tracker]]] = {
    "tensorboard": ("TensorBoard", "tensorboard", TensorBoard),
    "trackio": ("trackio", "trackio", Trackio),
    "wandb": ("wandb", "wandb", Wandb),
}


def check_trackers(names: Sequence[str]) -> None:
    """Say before any work that a tracker is unknown or not installed; nothing is imported.

    Raises:
        InputError: an unknown name, with the nearest known one, or an absent package, with how to get it.
    """
    for name in names:
        if name not in TRACKERS:
            raise InputError(
                "There is no tracker of this name.",
                where=name,
                fix=did_you_mean(name, TRACKERS) + "Known: " + ", ".join(TRACKERS),
            )
        label, module, _ = TRACKERS[name]
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:  # a folder of that name, such as wandb's own, is no package
            raise InputError(f"{label} is not installed.", where=name, fix=f"pip install '{PROJECT}[{name}]'")


def choose_trackers(
    names: Sequence[str], folder: Path, run_name: str, config: Mapping[str, Any]
) -> list[Tracker]:
    """The trackers of a run, for its first process alone. A name that is given twice counts once.

    Args:
        names: keys of ``TRACKERS``.
        folder: the run's folder.
        run_name: what people call the run.
        config: the resolved recipe; dashboards show it.

    Raises:
        InputError: see ``check_trackers``.
    """
    check_trackers(names)
    chosen = ((TRACKERS[name][0], TRACKERS[name][2]) for name in dict.fromkeys(names))
    return [make(label, folder, run_name, config) for label, make in chosen]
