import copy

import pytest
import timm
import torch
from timm.models import get_model_args, save_for_hf
from timm.models.vision_transformer import VisionTransformer

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import grow
from tokenformer_vit.layers import Pattention
from tokenformer_vit.ops import THETAS


def pattentions(model):
    return [module for module in model.modules() if isinstance(module, Pattention)]


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("norm", ["none", "bias", "weight+bias"])
def test_arguments_reach_every_layer_and_are_recorded(small, theta, norm):
    tau, learned = (3.5, True) if THETAS[theta].norm_order else (1.0, False)
    shared = {"tau": tau, "learn_tau": learned, "eps": 1e-3, "init": "released"}
    counts = {"num_qkv_param_tokens": [8, 12], "num_ffn_param_tokens": [32, 24]}
    given = {"theta": theta, "norm": norm, "norm_eps": 1e-4, "pattention_args": shared, **counts}
    uniform = {"drop_path_rate": 0.3, "drop_path_uniform": True}
    model = small(**given, **uniform, num_proj_param_tokens=16, qk_norm=True)
    assert {(b.drop_path1.drop_prob, b.mlp.init_gain) for b in model.blocks} == {(0.3, 0.5)}
    layers = pattentions(model)
    assert [each.num_param_tokens for each in layers] == [8, 8, 8, 16, 32, 12, 12, 12, 16, 24]
    assert {(each.theta, each.eps, each.tau.item()) for each in layers} == {(theta, 1e-3, tau)}
    assert all(each.tau.requires_grad == learned for each in layers)
    keys = torch.cat([each.key_param_tokens.flatten() for each in layers])
    assert keys.std().item() == pytest.approx(0.02, rel=0.1)
    assert {n.affine for b in model.blocks for n in (b.norm1, b.norm2)} == {norm}
    norms = [each for each in model.modules() if isinstance(each, torch.nn.LayerNorm)]
    assert [each.eps for each in norms] == [1e-4] * 9
    assert len(list(model.norm.parameters())) == 2
    counts["num_proj_param_tokens"] = 16
    assert {**given, **counts, "qk_norm": True}.items() <= get_model_args(model).items()


def test_the_description_is_what_the_layers_say_now(small, images, tmp_path):
    model, x = small(depth=3, pattention_args={"learn_tau": True}), images()
    grow(model.blocks, num_ffn_param_tokens=[192, 200, 300])
    for layer in pattentions(model):
        layer.eps = 0.5
    for block in model.blocks:
        block.norm1.eps = block.norm2.eps = 0.25
    model.norm.eps = 0.25
    model.blocks = torch.nn.Sequential(*model.blocks[1:])
    args, expected = get_model_args(model), {"depth": 2, "num_ffn_param_tokens": [200, 300]}
    expected |= {"norm_eps": 0.25, "pattention_args": {"learn_tau": True, "eps": 0.5}}
    assert expected.items() <= args.items()
    save_for_hf(model, tmp_path, safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert torch.equal(again(x), model(x))
    model.blocks[0].mlp.eps = model.blocks[0].attn.key.eps = 0.125  # no argument builds this model
    of_kinds = {"qkv": [[0.5, 0.125, 0.5], 0.5], "proj": 0.5, "ffn": [0.125, 0.5]}
    assert model.computation()["eps"] == of_kinds


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"qkv_bias": True}, TypeError, "no linear layers .*leave out 'qkv_bias'"),
        ({"norm_layer": "rmsnorm"}, TypeError, "norms by `norm`: leave out 'norm_layer'"),
        ({"rope_temperature": 0.0}, InputError, r"must be positive, but got 0\.0"),
        ({"stem": "conv", "patch_size": 12}, InputError, "patch_size of 2, 4, 8, .*, not 12 × 12"),
        ({"stem": "convs"}, InputError, "patch or conv, but got 'convs'"),
        ({"global_pool": "map"}, TypeError, "attention pools .* another global_pool"),
        ({"theta": "relu"}, InputError, "softmax.*'relu'"),
    ],
)
def test_wrong_arguments_are_named(small, arguments, error, said):
    with pytest.raises(error, match=said):
        small(**arguments)


