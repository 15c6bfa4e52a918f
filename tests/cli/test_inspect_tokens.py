"""Maps and exemplars agree with weights computed by hand; what was planted is found."""

import copy
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import timm
import torch
from matplotlib.axes import Axes
from PIL import Image
from timm.data import create_transform
from timm.models import save_for_hf

from tokenformer_vit.cli import inspect_tokens as tool
from tokenformer_vit.errors import InputError
from tokenformer_vit.models import compile_blocks
from tokenformer_vit.vision import drawing, inspection

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
        assert picture.format == "PNG"
        assert min(picture.size) > 100
    return json.loads((out / "tokens.json").read_text())


def load(path):
    transform = create_transform((3, 32, 32), crop_pct=0.875, interpolation="bicubic")
    return transform(Image.open(path).convert("RGB"))


def features(model, images, layer):
    """Return what reaches a layer in a whole forward pass, in float64, patches only."""
    seen = []
    module = model.get_submodule(layer)
    hook = module.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    with torch.no_grad():
        model(images)
    hook.remove()
    return seen[0][:, model.num_prefix_tokens :].double()


def by_hand(model, images, layer):
    """Compute gelu(√P · A / ‖A‖) in float64."""
    keys = model.get_submodule(layer).key_param_tokens.detach().double()
    scores = features(model, images, layer) @ keys.T
    scores *= len(keys) ** 0.5 / scores.norm(dim=-1, keepdim=True)
    return torch.nn.functional.gelu(scores)


@pytest.mark.parametrize("layer", ["blocks.0.attn.query", "blocks.1.attn.proj", "blocks.2.mlp"])
def test_weights_agree_with_float64(layer, model):
    images = torch.randn(3, 3, 32, 32)
    weights = inspection.token_weights(model, images, layer)
    assert weights.dtype == torch.float32
    assert weights.shape == (3, 16, PAIRS["mlp" if "mlp" in layer else "attn"])
    torch.testing.assert_close(
        weights.double(), by_hand(model, images, layer), atol=2e-5, rtol=1e-4
    )


@pytest.mark.parametrize(
    "kwargs",
    [
        {"reg_tokens": 4, "use_rot_pos_emb": True, "norm": "rms"},
        {"class_token": False, "global_pool": "avg"},
        {"dynamic_img_size": True, "patch_size": 16},
    ],
    ids=["registers", "no class token", "dynamic size"],
)
def test_only_patches_count(kwargs, photos):
    model = build(**kwargs)
    found = inspection.map_tokens(model, [photos / "0.png"], "blocks.1.mlp", tokens=[7])
    expected = by_hand(model, load(photos / "0.png")[None], "blocks.1.mlp")[0, :, 7]
    size = 32 // kwargs.get("patch_size", 8)
    assert found["grid"] == [size, size]
    actual = torch.tensor(found["tokens"][0]["weights"], dtype=torch.float64)
    torch.testing.assert_close(actual, expected.view(1, size, size), atol=2e-5, rtol=1e-4)


def test_a_compiled_model_has_the_same_weights(model):
    images = torch.randn(3, 3, 32, 32)
    expected = inspection.token_weights(model, images, "blocks.1.mlp")
    compiled = copy.deepcopy(model)
    compile_blocks(compiled, backend="eager")
    with torch.no_grad():
        compiled(images)
    weights = inspection.token_weights(compiled, images, "blocks.1.mlp")
    torch.testing.assert_close(weights, expected)


def test_softmax_weights_and_inactive_pairs():
    model, images = build(theta="softmax", depth=1), torch.randn(2, 3, 32, 32)
    layer = model.blocks[0].mlp
    scores = features(model, images, "blocks.0.mlp") @ layer.key_param_tokens.double().T
    weights = inspection.token_weights(model, images, "blocks.0.mlp").double()
    torch.testing.assert_close(weights, 192 * scores.softmax(-1), atol=2e-5, rtol=1e-4)
    # Pairs that are left out keep their number, and the others theirs.
    layer.active = torch.tensor([5, 190])
    weights = inspection.token_weights(model, images, "blocks.0.mlp").double()
    expected = torch.zeros_like(weights)
    expected[..., layer.active] = 192 * scores[..., layer.active].softmax(-1)
    torch.testing.assert_close(weights, expected, atol=2e-5, rtol=1e-4)


