"""A folder for each cluster, with links to its images or copies of them; whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from .errors import InputError, RunError
from .files import disk_errors, whole_folder

__all__ = ["check_place", "write_cluster_folders"]

_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP}


def check_place(target: Path, images: Path | None = None) -> None:
    """Whether folders of clusters may be made at ``target``, asked before anything is computed.

    Args:
        target: absent, or an empty folder.
        images: the folder that the images are searched in.

    Raises:
        InputError: something is there, its parent isn't, or it would be among the images.
    """
    if not target.parent.is_dir():
        raise InputError("The folder to write to isn't there.", where=target.parent)
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise InputError(
            "The clusters' folder would be where a file or a link is.",
            where=target,
            fix="choose another place",
        )
    with disk_errors("Looking at the clusters' folder", target):
        taken = target.exists() and any(target.iterdir())
    if taken:
        raise InputError(
            "The clusters' folder exists and is not empty.",
            where=target,
            fix="choose another place, or remove it first",
        )
    if target.exists() and target.samefile(Path.cwd()):  # the shell would stay in one that is gone
        raise InputError(
            "The clusters' folder would replace the folder you are in.",
            where=target,
            fix="name a new folder in it",
        )
    if images is not None and target.resolve().is_relative_to(images.resolve()):
        raise InputError(
            "The clusters' folder would lie in the folder of the images, and be read as more of them.",
            where=target,
            fix=f"choose a place outside of {images}",
        )


def write_cluster_folders(
    target: Path, files: Sequence[str], clusters: Sequence[int], count: int, copy: bool = False
) -> None:
    """Make a folder for each cluster that has images, called by its number.

    Names are those of the files; of equal ones in a cluster (also in another case or spelling of accents, which
    some disks take for equal) the later ones get a number.

    Args:
        target: see ``check_place``.
        files: paths of images.
        clusters: the cluster of each, from 0 to ``count`` - 1.
        count: of all clusters; decides how many digits a number has.
        copy: copy the files instead of linking to them.

    Raises:
        RunError: the disk is full or read-only, or has no links.
    """
    digits = len(str(count - 1))
    folders: dict[int, _Names] = {}
    with disk_errors("Writing the clusters' folders", target), whole_folder(target) as temporary:
        for file, cluster in zip(files, clusters, strict=True):
            folder = temporary / f"{cluster:0{digits}d}"
            if cluster not in folders:
                folder.mkdir()
                folders[cluster] = _Names()
            place = folder / folders[cluster].give(os.path.basename(file))
            if copy:
                shutil.copyfile(file, place)
            else:
                _link(os.path.abspath(file), place)


class _Names:
    """Names in one folder, each given once."""

    def __init__(self) -> None:
        self._taken: dict[str, int] = {}  # and the number that was tried last

    def give(self, wanted: str) -> str:
        stem, suffix = os.path.splitext(wanted)
        first, name = _key(wanted), wanted
        while _key(name) in self._taken:
            self._taken[first] += 1
            name = f"{stem}-{self._taken[first]}{suffix}"
        self._taken[_key(name)] = 1
        return name


def _key(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


def _link(file: str, place: Path) -> None:
    try:
        place.symlink_to(file)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        raise RunError(
            f"This disk takes no links ({error.strerror}).", where=place.parent, fix="copy the files: --copy"
        ) from error
