"""Layouts that a model can be written in, so that other libraries load it.

A layout is a class with ``write`` (``base.Writer``) and one line here.
"""

from __future__ import annotations

from ...registry import Entry, Registry

__all__ = ["WRITERS"]


def _entry(name: str, code: str, summary: str) -> Entry:
    return Entry(name, code, code, summary)  # a layout has nothing to configure


WRITERS = Registry(
    "layout",
    __name__,
    _entry("bundle", "bundle:BundleFolder", "the zoo's published form: a folder"),
    _entry("torchvision", "torchvision:Torchvision", "a state dict by torchvision's names: a .pth file"),
    _entry("timm", "timm:Timm", "a folder for timm.create_model('local-dir:FOLDER', pretrained=True)"),
    _entry("detectron2", "detectron2:Detectron2", "a backbone for detectron2's checkpointer: a .pkl file"),
    _entry("transformers", "transformers:Transformers", "a folder for ResNetModel.from_pretrained('FOLDER')"),
    _entry("onnx", "onnx:Onnx", "images to pooled features, for any runtime: an .onnx file"),
    _entry("amdim", "amdim:AMDIMCheckpoint", "a checkpoint for AMDIM's released code: a .pth file"),
)
