"""Pretraining: recipes, methods, losses, runs.

The package is callable, so that ``zoo.pretrain("swav_tiny", data=...)`` starts a run: a function of
that name in ``zoo`` would be replaced by this module as soon as anything below it is imported.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    def __call__(self, *args: Any, resume: Any = None, **kwargs: Any) -> Any:
        """Start a run, or go on with one (``resume=RUN``): see ``zoo.pretrain.run``."""
        from . import run

        if resume is not None:
            return run.resume(resume, *args, **kwargs)
        return run.start(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
