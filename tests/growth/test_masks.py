"""A mask removes pairs from the computation; gradients reach only the others."""

import copy

import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

import tokenformer_vit  # noqa: F401
from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import grow, pattention_layers
from tokenformer_vit.growth.masks import TokenMasks, count_pairs
from tokenformer_vit.growth.prune import measure_usage, prune
from tokenformer_vit.layers.segments import TOKENS
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
        for layer in pattention_layers(model).values():
            layer.key_param_tokens[-5:] += 1
            if layer.gate is not None:
                layer.gate[-5:] = 0.8
    assert (logits(model, x) - before).abs().max() > 1e-4 * before.abs().max()
    with masks.use("base"):
        torch.testing.assert_close(logits(model, x), before, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("theta", THETAS)
def test_gradients_reach_active_pairs_alone(theta, split):
    model = grow(build(theta), **LARGER, init="random", split=split)
    if theta == "softmax":
        for layer in pattention_layers(model).values():
            layer.gate = nn.Parameter(torch.ones(layer.num_param_tokens))
    masks = TokenMasks(model)
    masks.add("some", lambda name, layer: torch.rand(layer.num_param_tokens) < 0.5)
    with masks.use("some"):
        F.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.arange(4)).backward()
        chosen = {name: each.active for name, each in pattention_layers(model).items()}
    for name, layer in pattention_layers(model).items():
        expected = torch.zeros(layer.num_param_tokens, dtype=torch.bool)
        expected[chosen[name]] = True
        for token in TOKENS:
            grads = [p.grad for n, p in layer.named_parameters() if n.endswith(token)]
            assert len(grads) == (2 if split else 1)
            assert torch.equal((torch.cat(grads) != 0).any(dim=-1), expected)
        if theta == "softmax":
            assert torch.equal(layer.gate.grad != 0, expected)


def test_masks_are_united_nested_and_restored(tasks):
    model, masks = tasks
    assert masks.names == ["base", "french", "spanish"]
    with masks.use("base"):
        assert active(model) == [[*range(24)], [*range(56)]]
        with masks.use("base", "spanish"):
            assert active(model) == [[*range(24)], [*range(56), *range(70, 90)]]
        assert active(model) == [[*range(24)], [*range(56)]]
        with pytest.raises(IndexError), masks.use():
            [][len(active(model))]
        assert active(model) == [[*range(24)], [*range(56)]]
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
    layers = [block.mlp for block in model.blocks]
    tokens = [getattr(layer, name) for layer in layers for name in TOKENS]
    with torch.no_grad():
        for parameter, grad in zip(tokens, torch.autograd.grad(loss, tokens), strict=True):
            parameter[new] -= 10 * grad[new]
    with masks.use("base", "french"):
        assert torch.equal(logits(model, x), french)
    with masks.use("base", "spanish"):
        assert not torch.equal(logits(model, x), spanish)


@pytest.mark.parametrize(
    "pairs",
    [
        {"qkv": slice(0, 3), "ffn": [0, 1, 5]},
        {"qkv": torch.tensor([2, 0, 1]), "ffn": torch.tensor([0, 1, 5])},
        {"qkv": torch.arange(24) < 3, "ffn": range(0, 10, 5), "blocks.0.mlp": [1, 0, 5]},
        lambda name, layer: [0, 1, 5] if name.endswith("mlp") else range(3),
    ],
    ids=["slices and lists", "tensors", "layers", "function"],
)
def test_pairs_are_said_in_many_ways(pairs):
    model = build()
    masks = TokenMasks(model)
    masks.add("some", pairs)
    masks.add("rest", {"proj": slice(None)})
    with masks.use("some", "rest"):
        assert active(model) == [[0, 1, 2], [0, 1, 5]]


def test_masks_survive_a_file_and_growth(tasks, tmp_path):
    model, masks = tasks
    masks.save(tmp_path / "masks.safetensors")
    tensors = load_file(tmp_path / "masks.safetensors")
    assert len(tensors) == 3 * 10
    assert tensors["spanish:blocks.1.mlp"].tolist() == 70 * [False] + 20 * [True]
    grow(model, num_ffn_param_tokens=96)
    loaded = TokenMasks.load(tmp_path / "masks.safetensors", model)
    assert loaded.names == sorted(masks.names)
    for names in (["base"], ["base", "french"], ["base", "spanish"], ["base", "french", "spanish"]):
        with masks.use(*names):
            before = active(model)
        with loaded.use(*names):
            assert active(model) == before
            assert 95 not in (before[1] or [95])
    assert [file.name for file in tmp_path.iterdir()] == ["masks.safetensors"]


