import os

import pytest
import torch
from hypothesis import HealthCheck, settings

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
