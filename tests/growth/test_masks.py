"""Chosen pairs compute as if there were no others; gradients reach only these."""

import copy

import pytest
import torch
import torch.nn.functional as F

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import Usage, count_pairs, grow, pattention_layers, prune, use_pairs
from tokenformer_vit.layers.pattention import TOKENS

from .conftest import build, images, logits

LARGER = {"num_qkv_param_tokens": 40, "num_proj_param_tokens": 50, "num_ffn_param_tokens": 140}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("theta", ["softmax", "gelu_l2"])
def test_gradients_reach_chosen_pairs_alone(theta, split):
    model = grow(build(theta), **LARGER, init="random", split=split)
    chosen = {name: torch.rand(count) < 0.5 for name, count in count_pairs(model).items()}
    with use_pairs(model, chosen):
        F.cross_entropy(model(images()), torch.arange(3)).backward()
    for name, layer in pattention_layers(model).items():
        for token in TOKENS:
            grads = [part.grad for part in layer.parts(token)]
            assert len(grads) == (2 if split else 1)
            assert torch.equal((torch.cat(grads) != 0).any(dim=-1), chosen[name])


def test_chosen_pairs_compute_what_a_model_of_them_does_and_are_restored():
    model, x, usage, chosen = build(), images(), {}, {}
    before = logits(model, x)
    for name, count in count_pairs(model).items():
        order = torch.randperm(count)
        sizes = torch.zeros(count)
        sizes[order[: count // 2]] = 1
        usage[name], chosen[name] = Usage(sizes, sizes), order[: count // 2]
    small = prune(copy.deepcopy(model), usage, 16, 16, 64, adapt_tau=False)
    with use_pairs(model, chosen):
        assert torch.equal(logits(model, x), logits(small, x))
        assert torch.equal(logits(copy.deepcopy(model), x), logits(small, x))
        with pytest.raises(IndexError), use_pairs(model, {}):
            [][logits(model, x).ndim]
        assert torch.equal(logits(model, x), logits(small, x))
    assert torch.equal(logits(model, x), before)


def test_pairs_that_cannot_be_used():
    model, x = build(), images()
    before = logits(model, x)
    for pairs, error, said in (
        ({"mlp": slice(1)}, InputError, "'mlp' is no Pattention layer; give names of"),
        ({"blocks.0.mlp": slice(0)}, InputError, r"no pair of .*mlp is chosen.* of its 128"),
        ({"blocks.0.mlp": [128]}, IndexError, "128"),
    ):
        with pytest.raises(error, match=said):
            use_pairs(model, pairs).__enter__()
    model.set_size(0.5)
    with pytest.raises(InputError, match=r"uses a size: call set_size\(None\)"):
        use_pairs(model, {"blocks.0.mlp": [3]}).__enter__()
    model.set_size(None)
    with use_pairs(model, {"blocks.0.mlp": [3]}), pytest.raises(InputError, match="mask is in use"):
        model.set_size(0.5)
    assert torch.equal(logits(model, x), before)
    model.train().set_grad_checkpointing()  # which would compute blocks again with other pairs
    with pytest.raises(InputError, match="gradient checkpointing is on"):
        use_pairs(model, {"blocks.0.mlp": [3]}).__enter__()
