"""A layer with separate old and new pairs computes, loads and is copied like any other."""

import torch
from torch import nn

from tokenformer_vit.layers import Pattention
from tokenformer_vit.layers.pattention import TOKENS, join_state_dict


def split(num_old=13, **kwargs):
    """Build a layer of 20 pairs that holds the last ones apart."""
    layer = Pattention(8, 12, num_old, **kwargs)
    layer.new_key_param_tokens = nn.Parameter(torch.randn(20 - num_old, 8))
    layer.new_value_param_tokens = nn.Parameter(torch.randn(20 - num_old, 12))
    return layer


def test_state_dicts_of_all_forms_load_into_all():
    plain, layer, otherwise, x = Pattention(8, 12, 20), split(), split(5), torch.randn(3, 8)
    names = {*TOKENS, "tau", *(f"new_{name}" for name in TOKENS)}
    assert set(layer.state_dict()) == names
    assert set(join_state_dict(layer.state_dict())) == set(plain.state_dict())
    for source in (plain, layer, otherwise):
        source.reset_parameters()
        source.tau.fill_(source.tau.item() + 1)
        saved = source.state_dict()
        for other in (plain, layer, otherwise):
            other.load_state_dict(saved)
            assert torch.equal(other(x), source(x))
        assert set(saved) == set(source.state_dict())  # it is the caller's
    names = [name for name, _ in split(learn_tau=True).named_parameters()]
    assert names == [*TOKENS, *(f"new_{name}" for name in TOKENS), "tau"]
