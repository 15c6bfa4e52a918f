"""A converted folder has the outputs, the class names and the preprocessing of the ViT."""

import json
import re

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import resolve_input_data_config
from timm.layers import QuickGELU, RmsNorm
from timm.models.vision_transformer import VisionTransformer

from tokenformer_vit.cli import compress, convert_checkpoint, export, inspect_tokens
from tokenformer_vit.errors import InputError
from tokenformer_vit.models.checkpoints import save_model
from tokenformer_vit.vision.prediction import class_names

NAME = "vit_tiny_patch16_224"
SHAPE = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
NAMES = ["ant", "bee", "cat"]


def run(*words):
    convert_checkpoint.main([str(word) for word in words])


@pytest.fixture
def vit():
    model = timm.create_model(NAME, **SHAPE, num_classes=3).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, float(parameter.ndim == 1), 0.3)
    return model


@pytest.fixture
def folder(vit, tmp_path):
    save_model(vit, tmp_path / "vit", NAMES, {"mean": (0.1, 0.2, 0.3)})
    return tmp_path / "vit"


def same(out, vit):
    x = torch.randn(4, 3, 32, 32)
    model = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    torch.testing.assert_close(model(x), vit(x), rtol=1e-4, atol=1e-4)
    return model


@pytest.mark.parametrize("kind", ["folder", "local-dir", "training"])
def test_a_vit_on_the_disk_becomes_a_folder(kind, vit, folder, tmp_path, capsys):
    source = {"folder": folder, "local-dir": f"local-dir:{folder}"}.get(kind, tmp_path / "vit.pth")
    if kind == "training":
        export.main([str(folder), str(source)])
    run(source, tmp_path / "out", "--batch-size", 20)
    model = same(tmp_path / "out", vit)
    assert class_names(model) == NAMES
    config = resolve_input_data_config(model)
    assert (config["mean"], config["input_size"]) == ((0.1, 0.2, 0.3), (3, 32, 32))
    out = capsys.readouterr().out
    errors = re.search(r"outputs: (\S+) at most, (\S+) on average, on 32 images of noise", out)
    assert 0 < float(errors[2]) <= float(errors[1]) < 1e-2
    counts = [f"{sum(p.numel() for p in each.parameters()):,}" for each in (vit, model)]
    assert f"Parameters: {' -> '.join(counts)} (" in out
    assert f"**Converted from:**\n  - Model: {NAME}" in (tmp_path / "out/README.md").read_text()


def test_images_of_a_folder_are_compared_and_other_commands_read_the_result(
    folder, tmp_path, capsys, generator
):
    photos = tmp_path / "photos"
    for index in range(6):
        place = photos / ("train", "val")[index % 2] / NAMES[index % 3]
        place.mkdir(parents=True)
        Image.fromarray(generator.integers(0, 255, (40, 50, 3), np.uint8)).save(place / "0.png")
    run(folder, tmp_path / "out", "--images", photos, "--batch-size", 5)
    assert f"{photos} in float32\nSame top-1 class: 100.00%\n" in capsys.readouterr().out
    words = ["--keep", "0.5", "--out", str(tmp_path / "less")]
    compress.main([str(tmp_path / "out"), str(photos), *words])
    dense = json.loads((tmp_path / "less/compression.json").read_text())["points"][0]
    assert dense["pairs"] == {"qkv": 128, "proj": 128, "ffn": 256}
    inspect_tokens.main([str(tmp_path / "out"), str(photos), "--out", str(tmp_path / "seen")])
    assert json.loads((tmp_path / "seen/tokens.json").read_text())["theta"] == "gelu"


def test_a_name_of_timm_brings_its_pretrained_weights(vit, tmp_path, monkeypatch):
    create = timm.create_model
    known = [NAME, {"pretrained": True}]
    offline = lambda name, **how: vit if [name, how] == known else create(name, **how)  # noqa: E731
    monkeypatch.setattr(timm, "create_model", offline)
    run(NAME, tmp_path / "out")
    same(tmp_path / "out", vit)


@pytest.mark.parametrize("part", [{"norm_layer": RmsNorm}, {"act_layer": QuickGELU}])
def test_what_has_no_counterpart_is_one_line_and_leaves_nothing(part, tmp_path, monkeypatch):
    monkeypatch.setattr(timm, "create_model", lambda *_, **__: VisionTransformer(**SHAPE, **part))
    with pytest.raises(InputError, match=r"^[^\n]* is a (RmsNorm|QuickGELU); give[^\n]*$"):
        run(NAME, tmp_path / "new" / "out")
    assert not any(tmp_path.iterdir())


def test_other_sources_and_options_are_named(vit, folder, tmp_path):
    torch.save(vit.state_dict(), tmp_path / "bare.pth")
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert/config.json").write_text('{"model_type": "bert"}')
    for source, options, said in (
        ("vit_nope", [], "vit_nope cannot be converted: .*nor a name of timm"),
        (tmp_path / "bert", [], "a model of type bert"),
        (tmp_path / "bare.pth", [], r"bare\.pth .*give its name with --model"),
        (folder, ["--tokenizer", "x", "--eps", 0], "is a ViT: leave out --tokenizer, --eps"),
        (folder, ["--images", tmp_path / "bert"], "there is no image in .*bert, but 1 .json"),
    ):
        with pytest.raises(InputError, match=said):
            run(source, tmp_path / "out", *options)
    words = ["--model", NAME, "--model-kwargs", *map("{}={}".format, SHAPE, SHAPE.values())]
    run(tmp_path / "bare.pth", tmp_path / "out", *words)
    same(tmp_path / "out", vit)
