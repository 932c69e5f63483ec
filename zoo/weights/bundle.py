"""The published form of a backbone: a folder that is whole, verified, and loads without our code.

``model.safetensors`` (the trunk, torchvision's keys), ``heads.safetensors`` and ``classifier.safetensors``
(both optional), ``config.json`` (which timm reads for the architectures that it has), ``zoo.json`` (what it
is and where it comes from), ``README.md`` (the card), ``SHA256SUMS``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..files import read_json, sha256_of, write_json, write_text
from ..homes import cache_home
from ..models.factory import TIMM
from .formats.base import Network

if TYPE_CHECKING:  # `zoo list` and `zoo show` import no torch
    import torch

__all__ = [
    "SCHEMA",
    "Bundle",
    "Description",
    "config_of",
    "read_bundle",
    "read_sums",
    "timm_builds",
    "weights_digest",
    "write_bundle",
]

SCHEMA = 1
SUMS = "SHA256SUMS"
WEIGHTS = "model.safetensors"
HEADS = "heads.safetensors"
CLASSIFIER = "classifier.safetensors"
# timm builds these with the same values. The wide networks are not among them: "w2" widens everything,
# wide_resnet50_2 of timm and torchvision only the 3x3 convolutions. Nor is resnext101_32x48d, which timm lacks.
_TIMM_NAMES = (
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnext101_32x8d",
    "resnext101_32x16d",
    "resnext101_32x32d",
)


@dataclass(frozen=True)
class Description:
    """What a bundle says of itself (``zoo.json``, without the hash of its weights).

    Args:
        arch: with ``stem``, ``base_planes`` and ``options`` what ``zoo.models.factory.create_trunk`` takes.
        num_features: length of a pooled feature.
        method: the method that trained it, e.g. ``swav``.
        preprocessing: mean, std, resize, crop, interpolation.
        recipe: the resolved recipe; empty for weights that came out of a foreign file.
        data: fingerprint of the images; empty if unknown.
        lineage: the run, its step, and what it was initialised from; or ``converted_from``: what is known
            of the foreign file.
        versions: of the libraries that trained it.
        licence: an SPDX name, or ``unspecified``.
        results: transfer results (``result.json`` documents).
        options: what else the architecture takes (see ``Network``).
        num_classes: of the linear classifier in ``classifier.safetensors``; 0: there is none.
        features: of a made picture (``zoo.weights.fingerprint``); empty: not recorded.
    """

    arch: str
    stem: str
    base_planes: int | None
    num_features: int
    method: str
    preprocessing: dict[str, Any]
    recipe: dict[str, Any]
    data: dict[str, Any]
    lineage: dict[str, Any]
    versions: dict[str, Any]
    licence: str = "unspecified"
    results: list[dict[str, Any]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    num_classes: int = 0
    features: dict[str, Any] = field(default_factory=dict)

    @property
    def network(self) -> Network:
        """Which network the trunk is."""
        return Network(self.arch, self.stem, self.base_planes, self.options)

    def to_json(self) -> dict[str, Any]:
        """``zoo.json``, as far as it is known before the files are written.

        Raises:
            InputError: a value is not JSON, by field.
        """
        info = {"schema": SCHEMA, **self.__dict__}
        for key in ("options", "num_classes", "features"):  # absent, the bytes are as they always were
            if not info[key]:
                del info[key]
        for key, value in info.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise InputError(
                    f"The model's description can't be written as JSON: {error}.", where=f"zoo.json: {key}"
                ) from None
        return info


@dataclass(frozen=True)
class Bundle:
    """A bundle on disk whose listing was checked (not yet its bytes).

    ``links_into`` is the folder that its files may be links into; a bundle holds no others.
    """

    path: Path
    sums: dict[str, str]
    info: dict[str, Any]
    links_into: Path | None = None

    @property
    def weights(self) -> Path:
        return self.path / WEIGHTS

    @property
    def weights_sha256(self) -> str:
        return self.sums[WEIGHTS]

    @property
    def classifier(self) -> Path | None:
        """The file of the linear classifier, if there is one: ``weight`` (classes, F), ``bias`` (classes)."""
        return self.path / CLASSIFIER if CLASSIFIER in self.sums else None

    @property
    def network(self) -> Network:
        """Which network the trunk is.

        Raises:
            InputError: ``zoo.json`` does not say.
        """
        arch, stem = self.info.get("arch"), self.info.get("stem")
        planes, options = self.info.get("base_planes"), self.info.get("options", {})
        numbered = planes is None or type(planes) is int
        if not (isinstance(arch, str) and isinstance(stem, str) and isinstance(options, dict) and numbered):
            raise InputError(
                "The description does not say which network this is (arch, stem, base_planes, options).",
                where=self.path / "zoo.json",
                fix="publish or pull the model again",
            )
        return Network(arch, stem, planes, options)

    def verify(self, full: bool = False) -> str:
        """Check every file's SHA-256, or trust a receipt of an earlier check.

        A receipt holds each file's size, time and inode; it lives in the cache.

        Args:
            full: read all bytes even if there is a receipt.

        Returns:
            ``receipt`` or ``full``: what was done.

        Raises:
            InputError: a file is damaged, missing or replaced by a link.
        """
        stamps = {name: _stamp(self.path / name, self.links_into) for name in (*self.sums, SUMS)}
        receipt = cache_home() / "receipts" / f"{_digest_of(str(self.path.resolve()))}.json"
        expected = {"sums": self.sums, "stamps": stamps}
        if not full and receipt.is_file():
            try:
                if read_json(receipt) == expected:
                    return "receipt"
            except (OSError, ValueError):
                pass  # a damaged receipt is no receipt
        for name, digest in self.sums.items():
            if sha256_of(self.path / name) != digest:
                raise _damaged(self.path / name)
        try:
            receipt.parent.mkdir(parents=True, exist_ok=True)
            write_json(receipt, expected)
        except OSError:
            pass  # without a receipt the next load hashes again; that is all
        return "full"


def _damaged(file: Path) -> InputError:
    return InputError(
        "The file is not what was published (its SHA-256 differs): it is damaged or was changed.",
        where=file,
        fix="publish or pull the model again",
    )


def _stamp(file: Path, links_into: Path | None = None) -> list[int]:
    if file.is_symlink() and not _leads_into(file, links_into):
        raise InputError(
            "A bundle holds no links, but this is one.", where=file, fix="publish or pull the model again"
        )
    try:
        status = file.stat()
    except OSError:
        raise InputError(
            "A file of the bundle is missing.", where=file, fix="publish or pull the model again"
        ) from None
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _leads_into(link: Path, folder: Path | None) -> bool:
    return folder is not None and os.path.dirname(
        os.path.abspath(link.parent / os.readlink(link))
    ) == os.path.abspath(folder)


def _digest_of(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def read_sums(file: Path) -> dict[str, str]:
    """``SHA256SUMS``: file name -> hash, in the order of the list.

    Raises:
        InputError: a line can't be right, or names a file outside the folder.
    """
    sums: dict[str, str] = {}
    for line in file.read_text("utf-8", errors="replace").removesuffix("\n").split("\n"):
        match = re.fullmatch(r"([0-9a-f]{64})  (.+)", line)
        if match is None or Path(match[2]).name != match[2] or match[2] in (".", ".."):
            raise InputError(
                f"SHA256SUMS has a line that can't be right: {line[:80]!r}.",
                where=file,
                fix="publish or pull the model again",
            )
        sums[match[2]] = match[1]
    return sums


def read_bundle(path: Path, links_into: Path | None = None) -> Bundle:
    """Open a bundle and check its listing.

    Args:
        path: its folder.
        links_into: a folder that its files may be links into, as those of a download cache are.

    Raises:
        InputError: not a bundle, one of a future schema, or one that names files outside itself.
    """
    sums_file, zoo_file = path / SUMS, path / "zoo.json"
    if path.is_symlink():
        raise InputError("A bundle can't be a link.", where=path)
    if not sums_file.is_file() or not zoo_file.is_file():
        raise InputError("This folder is not a published model (no SHA256SUMS and zoo.json).", where=path)
    _stamp(sums_file, links_into)
    sums = read_sums(sums_file)
    for name in (WEIGHTS, "zoo.json"):
        if name not in sums:
            raise InputError(
                f"SHA256SUMS does not list {name}.", where=sums_file, fix="publish or pull the model again"
            )
    _stamp(zoo_file, links_into)
    # The description is believed before the other files are checked, so it is checked here.
    if sha256_of(zoo_file) != sums[zoo_file.name]:
        raise _damaged(zoo_file)
    try:
        info = read_json(zoo_file)
    except (OSError, ValueError) as error:
        raise InputError(f"The description can't be read ({error}).", where=zoo_file) from None
    schema = info.get("schema") if isinstance(info, dict) else None
    if schema != SCHEMA:
        raise InputError(
            f"The model was published with schema {schema}; this version reads schema {SCHEMA}.",
            where=zoo_file,
            fix="update the toolkit" if isinstance(schema, int) and schema > SCHEMA else None,
        )
    return Bundle(path, sums, info, links_into)


def write_bundle(
    folder: Path,
    description: Description,
    trunk: Mapping[str, torch.Tensor],
    heads: Mapping[str, torch.Tensor],
    card: str,
    classifier: Mapping[str, torch.Tensor] | None = None,
) -> Bundle:
    """Write all files of a bundle into an empty folder (see ``zoo.files.whole_folder``).

    The same input gives the same bytes. Tensors that share memory are stored once; the other names
    are recorded as aliases.

    Args:
        folder: empty.
        description: of the model.
        trunk: its tensors.
        heads: projection head, prototypes and the like, or none.
        card: text of ``README.md``.
        classifier: ``weight`` (classes, F) and ``bias`` (classes), or none.

    Raises:
        InputError: the description is not JSON, by field, or the classifier is not the described one.
    """
    from ..tensors import write_safetensors

    info = description.to_json()
    _check_classifier(description, classifier or {})
    for name, tensors in ((WEIGHTS, trunk), (HEADS, heads), (CLASSIFIER, classifier)):
        if tensors:
            kept, aliases = _without_aliases(tensors)
            if aliases:
                info.setdefault("aliases", {})[name] = aliases
            write_safetensors(folder / name, kept)
    write_json(folder / "config.json", config_of(description))
    write_json(folder / "zoo.json", info)
    write_text(folder / "README.md", card)
    names = sorted(file.name for file in folder.iterdir())
    write_text(folder / SUMS, "".join(f"{sha256_of(folder / name)}  {name}\n" for name in names))
    for name in (*names, SUMS):
        (folder / name).chmod(0o644)
    return read_bundle(folder)


def weights_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """The SHA-256 that ``model.safetensors`` would have: names weights that are not published yet."""
    from safetensors.torch import save

    kept, _ = _without_aliases(tensors)
    return hashlib.sha256(save(kept, metadata={"format": "pt"})).hexdigest()


def _without_aliases(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    from ..tensors import standalone

    kept: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    places = set()
    for name, tensor in tensors.items():
        identity = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and identity in first:
            aliases[name] = first[identity]
            continue
        first[identity] = name
        alone = standalone(tensor)
        # Two shapes of the same memory are no aliases, and safetensors refuses them.
        kept[name] = alone.clone() if alone.data_ptr() in places else alone
        places.add(alone.data_ptr())
    return kept, aliases


def _check_classifier(description: Description, classifier: Mapping[str, torch.Tensor]) -> None:
    classes = description.num_classes
    wanted = {"weight": (classes, description.num_features), "bias": (classes,)} if classes else {}
    found = {name: tuple(tensor.shape) for name, tensor in classifier.items()}
    if found != wanted:
        raise InputError(
            f"The classifier holds {_shapes(found)}; the description says {_shapes(wanted)}.",
            where="zoo.json: num_classes",
        )


def _shapes(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items()) or "nothing"


def timm_builds(description: Description) -> bool:
    """Whether timm has this network, under the same name and keys."""
    network = description.network
    if network.arch.startswith(TIMM):
        return True
    return network.arch in _TIMM_NAMES and network == type(network)(network.arch)


def config_of(description: Description) -> dict[str, Any]:
    """``config.json``: what timm needs to build the network, where it has it; what we need, always."""
    ours = {key: getattr(description, key) for key in ("arch", "stem", "base_planes")}
    if description.options:
        ours["options"] = description.options
    if not timm_builds(description):
        return {"zoo": ours, "num_features": description.num_features}
    how = description.preprocessing
    size, channels, resnet = int(how["crop"]), len(how["mean"]), description.arch in _TIMM_NAMES
    config: dict[str, Any] = {
        "architecture": description.arch.removeprefix(TIMM),
        "num_classes": 0,
        "num_features": description.num_features,
        **({"global_pool": "avg"} if resnet else {}),
        "pretrained_cfg": {
            "tag": description.recipe.get("name", description.method),
            "input_size": [channels, size, size],
            "fixed_input_size": False,
            "interpolation": how["interpolation"],
            "crop_pct": _crop_pct(size, int(how["resize"])),
            "crop_mode": "center",
            "mean": how["mean"],
            "std": how["std"],
            "num_classes": 0,
            **({"pool_size": [7, 7], "first_conv": "conv1", "classifier": "fc"} if resnet else {}),
        },
        "zoo": ours,
    }
    arguments = {**description.options, **({} if channels == 3 else {"in_chans": channels})}
    if arguments:
        config["model_args"] = arguments
    return config


def _crop_pct(crop: int, resize: int) -> float:
    """The ratio from which timm gets ``resize`` back: it rounds ``crop / ratio`` down."""
    ratio = round(crop / resize, 4)
    return ratio if math.floor(crop / ratio) >= resize else round(ratio - 1e-4, 4)
