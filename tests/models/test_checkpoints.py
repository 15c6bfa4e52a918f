import pytest
import timm
import torch
from timm.layers import resample_abs_pos_embed
from timm.models import get_model_args, load_checkpoint, save_for_hf

from tokenformer_vit.errors import InputError
from tokenformer_vit.models import checkpoint_filter_fn
from tokenformer_vit.models.checkpoints import load_model
from tokenformer_vit.ops import THETAS

PAIRS = {"num_qkv_param_tokens": 24, "num_proj_param_tokens": 40, "num_ffn_param_tokens": 56}


def local_dir(path, **kwargs):
    return timm.create_model(f"local-dir:{path}", pretrained=True, **kwargs).eval()


@pytest.fixture
def saved(small, tmp_path):
    """A model with no default value among its own arguments, and its folder."""
    model = small(
        theta="gelu_l1",
        norm="bias",
        num_qkv_param_tokens=24,
        num_proj_param_tokens=40,
        num_ffn_param_tokens=56,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
        for block in model.blocks:
            block.mlp.tau.fill_(33.3)
    save_for_hf(model, tmp_path, safe_serialization=True)
    assert [file.name for file in tmp_path.glob("model.*")] == ["model.safetensors"]
    return model, tmp_path


def test_folder_reloads_to_the_same_function(saved):
    model, path = saved
    loaded = local_dir(path)
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(loaded(x), model(x))
    assert loaded.blocks[0].mlp.tau == torch.tensor(33.3)
    own = ("theta", "norm", "num_qkv_param_tokens", "num_proj_param_tokens", "num_ffn_param_tokens")
    assert {k: get_model_args(loaded)[k] for k in own} == {k: get_model_args(model)[k] for k in own}


@pytest.mark.parametrize("theta", THETAS)
def test_every_theta_survives_a_folder(small, tmp_path, theta):
    model = small(theta=theta)
    save_for_hf(model, tmp_path, safe_serialization=True)
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(local_dir(tmp_path)(x), model(x))


@pytest.mark.parametrize("pool", ["token", "avg"])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("head", [False, True])
def test_a_model_without_its_last_blocks_survives_a_folder(small, tmp_path, pool, norm, head):
    model = small(num_ffn_param_tokens=[40, 50], global_pool=pool)
    model.prune_intermediate_layers([0], prune_norm=norm, prune_head=head)
    save_for_hf(model, tmp_path, safe_serialization=True)
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(local_dir(tmp_path)(x), model(x))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"theta": "softmax"}, r"theta is 'softmax', but .*set theta='gelu_l1'"),
        ({"num_heads": 6}, r"num_heads is 6, but .*set num_heads=3"),
        ({"qk_norm": True}, r"qk_norm is True, but .*set qk_norm=False"),
        ({"use_rot_pos_emb": True}, r"use_rot_pos_emb is True, but .*set use_rot_pos_emb=False"),
        (
            {"pattention_args": {"eps": 0.1}},
            r"eps is 0\.1, but .*set pattention_args=dict\(eps=1e-06",
        ),
    ],
)
def test_weights_for_another_computation_are_refused(small, saved, change, line):
    """The tensors fit: only the description tells the difference."""
    _, path = saved
    file = path / "model.safetensors"
    shape = {
        **{"norm": "bias", "embed_dim": 48, "depth": 2, "num_heads": 3, "img_size": 64},
        **{"theta": "gelu_l1", **PAIRS},
    }
    own = {"pretrained": True, "pretrained_cfg_overlay": {"file": str(file)}}
    for refused in (
        lambda: local_dir(path, **change),
        lambda: small(**{**own, **shape, **change}),
        lambda: load_model(None, path, **change),
        lambda: load_model("tokenformer_tiny", file, **{**shape, **change}),
    ):
        with pytest.raises(InputError, match=line):
            refused()
    small(**own, **shape)


def test_the_shipped_weights_are_for_one_computation():
    for change in ({"qk_norm": True}, {"norm": "rms"}):
        with pytest.raises(InputError, match=f"{next(iter(change))} is .* but the weights in"):
            timm.create_model("tokenformer_cifar10_micro", pretrained=True, **change)


def test_weights_without_some_blocks_are_refused_for_any_number_of_classes(small, tmp_path):
    """timm would draw what is missing, and say so at level INFO."""
    for classes in (10, 7):
        with pytest.raises(InputError, match=r"no blocks\.4\.\S*key_param_tokens and 9 more: "):
            timm.create_model(
                "tokenformer_cifar10_micro", pretrained=True, num_classes=classes, depth=6
            )
    vit = timm.create_model("vit_tiny_patch16_224", embed_dim=48, depth=2, num_heads=3, img_size=64)
    torch.save(vit.state_dict(), tmp_path / "vit.pth")
    own = {"pretrained": True, "pretrained_cfg_overlay": {"file": str(tmp_path / "vit.pth")}}
    with pytest.raises(InputError, match=r"vit\.pth has no blocks\.0.* weights of a TokenFormer"):
        small(num_classes=5, **own)


def test_only_the_description_of_the_loaded_weights_counts(small, saved, tmp_path):
    """Not that of the folder that names the model, nor what else is in a folder."""
    model, path = saved
    other = tmp_path / "other"
    save_for_hf(small(theta="softmax", norm="bias", **PAIRS), other, safe_serialization=True)
    with pytest.raises(InputError, match=r"theta is 'gelu_l1', but .* with 'softmax'"):
        load_model(f"local-dir:{path}", other / "model.safetensors")
    load_model(f"local-dir:{path}", other / "model.safetensors", theta="softmax")
    own = {"pretrained_cfg_overlay": {"state_dict": model.state_dict()}}
    local_dir(other, theta="gelu_l1", **own)
    (other / "config.json").write_text('{"model_type": "vit"}')
    own = {"pretrained_cfg_overlay": {"file": str(other / "model.safetensors")}}
    small(theta="gelu_l1", norm="bias", **PAIRS, **own, pretrained=True)


