"""`tokenformer-vit grow` as a user starts it."""

import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file

from tokenformer_vit.cli import grow as tool
from tokenformer_vit.errors import InputError
from tokenformer_vit.models.checkpoints import load_model, save_model

SHAPE = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}


def run(*arguments):
    """Run within this process."""
    tool.main([str(argument) for argument in arguments])


@pytest.fixture(params=["gelu_l2", "softmax"])
def folder(request, tmp_path):
    model = timm.create_model("tokenformer_tiny", **SHAPE, num_classes=2, theta=request.param)
    save_model(model, tmp_path / "run", ["cat", "dog"])
    return tmp_path / "run"


def test_a_file_is_not_grown_with_another_theta(folder, tmp_path):
    source, target = folder / "model.safetensors", tmp_path / "grown.safetensors"
    trained = json.loads((folder / "config.json").read_text())["model_args"]["theta"]
    with pytest.raises(InputError, match=f"--theta is gelu_l1, but .*: give --theta {trained}"):
        run(source, target, "--ffn", 96, "--theta", "gelu_l1")
    assert not target.exists()
    run(source, target, "--ffn", 96, "--theta", trained)


def test_a_grown_folder_is_the_same_model_with_more_pairs(folder, tmp_path, capsys):
    target = tmp_path / "deep" / "grown"
    run(folder, target, "--qkv", 32, "--ffn", 96)
    assert "output changed by" in capsys.readouterr().out
    before, after = (
        timm.create_model(f"local-dir:{each}", pretrained=True).eval() for each in (folder, target)
    )
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(after(x), before(x), rtol=1e-5, atol=1e-6)
    block = after.blocks[1]
    counts = [each.num_param_tokens for each in (block.attn.key, block.attn.proj, block.mlp)]
    assert counts == [32, 16, 96]
    assert json.loads((target / "config.json").read_text())["label_names"] == ["cat", "dog"]
    assert [path.name for path in target.parent.iterdir()] == ["grown"]

    with pytest.raises(InputError, match="already exists"):
        run(folder, target, "--ffn", 128)


def test_a_grown_folder_contains_the_small_model(folder, tmp_path, capsys):
    run(folder, tmp_path / "grown", "--qkv", 32, "--ffn", 96, "--nested")
    small = {"qkv": 16, "proj": 16, "ffn": 64}
    assert f"nested=[{small}]" in capsys.readouterr().out
    before, after = (load_model(None, tmp_path / name) for name in ("run", "grown"))
    assert after.sizes == (small, 1.0)
    after.set_size(small)
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(after(x), before(x), rtol=1e-5, atol=1e-6)


def test_a_training_checkpoint_becomes_a_file_of_tensors(tmp_path):
    model = timm.create_model("tokenformer_tiny", **SHAPE)
    names = {f"backbone.model.{name}": tensor for name, tensor in model.state_dict().items()}
    source, target = tmp_path / "epoch_3.pth", tmp_path / "grown.safetensors"
    torch.save({"state_dict": names, "meta": {"epoch": 3}}, source)
    run(source, target, "--ffn", 128, "--theta", "gelu_l2", "--init", "duplicate")
    grown = load_file(target)
    assert grown.keys() == names.keys()
    assert grown["backbone.model.blocks.1.mlp.key_param_tokens"].shape == (128, 16)
    torch.testing.assert_close(grown["backbone.model.blocks.1.mlp.tau"], torch.tensor(128.0).sqrt())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing.pth", "out", "--ffn", "96"), "there is no checkpoint file nothing.pth"),
        (("code.pth", "out.safetensors", "--ffn", "96"), "give --theta"),
        (("code.pth", "out.safetensors", "--ffn", "96", "--theta", "softmax"), "could run code"),
        (("run", "out", "--ffn", "60"), "has 64 pairs and cannot grow to 60"),
    ],
)
def test_what_cannot_be_grown_is_said(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    save_model(timm.create_model("tokenformer_tiny", **SHAPE), tmp_path / "run")
    torch.save({"state_dict": Path("x")}, "code.pth")
    with pytest.raises(InputError, match=message):
        run(*arguments)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "code.pth"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "out"), "give a new number of pairs: --qkv, --proj or --ffn"),
        (("run", "out", "--ffn", "96", "--theta", "gelu_l2"), "but out is a folder, .* leave them"),
        (("run", "out", "--ffn", "96", "--missing-tau", "error"), "but out is a folder"),
        (("a.pth", "b.safetensors", "--ffn", "96", "--model", "x"), "b.safetensors is a file of t"),
        (("a.pth", "b.safetensors", "--ffn", "96", "--model-kwargs", "depth=2"), "is a file of t"),
    ],
)
def test_what_does_not_go_together(arguments, message):
    with pytest.raises(InputError, match=message):
        run(*arguments)


def test_a_version_in_the_name_of_a_folder_is_no_suffix(folder, tmp_path):
    run(folder, tmp_path / "grown_v1.5", "--ffn", 96)
    assert (tmp_path / "grown_v1.5" / "model.safetensors").is_file()


def test_the_command_ends_in_one_line(tmp_path, command):
    done = command("grow", tmp_path / "nothing.pth", tmp_path / "out", "--ffn", 96)
    assert done.status == 2
    assert done.err == f"error: there is no checkpoint file {tmp_path}/nothing.pth\n"
