"""Networks that the zoo has no trunk for, told by the names of their tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["looks_like"]

# What a network is called, and a name that only it has; more special ones come first.
_MARKS = (
    ("a Swin transformer", r"relative_position_bias_table|attention\.self\.relative_position"),
    ("CLIP", r"(^|\.)(visual\.(attnpool|transformer|conv1)|logit_scale$|text_model\.)"),
    ("a vision transformer (ViT) of transformers", r"embeddings\.(cls_token|patch_embeddings)"),
    (
        "a vision transformer (ViT)",
        r"(^|\.)(cls_token|pos_embed|class_token|patch_embed\.proj)|encoder\.layers\.encoder_layer_\d|"
        r"blocks\.\d+\.attn\.qkv|transformer\.resblocks\.",
    ),
    (
        "a ConvNeXt",
        r"stages\.\d+\.(blocks\.)?\d+\.(conv_dw|dwconv|gamma)|features\.\d+\.\d+\.layer_scale|downsample_layers\.",
    ),
    ("a ShuffleNet", r"(^|\.)stage\d\.\d+\.branch\d"),
    ("a DenseNet", r"features\.denseblock\d"),
    ("a RegNet", r"trunk_output\.block\d|(^|\.)s\d\.b\d+\.conv\d|_feature_blocks\.block\d"),
    ("an Inception network", r"(^|\.)Mixed_\d[a-z]|inception\d[a-z]"),
    (
        "an EfficientNet or a MobileNet",
        r"blocks\.\d+\.\d+\.(conv_pw|conv_dw|bn1)|features\.\d+\.\d+\.block|_blocks\.\d+\._depthwise|"
        r"features\.\d+\.(conv|block)\.\d",
    ),
    (
        "a ResNet by transformers' names (which zoo convert writes but nothing here reads)",
        r"embedder\.embedder\.convolution|stages\.\d+\.layers\.\d+\.layer\.",
    ),
    ("a VGG or an AlexNet", r"(^|\.)features\.\d+\.weight"),
    ("a CIFAR WideResNet", r"(^|\.)block[123]\.layer\.\d+\."),
    ("a ResNet with a deep stem (timm's resnet50d)", r"(^|\.)conv1\.[03]\.weight"),
    ("caffe2's ResNet (an old detectron model)", r"res\d_\d+_branch\d"),
)


def looks_like(names: Iterable[str]) -> str | None:
    """What tensors of these names belong to, if it is a network that is known but not in the zoo."""
    listed = list(names)
    return next((what for what, mark in _MARKS if any(re.search(mark, name) for name in listed)), None)
