"""Smaller models cost what they may, lose pairs where least is lost, and are measured fairly."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from timm.models.vision_transformer import VisionTransformer
from timm.utils import reparameterize_model

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import extract, grow, pattention_layers
from tokenformer_vit.models import TokenFormerViT, from_vit, to_vit
from tokenformer_vit.vision import compression

SHAPE: Any = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 2}


def build(**changes: Any) -> Any:
    counts = {f"num_{kind}_param_tokens": 32 for kind in ("qkv", "proj")}
    counts["num_ffn_param_tokens"] = 128
    model = TokenFormerViT(**{**SHAPE, **counts, **changes}, num_classes=4)
    torch.nn.init.normal_(model.head.weight)
    return model.eval()


def convert(num_classes: int = 4) -> Any:
    vit = VisionTransformer(**SHAPE, num_classes=num_classes)
    torch.nn.init.normal_(vit.head.weight) if num_classes else None
    return from_vit(vit.eval())


def images(count=24):
    return torch.randn(count, 3, 16, 16)


def cut_before():
    return extract(convert(), num_qkv_param_tokens=9, num_proj_param_tokens=9)


@pytest.mark.parametrize("make", [build, convert, cut_before])
def test_each_share_of_the_flops_is_used_up_to_a_step(make):
    model, shares = make(), (0.9, 0.6, 0.3)
    found = compression.smaller_models(model, [images()], shares)
    assert list(found) == list(shares)
    for share, made in found.items():
        part = compression.flops_of(made) / compression.flops_of(model)
        assert share - 0.05 < part <= share
        assert compression.flops_of(reparameterize_model(made)) == compression.flops_of(made)
        for block in made.blocks:
            attn = block.attn
            assert attn.query.num_param_tokens == attn.value.num_param_tokens
            # Linear tokens between a half and all would save nothing.
            linear = attn.query.theta == "linear"
            assert not linear or not 16 <= attn.query.num_param_tokens < 32
    with pytest.raises(InputError, match=r"are the least, not 0\.001"):
        compression.choose_counts(model, [images()], [0.001])


@torch.no_grad()
def test_pairs_that_add_nothing_go_first():
    torch.manual_seed(0)
    model = build(theta="gelu")
    twice = grow(copy.deepcopy(model), None, None, [128, 256, 128], init="duplicate")
    share = compression.flops_of(model) / compression.flops_of(twice)
    (made,) = compression.smaller_models(twice, [images(200)], [share + 1e-6]).values()
    x = images()
    assert {name: each.num_param_tokens for name, each in pattention_layers(made).items()} == {
        name: each.num_param_tokens for name, each in pattention_layers(model).items()
    }
    assert (made(x) - model(x)).norm() < 1e-3 * model(x).norm()


@pytest.mark.parametrize("name", ["blocks.0.attn.value", "blocks.1.attn.proj", "blocks.1.mlp"])
def test_slopes_predict_how_far_noise_in_a_layer_moves_the_outputs(name):
    model, x, size = convert(), images(256), 1e-3
    torch.manual_seed(0)
    slope = compression.output_slopes(model, [x])[name]
    assert all(parameter.grad is None for parameter in model.parameters())
    layer = pattention_layers(model)[name]
    with torch.no_grad():
        before = model(x)
        layer.register_forward_hook(lambda *found: found[2] + size * torch.randn_like(found[2]))
        moved = (model(x) - before).square().sum(dim=1).mean().item()
    expected = slope * 17 * 32 * size**2  # of 17 tokens and 32 channels
    assert 0.6 < moved / expected < 1.6


@torch.no_grad()
def test_a_vit_leaves_with_equal_feed_forward_layers():
    model = convert()
    (made,) = compression.smaller_models(model, [images()], [0.71], like_vit=True).values()
    vit = to_vit(made)
    assert 0.69 < compression.flops_of(vit) / compression.flops_of(model) <= 0.71
    assert (vit(x := images()) - made(x)).norm() < 1e-5 * made(x).norm()
    (kept,) = compression.smaller_models(
        model, [images()], [0.3], of_pairs=True, like_vit=True
    ).values()
    assert to_vit(kept).blocks[0].mlp.fc1.out_features == 38
    with pytest.raises(InputError, match=r"no feed-forward pair is left at 0\.2 of"):
        compression.equal_count(model, 0.2, 17)


@torch.no_grad()
def test_models_without_classes_are_compared_by_the_cosine_of_their_outputs():
    bare, x = [convert(num_classes=0) for _ in range(2)], images(10)
    first, second = compression.measure(dict(zip("ab", bare, strict=True)), [x], None)
    cosine = torch.nn.functional.cosine_similarity(*(each(x) for each in bare)).mean().item()
    assert first["agreement"] == pytest.approx(100)
    assert second["agreement"] == pytest.approx(100 * cosine, abs=1e-3)
    bare[0].global_pool = ""
    assert compression.measure({"a": bare[0]}, [x], None)[0]["agreement"] == pytest.approx(100)


def test_flops_are_those_at_the_size_of_the_images():
    model, x = build(dynamic_img_size=True), torch.randn(4, 3, 32, 32)
    (point,) = compression.measure({"a": model}, [x], None)
    assert (
        point["flops_per_image"]
        == compression.flops_of(build(img_size=32))
        > 2 * compression.flops_of(model)
    )
    (made,) = compression.smaller_models(model, [x], [0.5]).values()
    assert 0.45 < compression.flops_of(made, 65) / point["flops_per_image"] <= 0.5


def test_images_to_fit_to_are_not_those_to_measure_with(tmp_path):
    for folder in ("flat", "classes/cat", "classes/dog", "both/train/cat", "both/dev/cat", "one"):
        (tmp_path / folder).mkdir(parents=True)
        for index in range(1 if folder == "one" else 6):
            Image.new("RGB", (8, 8), (index, 0, 0)).save(tmp_path / folder / f"{index}.png")

    for folder, sizes in (("flat", (3, 3)), ("classes", (6, 6)), ("both", (6, 6))):
        fitted, measured = compression.divide_images(str(tmp_path / folder), 100)
        assert (len(fitted), len(measured)) == sizes
        paths = [each["img_path"] for part in (fitted, measured) for each in part]
        assert len({*paths}) == sum(sizes)
        assert (
            compression.divide_images(str(tmp_path / folder), 2)[0][1] == fitted[1]
        )  # the same order
    assert all("train" in each["img_path"] for each in fitted)
    with pytest.raises(InputError, match="the model has class 0"):
        compression.find_labels(convert(), measured)
    with pytest.raises(InputError, match="has 1 image"):
        compression.divide_images(str(tmp_path / "one"), 5)


@pytest.mark.parametrize("name", ["micro", "micro_equal", "stem", "stem_equal"])
def test_the_page_has_what_the_records_have(name):
    folder = Path(__file__).resolve().parents[2] / "tokenformer_vit/growth"
    record = json.loads((folder / f"results/compression_cifar10_{name}.json").read_text())
    page = (folder / "README.md").read_text(encoding="utf-8")
    (line,) = (each for each in page.splitlines() if f"cifar10_{name}.json" in each)
    assert line.split("|")[2:-1] == [f" {point['top1']:.2f} " for point in record["points"]]
    shares = [
        each["flops_per_image"] / record["points"][0]["flops_per_image"]
        for each in record["points"]
    ]
    assert "equal" not in name or all(f"{share:.2f}" in line for share in shares[1:])
