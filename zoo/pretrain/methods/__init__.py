"""The methods by name: one line each."""

from __future__ import annotations

from ...registry import Entry, Registry

__all__ = ["METHODS"]

METHODS = Registry(
    "method",
    __name__,
    Entry("swav", "swav_config:SwAVConfig", "swav:SwAV", "swapped prediction of Sinkhorn codes"),
    Entry("moco", "moco_config:MoCoConfig", "moco:MoCo", "contrast with a queue of keys (v1 and v2)"),
    Entry(
        "simclr", "simclr_config:SimCLRConfig", "simclr:SimCLR", "contrast with all other images of the batch"
    ),
    Entry(
        "supervised",
        "supervised_config:SupervisedConfig",
        "supervised:Supervised",
        "labels, on the same crops",
    ),
    Entry(
        "deepcluster_v2",
        "deepcluster_v2_config:DeepClusterV2Config",
        "deepcluster_v2:DeepClusterV2",
        "clusters of the last epoch's embeddings",
    ),
    Entry(
        "sela_v2",
        "sela_v2_config:SeLaV2Config",
        "sela_v2:SeLaV2",
        "Sinkhorn codes of the last epoch's embeddings",
    ),
    Entry(
        "amdim", "amdim_config:AMDIMConfig", "amdim:AMDIM", "features of one view predict the other's maps"
    ),
)
