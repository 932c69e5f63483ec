"""A user's own transforms in the place of a plan: torchvision v2, or anything that takes a picture."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from ...errors import InputError
from ..decode import Picture
from .params import ViewParams

__all__ = ["OwnViews"]

Transform = Callable[[Any], Any]


class OwnViews:
    """Views by callables.

    Each call draws from torch's, numpy's and Python's global generators; these are seeded from the
    sample's key and put back afterwards, so that views don't depend on workers or history.

    Args:
        transform: one callable that gives all views of an image (a list or tuple), or one callable for each
            view. It is passed a PIL image (an array for channels other than 1 or 3) and gives a tensor
            (C, S, S), a PIL image or an array (S, S, C). 8-bit views are normalised by the recipe's mean
            and std; floating-point views are taken as finished.
        example: any picture: which sizes come out is found by trying.

    Raises:
        InputError: it can't be called, fails on ``example``, or what comes out is no picture, not square, or has other channels than what went in.
    """

    def __init__(self, transform: Transform | Sequence[Transform], example: Picture) -> None:
        _check_callable(transform)
        self._transform = transform
        try:
            views = self._run(example.pixels(), 0)
        except InputError:
            raise
        except Exception as error:
            said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise InputError(
                f"The transform failed on its first picture ({said}).",
                where="views",
                fix="it is called with one PIL image; --debug shows the line",
            ) from error
        if not views:
            raise InputError("The transform gave no views.", where="views", fix="return one picture or more")
        self._kinds = [_kind(view) for view in views]
        runs = itertools.groupby(self._kinds, key=lambda kind: kind[0])
        self._groups = tuple((size, len(list(run))) for size, run in runs)
        self._bytes = sum(view.nbytes for view in views)

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        return self._groups

    @property
    def image_bytes(self) -> int:
        return self._bytes

    def make(self, picture: Picture, key: int) -> tuple[list[np.ndarray], list[ViewParams]]:
        views = self._run(picture.pixels(), key)
        kinds = [_kind(view) for view in views]
        if kinds != self._kinds:
            raise InputError(
                f"The transform gave {_words(kinds)} for one image and {_words(self._kinds)} for another.",
                where="views",
                fix="give the same number of views each time, and end each with a crop or a resize to one "
                "size and with one data type",
            )
        return views, []

    def _run(self, pixels: np.ndarray, key: int) -> list[np.ndarray]:
        image: Any = pixels
        if pixels.shape[2] in (1, 3):
            image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
        with _seeded(key):
            if callable(self._transform):
                found = self._transform(image)
                views = list(found) if isinstance(found, list | tuple) else [found]
            else:
                views = [one(image) for one in self._transform]
        return [_as_array(view, pixels.shape[2]) for view in views]


def _check_callable(transform: Any) -> None:
    parts = list(transform) if isinstance(transform, list | tuple) else [transform]
    for part in parts:
        if not callable(part) or isinstance(part, type):
            kind = f"the class {part.__name__}" if isinstance(part, type) else f"a {type(part).__name__}"
            raise InputError(
                f"The transform is {kind}, which can't be called with a picture.",
                where="views",
                fix="name a function, an object that can be called (a class needs its arguments first), or a list "
                "of them",
            )


def _kind(view: np.ndarray) -> tuple[int, str]:
    return view.shape[0], str(view.dtype)


def _words(kinds: Sequence[tuple[int, str]]) -> str:
    runs = [(kind, len(list(run))) for kind, run in itertools.groupby(kinds)]
    return "views of " + (" + ".join(f"{n} x {size} px ({kind})" for (size, kind), n in runs) or "nothing")


@contextlib.contextmanager
def _seeded(key: int) -> Iterator[None]:
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(key >> 1)  # torch.manual_seed would restart the GPUs' ones as well
    np.random.seed(key % 2**32)
    random.seed(key)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def _as_array(view: Any, channels: int) -> np.ndarray:
    if isinstance(view, torch.Tensor):
        tensor = view.detach().as_subclass(torch.Tensor).cpu()
        array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
        array = array.transpose(1, 2, 0) if array.ndim == 3 else array
    elif isinstance(view, Image.Image | np.ndarray):
        array = np.asarray(view)
        array = array[:, :, None] if array.ndim == 2 else array
    else:
        array = np.empty(0)
    square = array.ndim == 3 and array.shape[0] == array.shape[1]
    if not square or not (array.dtype == np.uint8 or np.issubdtype(array.dtype, np.floating)):
        what = f"{array.dtype} of shape {array.shape}" if array.size else type(view).__name__
        raise InputError(
            f"The transform gave {what}, not a square picture.",
            where="views",
            fix="a view is a tensor (C, S, S), a PIL image or an array (S, S, C), of 8 bits or floating point",
        )
    if array.shape[2] != channels:
        raise InputError(
            f"The transform made {channels} channels into {array.shape[2]}.",
            where="views",
            fix="keep the number of channels; which number images are read with is data.channels (--channels)",
        )
    return np.ascontiguousarray(array)
