"""The models that are registered with timm."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from tokenformer_vit.benchmarking.costs import model_costs, total
from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import BlockRMSNorm

PARAMETERS = {
    "tokenformer_tiny": 7_456_936,
    "tokenformer_small": 29_068_648,
    "tokenformer_base": 114_759_400,
    "tokenformer_base_matched": 86_447_848,
    "tokenformer_large": 404_670_440,
    "tokenformer_large_matched": 304_007_144,
    "tokenformer_small_distilled": 29_454_416,
    "tokenformer_base_distilled": 115_529_936,
    "tokenformer_small_rope_reg4": 29_078_632,
    "tokenformer_base_rope_reg4": 114_779_368,
    "tokenformer_large_rope_reg4": 404_721_640,
}


def test_registers_exactly_these_models():
    others = {"tokenformer_vit", "tokenformer_vit_distilled", "tokenformer_cifar10_micro"}
    others.add("tokenformer_cifar10_stem")
    assert {*timm.list_models("tokenformer*")} == {*PARAMETERS, *others}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parts_preprocessing_and_figures_of_the_readme(name):
    model: Any = timm.create_model(name, device="meta")
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
    gmacs = total(model_costs(model)).forward_flops / 2e9
    root = Path(__file__).resolve().parents[2]
    pages = [root / "README.md", root / "tokenformer_vit/models/README.md"]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    (row,) = (line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
    assert row.endswith(f"| {PARAMETERS[name]:,} | {gmacs:.2f} |")
    heads = ["head", "head_dist"] if name.endswith("_distilled") else ["head"]
    assert [n for n, each in model.named_modules() if isinstance(each, torch.nn.Linear)] == heads
    assert not list(model.blocks[0].norm1.parameters())
    if name.endswith("_rope_reg4"):
        assert (model.num_reg_tokens, model.num_prefix_tokens, model.global_pool) == (4, 5, "token")
        assert model.rope.pos_embed.shape == (196, 2 * 64)
        assert isinstance(model.blocks[0].attn.q_norm, BlockRMSNorm)
        assert model.blocks[0].ls1.gamma.shape == (model.embed_dim,)
    final = ["weight"] if name.endswith("_rope_reg4") else ["weight", "bias"]
    assert [name for name, _ in model.norm.named_parameters()] == final
    cfg = timm.get_pretrained_cfg(name)
    assert (cfg.input_size, cfg.interpolation) == ((3, 224, 224), "bicubic")
    assert cfg.crop_pct == (1 if name.endswith("_rope_reg4") else 224 / 256)
    assert (cfg.mean, cfg.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def test_a_distilled_model_has_two_heads_on_two_tokens():
    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 1, "num_heads": 2}
    model: Any = timm.create_model("tokenformer_small_distilled", num_classes=3, **sizes)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    images = torch.randn(2, 3, 8, 8)
    tokens = model.forward_features(images)
    assert tokens.shape == (2, 6, 24)
    both = model.head(tokens[:, 0]), model.head_dist(tokens[:, 1])
    torch.testing.assert_close(model.eval()(images), (both[0] + both[1]) / 2)
    model.set_distilled_training()
    for output, expected in zip(model.train()(images), both, strict=True):
        torch.testing.assert_close(output, expected)
    for name, value in (("reg_tokens", 4), ("pos_embed", "none"), ("patch_drop_rate", 0.5)):
        with pytest.raises(InputError, match=rf"{name} is .*leave it at"):
            timm.create_model("tokenformer_small_distilled", **sizes, **{name: value})
