"""Measurements and baselines of ablations compute what they say, and leave a run as it is."""

import json
import math

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from masked_lm import MaskedLM
from mmengine.model import ExponentialMovingAverage
from mmengine.registry import DefaultScope
from mmpretrain.registry import MODELS
from mmpretrain.structures import DataSample
from net2net import stack_blocks, widen_mlp
from probes import append_line, diagnose, measured_layers, probe_indices, reconstruct
from torch import nn

import tokenformer_vit.training.language  # noqa: F401  registers CausalLM
from tokenformer_vit.errors import InputError
from tokenformer_vit.language import MASKS, byte_tokenizer, save_language_model, transformer_lm
from tokenformer_vit.layers import Pattention
from tokenformer_vit.layers.split import is_split, split_tokens
from tokenformer_vit.mmpretrain_names import timm_state_dict
from tokenformer_vit.training.config import load_config
from tokenformer_vit.training.export import as_timm_model

SIZES = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2}
TOKENFORMER = {"type": "ProbeBackbone", "model_name": "tokenformer_tiny", **SIZES}
VIT = {"type": "ProbeBackbone", "model_name": "vit_tiny_patch16_224", **SIZES}
TARGETS = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
LORA = {
    "type": "LoRABackbone",
    "module": {**VIT, "type": "TimmClassificationBackbone"},
    **{"alpha": 4, "rank": 2, "targets": [{"type": name} for name in TARGETS]},
}
TOKENS = torch.randint(61, (2, 9))


@pytest.fixture(autouse=True)
def scope():
    with DefaultScope.overwrite_default_scope("mmpretrain"):
        yield


def build(backbone=TOKENFORMER, **more):
    head = {"type": "LinearClsHead", "num_classes": 5, "in_channels": 24}
    preprocessor = {"type": "ClsDataPreprocessor", "mean": [9.0], "std": [2.0], "num_classes": 5}
    own = {"backbone": {**backbone, **more}, "head": head, "data_preprocessor": preprocessor}
    return MODELS.build({"type": "ImageClassifier", **own})


def batch(images):
    return {
        "inputs": torch.randint(256, (images, 3, 16, 16), dtype=torch.uint8),
        "data_samples": [DataSample().set_gt_label(index % 5) for index in range(images)],
    }


def test_gradients_are_those_of_the_cross_entropy_of_all_images():
    classifier, whole = build(drop_path_rate=0.5).train(), batch(10)
    parts = [
        {"inputs": whole["inputs"][part], "data_samples": whole["data_samples"][part]}
        for part in (slice(0, 7), slice(7, 10))
    ]
    measured = diagnose(classifier, parts)
    classifier.eval()
    logits = classifier((whole["inputs"] - 9.0) / 2.0, mode="tensor")
    loss = F.cross_entropy(logits, torch.arange(10) % 5)
    loss.backward()
    assert measured["loss"] == pytest.approx(loss.item(), rel=1e-5)
    names = ["attn.query", "attn.key", "attn.value", "attn.proj", "mlp"]
    assert list(measured["layers"]) == [f"blocks.{i}.{name}" for i in range(2) for name in names]
    for name, layer in measured_layers(classifier).items():
        figures = measured["layers"][name]
        for part in ("key", "value"):
            parameter = getattr(layer, f"{part}_param_tokens")
            assert figures[f"{part}_norm"] == pytest.approx(parameter.norm().item(), rel=1e-5)
            expected = parameter.grad.norm().item()
            assert figures[f"{part}_grad_norm"] == pytest.approx(expected, rel=1e-4)
            assert expected > 0
        assert figures["tau"] == pytest.approx(layer.tau.item())
        assert 0 < figures["entropy"] < 1


