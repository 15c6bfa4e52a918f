"""A mask removes pairs from the computation; gradients reach only the others."""

import copy

import pytest
import torch
import torch.nn.functional as F

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import (
    TokenMasks,
    Usage,
    count_pairs,
    grow,
    measure_usage,
    pattention_layers,
    prune,
)
from tokenformer_vit.layers.split import TOKENS
from tokenformer_vit.ops import THETAS

from .conftest import build, images, in_float64, logits

LARGER = {"num_qkv_param_tokens": 40, "num_proj_param_tokens": 50, "num_ffn_param_tokens": 140}


def active(model):
    """Return the indices of the active pairs of the first query and feed-forward layers."""
    layers = (model.blocks[0].attn.query, model.blocks[0].mlp)
    return [None if each.active is None else each.active.tolist() for each in layers]


@pytest.fixture
def tasks():
    """A model that grew twice, with a mask for each of the three sets of pairs."""
    model = build()
    masks = TokenMasks(model)
    masks.add("base")
    for name, ffn in (("french", 140), ("spanish", 160)):
        before = count_pairs(model)
        grow(model, **{**LARGER, "num_ffn_param_tokens": ffn}, init="random")
        masks.add_appended(name, before)
    return model, masks


@pytest.mark.parametrize("init", ["random", "zero_key"])
@pytest.mark.parametrize("theta", THETAS)
def test_the_pairs_of_before_growth_compute_what_they_did(theta, init):
    model, x = in_float64(build(theta)), images().double()
    before = logits(model, x)
    masks = TokenMasks(model)
    masks.add("base")
    grow(model, **LARGER, init=init)
    with torch.no_grad():  # as if the new pairs had been trained
        for layer in pattention_layers(model).values():
            layer.key_param_tokens[-5:] += torch.randn(5, layer.in_features)
            if layer.gate is not None:
                layer.gate[-5:] = 0.8
    assert (logits(model, x) - before).abs().max() > 1e-4 * before.abs().max()
    with masks.use("base"):
        torch.testing.assert_close(logits(model, x), before, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("theta", ["softmax", "gelu_l2"])
def test_gradients_reach_active_pairs_alone(theta, split):
    model = grow(build(theta), **LARGER, init="random", split=split)
    masks = TokenMasks(model)
    masks.add("some", {n: torch.rand(count) < 0.5 for n, count in count_pairs(model).items()})
    with masks.use("some"):
        F.cross_entropy(model(images()), torch.arange(3)).backward()
        chosen = {name: each.active for name, each in pattention_layers(model).items()}
    for name, layer in pattention_layers(model).items():
        expected = torch.zeros(layer.num_param_tokens, dtype=torch.bool)
        expected[chosen[name]] = True
        for token in TOKENS:
            grads = [p.grad for n, p in layer.named_parameters() if n.endswith(token)]
            assert len(grads) == (2 if split else 1)
            assert torch.equal((torch.cat(grads) != 0).any(dim=-1), expected)


def test_masks_are_united_and_restored(tasks):
    model, masks = tasks
    with masks.use("base"):
        assert active(model) == [[*range(32)], [*range(128)]]
        with masks.use("base", "spanish"):
            assert active(model) == [[*range(32)], [*range(128), *range(140, 160)]]
        with pytest.raises(IndexError), masks.use():
            [][len(active(model))]
        assert active(model) == [[*range(32)], [*range(128)]]
    assert active(model) == [None, None]
    masks.activate("french", "base")
    assert active(model) == [None, [*range(140)]]  # of the first all pairs
    masks.activate()
    assert active(model) == [None, None]


def test_a_union_computes_what_a_model_of_its_pairs_does(tasks):
    model, masks = tasks
    x, usage = images(), {}
    for name, layer in pattention_layers(model).items():
        sizes = torch.zeros(layer.num_param_tokens)
        sizes[torch.cat([masks.pairs[each][name] for each in ("base", "spanish")])] = 1
        usage[name] = Usage(sizes, sizes)
    small = prune(copy.deepcopy(model), usage, 32, 32, 148, adapt_tau=False)
    with masks.use("base", "spanish"):
        assert torch.equal(logits(model, x), logits(small, x))
        assert torch.equal(logits(copy.deepcopy(model), x), logits(small, x))


def test_masks_that_cannot_be_used(tasks):
    model, masks = tasks
    with pytest.raises(InputError, match="no mask 'german'; choose from base, french, spanish"):
        masks.activate("base", "german")
    with pytest.raises(InputError, match=r"spanish choose no pair .* 40 in .*activate another"):
        masks.activate("spanish")
    with pytest.raises(InputError, match=r"mask 'french'; call count_pairs\(\) before growth"):
        masks.add_appended("french", count_pairs(model))
    with pytest.raises(InputError, match=r"'mlp' is not a Pattention layer.* give names"):
        masks.add("x", {"mlp": slice(1)})
    model.set_size(0.5)
    with pytest.raises(InputError, match=r"first 20 pairs; call model.set_size\(None\)"):
        masks.activate("base")
    model.set_size(None)
    model.train().set_grad_checkpointing()  # which would compute blocks again with other pairs
    with pytest.raises(InputError, match="gradient checkpointing is on"), masks.use("base"):
        model(images())
    model.eval()
    prune(model, measure_usage(model, [images()]), num_qkv_param_tokens=20)
    with pytest.raises(InputError, match=r"base choose pair 31 of 20 .* after pruning"):
        masks.activate("base")