def test_a_mask_follows_its_model_and_is_no_part_of_it(tasks):
    model, masks = tasks
    before = model.state_dict().keys()
    with masks.use("base"):
        x = torch.randn(4, 3, 32, 32)
        expected = logits(model, x)
        assert model.state_dict().keys() == before
        assert torch.equal(logits(copy.deepcopy(model), x), expected)


def test_a_mask_is_not_changed_before_blocks_are_computed_again(tasks):
    model, masks = tasks
    model.train().set_grad_checkpointing()
    x = torch.randn(1, 3, 32, 32)
    with pytest.raises(InputError, match="gradient checkpointing is on"), masks.use("base"):
        model(x)
    with torch.no_grad(), masks.use("base"):
        model(x)
    model.eval()
    with masks.use("base"):
        model(x)


def test_a_mask_that_was_activated_in_inference_mode_is_trained(tasks):
    model, masks = tasks
    with torch.inference_mode():
        masks.activate(masks.names[0])
    model(torch.randn(4, 3, 32, 32)).sum().backward()


def test_masks_that_cannot_be_used(tasks):
    model, masks = tasks
    with pytest.raises(InputError, match="no mask 'german'; choose from base, french, spanish"):
        masks.activate("base", "german")
    with pytest.raises(InputError, match=r"spanish leave 0 active pairs in blocks.0.attn.query"):
        masks.activate("spanish")
    with pytest.raises(InputError, match=r"mask 'french': .* count_pairs\(model\) before growth"):
        masks.add_appended("french", count_pairs(model))
    prune(model, measure_usage(model, [torch.randn(2, 3, 32, 32)]), num_qkv_param_tokens=20)
    with pytest.raises(InputError, match=r"mask 'base' has 24 pairs .* before any pruning"):
        masks.activate("base")


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ({"mlp": [0]}, "'mlp' .* or a kind: qkv, proj or ffn"),
        ({"ffn": [56]}, r"mask 'x' does not index the 56 pairs of blocks.0.mlp"),
        ({"ffn": [0.5]}, "does not index the 56 pairs"),
        ({"ffn": torch.ones(57, dtype=torch.bool)}, "does not index the 56 pairs"),
        ({"ffn": "all"}, "does not index the 56 pairs"),
        (lambda name, layer: None, "does not index the 24 pairs"),
    ],
)
def test_pairs_that_there_are_not(pairs, said):
    with pytest.raises(InputError, match=said):
        TokenMasks(build()).add("x", pairs)


def test_files_that_cannot_be_read(tasks, tmp_path):
    model, masks = tasks
    path = tmp_path / "masks.safetensors"
    with pytest.raises(InputError, match=f"there is no file {path}"):
        TokenMasks.load(path, model)
    path.write_bytes(b"no masks")
    with pytest.raises(InputError, match=f"{path} is not a readable safetensors file"):
        TokenMasks.load(path, model)
    masks.save(path)
    larger = {**LARGER, "num_ffn_param_tokens": 90}
    with pytest.raises(InputError, match=r"mask 'base' has no entry for blocks.2.attn.key"):
        TokenMasks.load(path, build(depth=3, **larger))
    with pytest.raises(InputError, match=r"'base:blocks.1.attn.key' is not a mask"):
        TokenMasks.load(path, build(depth=1, **larger))
    with pytest.raises(InputError, match=r"90 pairs for blocks.0.mlp, which has only 80"):
        TokenMasks.load(path, build(**LARGER))
    save_file({"base:blocks.0.mlp": torch.ones(3)}, path)
    with pytest.raises(InputError, match=r"'base:blocks.0.mlp' is not a mask"):
        TokenMasks.load(path, model)


def test_models_without_parameter_tokens():
    with pytest.raises(InputError, match="give a TokenFormer"):
        TokenMasks(nn.Linear(2, 2))
