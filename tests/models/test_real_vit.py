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
from tokenformer_vit.models.checkpoints import load_model
from tokenformer_vit.vision.datasets import open_images
from tokenformer_vit.vision.images import read_pixels

SCRIPT = Path(__file__).parents[2] / "tools/pretrained_vit.py"


@pytest.mark.slow
@torch.no_grad()
def test_a_pretrained_vit_is_converted_grown_and_cut(shared_data, tmp_path):
    pytest.importorskip("onnx")
    path = tmp_path / "vit.safetensors"
    made = subprocess.run([sys.executable, str(SCRIPT), str(path)], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"the package of PyPI is not to be had: {made.stderr.splitlines()[-1:]}")
    vit: Any = load_model("vit_small_patch14_dinov2", path, img_size=98)
    rows = open_images(str(shared_data("imagenette_128")), "train")
    rows.keep(rows.rows.argsort()[:48])
    pixels = (torch.from_numpy(read_pixels(s["img_path"], s["img_bytes"])) for s in rows)
    sized = [v2.functional.resize(each.permute(2, 0, 1), [98, 98]) for each in pixels]
    mean, std = (timm.data.IMAGENET_DEFAULT_MEAN, timm.data.IMAGENET_DEFAULT_STD)
    images = v2.functional.normalize(torch.stack(sized) / 255, list(mean), list(std))
    exact, model = copy.deepcopy(vit).double()(images.double()), from_vit(vit, images)

    def error(model):
        return ((model(images).double() - exact).norm() / exact.norm()).item()

    fused, grown = reparameterize_model(model), copy.deepcopy(model)
    growth.grow(grown, 400, 400, 1600)
    for each in (model, fused, to_vit(model), grown, to_vit(grown)):
        assert error(each) <= 5e-6
    count, own, in_fused = (sum(p.numel() for p in m.parameters()) for m in (model, vit, fused))
    assert count <= 1.34 * own
    assert in_fused == own
    with torch.autocast("cpu", torch.bfloat16):
        low, least, limit = error(model), error(fused), error(vit)
    assert low <= 1.5 * limit
    assert least <= 1.05 * limit
    halves = (growth.extract(each, None, 192, 192) for each in (model, from_vit(vit)))
    by_images, by_weights = map(error, halves)
    assert by_images <= 0.3 * by_weights