def test_weights_in_the_package_are_used_with_their_theta():
    with pytest.raises(InputError, match=r"theta is 'gelu_l1', but .*set theta='gelu_l2'"):
        timm.create_model("tokenformer_cifar10_micro", pretrained=True, theta="gelu_l1")


def test_shared_arguments_and_a_learned_tau_survive_a_folder(small, tmp_path):
    arguments = {"learn_tau": True, "eps": 1e-3, "key_init_scale": 0.5}
    model = small(pattention_args=arguments)
    with torch.no_grad():
        for block in model.blocks:
            block.mlp.tau.mul_(1.5)
    save_for_hf(model, tmp_path, safe_serialization=True)
    loaded, x = local_dir(tmp_path), torch.randn(2, 3, 64, 64)
    assert torch.equal(loaded(x), model(x))
    assert loaded.blocks[0].mlp.tau.requires_grad
    assert loaded.blocks[0].attn.key.eps == 1e-3
    assert get_model_args(loaded)["pattention_args"] == arguments


def test_folder_reloads_with_another_head(saved):
    model, path = saved
    loaded, x = local_dir(path, num_classes=7), torch.randn(2, 3, 64, 64)
    assert loaded(x).shape == (2, 7)
    assert torch.equal(loaded.forward_features(x), model.forward_features(x))
    assert torch.equal(local_dir(path, num_classes=0)(x), model.forward_features(x)[:, 0])


def test_folder_reloads_at_another_size(saved):
    model, path = saved
    loaded = local_dir(path, img_size=96)
    assert loaded(torch.randn(2, 3, 96, 96)).shape == (2, 10)
    expected = resample_abs_pos_embed(model.pos_embed, new_size=[6, 6])
    torch.testing.assert_close(loaded.pos_embed, expected)
    assert torch.equal(loaded.blocks[1].mlp.key_param_tokens, model.blocks[1].mlp.key_param_tokens)


def test_the_parts_of_vit5_survive_a_folder_and_another_size(small, parts, tmp_path):
    model, x = small(**parts), torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    save_for_hf(model, tmp_path, safe_serialization=True)
    loaded, larger = local_dir(tmp_path), local_dir(tmp_path, img_size=96)
    assert torch.equal(loaded(x), model(x))
    model.set_input_size(img_size=(96, 96))
    assert torch.equal(larger.reg_token, model.reg_token)
    images = torch.randn(2, 3, 96, 96)
    torch.testing.assert_close(larger(images), model(images))


def test_folder_reloads_with_another_patch_size(saved):
    _, path = saved
    loaded = local_dir(path, patch_size=8)
    assert loaded(torch.randn(2, 3, 64, 64)).shape == (2, 10)


def test_folder_reloads_for_grey_images(saved):
    model, path = saved
    loaded, grey = local_dir(path, in_chans=1), torch.randn(2, 1, 64, 64)
    torch.testing.assert_close(loaded(grey), model(grey.expand(2, 3, 64, 64)), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("form", ["checkpoint_path", "overlay", "load_checkpoint"])
def test_state_dict_file(small, tmp_path, form):
    model, x = small(), torch.randn(2, 3, 64, 64)
    file = tmp_path / "weights.pth"
    torch.save(model.state_dict(), file)
    if form == "checkpoint_path":
        loaded = small(checkpoint_path=str(file))
    elif form == "overlay":
        overlay = {"file": str(file), "num_classes": 10}
        loaded = small(pretrained=True, pretrained_cfg_overlay=overlay)
    else:
        loaded = small()
        load_checkpoint(loaded, str(file))
    assert torch.equal(loaded(x), model(x))


def test_wrong_pair_count_names_the_parameter(small):
    with pytest.raises(RuntimeError, match=r"blocks.0.mlp.key_param_tokens.*\[96, 48\]"):
        small().load_state_dict(small(num_ffn_param_tokens=96).state_dict())


def test_a_model_without_pooling_has_no_answer_for_an_image(saved):
    name = f"local-dir:{saved[1]}"
    with pytest.raises(InputError, match=r"global_pool.*'avg'"):
        load_model(name, None, global_pool="")
    assert load_model(name, None, for_images=False, global_pool="").global_pool == ""


def test_filter_reads_mmpretrain_checkpoints(small):
    model, x = small(), torch.randn(2, 3, 64, 64)
    state = {
        f"head.fc.{name[5:]}" if name.startswith("head.") else f"backbone.model.{name}": tensor
        for name, tensor in model.state_dict().items()
    }
    loaded = small()
    loaded.load_state_dict(checkpoint_filter_fn({"state_dict": state, "meta": {}}, loaded))
    assert torch.equal(loaded(x), model(x))


def test_filter_resamples_positions(small):
    model, larger = small(), small(img_size=96)
    larger.load_state_dict(checkpoint_filter_fn(model.state_dict(), larger))
    torch.testing.assert_close(
        larger.pos_embed, resample_abs_pos_embed(model.pos_embed, new_size=[6, 6])
    )


def test_npz_is_refused(small, tmp_path):
    model = small()
    with pytest.raises(ValueError, match=r"ViT-B_16\.npz.*\.safetensors"):
        model.load_pretrained(str(tmp_path / "ViT-B_16.npz"))
    with pytest.raises(ValueError, match=r"ViT-B_16\.npz"):
        load_checkpoint(model, str(tmp_path / "ViT-B_16.npz"))
