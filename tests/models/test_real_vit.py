"""A real pretrained ViT, in all that people do with one; see tools/pretrained_vit.py."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.utils import reparameterize_model
from torchvision.transforms import v2

from tokenformer_vit import growth
from tokenformer_vit.models import from_vit, to_vit
from tokenformer_vit.models.checkpoints import load_model, save_model
from tokenformer_vit.vision.datasets import open_images
from tokenformer_vit.vision.images import read_pixels

SCRIPT = Path(__file__).parents[2] / "tools/pretrained_vit.py"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def vit(tmp_path_factory) -> Any:
    pytest.importorskip("onnx")
    path = tmp_path_factory.mktemp("real") / "vit.safetensors"
    made = subprocess.run([sys.executable, str(SCRIPT), str(path)], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"the package of PyPI is not to be had: {made.stderr.splitlines()[-1:]}")
    return load_model("vit_small_patch14_dinov2", path, img_size=98)


@pytest.fixture(scope="module")
def images(shared_data):
    rows = open_images(str(shared_data("imagenette_128")), "train")
    rows.keep(rows.rows.argsort()[:48])
    pixels = (torch.from_numpy(read_pixels(s["img_path"], s["img_bytes"])) for s in rows)
    sized = [v2.functional.resize(each.permute(2, 0, 1), [98, 98]) for each in pixels]
    mean, std = (timm.data.IMAGENET_DEFAULT_MEAN, timm.data.IMAGENET_DEFAULT_STD)
    return v2.functional.normalize(torch.stack(sized) / 255, list(mean), list(std))


@pytest.fixture(scope="module")
def exact(vit, images):
    with torch.no_grad():
        return copy.deepcopy(vit).double()(images.double())


@pytest.fixture(scope="module")
def model(vit, images):
    return from_vit(vit, images)


def error(model, images, exact):
    with torch.no_grad():
        return ((model(images).double() - exact).norm() / exact.norm()).item()


def test_outputs_there_and_back(vit, model, images, exact, tmp_path):
    fused, back = reparameterize_model(model), to_vit(model)
    for each in (model, fused, back):
        assert error(each, images, exact) <= 5e-6
    assert {n: t.shape for n, t in back.state_dict().items()} == {
        n: t.shape for n, t in vit.state_dict().items()
    }
    count, own, in_fused = (sum(p.numel() for p in m.parameters()) for m in (model, vit, fused))
    assert count <= 1.34 * own
    assert in_fused == own
    with torch.autocast("cpu", torch.bfloat16):
        low, least, limit = (error(each, images, exact) for each in (model, fused, vit))
    assert low <= 1.5 * limit
    assert least <= 1.05 * limit
    save_model(back, tmp_path / "back")
    again: Any = timm.create_model(f"local-dir:{tmp_path / 'back'}", pretrained=True).eval()
    assert torch.equal(again(images), back(images))


def test_it_grows_and_is_cut(vit, model, images, exact):
    grown = growth.grow(copy.deepcopy(model), 400, 400, 1600)
    assert error(grown, images, exact) <= 5e-6
    assert error(to_vit(grown), images, exact) <= 5e-6
    lost = {}
    for name, each in (("by images", model), ("by σ", from_vit(vit))):
        half = growth.extract(each, num_qkv_param_tokens=192, num_proj_param_tokens=192)
        lost[name] = error(half, images, exact)
    assert lost["by images"] <= 0.3 * lost["by σ"]