def test_maps_show_the_strongest_pairs(model, checkpoint, photos, tmp_path, capsys):
    files = [photos / "3.png", photos / "more/8.png", photos / "1.png"]
    # Two batches; the layer is the feed-forward part of the middle block.
    run(checkpoint, *files, "--out", tmp_path / "new/out", "--top", 5, "--batch-size", 2)
    assert "tokens.png" in capsys.readouterr().out
    found = record(tmp_path / "new/out")
    assert found["layer"] == "blocks.1.mlp"
    assert (found["theta"], found["num_param_tokens"]) == ("gelu_l2", 192)
    assert (found["grid"], found["patch_size"]) == ([4, 4], [8, 8])
    assert found["images"] == [str(file) for file in files]
    assert found["checkpoint"] == str(checkpoint)
    weights = by_hand(model, torch.stack([load(file) for file in files]), "blocks.1.mlp")
    assert len(found["tokens"]) == 5
    peaks = weights.amax(dim=(0, 1))
    for entry, peak in zip(found["tokens"], peaks.topk(5).values, strict=True):
        assert peaks[entry["token"]].item() == pytest.approx(peak.item(), abs=1e-4)
        map_ = torch.tensor(entry["weights"], dtype=torch.float64)
        expected = weights[..., entry["token"]]
        torch.testing.assert_close(map_.flatten(1), expected, atol=2e-5, rtol=1e-4)
        assert entry["peaks"] == pytest.approx(expected.amax(dim=1).tolist(), abs=2e-4)
        norm = model.blocks[1].mlp.value_param_tokens[entry["token"]].norm().item()
        assert entry["value_norm"] == pytest.approx(norm, abs=1e-5)


def test_named_pairs_come_in_their_order(checkpoint, photos, tmp_path):
    arguments = [checkpoint.parent, photos / "0.png", "--layer", "blocks.0.attn.key"]
    run(*arguments, "--tokens", "17,5,17", "--out", tmp_path)  # the folder, as good as the file
    assert [entry["token"] for entry in record(tmp_path)["tokens"]] == [17, 5]
    run(*arguments, "--tokens", "17,5", "--out", tmp_path, "--exemplars", 3)
    found = record(tmp_path)  # replaced, both of the two files
    assert [entry["token"] for entry in found["tokens"]] == [17, 5]
    assert all(len(entry["exemplars"]) == 1 for entry in found["tokens"])  # there is one image


