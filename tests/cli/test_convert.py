"""A converted folder has the outputs, the class names and the preprocessing of its source."""

import copy
import re

import pytest
import timm
import torch
from timm.data import resolve_input_data_config
from timm.models.vision_transformer import VisionTransformer
from timm.utils import reparameterize_model

from tokenformer_vit.cli import convert, export
from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import extract
from tokenformer_vit.models import from_vit, to_vit
from tokenformer_vit.models.checkpoints import save_model
from tokenformer_vit.models.vit import ConvStem
from tokenformer_vit.vision.compression import tensor_batches
from tokenformer_vit.vision.images import list_images
from tokenformer_vit.vision.prediction import class_names

from ..samples import write_images

NAME = "vit_tiny_patch16_224"
SHAPE = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
NAMES = ["ant", "bee", "cat"]


def run(*words):
    convert.main([str(word) for word in words])


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
    errors = re.search(r"error (\S+) at most, (\S+) on average, .* of 32 images of noise\n", out)
    assert 0 < float(errors[2]) <= float(errors[1]) < 1e-2
    counts = [f"{sum(p.numel() for p in each.parameters()):,}" for each in (vit, model)]
    assert f"Parameters: {' -> '.join(counts)}\n" in out
    assert f"**Converted from:**\n  - Model: {NAME}" in (tmp_path / "out/README.md").read_text()


def test_images_order_the_pairs_and_the_result_can_be_inspected(
    vit, folder, tmp_path, capsys, generator
):
    photos = write_images(tmp_path, (40, 50), {"photos": 6}, generator) / "photos"
    run(folder, tmp_path / "out", "--images", photos, "--batch-size", 5)
    assert "and 100.00% with the same top-1 class, of 6 images\n" in capsys.readouterr().out
    model = same(tmp_path / "out", vit)
    expected = from_vit(vit, tensor_batches(model, list_images([photos]), 5, torch.device("cpu")))
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_a_cut_model_becomes_a_plain_vit(eps, vit, tmp_path, capsys):
    for module in vit.modules():
        if hasattr(module, "eps"):
            module.eps = eps
    cut = extract(from_vit(vit), None, 20, 48, 100)
    save_model(cut, tmp_path / "cut", NAMES, {"mean": (0.1, 0.2, 0.3)})
    run(tmp_path / "cut", tmp_path / "out", "--to-vit", "--batch-size", 20)
    assert "of 32 images of noise" in capsys.readouterr().out
    model = same(tmp_path / "out", cut)
    assert (type(model), model.norm.eps) == (VisionTransformer, eps)
    assert model.blocks[0].mlp.fc1.out_features == 100
    assert class_names(model) == NAMES
    assert resolve_input_data_config(model)["mean"] == (0.1, 0.2, 0.3)
    config, card = ((tmp_path / "out" / name).read_text() for name in ("config.json", "README.md"))
    assert not re.search("hf_hub_id|http|augreg2|laion", config)
    assert not re.search("import tokenformer_vit|augreg2|laion", card)
    fused = to_vit(reparameterize_model(cut)).state_dict()
    torch.testing.assert_close(fused, model.state_dict(), rtol=0, atol=1e-5)


def test_what_is_no_plain_vit_leaves_nothing(vit, folder, tmp_path):
    with pytest.raises(InputError, match="is a VisionTransformer: leave out --to-vit"):
        run(folder, tmp_path / "out", "--to-vit")
    save_model(from_vit(VisionTransformer(**SHAPE, embed_layer=ConvStem)), tmp_path / "stem")
    with pytest.raises(InputError, match=r"because its stem .* use models\.to_vit"):
        run(tmp_path / "stem", tmp_path / "out", "--to-vit")
    assert not (tmp_path / "out").exists()


def test_a_name_of_timm_brings_weights_that_have_a_counterpart(vit, tmp_path, monkeypatch):
    create = timm.create_model

    def convert_named(model, *words):
        known = (NAME, {"pretrained": True})
        offline = lambda name, **how: model if (name, how) == known else create(name, **how)  # noqa: E731
        monkeypatch.setattr(timm, "create_model", offline)
        run(NAME, *words)

    hooked = copy.deepcopy(vit)
    hooked.blocks[1].mlp.register_forward_hook(lambda _, __, output: 2 * output)
    with pytest.raises(InputError, match=r"^[^\n]*blocks\.1\.mlp has a forward hook; give[^\n]*$"):
        convert_named(hooked, tmp_path / "new" / "out")
    assert not [*tmp_path.iterdir()]
    convert_named(vit, tmp_path / "out")
    same(tmp_path / "out", vit)


def test_a_checkpoint_of_other_code_needs_the_name_of_its_model(vit, folder, tmp_path):
    torch.save(vit.state_dict(), tmp_path / "bare.pth")
    with pytest.raises(InputError, match="vit_nope is no file or folder, and no name of timm"):
        run("vit_nope", tmp_path / "out")
    with pytest.raises(InputError, match=r"is read as a ViT: .* leave out --eps, --tokenizer"):
        run(folder, tmp_path / "out", "--tokenizer", "x", "--eps", 0)
    words = ["--model", NAME, "--model-kwargs", *map("{}={}".format, SHAPE, SHAPE.values())]
    run(tmp_path / "bare.pth", tmp_path / "out", *words)
    same(tmp_path / "out", vit)
    pytest.importorskip("transformers", reason="pip install '.[language]'")
    with pytest.raises(InputError, match=r"not a complete released .* --model"):
        run(tmp_path / "bare.pth", tmp_path / "new")


@pytest.fixture
def released(tmp_path):
    pytest.importorskip("transformers", reason="pip install '.[language]'")
    from tokenformer_vit.language import TokenFormerConfig, TokenFormerModel
    from tokenformer_vit.language.released import released_names

    config = TokenFormerConfig(vocab_size=61, embed_dim=16, depth=2, num_heads=2)
    ours = TokenFormerModel(config).state_dict()
    torch.save({theirs: ours[name] for theirs, name in released_names(2)}, tmp_path / "model.bin")
    return tmp_path / "model.bin"


def test_a_released_file_becomes_a_folder(released, tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "deep" / "folder"
    run(released, folder, "--num-heads", 2, "--context-length", 64)
    assert "9,200 parameters, 2 heads" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.context_length == 64
    assert model.model.blocks[0].mlp.eps == 0
    assert model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=2).shape == (1, 5)
    for tensor in torch.load(released, weights_only=True).values():
        assert any(torch.equal(tensor, ours) for ours in model.state_dict().values())
    assert [path.name for path in folder.parent.iterdir()] == ["folder"]
    with pytest.raises(InputError, match="already exists; choose another"):
        run(released, folder)


def test_a_tokenizer_goes_along_and_says_where_texts_end(released, tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM

    file = tmp_path / "tokenizer.json"
    Tokenizer(WordLevel({"a": 0, "<|endoftext|>": 1}, "a")).save(str(file))
    run(released, tmp_path / "out", "--num-heads", 2, "--tokenizer", file)
    generation = AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config
    assert generation.eos_token_id == 1
    Tokenizer(WordLevel({str(n): n for n in range(70)}, "0")).save(str(file))
    with pytest.raises(InputError, match=r"is read as a released model: .* leave out --to-vit"):
        run(released, tmp_path / "new", "--to-vit")
    with pytest.raises(InputError, match="has 70 entries"):
        run(released, tmp_path / "new", "--num-heads", 2, "--tokenizer", file)
    with pytest.raises(InputError, match="give its number of heads"):
        run(released, tmp_path / "new")
    assert not (tmp_path / "new").exists()
