"""Folders and files of weights: what is saved comes back, and what is wrong is refused."""

import argparse
import json
import pickle
import random
import re
from contextlib import suppress

import pytest
import timm
import torch
import yaml
from PIL import Image
from timm.data import resolve_input_data_config as data_config
from timm.layers import resample_abs_pos_embed
from timm.models import get_model_args

from tokenformer_vit.errors import InputError
from tokenformer_vit.mmpretrain_names import classifier_state_dict
from tokenformer_vit.models.checkpoints import (
    DESCRIPTION,
    load_model,
    read_checkpoint,
    save_model,
    state_dict_in,
)
from tokenformer_vit.vision.prediction import class_names, load_for_images

from ..samples import Trap
from .conftest import SHAPE

OWN = {"theta": "gelu_l1", "norm": "bias", "pattention_args": {"learn_tau": True}}
OWN |= {"num_qkv_param_tokens": 24, "num_proj_param_tokens": 40, "num_ffn_param_tokens": 56}


def local_dir(path, **kwargs):
    return timm.create_model(f"local-dir:{path}", pretrained=True, **kwargs).eval()


@pytest.fixture
def saved(small, tmp_path):
    """A model with no default value among its own arguments, and its folder."""
    model = small(**OWN)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
        for block in model.blocks:
            block.mlp.tau.fill_(33.3)
    save_model(model, tmp_path / "saved", list("abcdefghij"), {"mean": (0.1, 0.2, 0.3)})
    return model, tmp_path / "saved"


@pytest.mark.parametrize("load", [local_dir, lambda path: load_model(None, path)])
def test_a_folder_gives_the_same_function(saved, images, load):
    model, folder = saved
    loaded, x = load(folder), images()
    assert torch.equal(loaded(x), model(x))
    assert loaded.blocks[0].mlp.tau == torch.tensor(33.3)
    assert OWN.items() <= get_model_args(loaded).items()
    assert class_names(loaded) == list("abcdefghij")
    assert data_config(loaded)["mean"] == (0.1, 0.2, 0.3)
    assert data_config(loaded)["input_size"] == (3, 64, 64)


@pytest.mark.parametrize("pool", ["token", "avg"])
@pytest.mark.parametrize("head", [False, True])
def test_a_model_without_its_last_blocks_survives_a_folder(small, images, tmp_path, pool, head):
    model, x = small(num_ffn_param_tokens=[40, 50], global_pool=pool), images()
    model.prune_intermediate_layers([0], prune_norm=True, prune_head=head)
    save_model(model, tmp_path / "out")
    assert torch.equal(local_dir(tmp_path / "out")(x), model(x))
    assert torch.equal(load_model(None, tmp_path / "out")(x), model(x))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"theta": "softmax"}, r"theta is 'softmax', but .*set theta='gelu_l1'"),
        ({"norm": "none"}, r"norm is 'none', but .*set norm='bias'"),
        ({"norm_eps": 1e-5}, r"norm_eps is 1e-05, but .*set norm_eps=1e-06"),
        ({"qk_norm": True}, r"qk_norm is True, but .*set qk_norm=False"),
        ({"num_heads": 6}, r"num_heads is 6, but .*set num_heads=3"),
        ({"use_rot_pos_emb": True}, r"use_rot_pos_emb is True, but .*set use_rot_pos_emb=False"),
        ({"pattention_args": {"eps": 0.1, "learn_tau": True}}, r"eps is 0\.1.*=dict\(eps=1e-06"),
    ],
)
def test_weights_for_another_computation_are_refused(small, saved, change, line):
    """Only the description tells the difference: the tensors of most of these fit."""
    file, inside = saved[1] / "model.safetensors", saved[1] / "epoch_3.pth"
    about = json.loads((saved[1] / "config.json").read_text())
    torch.save({"state_dict": saved[0].state_dict(), DESCRIPTION: about}, inside)
    own = {**SHAPE, **OWN, **change}
    overlay, of_inside = (
        {"pretrained": True, "pretrained_cfg_overlay": {"file": str(each)}}
        for each in (file, inside)
    )
    for refused in (
        lambda: local_dir(saved[1], **change),
        lambda: small(**overlay, **own),
        lambda: small(**of_inside, **own),
        lambda: load_model(None, file, **change),
        lambda: load_model("tokenformer_tiny", file, **own),
    ):
        with pytest.raises(InputError, match=line):
            refused()
    small(**overlay, **OWN)
    small(**of_inside, **OWN)