def test_gradients_of_a_language_model_are_those_of_all_tokens():
    shape = {"vocab_size": 20, "context_length": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
    model = MODELS.build({"type": "CausalLM", "config": shape}).train()
    rows = torch.randint(20, (7, 9))
    measured = diagnose(model, [{"inputs": rows[:4]}, {"inputs": rows[4:]}])
    loss = model(rows, mode="loss")["loss"]
    loss.backward()
    assert measured["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for name, layer in measured_layers(model).items():
        expected = layer.key_param_tokens.grad.norm().item()
        assert measured["layers"][name]["key_grad_norm"] == pytest.approx(expected, rel=1e-4)


def test_a_text_keeps_its_pairs_under_a_mask(tmp_path):
    shape = {"vocab_size": 300, "context_length": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
    first = MaskedLM(config=shape, masks={"new": "en"})
    save_language_model(first.model, tmp_path, byte_tokenizer())
    torch.save(first.masks.pairs, tmp_path / MASKS)
    growth = {"num_qkv_param_tokens": 32, "num_proj_param_tokens": 32, "init": "random"}
    growth["num_ffn_param_tokens"] = 128
    masks = {"masks": {"new": "fr"}, "growth": growth, "frozen_stem": True}
    second = MaskedLM(checkpoint=str(tmp_path), **masks)
    second.sources = ("en", "fr")
    rows, source = torch.randint(300, (6, 9)), torch.tensor([1, 0, 1, 0, 0, 1])

    def losses(model):
        return torch.stack([row["losses"] for row in model(rows, source, mode="predict")])

    before = losses(second)
    optimizer = torch.optim.AdamW(second.parameters(), lr=0.01, weight_decay=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        second(rows, mode="loss")["loss"].backward()
        optimizer.step()
    english = source == 0
    torch.testing.assert_close(losses(second)[english], losses(first)[english])
    assert losses(second)[~english].mean() < before[~english].mean()
    assert [*second.masks.pairs] == ["en", "fr"]


def measure_one_layer(keys, theta, tokens):
    """Measure a classifier that is a Pattention layer over single tokens of two channels."""
    layer = Pattention(2, 3, len(keys), theta=theta)
    with torch.no_grad():
        layer.key_param_tokens.copy_(keys)
    model = nn.Sequential(layer)
    model.extract_feat, model.head = layer, nn.Identity()
    model.data_preprocessor = lambda data, training: data
    data = {"inputs": tokens, "data_samples": [DataSample().set_gt_label(0) for _ in tokens]}
    return diagnose(model, [data])["layers"]["0"]


def test_entropy_and_kurtosis_of_known_rows():
    keys = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [-1.0, 0.0]])
    figures = measure_one_layer(keys, "softmax", torch.tensor([[1e-3, 0.0], [50.0, 0.0]]))
    # A token for which all pairs are alike, and one that two of the four share.
    assert figures["entropy"] == pytest.approx((1 + math.log(2) / math.log(4)) / 2, abs=1e-4)
    assert figures["kurtosis"] == pytest.approx(-2, abs=1e-4)  # two equal points
    # Under a GELU weights have signs; their sizes are what is compared.
    shares = F.gelu(torch.tensor([1.0, 1.0, -1.0, -1.0])).abs()
    shares = shares / shares.sum()
    expected = -(shares * shares.log()).sum() / math.log(4)
    figures = measure_one_layer(keys, "gelu_l2", torch.tensor([[1.0, 0.0]]))
    assert figures["entropy"] == pytest.approx(expected.item(), rel=1e-4)
    figures = measure_one_layer(torch.zeros(2, 2), "gelu_l2", torch.eye(2))
    assert (figures["entropy"], figures["kurtosis"]) == (None, None)
    assert figures["key_grad_norm"] > 0  # zero keys, random values: it learns


def test_the_measured_model_is_left_as_it_is():
    classifier, images = build(compile=True).train(), [batch(5)]
    expected = diagnose(classifier, images)
    for layer in measured_layers(classifier).values():
        split_tokens(layer, 10)
    for name, parameter in classifier.named_parameters():
        parameter.requires_grad_("mlp" not in name)  # partly frozen
    before = {name: tensor.clone() for name, tensor in classifier.state_dict().items()}
    state = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert diagnose(classifier, images) == expected
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(is_split, measured_layers(classifier).values()))
    assert all(module.training for module in classifier.modules())
    for name, tensor in classifier.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    for name, parameter in classifier.named_parameters():
        assert parameter.grad is None
        assert parameter.requires_grad is ("mlp" not in name)


def test_images_are_of_many_classes_and_lines_go_on_after_a_kill(tmp_path):
    data = type("Data", (list,), {"get_gt_labels": lambda self: np.repeat(range(3), 3)})(range(9))
    assert probe_indices(data, 3) == [0, 3, 6]  # sorted, as folders of classes are
    type(data).get_gt_labels = lambda self: np.tile(range(3), 3)
    assert probe_indices(data, 3) == [0, 1, 2]  # even distances would be one class
    assert probe_indices(data, 100) == list(range(9))
    path = tmp_path / "lines.jsonl"
    path.write_text('{"iteration": 6, "lo')
    append_line(path, {"iteration": 6})
    assert path.read_text().splitlines() == ['{"iteration": 6, "lo', '{"iteration": 6}']


def outside_the_blocks(classifier):
    own = timm_state_dict(classifier.state_dict())
    return {name: own[name] for name in own if not name.startswith(("blocks.", "head."))}


def test_models_with_one_stem_seed_differ_in_their_blocks_alone():
    stems = []
    for index, new in enumerate(({}, {"theta": "softmax", "num_ffn_param_tokens": 40}, VIT)):
        torch.manual_seed(index)
        stems.append(outside_the_blocks(build(TOKENFORMER, **new, stem_seed=7)))
        state = torch.get_rng_state()
        torch.manual_seed(index)
        plain = build(TOKENFORMER, **new)  # blocks and global generator are the same
        assert torch.equal(torch.get_rng_state(), state)
        assert not torch.equal(plain.backbone.model.pos_embed, stems[0]["pos_embed"])
    assert {"patch_embed.proj.weight", "cls_token", "pos_embed", "norm.weight"} <= set(stems[0])
    for stem in stems[1:]:
        assert stem.keys() == stems[0].keys()
        assert all(torch.equal(tensor, stems[0][name]) for name, tensor in stem.items())
    with pytest.raises(InputError, match="stem_seed is 7, but the weights are loaded"):
        build(VIT, stem_seed=7, pretrained=True)


def test_frozen_norms_stay_as_if_there_were_none():
    named = build(VIT, frozen_norms=True).named_parameters()
    frozen = {name: part for name, part in named if not part.requires_grad}
    assert len(frozen) == 8
    assert all(".norm" in name and (part == part[0]).all() for name, part in frozen.items())
    with pytest.raises(InputError, match="set frozen_norms=False"):
        build(norm="none", frozen_norms=True)


def test_tau_of_the_smaller_sizes_may_be_kept():
    for how, tau in (("scaled", 6**0.5), ("kept", 24**0.5)):
        layer = build(nested=(0.25,), nested_tau=how).backbone.model.blocks[0].attn.query
        assert layer.nested_tau[0].item() == pytest.approx(tau)


@torch.no_grad()
def test_lora_trains_its_products_and_becomes_a_plain_model():
    classifier = build(LORA).eval()
    trained = {name for name, part in classifier.named_parameters() if part.requires_grad}
    assert {"lora_" in name or name.startswith("head.fc.") for name in trained} == {True}
    assert len(trained) == 2 * 2 * len(TARGETS) + 2
    images = torch.randn(4, 3, 16, 16)
    plain = as_timm_model(classifier).eval()
    torch.testing.assert_close(plain(images), classifier(images, mode="tensor"))
    for name, parameter in classifier.named_parameters():
        if "lora_up" in name:
            nn.init.normal_(parameter)
    tuned = as_timm_model(classifier).eval()
    assert not torch.allclose(tuned(images), plain(images), atol=0.1)
    torch.testing.assert_close(tuned(images), classifier(images, mode="tensor"))
    average = ExponentialMovingAverage(classifier).state_dict()
    assert {name.removeprefix("module.") for name in average} == {"steps", *classifier.state_dict()}


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_a_wider_transformer_computes_what_it_did(positions):
    model = transformer_lm(61, 40, 32, 2, 2, hidden_features=48, positions=positions)
    with torch.no_grad():  # so that every weight and bias tells
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model = model.double().eval()
    before = model(TOKENS).logits
    assert widen_mlp(model, 131) is model
    torch.testing.assert_close(model(TOKENS).logits, before, rtol=0, atol=1e-11)
    weights = [part for name, part in model.named_parameters() if 131 in part.shape]
    assert len(weights) == 6  # two matrices and a bias in each block
    with pytest.raises(InputError, match="a TokenFormer grows in its pairs"):
        stack_blocks(model, 4)


def test_a_vit_and_its_optimizer_go_on():
    vit = timm.create_model("vit_tiny_patch16_224", **SIZES, num_classes=3).eval()
    groups = [{"params": [p for p in vit.parameters() if (p.dim() > 1) == many]} for many in (1, 0)]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    x = torch.randn(4, 3, 16, 16)

    def step():
        optimizer.zero_grad()
        F.cross_entropy(vit(x), torch.tensor([0, 1, 2, 1])).backward()
        optimizer.step()

    step()
    before, moments = vit(x), optimizer.state[vit.blocks[0].mlp.fc2.weight]["exp_avg"].clone()
    widen_mlp(vit, 130, optimizer=optimizer)
    torch.testing.assert_close(vit(x), before, rtol=0, atol=1e-5)
    carried = optimizer.state[vit.blocks[0].mlp.fc2.weight]["exp_avg"]
    assert torch.equal(carried[:, :96], moments)
    assert not carried[:, 96:].any()
    step()
    stack_blocks(vit, 5, optimizer=optimizer)
    places = {parameter: place for place, parameter in enumerate(vit.parameters())}
    for group in optimizer.param_groups:  # PyTorch loads by position
        assert [*map(places.get, group["params"])] == sorted(map(places.get, group["params"]))
    step()
    assert not torch.equal(vit.blocks[2].mlp.fc1.weight, vit.blocks[0].mlp.fc1.weight)


def test_reconstructions_have_the_true_pixels_where_they_are_visible():
    cfg = load_config("configs/mae_cifar10_micro_pretrain.py")
    model = MODELS.build(cfg.model).eval()
    images = torch.randn(2, 3, 32, 32)
    original, masked, filled = reconstruct(model, images).unbind(dim=1)
    assert torch.equal(original, images)
    hidden = masked == 0
    assert hidden.float().mean().item() == pytest.approx(0.75)
    assert torch.equal(filled[~hidden], images[~hidden])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Diagnostics", "Compression", "Net2Net"])
def test_hooks_in_a_run(kind, config, digits, command, tmp_path):
    hooks = {
        "Diagnostics": {"interval": 2, "examples": 20},
        "Compression": {"keep": [0.25], "images": 20},
        "Net2Net": {"schedule": [{"epoch": 1, "depth": 2}]},
    }
    hook = {"type": f"{kind}Hook", **hooks[kind]}
    path = tmp_path / "probed.py"
    imports = ["tokenformer_vit.training", "probes", "net2net"]
    shape = {**SIZES, "img_size": 8, "type": "TimmClassificationBackbone", "depth": 1}
    shape |= {"model_name": "vit_tiny_patch16_224", "_delete_": True, "embed_dim": 96}
    model = f"model = dict(backbone={shape!r})\n" if kind == "Net2Net" else ""
    path.write_text(
        f"_base_ = {str(config)!r}\n{model}custom_imports = dict(imports={imports!r})\n"
        f"custom_hooks = [{hook!r}]\n"
    )
    done = command(
        "train", *map(str, (path, "--data-root", digits, "--work-dir", tmp_path / "run"))
    )
    assert done.status == 0, done.output
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    if kind == "Diagnostics":
        lines = (tmp_path / "run" / "diagnostics.jsonl").read_text().splitlines()
        assert [json.loads(line)["epoch"] for line in lines] == [0, 1, 2]
        assert json.loads(lines[0])["examples"] == 20
    elif kind == "Compression":
        assert [point["method"] for point in record["compression"]] == ["prune", "top-k"]
        model = timm.create_model(f"local-dir:{tmp_path / 'run' / 'nested'}", pretrained=True)
        assert model.sizes == (0.25, 1.0)
    else:
        model = timm.create_model(f"local-dir:{tmp_path / 'run'}", pretrained=True)
        assert len(model.blocks) == 2
