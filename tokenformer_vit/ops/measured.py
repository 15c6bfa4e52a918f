"""The fastest backend on a GPU, as far as it has been measured.

``measured.json`` holds the facts: the name of a GPU, the dtype of the products, the number of pairs
P, and the backend. ``python ablations/tables.py`` makes it from the records of the benchmark. Where
there is no fact, ``fused`` is the default, because it runs everywhere.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from .precision import product_dtype

PATH = Path(__file__).with_name("measured.json")
"""The facts: {GPU: {dtype: {P: backend}}}."""

Facts = dict[str, dict[str, dict[str, str]]]


def read_facts(path: Path = PATH) -> Facts:
    """Read the facts about the backends that are installed.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is not JSON.
    """
    return json.loads(path.read_text(encoding="utf-8")) if find_spec("triton") else {}


_FACTS = read_facts()


@torch.compiler.assume_constant_result  # a compiled graph is for one GPU and one dtype
def _facts_about(device: torch.device, dtype: torch.dtype) -> tuple[tuple[int, str], ...]:
    facts = _FACTS.get(torch.cuda.get_device_name(device), {})
    own = facts.get(str(dtype).removeprefix("torch."), {})
    return tuple((int(pairs), backend) for pairs, backend in own.items())


def fastest_backend(x: Tensor, num_param_tokens: int) -> str:
    """Return the backend that ``auto`` means.

    Args:
        x: (..., C_in) input tokens of a layer, of which only device and dtype matter.
        num_param_tokens: P, its number of pairs.
    """
    if not _FACTS or x.device.type != "cuda":
        return "fused"
    for pairs, backend in _facts_about(x.device, product_dtype(x)):
        if pairs == num_param_tokens:  # which may be symbolic
            return backend
    return "fused"
