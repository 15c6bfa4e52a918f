"""Errors of each Θ and classes of the shipped models are those of da6feacf, in baseline.json."""

import json
from pathlib import Path

import pytest
import timm
import torch
from timm.data import create_transform, resolve_model_data_config

from tokenformer_vit.ops import THETAS, default_tau, pattention
from tokenformer_vit.vision.datasets import open_images
from tokenformer_vit.vision.images import read_image

RECORD = json.loads(Path(__file__).with_name("baseline.json").read_text(encoding="utf-8"))
NAMES = ("output", "x", "keys", "values", "tau")


def outputs_and_gradients(drawn: list[torch.Tensor], theta: str) -> list[torch.Tensor]:
    """Return the output of one layer and the gradients of its inputs and τ."""
    tau = torch.tensor(default_tau(theta, 384))
    leaves = [each.clone().requires_grad_() for each in (*drawn[:3], tau)]
    output = pattention(*leaves[:3], theta, leaves[3])
    leaves = leaves if THETAS[theta].norm_order else leaves[:3]
    return [output.detach(), *torch.autograd.grad(output, leaves, drawn[3])]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("theta", sorted(RECORD["errors"].keys() & THETAS.keys()))
def test_errors_are_those_of_the_record(theta, dtype):
    """Relative to float64, over the 64 draws of the record; inputs are drawn in the dtype."""
    wrong, size = torch.zeros(2, len(NAMES), dtype=torch.float64)
    for seed in range(64):
        random = torch.Generator().manual_seed(seed)
        shapes = [(256, 96), (384, 96), (384, 96), (256, 96)]
        x, keys, values, grad = (torch.randn(shape, generator=random) for shape in shapes)
        drawn = [each.to(dtype) for each in (x, keys / 96**0.5, values, grad)]
        exact = outputs_and_gradients([each.double() for each in drawn], theta)
        for part, ours in enumerate(outputs_and_gradients(drawn, theta)):
            wrong[part] += (ours.double() - exact[part]).square().sum()
            size[part] += exact[part].square().sum()
    errors = dict(zip(NAMES, (wrong / size).sqrt().tolist(), strict=True))
    for name, known in RECORD["errors"][theta][str(dtype).removeprefix("torch.")].items():
        assert errors[name] <= 1.05 * known, name


@torch.no_grad()
@pytest.mark.usefixtures("arrow_cache")
@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", RECORD["classes"])
def test_classes_of_cifar10s_test_images_are_those_of_the_record(name, count, shared_data):
    images = open_images(str(shared_data("cifar10")), "val")
    places = images.rows.argsort()[:count]  # the record is in the order of the file
    model = timm.create_model(name, pretrained=True).eval()
    transform = create_transform(**resolve_model_data_config(model))
    batch = [images[int(place)] for place in places]
    tensors = (transform(read_image(each["img_path"], each["img_bytes"])) for each in batch)
    found = torch.cat([model(part).argmax(1) for part in torch.stack([*tensors]).split(250)])
    assert "".join(map(str, found.tolist())) == RECORD["classes"][name][:count]
