import copy
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models import get_model_args, save_for_hf

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import BlockLayerNorm, BlockRMSNorm, Pattention
from tokenformer_vit.ops import THETAS

ABSENT = [
    "act_layer",
    "attn_layer",
    "block_fn",
    "fix_init",
    "mlp_layer",
    "norm_layer",
    "proj_bias",
    "qkv_bias",
    "scale_attn_norm",
    "scale_mlp_norm",
]


def pattentions(model):
    return [module for module in model.modules() if isinstance(module, Pattention)]


@pytest.mark.parametrize("theta", THETAS)
def test_theta_reaches_every_layer(small, theta):
    model = small(theta=theta)
    assert {layer.theta for layer in pattentions(model)} == {theta}
    assert model(torch.randn(2, 3, 64, 64)).isfinite().all()


@pytest.mark.parametrize("norm", BlockLayerNorm.AFFINE)
def test_norm_is_that_of_the_blocks_alone(small, norm):
    model = small(norm=norm)
    assert {block.norm1.affine for block in model.blocks} == {norm}
    assert {block.norm2.affine for block in model.blocks} == {norm}
    assert len(list(model.norm.parameters())) == 2


def test_rms_is_for_all_norms(small):
    model = small(norm="rms", qk_norm=True)
    attention = model.blocks[0].attn
    assert {type(norm) for norm in (model.blocks[1].norm2, attention.q_norm)} == {BlockRMSNorm}
    assert [name for name, _ in model.named_parameters() if "norm" in name] == ["norm.weight"]


def test_pair_counts(small):
    model = small(num_qkv_param_tokens=8, num_proj_param_tokens=16, num_ffn_param_tokens=32)
    assert [layer.num_param_tokens for layer in pattentions(model)] == 2 * [8, 8, 8, 16, 32]


def test_each_block_may_have_its_own_number_of_pairs(small):
    arguments = {"num_qkv_param_tokens": [8, 12], "num_ffn_param_tokens": (32, 24)}
    model = small(num_proj_param_tokens=16, **arguments)
    counts = [layer.num_param_tokens for layer in pattentions(model)]
    assert counts == [8, 8, 8, 16, 32, 12, 12, 12, 16, 24]
    model.record_param_tokens()
    expected = {
        "num_qkv_param_tokens": [8, 12],
        "num_proj_param_tokens": 16,
        "num_ffn_param_tokens": [32, 24],
    }
    assert expected.items() <= get_model_args(model).items()


@pytest.mark.parametrize("numbers", [[8], [8, 8, 8], []])
def test_a_list_of_pairs_has_one_number_for_each_block(small, numbers):
    with pytest.raises(InputError, match=rf"ffn.* has {len(numbers)} .* 2 blocks: give one") as e:
        small(num_ffn_param_tokens=numbers)
    assert "\n" not in str(e.value)
    with pytest.raises(InputError, match=r"num_ffn_.* a whole number, .* got \[8, 'x'\]"):
        small(num_ffn_param_tokens=[8, "x"])
    with pytest.raises(InputError, match="at least 1, but got 0"):
        small(num_ffn_param_tokens=[8, 0])


def test_own_arguments_are_recorded_as_plain_values(small):
    arguments = {
        "theta": "softmax",
        "norm": "bias",
        "num_qkv_param_tokens": 8,
        "num_proj_param_tokens": 16,
        "num_ffn_param_tokens": 32,
        "pattention_args": {"tau": 3.5, "learn_tau": True},
    }
    recorded = get_model_args(small(**arguments))
    assert arguments.items() <= recorded.items()


def test_shared_arguments_reach_every_layer(small):
    layers = pattentions(small(pattention_args={"eps": 1e-3, "learn_tau": True}))
    assert {layer.eps for layer in layers} == {1e-3}
    assert all(layer.tau.requires_grad for layer in layers)
    with pytest.raises(ValueError, match=r"pattention_args .* tau.*'thta'"):
        small(pattention_args={"thta": 3.0})


def test_the_released_initialization_is_recorded_and_rebuilt(small, tmp_path):
    model = small(pattention_args={"init": "released"})
    keys = torch.cat([layer.key_param_tokens.flatten() for layer in pattentions(model)])
    assert keys.std().item() == pytest.approx(0.02, rel=0.05)
    values = torch.cat([layer.value_param_tokens.flatten() for layer in pattentions(model)])
    std = 2 / (len(model.blocks) * model.embed_dim**0.5)
    assert values.std().item() == pytest.approx(std, rel=0.05)
    save_for_hf(model, tmp_path, safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=False)
    assert get_model_args(again)["pattention_args"] == {"init": "released"}
    assert {layer.key_init_std for layer in pattentions(again)} == {0.02}
    with pytest.raises(ValueError, match=r"init .* scaled, released.*'wang'"):
        small(pattention_args={"init": "wang"})


def test_a_uniform_drop_path_is_recorded_and_rebuilt(small, tmp_path):
    model = small(drop_path_rate=0.3, drop_path_uniform=True, depth=3)
    save_for_hf(model, tmp_path, safe_serialization=True)
    # timm leaves rates out of config.json.
    again: Any = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, drop_path_rate=0.3)
    for each in (model, again):
        rates = [(block.drop_path1.drop_prob, block.drop_path2.drop_prob) for block in each.blocks]
        assert rates == [(0.3, 0.3)] * 3
    scripted = torch.jit.script(model.train())
    images = torch.randn(4, 3, *model.patch_embed.img_size)
    torch.manual_seed(1)
    expected = model(images)
    torch.manual_seed(1)
    torch.testing.assert_close(scripted(images), expected)
    assert not any(hasattr(b.drop_path1, "drop_prob") for b in small(drop_path_uniform=True).blocks)


