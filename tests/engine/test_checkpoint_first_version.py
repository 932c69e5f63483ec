"""A checkpoint of the first version of the format loads for ever."""

from __future__ import annotations

import base64

import torch

from zoo.engine.checkpoint import CheckpointFolder
from zoo.engine.collectives import WorldOfOne

# Its bytes.
FIRST = {
    "manifest.json": """{
 "schema": 1,
 "step": 7,
 "world_size": 1,
 "files": {
  "global.json": "a034af47f123a499a062ead72d6f2121a929eb001679661c7324b7858bb99d28",
  "global.safetensors": "98aba32119750fa46f8d42acc68277389f40a23ee86201df1dcc523dcee84a8e",
  "rank-0.json": "230d066b75901f388c87a05bfa9978b65f15fb4b22e73331f8d82aa2f12a30db",
  "rank-0.safetensors": "463d2de121737e52283d80281a470f52d2d60cfbdee4e8bbcb926421d562dc6a"
 }
}
""",
    "global.json": """{
 "step": 7,
 "elapsed": 1.5,
 "learner": {
  "w": {
   "$tensor": "learner/w"
  }
 },
 "optimizer": {
  "state": {
   "$pairs": [
    [
     0,
     {
      "momentum": {
       "$tensor": "optimizer/state/0/momentum"
      }
     }
    ]
   ]
  },
  "param_groups": [
   {
    "betas": {
     "$tuple": [
      0.9,
      0.999
     ]
    },
    "lr": 0.1
   }
  ]
 },
 "scaler": {}
}
""",
    "rank-0.json": """{
 "learner": {
  "queue": {
   "$tensor": "learner/queue"
  }
 },
 "torch_rng": {
  "cpu": {
   "$tensor": "torch_rng/cpu"
  }
 }
}
""",
}
FIRST_TENSORS = {
    "global.safetensors": (
        "sAAAAAAAAAB7Il9fbWV0YWRhdGFfXyI6eyJmb3JtYXQiOiJwdCJ9LCJsZWFybmVyL3ciOnsiZHR5cGUiOiJGMzIiLCJzaGFw"
        "ZSI6WzEsMl0sImRhdGFfb2Zmc2V0cyI6WzAsOF19LCJvcHRpbWl6ZXIvc3RhdGUvMC9tb21lbnR1bSI6eyJkdHlwZSI6IkJG"
        "MTYiLCJzaGFwZSI6WzFdLCJkYXRhX29mZnNldHMiOls4LDEwXX19IAAAgD8AAADAAD8="
    ),
    "rank-0.safetensors": (
        "qAAAAAAAAAB7Il9fbWV0YWRhdGFfXyI6eyJmb3JtYXQiOiJwdCJ9LCJsZWFybmVyL3F1ZXVlIjp7ImR0eXBlIjoiSTY0Iiwi"
        "c2hhcGUiOlsyXSwiZGF0YV9vZmZzZXRzIjpbMCwxNl19LCJ0b3JjaF9ybmcvY3B1Ijp7ImR0eXBlIjoiVTgiLCJzaGFwZSI6"
        "WzJdLCJkYXRhX29mZnNldHMiOlsxNiwxOF19fSAgICADAAAAAAAAAAQAAAAAAAAAAQI="
    ),
}


def test_a_checkpoint_of_the_first_version_loads(tmp_path):
    folder = CheckpointFolder(tmp_path)
    path = folder.path(7)
    path.mkdir()
    for name, text in FIRST.items():
        (path / name).write_bytes(text.encode())
    for name, text in FIRST_TENSORS.items():
        (path / name).write_bytes(base64.b64decode(text))
    for found, problems in (folder.newest(), folder.newest_for(WorldOfOne())):
        assert (found.step, found.world_size, problems) == (7, 1, [])
        shared = dict(found.shared)
        weight, momentum = shared["learner"].pop("w"), shared["optimizer"]["state"][0].pop("momentum")
        assert (weight.tolist(), weight.dtype) == ([[1.0, -2.0]], torch.float32)
        assert (momentum.tolist(), momentum.dtype) == ([0.5], torch.bfloat16)
        optimizer = {"state": {0: {}}, "param_groups": [{"betas": (0.9, 0.999), "lr": 0.1}]}
        assert shared == {"step": 7, "elapsed": 1.5, "learner": {}, "optimizer": optimizer, "scaler": {}}
        queue, rng = found.local["learner"]["queue"], found.local["torch_rng"]["cpu"]
        assert (queue.tolist(), queue.dtype) == ([3, 4], torch.int64)
        assert (rng.tolist(), rng.dtype) == ([1, 2], torch.uint8)
    folder.verify(7)
