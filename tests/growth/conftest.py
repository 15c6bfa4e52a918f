import pytest
import torch
from torch import nn

from tokenformer_vit.layers import Pattention


@pytest.fixture
def rounding():
    """Bound the difference of two computations of the same outputs, relative to the largest.

    Rounding errors are a random walk: each term of a sum adds at most half an eps. Therefore the
    bound is eps times the root of the number of terms in all sums of a model, on any machine.
    """

    def bound(model, dtype=torch.float32):
        terms = 0
        for layer in model.modules():
            if isinstance(layer, Pattention):
                terms += layer.num_param_tokens + layer.in_features
            elif isinstance(layer, nn.Linear):
                terms += layer.in_features
        return torch.finfo(dtype).eps * terms**0.5

    return bound
