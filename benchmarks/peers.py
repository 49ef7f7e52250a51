"""The libraries that others use for this, loaded so that they run here."""

import importlib.machinery
import sys
from types import ModuleType
from typing import Any


def load_streaming() -> Any:
    """MosaicML Streaming. It imports torchvision, which does not import beside this torch and is
    not used for what is measured: a stand-in takes its place."""
    import transformers  # noqa: F401  # looks for torchvision, and must not find the stand-in

    stand_ins = {
        "torchvision": (),
        "torchvision.datasets": ("VisionDataset",),
        "torchvision.datasets.folder": ("default_loader",),
        "torchvision.transforms": (),
        "torchvision.transforms.functional": ("to_tensor",),
    }
    for name, members in stand_ins.items():
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        for member in members:
            setattr(module, member, type(member, (), {}))
        sys.modules.setdefault(name, module)
    import streaming

    return streaming
