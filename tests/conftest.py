"""Which tests a machine can run."""

import pytest
import torch

_DEVICES = {"gpu": (1, "needs a CUDA device"), "gpu2": (2, "needs two CUDA devices")}


def pytest_collection_modifyitems(items):
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        for marker, (needed, reason) in _DEVICES.items():
            if item.get_closest_marker(marker) and present < needed:
                item.add_marker(pytest.mark.skip(reason=reason))
