import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch.nn.attention import SDPBackend, sdpa_kernel

# `make fuzz` takes the long one. How long an example took says nothing on a busy machine.
_COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
settings.register_profile("short", max_examples=25, **_COMMON)
settings.register_profile("long", max_examples=2000, **_COMMON)
settings.load_profile("short")


@pytest.fixture(autouse=True)
def seed() -> int:
    """Draw fresh inputs in every test; SEED=<the number printed> repeats a failure."""
    seed = int(os.environ.get("SEED", 0)) or torch.seed() % 2**31
    print(f"SEED={seed}")
    torch.manual_seed(seed)
    return seed


@pytest.fixture
def plain_attention() -> Iterator[None]:
    """Compute attention as its two products, which every PyTorch's FlopCounterMode counts.

    The counter knows the CPU's fused kernel only since PyTorch 2.15.
    """
    with sdpa_kernel(SDPBackend.MATH):
        yield


@pytest.fixture
def shared_data() -> Callable[[str], Path]:
    """Find real data by a path within the folder TOKENFORMER_TEST_DATA, or skip the test."""

    def find(name: str) -> Path:
        root = os.environ.get("TOKENFORMER_TEST_DATA")
        if not root or not Path(root, name).exists():
            pytest.skip(f"{name} is not in TOKENFORMER_TEST_DATA={root or ''} (CONTRIBUTING.md)")
        return Path(root, name).resolve()

    return find
