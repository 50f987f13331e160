"""Import it before torchvision: its wheels need a torch with CUDA, and it is not importable without its operators.

No model of the sweep calls them. A definition is enough, because torchvision only registers their shapes.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")

if find_spec("torchvision") is not None and torch.version.cuda is None:
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            _LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
