from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models import get_model_args, save_for_hf
from torch.utils.flop_counter import FlopCounterMode

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import BlockLayerNorm, Pattention
from tokenformer_vit.models import TokenFormerViT
from tokenformer_vit.ops import THETAS

PARAMETERS = {
    "tokenformer_tiny": 7_456_936,
    "tokenformer_small": 29_068_648,
    "tokenformer_base": 114_759_400,
    "tokenformer_base_matched": 86_447_848,
    "tokenformer_large": 404_670_440,
    "tokenformer_large_matched": 304_007_144,
}
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


def test_registers_exactly_these_models():
    assert {*timm.list_models("tokenformer*")} == {*PARAMETERS, "tokenformer_cifar10_micro"}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_count(name):
    model = timm.create_model(name, device="meta")
    assert isinstance(model, TokenFormerViT)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_readme_states_parameters_and_multiplications(name):
    model = timm.create_model(name, device="meta").eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.empty(1, 3, 224, 224, device="meta"))
    gmacs = counter.get_total_flops() / 2e9
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    (row,) = (line for line in readme.splitlines() if line.startswith(f"| `{name}` |"))
    assert row.endswith(f"| {PARAMETERS[name]:,} | {gmacs:.2f} |")


@pytest.mark.parametrize("name", PARAMETERS)
def test_blocks_are_pattention_and_token_attention_alone(name):
    model = timm.create_model(name, device="meta")
    assert [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)] == ["head"]
    assert len(pattentions(model)) == 5 * len(model.blocks)
    assert not list(model.blocks[0].norm1.parameters())
    assert [name for name, _ in model.norm.named_parameters()] == ["weight", "bias"]


@pytest.mark.parametrize("name", PARAMETERS)
def test_recipe_of_evaluation(name):
    cfg = timm.get_pretrained_cfg(name)
    assert cfg.input_size == (3, 224, 224)
    assert cfg.interpolation == "bicubic"
    assert cfg.crop_pct == 224 / 256
    assert (cfg.mean, cfg.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def test_pretrained_weights_that_do_not_exist_are_refused():
    with pytest.raises(RuntimeError, match="No pretrained weights exist"):
        timm.create_model("tokenformer_tiny", pretrained=True)


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
    with pytest.raises(InputError, match=r"at least 1, but got 'x'"):
        small(num_ffn_param_tokens=[8, "x"])


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
    [({"theta": "relu"}, list(THETAS)), ({"norm": "weight"}, ["none", "bias", "weight+bias"])],
)
def test_unknown_theta_or_norm_lists_the_known(small, arguments, known):
    with pytest.raises(ValueError, match="must be one of") as error:
        small(**arguments)
    assert all(name in str(error.value) for name in known)


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