def test_rotary_positions_follow_the_image_size(small, parts):
    model, dynamic = small(**parts), small(**parts, dynamic_img_size=True)
    dynamic.load_state_dict(model.state_dict())
    assert not any("rope" in name for name in model.state_dict())
    assert get_model_args(model)["use_rot_pos_emb"] is True
    for size in ((96, 48), (48, 96), (64, 64)):
        resized = copy.deepcopy(model)
        resized.set_input_size(img_size=size)
        fresh = small(**parts, img_size=size)
        fresh.load_state_dict(resized.state_dict())
        images = torch.randn(2, 3, *size)
        assert torch.equal(fresh(images), resized(images))
        torch.testing.assert_close(dynamic(images), resized(images))
    with pytest.raises(AssertionError, match="doesn't match model"):
        model(torch.randn(2, 3, 96, 48))


@pytest.mark.parametrize("sizes", [((16, 64), (64, 16)), ((32, 32), (16, 16))])
def test_crops_of_several_sizes_in_one_backward(small, parts, sizes):
    model = small(**parts, dynamic_img_size=True).train()
    crops = [torch.randn(2, 3, *size) for size in sizes]
    for crop in crops:
        model(crop).square().sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    for checkpointing in (False, True):
        model.set_grad_checkpointing(checkpointing)
        model.zero_grad()
        torch.stack([model(crop).square().sum() for crop in crops]).sum().backward()
        for parameter, grad in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropped_patches_take_their_rotary_positions_along(small, parts, seed, checkpointing):
    model, x = small(**parts, patch_drop_rate=0.5).train(), torch.randn(2, 3, 64, 64)
    model.set_grad_checkpointing(checkpointing)
    torch.manual_seed(seed)
    tokens = model.forward_features(x)
    torch.manual_seed(seed)
    kept = torch.randn(2, 16).argsort(-1)[:, :8]  # as timm draws them
    for image, places, out in zip(x, kept, tokens, strict=True):
        prefix, patches = model._pos_embed(model.patch_embed(image[None])).tensor_split([5], dim=1)
        by_hand, rope = torch.cat((prefix, patches[:, places]), dim=1), model.rope.get_embed()
        for block in model.blocks:
            by_hand = block(by_hand, rope=rope[places])
        torch.testing.assert_close(out, model.norm(by_hand)[0])
    assert model.eval().forward_features(x).shape == (2, 5 + 16, 48)


@pytest.mark.parametrize(
    "how",
    [
        {"norm": True, "output_fmt": "NLC"},
        {"output_dict": True, "return_prefix_tokens": True, "stop_early": True},
        {"intermediates_only": True, "is_causal": True},
    ],
)
def test_intermediates_are_those_of_timm(small, how, parts):
    model, x = small(depth=3, reg_tokens=2, dynamic_img_size=True), torch.randn(2, 3, 32, 48)
    for indices in (2, [0, -2]):
        theirs = VisionTransformer.forward_intermediates(model, x, indices, **how)
        torch.testing.assert_close(model.forward_intermediates(x, indices, **how), theirs)
    model = small(**parts)
    last, outputs = model.forward_intermediates(images := torch.randn(2, 3, 64, 64), norm=True)
    assert torch.equal(last, model.forward_features(images))
    assert torch.equal(outputs[-1].flatten(2).mT, last[:, 5:])


def test_class_and_register_tokens_without_a_position_are_not_tiny(small, parts):
    assert small(reg_tokens=4).reg_token.std() < 1e-5  # timm's; their positions are 0.02
    for changes in ({"no_embed_class": True}, {"pos_embed": "none"}, parts):
        model = small(**{**changes, "reg_tokens": 4})
        tokens = torch.cat((model.cls_token, model.reg_token), dim=1)
        assert tokens.std().item() == pytest.approx(0.02, rel=0.3)


def test_rotary_positions_are_made_again_and_stay_precise(small, parts):
    fresh = small(**parts)
    model = small(**parts, device="meta").to_empty(device="cpu")
    model.init_weights()
    assert torch.equal(model.rope.pos_embed, fresh.rope.pos_embed)
    assert small(**parts, dtype=torch.bfloat16).rope.pos_embed.dtype == torch.bfloat16
