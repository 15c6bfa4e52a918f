"""A converted ViT has the outputs of the ViT, and is a TokenFormer in everything else."""

import copy
import re
from collections import Counter
from functools import partial
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import GluMlp, LayerNorm, QuickGELU, RmsNorm
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer
from torch import nn

from tokenformer_vit import growth
from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import count_pairs, pattention_layers
from tokenformer_vit.models import from_vit
from tokenformer_vit.models.checkpoints import load_model, save_model
from tokenformer_vit.models.sizes import at_size

SHAPE = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3}
NO_TOKEN = {"global_pool": "avg", "class_token": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "layer scale and registers": {"init_values": 1e-5, "reg_tokens": 4},
    "no qkv bias, no class token": {"qkv_bias": False, **NO_TOKEN},
    "norm after the pool": {"fc_norm": True, "global_pool": "avg"},
    "no norm after the pool": {"fc_norm": False, "global_pool": "avg"},
    "pre-norm": {"pre_norm": True},
    "tanh": {"act_layer": "gelu_tanh"},
    "odd MLP": {"mlp_ratio": 2.7},
    "no output bias": {"proj_bias": False},
    "normed queries and keys": {"qk_norm": True},
    "distilled": {"distilled": True},
    "no head": {"num_classes": 0},
    "no pool, other eps": {"global_pool": "", "norm_layer": partial(LayerNorm, eps=1e-5)},
    "any image size": {"dynamic_img_size": True},
}
ANY_BATCH = ({0: torch.export.Dim("batch")},)


def build(distilled=False, **kwargs) -> Any:
    """Build a ViT none of whose norms, biases and scales is at its start."""
    kind = VisionTransformerDistilled if distilled else VisionTransformer
    vit = kind(**{**SHAPE, "num_classes": 10, **kwargs}).eval()
    for name, parameter in vit.named_parameters():
        if parameter.ndim == 1 and not re.search("[qk]_norm", name):
            spread = 0.3 * torch.randn_like(parameter)
            parameter.data += 0.5 + 0.5 * spread if "gamma" in name else spread
    return vit


def images(batch=8, size=32):
    return torch.randn(batch, 3, size, size)


def error(outputs, exact):
    """Return the relative error, without what is common to a row of outputs."""
    exact = exact.double() - exact.double().mean(-1, keepdim=True)
    outputs = outputs.double() - outputs.double().mean(-1, keepdim=True)
    return ((outputs - exact).norm() / exact.norm()).item()


@pytest.fixture
def model() -> Any:
    return from_vit(build())


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
def test_outputs_are_those_of_the_vit(name):
    for _ in range(3):
        vit = build(**VARIANTS[name])
        x = images(size=40 if name == "any image size" else 32)
        model = from_vit(vit)
        exact = copy.deepcopy(vit).double()(x.double())
        assert error(model(x), exact) <= 2e-5
        with torch.autocast("cpu", torch.bfloat16):
            assert error(model(x), exact) <= 2.5 * error(vit(x), exact)


@torch.no_grad()
@pytest.mark.parametrize("name", ["plain", "tanh"])
def test_weights_in_bfloat16(name):
    vit, x = build(**VARIANTS[name]), images()
    exact = copy.deepcopy(vit).double()(x.double())
    low = [from_vit(vit).bfloat16(), from_vit(copy.deepcopy(vit).bfloat16()), vit.bfloat16()]
    *ours, limit = (error(each(x.bfloat16()), exact) for each in low)
    assert max(ours) <= 2.5 * limit


def after(change, **kwargs):
    def make():
        vit = VisionTransformer(**SHAPE, **kwargs)
        change(vit.blocks[1])
        return vit

    return make


