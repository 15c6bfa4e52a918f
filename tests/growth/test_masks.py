"""A mask removes pairs from the computation; gradients reach only the others."""

import copy
import io

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

import tokenformer_vit  # noqa: F401
from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import TokenMasks, count_pairs, grow, measure_usage, prune
from tokenformer_vit.growth import pattention_layers as layers_of
from tokenformer_vit.layers.split import TOKENS
from tokenformer_vit.ops import THETAS

SHAPE = {
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 2,
    "img_size": 32,
    "patch_size": 8,
    "num_classes": 10,
    "num_qkv_param_tokens": 24,
    "num_proj_param_tokens": 40,
    "num_ffn_param_tokens": 56,
}
LARGER = {"num_qkv_param_tokens": 30, "num_proj_param_tokens": 50, "num_ffn_param_tokens": 80}


def build(theta="gelu_l2", **kwargs):
    return timm.create_model("tokenformer_tiny", theta=theta, **{**SHAPE, **kwargs}).eval()


def logits(model, x):
    with torch.no_grad():
        return model(x)


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
    for name, ffn in (("french", 70), ("spanish", 90)):
        before = count_pairs(model)
        grow(model, **{**LARGER, "num_ffn_param_tokens": ffn}, init="random")
        masks.add_appended(name, before)
    return model, masks


@pytest.mark.parametrize("init", ["random", "zero_key"])
@pytest.mark.parametrize("theta", THETAS)
def test_the_pairs_of_before_growth_compute_what_they_did(theta, init):
    model = build(theta).double()
    x = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    before = logits(model, x)
    masks = TokenMasks(model)
    masks.add("base")
    grow(model, **LARGER, init=init)
    with torch.no_grad():  # as if the new pairs had been trained
        for layer in layers_of(model).values():
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
    if theta == "softmax":
        for layer in layers_of(model).values():
            layer.gate = nn.Parameter(torch.ones(layer.num_param_tokens))
    masks = TokenMasks(model)
    masks.add("some", {n: torch.rand(count) < 0.5 for n, count in count_pairs(model).items()})
    with masks.use("some"):
        F.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.arange(4)).backward()
        chosen = {name: each.active for name, each in layers_of(model).items()}
    for name, layer in layers_of(model).items():
        expected = torch.zeros(layer.num_param_tokens, dtype=torch.bool)
        expected[chosen[name]] = True
        for token in TOKENS:
            grads = [p.grad for n, p in layer.named_parameters() if n.endswith(token)]
            assert len(grads) == (2 if split else 1)
            assert torch.equal((torch.cat(grads) != 0).any(dim=-1), expected)
        if theta == "softmax":
            assert torch.equal(layer.gate.grad != 0, expected)


def test_masks_are_united_and_restored(tasks):
    model, masks = tasks
    x = torch.randn(4, 3, 32, 32)
    assert [*masks.pairs] == ["base", "french", "spanish"]
    with masks.use("base"):
        assert active(model) == [[*range(24)], [*range(56)]]
        with masks.use("base", "spanish"):
            assert active(model) == [[*range(24)], [*range(56), *range(70, 90)]]
        with pytest.raises(IndexError), masks.use():
            [][len(active(model))]
        assert active(model) == [[*range(24)], [*range(56)]]
        expected = logits(model, x)
        assert torch.equal(logits(copy.deepcopy(model), x), expected)
    assert active(model) == [None, None]
    masks.activate("french", "base")
    assert active(model) == [None, [*range(70)]]  # of the first all pairs
    masks.activate()
    assert active(model) == [None, None]


def test_what_one_task_learns_does_not_change_another(tasks):
    model, masks = tasks
    x = torch.randn(4, 3, 32, 32)
    with masks.use("base", "french"):
        french = logits(model, x)
    with masks.use("base", "spanish"):
        spanish = logits(model, x)
        loss = F.cross_entropy(model(x), torch.arange(4))
    assert not torch.allclose(french, spanish)
    new = torch.arange(70, 90)
    tokens = [getattr(block.mlp, name) for block in model.blocks for name in TOKENS]
    with torch.no_grad():
        for parameter, grad in zip(tokens, torch.autograd.grad(loss, tokens), strict=True):
            parameter[new] -= 10 * grad[new]
    with masks.use("base", "french"):
        assert torch.equal(logits(model, x), french)
    with masks.use("base", "spanish"):
        assert not torch.equal(logits(model, x), spanish)


def test_masks_survive_a_file_and_growth(tasks):
    model, masks = tasks
    masks.add("some", {"blocks.0.mlp": torch.tensor([5, 0, 1]), "blocks.0.attn.query": slice(3)})
    file = io.BytesIO()
    torch.save(masks.pairs, file)
    file.seek(0)
    grow(model, num_ffn_param_tokens=96)
    loaded = TokenMasks(model, torch.load(file, weights_only=True))
    assert [*loaded.pairs] == [*masks.pairs]
    for names in (["base"], ["base", "french"], ["base", "spanish"], ["base", "some"]):
        with masks.use(*names):
            before = active(model)
        with loaded.use(*names):
            assert active(model) == before
    assert loaded.pairs["some"]["blocks.0.mlp"].tolist() == [0, 1, 5]


def test_a_mask_is_not_changed_before_blocks_are_computed_again(tasks):
    model, masks = tasks
    model.train().set_grad_checkpointing()
    x = torch.randn(1, 3, 32, 32)
    with pytest.raises(InputError, match="gradient checkpointing is on"), masks.use("base"):
        model(x)
    with torch.no_grad(), masks.use("base"):
        model(x)


def test_masks_that_cannot_be_used(tasks):
    model, masks = tasks
    with pytest.raises(InputError, match="no mask 'german'; choose from base, french, spanish"):
        masks.activate("base", "german")
    with pytest.raises(InputError, match=r"spanish choose no pair .* 30 in blocks.0.attn.query"):
        masks.activate("spanish")
    with pytest.raises(InputError, match=r"mask 'french'; call count_pairs\(\) before growth"):
        masks.add_appended("french", count_pairs(model))
    with pytest.raises(InputError, match="'mlp' is not a Pattention layer"):
        masks.add("x", {"mlp": slice(1)})
    with pytest.raises(IndexError):
        masks.add("x", {"blocks.0.mlp": torch.tensor([90])})
    with pytest.raises(InputError, match="give a TokenFormer"):
        TokenMasks(nn.Linear(2, 2))
    model.set_size(0.5)
    with pytest.raises(InputError, match=r"first 15 pairs; call model.set_size\(None\)"):
        masks.activate("base")
    model.set_size(None)
    assert active(model) == [None, None]
    prune(model, measure_usage(model, [torch.randn(2, 3, 32, 32)]), num_qkv_param_tokens=20)
    with pytest.raises(InputError, match=r"base choose pair 23 of 20 .* after pruning"):
        masks.activate("base")