def test_planted_pair_fires_on_its_patch(photos):
    model, files = build(), sorted(photos.glob("*.png"))
    images = torch.stack([load(file) for file in files])
    feature = features(model, images, "blocks.1.mlp")[4, 9]
    with torch.no_grad():
        model.blocks[1].mlp.key_param_tokens[123] = 3 * feature / feature.norm()
    arguments = {"paths": files, "layer": "blocks.1.mlp"}
    map_ = inspection.map_tokens(model, **arguments)["tokens"][0]
    assert map_["token"] == 123
    assert np.argmax(np.array(map_["weights"])) == 4 * 16 + 9
    # Among the images of a data set, in batches of every size.
    for size in (1, 3, 32):
        found = inspection.find_exemplars(model, **arguments, tokens=[123], batch_size=size)
        first = found["tokens"][0]["exemplars"][0]
        assert first["file"] == str(files[4])
        assert first["patch"] == [9 // 4, 9 % 4]


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


def test_memory_holds_the_weights_of_one_batch(model, photos, monkeypatch):
    alive, most, real = set(), [0], inspection.token_weights

    class Counted:
        def __init__(self, key):
            self.key = key

        def __del__(self):
            alive.discard(self.key)

    def counted(*args):
        weights = real(*args)
        weights.guard = Counted(id(weights))
        alive.add(id(weights))
        most[0] = max(most[0], len(alive))
        return weights

    monkeypatch.setattr(inspection, "token_weights", counted)
    inspection.find_exemplars(model, sorted(photos.glob("*.png")), batch_size=1)
    assert most[0] == 1


def test_same_image_twice_is_one(model, photos):
    found = inspection.map_tokens(model, [photos / "0.png"] * 3, batch_size=2)
    assert found["images"] == [str(photos / "0.png")]


@pytest.mark.filterwarnings("error::UserWarning")
def test_broken_images_are_named_and_skipped(checkpoint, photos, tmp_path, capsys):
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    names = ["$\\x$.png", "\u65e5\u672c.png", "\udcff.png"]  # no formula, no glyph, no character
    for name in names:
        shutil.copy(photos / "0.png", folder / name)
    (folder / "cut.png").write_bytes((photos / "1.png").read_bytes()[:900])
    for option in ([], ["--exemplars", 2]):
        with pytest.raises(SystemExit) as exit_:
            run(checkpoint, folder, "--out", out, *option)
        assert exit_.value.code == 1
        assert f"skipped: {folder / 'cut.png'}: " in capsys.readouterr().err
        expected = 3 if option else [str(folder / name) for name in sorted(names)]
        assert record(out)["images"] == expected
    assert "none of the images" in failure(checkpoint, folder / "cut.png", "--out", out)


def failure(*arguments):
    with pytest.raises((InputError, OSError)) as error:
        run(*arguments)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_unknown_layer_names_some_that_exist(checkpoint, photos, tmp_path):
    arguments = [checkpoint, photos, "--out", tmp_path, "--layer"]
    assert re.search("'blocks.7.mlp'.* blocks.2.mlp", failure(*arguments, "blocks.7.mlp"))
    assert "blocks.2.attn.query" in failure(*arguments, "nonsense")
    assert "blocks.1.attn" in failure(*arguments, "blocks.1.attn")  # has layers, is none


def test_pair_that_is_not_there(checkpoint, photos, tmp_path):
    arguments = [checkpoint, photos, "--out", tmp_path, "--tokens"]
    message = failure(*arguments, "5,192")
    assert "192" in message
    assert "0 to 191" in message
    for text in ("5,-1", "5,,6", "a"):
        assert "--tokens" in failure(*arguments, text)


def test_too_much_to_draw(checkpoint, photos, tmp_path, monkeypatch):
    arguments = [checkpoint, photos, "--out", tmp_path]
    assert "33" in failure(*arguments, "--top", 33)
    assert "33" in failure(*arguments, "--exemplars", 33)
    monkeypatch.setattr(inspection, "MOST", 9)
    assert "--exemplars" in failure(*arguments)


def test_model_without_parameter_tokens(photos, tmp_path):
    model = timm.create_model("vit_tiny_patch16_224", depth=1)
    torch.save(model.state_dict(), tmp_path / "vit.pth")
    options = ["--model", "vit_tiny_patch16_224", "--model-kwargs", "depth=1"]
    message = failure(tmp_path / "vit.pth", photos, "--out", tmp_path / "out", *options)
    assert "VisionTransformer has no parameter tokens; give a TokenFormer" in message


def test_missing_files(checkpoint, photos, tmp_path):
    out = ["--out", tmp_path / "out"]
    assert "x.safetensors" in failure(tmp_path / "x.safetensors", photos, *out)
    assert "nowhere.jpg" in failure(checkpoint, "nowhere.jpg", *out)


def test_out_folder_that_cannot_be_written(checkpoint, photos, tmp_path):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file/below"):
        assert str(out) in failure(checkpoint, photos, "--out", out)


def test_diverged_weights(photos):
    model = build()
    torch.nn.init.constant_(model.blocks[1].mlp.key_param_tokens, float("nan"))
    with pytest.raises(InputError, match=r"blocks\.1\.mlp are not finite"):
        inspection.find_exemplars(model, [photos / "0.png"])


def test_names_of_images_are_drawn_as_they_are(model, photos, tmp_path, monkeypatch):
    drawn = []
    set_ylabel = Axes.set_ylabel
    monkeypatch.setattr(
        Axes,
        "set_ylabel",
        lambda axes, text, **more: drawn.append(text) or set_ylabel(axes, text, **more),
    )
    names = [r"$\frac$.png", os.fsdecode(b"\xff.png")]
    for name in names:
        shutil.copy(photos / "0.png", tmp_path / name)
    found = inspection.map_tokens(model, [tmp_path / name for name in names])
    drawing.draw_maps(found, model, tmp_path / "tokens.png")
    assert drawn == [r"$\frac$.png", r"\udcff.png"]


def test_an_image_that_went_away_meanwhile(model, photos, tmp_path):
    shutil.copy(photos / "0.png", tmp_path / "0.png")
    found = inspection.map_tokens(model, [tmp_path / "0.png"])
    (tmp_path / "0.png").unlink()
    with pytest.raises(InputError, match=r"0\.png"):
        drawing.draw_maps(found, model, tmp_path / "tokens.png")


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_behind(checkpoint, photos, tmp_path):
    arguments = [checkpoint, photos, "--out", tmp_path, "--exemplars", "3", "--batch-size", "1"]
    code = (
        "import sys, time; from tokenformer_vit.vision import inspection as tokens;"
        "real = tokens.token_weights;"
        "slow = lambda *args: (print('at it', flush=True), time.sleep(60), real(*args))[2];"
        "tokens.token_weights = slow; sys.argv.insert(1, 'inspect');"
        "import runpy; runpy.run_module('tokenformer_vit', run_name='__main__')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test that runs in the background may have inherited that this signal be ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout.readline() == "at it\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert not list(tmp_path.iterdir())


def test_errors_end_the_command_in_one_line(checkpoint, photos, tmp_path, command):
    words = [checkpoint, photos, "--out", tmp_path, "--layer", "blocks.9.mlp"]
    done = command("inspect_tokens", *words)
    assert done.status == 2
    assert "'blocks.9.mlp'" in done.err
    assert done.err.count("\n") == 1


def test_real_images(checkpoint, shared_data, tmp_path):
    files = sorted(shared_data("imagenet_samples").glob("val/*/*"))[:40]
    assert len(files) == 40
    run(checkpoint, *files[:3], "--out", tmp_path, "--top", 2)
    assert len(record(tmp_path)["images"]) == 3
    run(checkpoint, *files, "--out", tmp_path, "--top", 2, "--exemplars", 3)
    found = record(tmp_path)
    assert found["images"] == 40
    for entry in found["tokens"]:
        assert len({item["file"] for item in entry["exemplars"]}) == 3
        # The map of an exemplar says the same.
        first = entry["exemplars"][0]
        run(checkpoint, first["file"], "--out", tmp_path / "map", "--tokens", entry["token"])
        map_ = np.array(record(tmp_path / "map")["tokens"][0]["weights"][0])
        assert np.unravel_index(map_.argmax(), map_.shape) == tuple(first["patch"])
        assert map_.max() == pytest.approx(first["weight"], abs=1e-4)