def vit_with(**kwargs):
    return partial(VisionTransformer, **SHAPE, **kwargs)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (vit_with(act_layer=QuickGELU), r"blocks\.0\.mlp\.act is a QuickGELU"),
        (vit_with(norm_layer=RmsNorm), "is a RmsNorm"),
        (vit_with(embed_norm_layer=LayerNorm), r"patch_embed\.norm is a LayerNorm"),
        (vit_with(global_pool="map"), "attn_pool is a AttentionPoolLatent"),
        (vit_with(block_fn=ParallelScalingBlock), r"blocks\.0 is a ParallelScalingBlock"),
        (vit_with(mlp_layer=GluMlp), r"blocks\.0\.mlp is a GluMlp"),
        (vit_with(scale_attn_norm=True), r"blocks\.0\.attn\.norm is a LayerNorm"),
        (vit_with(attn_layer="diff"), r"blocks\.0\.attn is a DiffAttention"),
        (
            after(lambda b: nn.init.zeros_(b.attn.k_norm.weight), qk_norm=True),
            "k_norm has parameters",
        ),
        (vit_with(norm_layer=type("OwnNorm", (nn.LayerNorm,), {})), "is a OwnNorm"),
        (after(lambda b: setattr(b.mlp, "act", nn.GELU("tanh"))), "differ in GELU, heads"),
        (after(lambda b: setattr(b.attn, "k_norm", LayerNorm(16, affine=False))), "in GELU"),
        (partial(timm.create_model, "resnet10t"), "it is a ResNet"),
        (partial(timm.create_model, "tokenformer_tiny", **SHAPE), "it is a TokenFormerViT"),
        (partial(timm.create_model, "beit_base_patch16_224", depth=1), "it is a Beit"),
    ],
)
def test_what_has_no_counterpart_is_named(make, said):
    with pytest.raises(InputError, match=rf"no exact TokenFormer: [^\n]*{said}.*; give"):
        from_vit(make())


# Why timm's other names are refused, with their numbers.
REFUSED = {
    "attn_pool is a AttentionPool": 18,
    "patch_embed is a HybridEmbed": 14,
    "is a RmsNorm": 16,
    "is a QuickGELU": 7,
    "norm is a LayerNorm": 4,
    "mlp is a GluMlp": 3,
    "attn is a DiffAttention": 2,
    "blocks.0 is a ": 5,
}


@pytest.mark.slow
def test_names_of_timm():
    modules = ("vision_transformer", "vision_transformer_hybrid", "deit")
    found = Counter[str]()
    for name in (name for module in modules for name in timm.list_models(module=module)):
        width = {} if "mci" in name else {"embed_dim": 48, "num_heads": 3}
        vit: Any = timm.create_model(name, depth=2, num_classes=5, **width).eval()
        try:
            model = from_vit(vit)
        except InputError as refusal:
            found[next(reason for reason in REFUSED if reason in str(refusal))] += 1
            continue
        found["fits"] += 1
        if model.patch_embed.num_patches < 300:  # the others take long
            x = torch.randn(1, 3, *vit.patch_embed.img_size)
            with torch.no_grad():
                assert error(model(x), copy.deepcopy(vit).double()(x.double())) <= 2e-5, name
    assert found == {"fits": 124, **REFUSED}


@torch.no_grad()
def test_a_saved_model_is_the_same_and_guards_its_computation(model, tmp_path):
    save_model(model, tmp_path / "out")
    x, file = images(), tmp_path / "out/model.safetensors"
    again = timm.create_model(f"local-dir:{file.parent}", pretrained=True).eval()
    assert torch.equal(again(x), model(x))
    assert torch.equal(load_model(None, file)(x), model(x))
    for change in ({"norm_eps": 1e-5}, {"theta": "gelu_l2"}, {"norm": "weight+bias"}):
        (name,) = change
        with pytest.raises(InputError, match=f"{name} is .*set {name}="):
            load_model(None, file, **change)


def test_preprocessing_and_class_names_come_along():
    cfg = {"mean": (0.1, 0.2, 0.3), "label_names": list("abc"), "license": "cc-by-4.0"}
    cfg |= {"fixed_input_size": False, "test_crop_pct": 1.0}
    how = {"depth": 1, "num_classes": 3, "pretrained_cfg_overlay": cfg}
    model: Any = from_vit(timm.create_model("vit_tiny_patch16_224", **how))
    assert cfg.items() <= model.pretrained_cfg.items()
    assert model.pretrained_cfg["architecture"] == "tokenformer_vit"


def step(model, rate=1e-2):
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.0)
    F.cross_entropy(model.train()(images(10)), torch.arange(10)).backward()
    optimizer.step()
    return model.eval()


