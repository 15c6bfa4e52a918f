"""What an exported folder says of its model, and what it must not say."""

import json

import pytest
import timm
import torch
from safetensors.torch import save_file

from tokenformer_vit.errors import InputError
from tokenformer_vit.models.card import CardFacts
from tokenformer_vit.models.checkpoints import load_model, save_model
from tokenformer_vit.models.description import class_names, data_config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label_names": 7}, "label_names"),
        ({"label_names": [1, 2]}, "label_names"),
        ({"num_classes": -3}, "num_classes"),
        ({"architecture": None}, "architecture"),
        ({"model_args": {"num_heads": 0}}, "cannot be built"),
        ({"model_args": {"depth": 2**31}}, "holds 38 tensors, but .* 2147483648 blocks"),
        ({"model_args": {"embed_dim": 30_000}}, "its description has .* parameters"),
        ({"model_args": {"patch_size": 0}}, "cannot be built"),
        ({"model_args": {"depth": "x"}}, "cannot be built"),
        ({"architecture": "tokenformer_none"}, "cannot be built"),
    ],
)
def test_a_description_that_cannot_be(exported, change, message):
    file = exported / "config.json"
    content = json.loads(file.read_text())
    for key, value in change.items():
        old = content.get(key)
        content[key] = (
            {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
        )
    file.write_text(json.dumps(content))
    with pytest.raises(InputError, match=message) as raised:
        load_model(f"local-dir:{exported}", None)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"crop_pct": 1e-6}, "crop_pct is 1e-06"),
        ({"mean": [0.5, float("inf"), 0.5]}, "mean.1 is inf"),
        ({"std": [0.5, 0, 0.5]}, "std.1 is 0"),
        ({"mean": "half"}, "preprocessing of the model"),
        ({"mean": 7}, "preprocessing of the model"),
        ({"interpolation": "cubist"}, "interpolation is 'cubist'"),
        ({"crop_mode": 3}, "crop_mode is 3"),
    ],
)
def test_preprocessing_that_cannot_be(exported, change, message):
    file = exported / "config.json"
    content = json.loads(file.read_text())
    content["pretrained_cfg"] |= change
    file.write_text(json.dumps(content))
    with pytest.raises(InputError, match=message) as raised:
        data_config(load_model(f"local-dir:{exported}", None))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["{", "[]", "7", "[" * 20_000, "\udcff"])
def test_a_config_that_is_no_description(exported, text):
    (exported / "config.json").write_text(text, errors="surrogateescape")
    with pytest.raises(InputError, match=r"config\.json"):
        load_model(f"local-dir:{exported}", None)


def test_a_language_model_is_no_image_model(exported):
    (exported / "config.json").write_text(json.dumps({"model_type": "tokenformer", "depth": 2}))
    with pytest.raises(InputError, match=r"transformers \('tokenformer'\).* give the folder of an"):
        load_model(f"local-dir:{exported}", None)


def test_a_card_key_of_another_tool_is_ignored(model, exported):
    file = exported / "config.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**content, "card": {"author": "somebody"}}))
    loaded = load_model(f"local-dir:{exported}", None)
    assert loaded.card_facts == CardFacts()


def test_a_named_model_takes_preprocessing_and_names_from_the_export(model, exported):
    kwargs = {"embed_dim": 48, "depth": 2, "num_heads": 3, "img_size": 64}
    save_model(
        model,
        exported,
        ["a"] * 10,
        {"mean": (0.1, 0.2, 0.3), "crop_pct": 0.5, "crop_mode": "squash"},
    )
    loaded = load_model("tokenformer_tiny", exported / "model.safetensors", **kwargs)
    assert loaded.pretrained_cfg["mean"] == [0.1, 0.2, 0.3]
    assert loaded.pretrained_cfg["crop_pct"] == 0.5
    assert loaded.pretrained_cfg["crop_mode"] == "squash"
    assert loaded.pretrained_cfg["label_names"] == ["a"] * 10


def test_names_of_another_head_are_not_saved(tmp_path):
    model = timm.create_model("tokenformer_cifar10_micro", pretrained=True, num_classes=3)
    save_model(model, tmp_path / "model")
    for file in ("config.json", "README.md"):
        assert "airplane" not in (tmp_path / "model" / file).read_text(encoding="utf-8")
    loaded = timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True)
    assert class_names(loaded) == ["class 0", "class 1", "class 2"]


def test_a_bare_state_dict_says_whose_preprocessing_is_taken(model, tmp_path, caplog):
    torch.save(model.state_dict(), tmp_path / "x.pth")
    kwargs = {"embed_dim": 48, "depth": 2, "num_heads": 3, "img_size": 64}
    load_model("tokenformer_tiny", tmp_path / "x.pth", **kwargs)
    assert "x.pth has no preprocessing" in caplog.text
    caplog.clear()
    load_model("tokenformer_tiny", tmp_path / "x.pth", for_images=False, **kwargs)
    assert not caplog.text


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (torch.tensor(1.0), r"head.weight must be a .* matrix.* shape \(\)"),
        (torch.ones(10), r"head.weight must .* shape \(10,\)"),
        (torch.ones(10, 7), r"head.weight is \(10, 7\) in the file and \(10, 48\) in the model"),
    ],
)
def test_a_head_of_another_shape(model, exported, head, message):
    state = {**model.state_dict(), "head.weight": head}
    save_file(state, exported / "model.safetensors")
    with pytest.raises(InputError, match=message):
        load_model(f"local-dir:{exported}", None)
