"""`tokenformer-vit grow` as a user starts it."""

import json
import re

import pytest
import timm
import torch

from tokenformer_vit.cli import grow as tool
from tokenformer_vit.errors import InputError
from tokenformer_vit.models.checkpoints import load_model, save_model

SHAPE = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}


def run(*arguments):
    tool.main([str(argument) for argument in arguments])


@pytest.fixture(params=["gelu_l2", "softmax"])
def folder(request, tmp_path):
    model = timm.create_model("tokenformer_tiny", **SHAPE, num_classes=2, theta=request.param)
    save_model(model, tmp_path / "run", ["cat", "dog"])
    return tmp_path / "run"


def test_a_grown_folder_is_the_same_model_with_more_pairs(folder, tmp_path, capsys):
    target = tmp_path / "deep" / "grown_v1.5"
    softmax = load_model(None, folder).blocks[0].mlp.theta == "softmax"
    init = ["--init", "duplicate"] if softmax else []
    for words, message in (
        ([], "give a new number of pairs: --qkv, --proj or --ffn"),
        (["--ffn", 60], "has 64 pairs and cannot grow to 60"),
    ):
        with pytest.raises(InputError, match=message):
            run(folder, target, *words, *init)
    assert not target.exists()
    run(folder, target, "--qkv", 32, "--ffn", 128, *init)
    out = capsys.readouterr().out
    assert re.search(r"Outputs: relative error \d\.\de[-+]\d\d at most", out)
    before, after = (
        timm.create_model(f"local-dir:{each}", pretrained=True).eval() for each in (folder, target)
    )
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(after(x), before(x), rtol=1e-5, atol=1e-6)
    block = after.blocks[1]
    counts = [each.num_param_tokens for each in (block.attn.key, block.attn.proj, block.mlp)]
    assert counts == [32, 16, 128]
    assert json.loads((target / "config.json").read_text())["label_names"] == ["cat", "dog"]
    assert [path.name for path in target.parent.iterdir()] == ["grown_v1.5"]
    with pytest.raises(InputError, match="already exists; choose another OUT"):
        run(folder, target, "--ffn", 192)


def test_a_grown_folder_contains_the_small_model(folder, tmp_path, capsys):
    before = load_model(None, folder)
    init = "random" if before.blocks[0].mlp.theta == "softmax" else "zero_key"
    run(folder, tmp_path / "grown", "--qkv", 32, "--ffn", 128, "--nested", "--init", init)
    assert "nested=[0.5], nested_kinds=['qkv', 'ffn']" in capsys.readouterr().out
    after = load_model(None, tmp_path / "grown")
    assert after.sizes == (0.5, 1.0)
    after.set_size(0.5)
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(after(x), before(x), rtol=1e-5, atol=1e-6)


def test_checkpoints_are_grown_by_the_name_of_their_model(tmp_path):
    model = timm.create_model("tokenformer_tiny", **SHAPE)
    names = {f"backbone.model.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"state_dict": names, "meta": {"epoch": 3}}, tmp_path / "epoch_3.pth")
    kwargs = [f"{name}={value}" for name, value in SHAPE.items()]
    words = ["--ffn", 128, "--init", "duplicate", "--model", "tokenformer_tiny"]
    run(tmp_path / "epoch_3.pth", tmp_path / "grown", *words, "--model-kwargs", *kwargs)
    assert load_model(None, tmp_path / "grown").blocks[1].mlp.num_param_tokens == 128
    run("tokenformer_cifar10_micro", tmp_path / "micro", "--ffn", 400)
    assert load_model(None, tmp_path / "micro").pretrained_cfg["label_names"][3] == "cat"
