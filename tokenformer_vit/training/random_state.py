"""The state of all global random generators of a process, as plain values and tensors."""

import random
from typing import Any, cast

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """Return the state of all global random generators, in plain values and tensors."""
    _, keys, *rest = cast(tuple, np.random.get_state())  # noqa: NPY002  # mixup draws from it
    return {
        "python": random.getstate(),
        "numpy": [keys.tolist(), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore a state that :func:`rng_state` returned."""
    random.setstate(state["python"])
    np.random.set_state(("MT19937", *state["numpy"]))  # noqa: NPY002
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