def test_unknown_argument_is_named():
    with pytest.raises(TypeError, match="num_heds"):
        timm.create_model("tokenformer_tiny", num_heds=3)


@pytest.mark.parametrize("name", ABSENT)
def test_argument_without_a_counterpart_is_named(name):
    with pytest.raises(TypeError, match=f"'{name}'"):
        timm.create_model("tokenformer_tiny", **{name: True})


@pytest.mark.parametrize(
    ("arguments", "known"),
    [
        ({"theta": "relu"}, list(THETAS)),
        ({"norm": "weight"}, ["none", "bias", "weight+bias", "rms"]),
    ],
)
def test_unknown_theta_or_norm_lists_the_known(small, arguments, known):
    with pytest.raises(ValueError, match="must be one of") as error:
        small(**arguments)
    assert all(name in str(error.value) for name in known)


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
        with torch.inference_mode():
            torch.testing.assert_close(dynamic(images), resized(images))
        dynamic.train()(images).sum().backward()  # also at a size first seen in inference mode
        dynamic.eval()
        torch.testing.assert_close(copy.deepcopy(dynamic)(images), dynamic(images))
    with pytest.raises(AssertionError, match="doesn't match model"):
        model(torch.randn(2, 3, 96, 48))


def test_functional_calls_of_rotary_models(small, parts):
    """PyTorch swaps the buffers of a module that several names share, but not back."""
    model, others = small(**parts), [small(**parts), small(**parts, rope_temperature=100.0)]
    images = torch.randn(2, 3, 64, 64)
    expected = model(images)
    parameters, buffers = torch.func.stack_module_state(others)

    def call(parameters, buffers):
        return torch.func.functional_call(model, (parameters, buffers), (images,))

    with torch.no_grad():
        together = torch.vmap(call)(parameters, buffers)
        for other, out in zip(others, together, strict=True):
            torch.testing.assert_close(out, other(images))
    assert torch.equal(model(images), expected)


def test_class_and_register_tokens_without_a_position_are_not_tiny(small, parts):
    assert small(reg_tokens=4).reg_token.std() < 1e-5  # timm's; their positions are 0.02
    for changes in ({"no_embed_class": True}, {"pos_embed": "none"}, parts):
        model = small(**{**changes, "reg_tokens": 4}).train()
        tokens = torch.cat((model.cls_token, model.reg_token), dim=1)
        assert tokens.std().item() == pytest.approx(0.02, rel=0.3)
        F.cross_entropy(model(torch.randn(8, 3, 64, 64)), torch.arange(8)).backward()
        tokens = ("cls_token", "reg_token")
        rest = [p.grad.norm() for name, p in model.named_parameters() if name not in tokens]
        # With 1e-6 it is hundreds of times as large.
        assert model.cls_token.grad.norm() < 20 * torch.stack(rest).norm()


def test_rotary_positions_are_made_again_and_stay_precise(small, parts):
    fresh = small(**parts)
    model = small(**parts, device="meta").to_empty(device="cpu")
    model.init_weights()
    assert torch.equal(model.rope.pos_embed, fresh.rope.pos_embed)
    assert small(**parts, dtype=torch.bfloat16).rope.pos_embed.dtype == torch.bfloat16
    assert small(**parts, depth=0)(torch.randn(2, 3, 64, 64)).shape == (2, 10)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"embed_dim": 54}, "embed_dim 54 and num_heads 3 give 18: choose another num_heads"),
        ({"rope_temperature": 0}, "rope_temperature must be .* got 0"),
        ({"patch_drop_rate": 0.5}, "patch_drop_rate 0.5 .* set patch_drop_rate=0"),
    ],
)
def test_rotary_positions_that_do_not_fit_are_refused(small, arguments, said):
    with pytest.raises(InputError, match=said):
        small(use_rot_pos_emb=True, **arguments)


@pytest.mark.parametrize("pool", ["map", "prr"])
def test_attention_pools_are_refused(small, pool):
    with pytest.raises(ValueError, match=f"global_pool '{pool}'"):
        small(global_pool=pool)
    with pytest.raises(ValueError, match=f"global_pool '{pool}'"):
        small().reset_classifier(10, pool)


@pytest.mark.parametrize("theta", THETAS)
def test_every_parameter_gets_a_gradient(small, theta):
    arguments = {"norm": "weight+bias", "pattention_args": {"learn_tau": True}}
    model = small(theta=theta, **arguments).train()
    model(torch.randn(2, 3, 64, 64)).square().sum().backward()
    dead = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not dead


def test_results_do_not_depend_on_the_rest_of_the_batch(small):
    model, images = small(), torch.randn(5, 3, 64, 64)
    single = torch.cat([model(image[None]) for image in images])
    torch.testing.assert_close(model(images), single, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(images.flip(0)), single.flip(0), rtol=1e-4, atol=1e-5)


def test_meta_construction_then_init_weights_is_a_fresh_model(small):
    model = small(device="meta").to_empty(device="cpu")
    model.init_weights()
    fresh = small()
    for name, tensor in fresh.state_dict().items():
        actual = model.state_dict()[name]
        if tensor.ndim and tensor.std() > 1e-5:
            assert actual.std() == pytest.approx(tensor.std(), rel=0.5), name
        elif name.endswith("tau"):
            assert actual == tensor, name
    assert model(torch.randn(2, 3, 64, 64)).isfinite().all()