def test_weights_without_some_blocks_are_refused_for_any_number_of_classes(small, tmp_path):
    """timm would draw what is missing, and say so at level INFO."""
    for classes in (10, 7):
        own = {"pretrained": True, "num_classes": classes, "depth": 6}
        with pytest.raises(InputError, match=r"no blocks\.4\.\S*key_param_tokens and 9 more: "):
            timm.create_model("tokenformer_cifar10_micro", **own)
    vit = timm.create_model("vit_tiny_patch16_224", **SHAPE)
    torch.save(vit.state_dict(), tmp_path / "vit.pth")
    own = {"pretrained": True, "pretrained_cfg_overlay": {"file": str(tmp_path / "vit.pth")}}
    with pytest.raises(InputError, match=r"vit\.pth has no blocks\.0.* weights of a TokenFormer"):
        small(num_classes=5, **own)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"depth": 3}, r"blocks\.2\.\S+ is absent in the file"),
        ({"num_ffn_param_tokens": 60}, r"blocks\.0\.mlp\.\S+ is \(56, 48\) in .* \(60, 48\)"),
        ({"patch_size": 8}, r"pos_embed is \(1, 17, 48\) in the file and \(1, 65, 48\)"),
        ({"patch_size": 8, "img_size": 32}, r"patch_embed\.proj\.weight is \(48, 3, 16, 16\)"),
        ({"num_classes": 7}, r"head\.weight is \(10, 48\) in the file and \(7, 48\)"),
        ({"embed_dm": 3}, r"cannot be built \(.*embed_dm.*correct its name or arguments"),
    ],
)
def test_weights_of_another_shape_are_refused_in_one_line(saved, change, line):
    """timm itself would resample patches and positions, and draw a new head."""
    with pytest.raises(InputError, match=line) as error:
        load_model(None, saved[1], **change)
    assert "\n" not in str(error.value)


def test_a_model_of_any_image_size_is_used_at_the_size_it_was_trained_at(small, tmp_path):
    save_model(small(dynamic_img_size=True), tmp_path / "out", None, {"input_size": (3, 96, 96)})
    assert data_config(load_model(None, tmp_path / "out"))["input_size"] == (3, 96, 96)


@pytest.mark.parametrize("named", [None, "tokenformer_tiny"])
def test_positions_of_rectangles_are_resampled_as_rectangles(small, named, tmp_path):
    model, own = small(img_size=(128, 32)), {**SHAPE, "img_size": (192, 48)}
    save_model(model, tmp_path / "out")
    loaded = load_model(named, tmp_path / "out/model.safetensors", new_norm=True, **own)
    expected = resample_abs_pos_embed(model.pos_embed, new_size=[12, 3], old_size=[8, 2])
    torch.testing.assert_close(loaded.pos_embed, expected)


def test_a_named_model_takes_the_preprocessing_of_the_file(saved, tmp_path, caplog):
    loaded = load_for_images("tokenformer_tiny", saved[1] / "model.safetensors", **SHAPE, **OWN)
    assert data_config(loaded)["mean"] == (0.1, 0.2, 0.3)
    assert class_names(loaded) == list("abcdefghij")
    assert class_names(local_dir(saved[1], num_classes=2)) == ["class 0", "class 1"]
    assert not caplog.text
    torch.save(saved[0].state_dict(), tmp_path / "x.pth")
    load_for_images("tokenformer_tiny", tmp_path / "x.pth", **SHAPE, **OWN)
    assert "x.pth does not describe its preprocessing: tokenformer_tiny's is used" in caplog.text
    with pytest.raises(InputError, match=r"x\.pth names no timm model: give its --model"):
        load_model(None, tmp_path / "x.pth")


def test_other_weights_and_an_mmpretrain_checkpoint(small, saved, tmp_path):
    model = saved[0]
    named = classifier_state_dict(model.state_dict())
    named = {f"module.{name}": each for name, each in named.items()}
    args = argparse.Namespace(lr=0.1, data=["x"])  # as timm's and DeiT's trainings save it
    torch.save({"state_dict": named, "args": args}, tmp_path / "mm.pth")
    loaded = load_model("tokenformer_tiny", tmp_path / "mm.pth", **SHAPE, **OWN)
    of_lightning = {f"model.{name}": each for name, each in model.state_dict().items()}
    torch.save({"state_dict": of_lightning, "epoch": 3}, tmp_path / "lightning.ckpt")
    again = load_model("tokenformer_tiny", tmp_path / "lightning.ckpt", **SHAPE, **OWN)
    overlay = {"file": str(tmp_path / "mm.pth"), "num_classes": 10}
    by_timm = small(pretrained=True, pretrained_cfg_overlay=overlay, **OWN)
    for each in (loaded, again, by_timm):
        assert all(torch.equal(each.state_dict()[k], v) for k, v in model.state_dict().items())


