"""The norm of a linear probe; tests/training/test_backbone.py tests the names."""

import torch

from tokenformer_vit.mmpretrain_names import timm_state_dict


def test_the_norm_of_a_linear_probe_becomes_a_part_of_its_head():
    head = torch.nn.Linear(4, 3).double()
    for affine in (False, True):
        norm = torch.nn.BatchNorm1d(4, eps=1e-6, affine=affine).double()
        for tensor in norm.state_dict().values():
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 2)
        named = {f"head.fc.{name}": each for name, each in head.state_dict().items()}
        named |= {f"neck.bn.{name}": each for name, each in norm.state_dict().items()}
        folded = timm_state_dict({**named, "backbone.model.x": torch.ones(1)})
        x = torch.randn(5, 4).double()
        found = torch.nn.functional.linear(x, folded["head.weight"], folded["head.bias"])
        torch.testing.assert_close(found, head(norm.eval()(x)))