@pytest.mark.parametrize("freeze", [None, "old"])
def test_growth_is_exact_and_frozen_old_pairs_stay(model, freeze):
    x, counts = images(), count_pairs(model)
    before, exact = model(x).detach(), copy.deepcopy(model).double()(x.double())
    growth.grow(model, num_qkv_param_tokens=192, num_ffn_param_tokens=320, freeze=freeze)
    # A sum of another length may round differently.
    assert error(copy.deepcopy(model).double()(x.double()), exact) < 1e-13
    step(step(model))
    with torch.no_grad():
        assert error(model(x), before) > 1e-3
        for name, layer in pattention_layers(model).items():
            layer.active = torch.arange(counts[name])
        assert torch.equal(model(x), before) == (freeze == "old")


def test_a_step_moves_keys_values_and_the_bias_of_the_norms(model):
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    assert {"blocks.0.norm1.bias", "blocks.2.mlp.key_param_tokens"} <= before.keys()
    for name, parameter in step(model).named_parameters():
        assert (parameter != before[name]).any(), name


@torch.no_grad()
def test_sizes_are_ranks_of_the_projections():
    vit = build()
    model, x = from_vit(vit), torch.randn(64, 48)
    block = vit.blocks[1]
    weight, bias = (each.double()[:48] for each in (block.attn.qkv.weight, block.attn.qkv.bias))
    bias = bias + weight @ block.norm1.bias.double()
    weight = weight * block.norm1.weight.double()
    weight = weight - weight.mean(dim=1, keepdim=True) + bias[:, None] / 48
    left, sizes, right = torch.linalg.svd(weight)
    shifted = F.layer_norm(x, (48,), eps=1e-6) + 1
    for rank in (48, 24, 5):
        exact = shifted.double() @ (left[:, :rank] * sizes[:rank] @ right[:rank]).T
        cut = growth.extract(model, num_qkv_param_tokens=2 * rank)
        found = cut.blocks[1].attn.query(shifted)
        assert (found - exact).norm() <= 1e-5 * exact.norm()


@torch.no_grad()
def test_nested_extracted_and_pruned_models(model):
    x = images()
    before = model(x)
    growth.nest(model, (0.5,), kinds=["qkv"])
    small = growth.extract(model, 0.5)
    assert torch.equal(model(x), before)
    with at_size(model, 0.5):
        assert torch.equal(model(x), small(x))
    assert small.blocks[0].attn.proj.num_param_tokens == model.blocks[0].attn.proj.num_param_tokens
    whole = model.blocks[0].attn.query.num_param_tokens
    assert small.blocks[0].attn.query.num_param_tokens == whole // 2
    growth.nest(model, ())
    pruned = growth.prune(copy.deepcopy(model), growth.measure_usage(model, [x]), 96, 108, 193)
    # What goes fills counts up, or adds nothing: the outputs stay.
    assert error(pruned(x), before) <= 1e-5


@torch.no_grad()
def test_compiled_and_exported_programs(model, tmp_path):
    x = images()
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    program = torch.export.export(model, (x,), dynamic_shapes=ANY_BATCH).module()
    torch.testing.assert_close(program(x[:5]), model(x[:5]), rtol=1e-4, atol=1e-5)
    pytest.importorskip("onnxscript", reason="torch.onnx.export needs onnxscript")
    runtime = pytest.importorskip("onnxruntime", reason="nothing else runs an ONNX file")
    file = tmp_path / "model.onnx"
    torch.onnx.export(model, (x,), file, dynamic_shapes=ANY_BATCH, verbose=False)
    session = runtime.InferenceSession(file)
    (logits,) = session.run(None, {session.get_inputs()[0].name: x[:5].numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), model(x[:5]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", ["imagenet_base", "deit3_base", "cifar10_micro"])
def test_recipes_do_not_decay_the_bias_of_the_norms(model, config):
    engine = pytest.importorskip("mmengine", reason="pip install '.[train]'")
    load_config = pytest.importorskip("tokenformer_vit.training.config").load_config
    with engine.DefaultScope.overwrite_default_scope("mmpretrain"):
        cfg = load_config(f"configs/{config}.py")
        groups = engine.optim.build_optim_wrapper(model, cfg.optim_wrapper).optimizer.param_groups
    decay = {each: group["weight_decay"] for group in groups for each in group["params"]}
    assert decay[model.blocks[0].mlp.key_param_tokens] > 0
    for block in model.blocks:
        assert decay[block.norm1.bias] == decay[block.norm2.bias] == 0