def test_damage_is_found(saved, caplog):
    model, folder = saved
    file, config = folder / "model.safetensors", folder / "config.json"
    whole, described = file.read_bytes(), config.read_bytes()
    for length in (0, 5, 99, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(InputError, match=r"model\.safetensors is damaged.*: copy"):
            load_model(None, folder)
    assert not caplog.text
    half = len(whole) // 2
    file.write_bytes(whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :])
    for load in (local_dir, lambda path: load_model(None, path)):
        load(folder)  # perhaps another tool wrote it
        assert caplog.text.count("model.safetensors is not the file that") == 1
        caplog.clear()
    config.write_bytes(described[:-9])
    with pytest.raises(InputError, match=r"config\.json is not JSON.*: copy it again"):
        load_model(None, folder)
    state = model.state_dict()
    torch.save(state, folder / "x.pth")
    content = bytearray((folder / "x.pth").read_bytes())
    content[content.index(state["head.weight"].numpy().tobytes()) + 7] ^= 1
    (folder / "x.pth").write_bytes(content)
    with pytest.raises(InputError, match=r"x\.pth is damaged.*: copy"):
        read_checkpoint(folder / "x.pth")


@pytest.mark.parametrize("zipped", [False, True])
def test_whatever_a_file_holds_is_read_or_refused_in_one_line(zipped, tmp_path, seed):
    draw, path = random.Random(seed), tmp_path / "x.pth"
    content = {"state_dict": {"w": torch.randn(3, 4)}, "meta": [1, 2.5, "x", None]}
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    whole = path.read_bytes()
    texts = [bytes([first]) + b"ello world\n1,2\n" for first in range(256)]
    cuts = [whole[: draw.randrange(len(whole))] for _ in range(50)]
    for data in (*texts, *cuts):
        path.write_bytes(data)
        with pytest.raises(InputError, match=r"x\.pth is damaged, or"):
            read_checkpoint(path)
    for _ in range(100):
        flipped = bytearray(whole)
        flipped[draw.randrange(len(whole))] = draw.randrange(256)
        path.write_bytes(flipped)
        with suppress(InputError):
            read_checkpoint(path)


@pytest.mark.parametrize("name", ["x.pth", "x.bin", "x.safetensors"])
def test_no_code_runs_and_foreign_bytes_are_refused(tmp_path, name):
    content = {"state_dict": {"w": torch.zeros(1)}, "evil": Trap(tmp_path / "ran")}
    torch.save(content, tmp_path / name)
    for data in (None, pickle.dumps(content), b"PK\x03\x04"):
        if data is not None:
            (tmp_path / name).write_bytes(data)
        with pytest.raises(InputError, match=rf"{name} is damaged, or .*could run code") as error:
            read_checkpoint(tmp_path / name)
        assert "weights_only" not in str(error.value)  # PyTorch's advice is to run it
    assert not (tmp_path / "ran").exists()
    with pytest.raises(InputError, match=r"y\.pth holds no state dict, but a: save"):
        state_dict_in({"a": 1}, "y.pth")


def test_the_card_says_what_is_known_and_its_code_loads_the_model(saved, tmp_path, monkeypatch):
    folder = tmp_path / "FOLDER"
    save_model(saved[0], folder, facts={"Training": {"Epochs": 3}, "Dataset": ["imagenet-1k"]})
    card = (folder / "README.md").read_text(encoding="utf-8")
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["tags"] == ["image-classification", "timm", "tokenformer"]
    assert front["datasets"] == ["imagenet-1k"]
    assert "  - Epochs: 3\n" in card
    assert f"{sum(each.numel() for each in saved[0].parameters()):,}" in card
    Image.new("RGB", (9, 11)).save(tmp_path / "image.png")
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(re.findall(r"```python\n(.*?)```", card, re.DOTALL)[0], names)
    assert names["output"].shape == (1, 10)
    for text in (card.replace("- Epochs: 3", "- Epochs: 4"), "license: cc-by-4.0\n"):
        (folder / "README.md").write_text(text, encoding="utf-8")
        save_model(saved[0], folder, facts={"Training": {"Epochs": 5}})
        card = (folder / "README.md").read_text(encoding="utf-8")
        assert card == text if "cc-by" in text else "Epochs: 5" in card


def test_transformers_opens_a_folder(saved, images):
    transformers = pytest.importorskip("transformers")
    model, folder = saved
    opened = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    x = images()
    torch.testing.assert_close(opened(pixel_values=x).logits, model(x))
    assert opened.config.id2label[9] == "j"
    with torch.no_grad():
        opened.timm_model.head.bias.add_(1)  # fine-tuned
    opened.save_pretrained(folder.with_name("tuned"))
    torch.testing.assert_close(load_model(None, folder.with_name("tuned"))(x), model(x) + 1)
