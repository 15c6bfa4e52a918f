"""Maps and exemplars agree with weights computed by hand; what was planted is found."""

import copy
import json
import os
import shutil

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform
from timm.models import save_for_hf

from tokenformer_vit.cli import inspect_tokens as tool
from tokenformer_vit.errors import InputError
from tokenformer_vit.models import compile_blocks
from tokenformer_vit.vision import inspection

KWARGS = {"depth": 3, "img_size": 32, "patch_size": 8, "embed_dim": 48, "num_heads": 3}
PAIRS = {"mlp": 192, "attn": 48}


def build(**kwargs):
    own = {"pretrained_cfg_overlay": {"input_size": (3, 32, 32)}, **KWARGS, **kwargs}
    return timm.create_model("tokenformer_tiny", num_classes=3, **own).eval()


@pytest.fixture(scope="module")
def model(session_seed):
    torch.manual_seed(session_seed)
    return build()


@pytest.fixture(scope="module")
def checkpoint(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    save_for_hf(model, folder, safe_serialization=True)
    return folder / "model.safetensors"


@pytest.fixture(scope="module")
def photos(tmp_path_factory, session_seed):
    """Ten images of noise in two folders, one grey."""
    folder = tmp_path_factory.mktemp("photos")
    (folder / "more").mkdir()
    random = np.random.default_rng(session_seed)
    for index in range(10):
        shape = (40, 50) if index == 3 else (40, 50, 3)
        noise = random.integers(0, 255, shape, dtype=np.uint8)
        Image.fromarray(noise).save(folder / ("more" if index > 6 else "") / f"{index}.png")
    return folder


def run(*arguments):
    tool.main([str(argument) for argument in arguments])


def record(out):
    with Image.open(out / "tokens.png") as picture:
        picture.load()
    return json.loads((out / "tokens.json").read_text())


def load(path):
    transform = create_transform((3, 32, 32), crop_pct=0.875, interpolation="bicubic")
    return transform(Image.open(path).convert("RGB"))


def inputs(model, images, layer):
    """Return what reaches a layer in a whole forward pass, in float64, of patches only."""
    seen = []
    hook = model.get_submodule(layer).register_forward_hook(lambda _, x, __: seen.append(x[0]))
    with torch.no_grad(), hook:
        model(images)
    return seen[0][:, model.num_prefix_tokens :].double()


def by_hand(model, images, layer):
    """Compute gelu(√P · A / ‖A‖) in float64."""
    keys = model.get_submodule(layer).key_param_tokens.detach().double()
    scores = inputs(model, images, layer) @ keys.T
    scores *= len(keys) ** 0.5 / scores.norm(dim=-1, keepdim=True)
    return torch.nn.functional.gelu(scores)


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"reg_tokens": 4, "use_rot_pos_emb": True, "norm": "rms"},
        {"class_token": False, "global_pool": "avg"},
        {"dynamic_img_size": True, "patch_size": 16},
    ],
)
@pytest.mark.parametrize("layer", ["blocks.0.attn.query", "blocks.1.attn.proj", "blocks.2.mlp"])
def test_weights_agree_with_float64(layer, kwargs):
    model, images = build(**kwargs), torch.randn(3, 3, 32, 32)
    weights = inspection.token_weights(model, images, layer)
    assert weights.dtype == torch.float32
    patches = (32 // kwargs.get("patch_size", 8)) ** 2
    assert weights.shape == (3, patches, PAIRS["mlp" if "mlp" in layer else "attn"])
    expected = by_hand(model, images, layer)
    torch.testing.assert_close(weights.double(), expected, atol=2e-5, rtol=1e-4)


def test_compiled_models_and_inactive_pairs(model):
    images, compiled = torch.randn(3, 3, 32, 32), copy.deepcopy(model)
    expected = inspection.token_weights(model, images, "blocks.1.mlp")
    compile_blocks(compiled, backend="eager")
    with torch.no_grad():
        compiled(images)
    weights = inspection.token_weights(compiled, images, "blocks.1.mlp")
    torch.testing.assert_close(weights, expected)
    # Pairs that are left out keep their number, and the others theirs.
    compiled.blocks[1].mlp.active = torch.tensor([5, 190])
    weights = inspection.token_weights(compiled, images, "blocks.1.mlp")
    assert weights.shape == expected.shape
    assert weights.any(dim=0).any(dim=0).nonzero().flatten().tolist() == [5, 190]


def test_maps_show_the_strongest_pairs(model, checkpoint, photos, tmp_path, capsys):
    files = [photos / "3.png", photos / "more/8.png", photos / "1.png"]
    # Two batches, one image twice; the layer is the feed-forward part of the middle block.
    words = ["--out", tmp_path / "new/out", "--top", 5, "--batch-size", 2]
    run(checkpoint, *files, files[0], *words)
    assert "tokens.png" in capsys.readouterr().out
    found = record(tmp_path / "new/out")
    assert (found["layer"], found["theta"]) == ("blocks.1.mlp", "gelu_l2")
    assert (found["grid"], found["patch_size"]) == ([4, 4], [8, 8])
    assert found["images"] == [str(file) for file in files]
    weights = by_hand(model, torch.stack([load(file) for file in files]), "blocks.1.mlp")
    peaks = weights.amax(dim=(0, 1))
    for entry, peak in zip(found["tokens"], peaks.topk(5).values, strict=True):
        assert peaks[entry["token"]].item() == pytest.approx(peak.item(), abs=1e-4)
        map_ = torch.tensor(entry["weights"], dtype=torch.float64)
        expected = weights[..., entry["token"]]
        torch.testing.assert_close(map_.flatten(1), expected, atol=2e-5, rtol=1e-4)
        assert entry["peaks"] == pytest.approx(expected.amax(dim=1).tolist(), abs=2e-4)
    run(checkpoint.parent, photos, "--tokens", 17, 5, 17, "--out", tmp_path)
    assert [entry["token"] for entry in record(tmp_path)["tokens"]] == [17, 5]


def test_a_planted_pair_fires_on_its_patch(photos):
    model, files = build(), sorted(photos.glob("*.png"))
    images = torch.stack([load(file) for file in files])
    with torch.no_grad():
        feature = inputs(model, images, "blocks.1.mlp")[4, 9]
        model.blocks[1].mlp.key_param_tokens[123] = 3 * feature / feature.norm()
    map_ = inspection.inspect_pairs(model, files, "blocks.1.mlp")["tokens"][0]
    assert map_["token"] == 123
    assert np.argmax(np.array(map_["weights"])) == 4 * 16 + 9
    for size in (1, 3, 32):
        how = {"exemplars": 2, "batch_size": size}
        found = inspection.inspect_pairs(model, files, "blocks.1.mlp", [123], **how)
        first = found["tokens"][0]["exemplars"][0]
        assert (first["file"], first["patch"]) == (str(files[4]), [9 // 4, 9 % 4])


def test_exemplars_are_those_of_all_weights_at_once(model, checkpoint, photos, tmp_path):
    files = [*sorted(photos.glob("*.png")), *sorted(photos.glob("more/*.png"))]
    run(checkpoint, photos, "--exemplars", 4, "--out", tmp_path, "--top", 6, "--batch-size", 3)
    found = record(tmp_path)
    assert found["images"] == 10
    weights = by_hand(model, torch.stack([load(file) for file in files]), found["layer"])
    peaks, patches = weights.max(dim=1)  # (10, P)
    mean = weights.abs().mean(dim=(0, 1))
    selectivity = peaks.topk(4, dim=0).values.mean(dim=0) / mean
    # The most selective of the half that adds most to the output.
    reach = mean * model.blocks[1].mlp.value_param_tokens.detach().double().norm(dim=1)
    half = reach.topk(96).indices
    expected = half[selectivity[half].topk(6).indices].tolist()
    assert [entry["token"] for entry in found["tokens"]] == expected
    for entry in found["tokens"]:
        token = entry["token"]
        best = peaks[:, token].topk(4)
        assert [item["file"] for item in entry["exemplars"]] == [
            str(files[i]) for i in best.indices
        ]
        for item, image, weight in zip(entry["exemplars"], *reversed(best), strict=True):
            assert item["weight"] == pytest.approx(weight.item(), abs=1e-4)
            assert item["patch"] == list(divmod(patches[image, token].item(), 4))
        assert entry["selectivity"] == pytest.approx(selectivity[token].item(), rel=1e-4)
        assert entry["mean_abs_weight"] == pytest.approx(mean[token].item(), abs=1e-5)


@pytest.mark.filterwarnings("error::UserWarning")
def test_broken_images_are_named_and_skipped(checkpoint, photos, tmp_path, capsys):
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    names = ["$\\x$.png", "\u65e5\u672c.png", os.fsdecode(b"\xff.png")]  # formula, glyph, no text
    for name in names:
        shutil.copy(photos / "0.png", folder / name)
    (folder / "cut.png").write_bytes((photos / "1.png").read_bytes()[:900])
    for option in ([], ["--exemplars", 2]):
        with pytest.raises(SystemExit, match="1"):
            run(checkpoint, folder, "--out", out, *option)
        assert f"skipped: {folder / 'cut.png'}: " in capsys.readouterr().err
        expected = 3 if option else [str(folder / name) for name in sorted(names)]
        assert record(out)["images"] == expected
    with pytest.raises(InputError, match="none of the images"):
        run(checkpoint, folder / "cut.png", "--out", out)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layer", "blocks.7.mlp"], "'blocks.7.mlp'.* blocks.2.mlp"),
        (["--layer", "blocks.1.attn"], "choose one, such as"),  # has layers, is none
        (["--tokens", 5, 192], "no pair 192; give numbers from 0 to 191"),
        (["--tokens", 5, -1], "--tokens"),
        (["--top", 33], "at most 32"),
        (["--exemplars", 33], "at most 32"),
    ],
)
def test_what_cannot_be_drawn_is_said(words, said, checkpoint, photos, tmp_path):
    with pytest.raises(InputError, match=said):
        run(checkpoint, photos, "--out", tmp_path, *words)


def test_other_and_diverged_models_are_refused(photos, tmp_path):
    vit = timm.create_model("vit_tiny_patch16_224", depth=1)
    with pytest.raises(InputError, match="VisionTransformer has no Pattention layer; give a"):
        inspection.inspect_pairs(vit, [photos / "0.png"])
    model = build()
    torch.nn.init.constant_(model.blocks[1].mlp.key_param_tokens, float("nan"))
    with pytest.raises(InputError, match=r"blocks\.1\.mlp are not finite"):
        inspection.inspect_pairs(model, [photos / "0.png"])
    with pytest.raises(InputError, match=r"at most 32 images, not 33.*--exemplars"):
        inspection.inspect_pairs(build(), [photos / "0.png"] * 33)
