"""Measurements and baselines of ablations compute what they say, and leave a run as it is."""

import copy
import math
from types import SimpleNamespace

import pytest
import timm
import torch
import torch.nn.functional as F
from mmengine.registry import DefaultScope
from mmpretrain.registry import MODELS
from mmpretrain.structures import DataSample
from net2net import Net2NetHook, stack_blocks, widen_mlp
from probes import DiagnosticsHook, HeldOutImages, diagnose, part_of
from torch import nn

import tokenformer_vit.training  # noqa: F401  registers the backbone
from tokenformer_vit.layers import Pattention
from tokenformer_vit.models.sizes import find_layers
from tokenformer_vit.training.export import as_timm_model

SIZES = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2}
TOKENFORMER = {"type": "ProbeBackbone", "model_name": "tokenformer_tiny", **SIZES}
VIT = {"type": "ProbeBackbone", "model_name": "vit_tiny_patch16_224", **SIZES}


@pytest.fixture(autouse=True)
def scope():
    with DefaultScope.overwrite_default_scope("mmpretrain"):
        yield


def build(backbone=TOKENFORMER, **more):
    head = {"type": "LinearClsHead", "num_classes": 5, "in_channels": 24}
    preprocessor = {"type": "ClsDataPreprocessor", "mean": [9.0], "std": [2.0], "num_classes": 5}
    own = {"backbone": {**backbone, **more}, "head": head, "data_preprocessor": preprocessor}
    return MODELS.build({"type": "ImageClassifier", **own})


def figures(model, batch):
    return {(row["layer"], row["kind"]): row["value"] for row in diagnose(model, batch)}


def test_gradients_are_those_of_the_cross_entropy():
    classifier = build(drop_path_rate=0.5).train()
    images = torch.randint(256, (10, 3, 16, 16), dtype=torch.uint8)
    samples = [DataSample().set_gt_label(index % 5) for index in range(10)]
    found = figures(classifier, {"inputs": images, "data_samples": samples})
    assert all(module.training for module in classifier.modules())
    logits = classifier.eval()((images - 9.0) / 2.0, mode="tensor")
    F.cross_entropy(logits, torch.arange(10) % 5).backward()
    for name, layer in find_layers(classifier.backbone.model).items():
        for part in ("key", "value"):
            expected = getattr(layer, f"{part}_param_tokens").grad.norm().item()
            assert found[name, f"{part}_grad_norm"] == pytest.approx(expected, rel=1e-4)
            assert expected > 0


def test_a_model_without_pairs_is_not_measured():
    DiagnosticsHook().after_val_iter(SimpleNamespace(model=build(VIT)), 0, {})


def test_entropy_and_kurtosis_of_known_rows():
    layer = Pattention(2, 3, 4, theta="softmax")
    with torch.no_grad():
        layer.key_param_tokens.copy_(torch.tensor([[1.0, 0], [1, 0], [-1, 0], [-1, 0]]))
    model = nn.Sequential(layer)
    model.extract_feat, model.head = layer, nn.Identity()
    model.data_preprocessor = lambda data, training: data
    tokens, samples = torch.tensor([[1e-3, 0.0], [50.0, 0.0]]), [DataSample().set_gt_label(0)] * 2
    found = figures(model, {"inputs": tokens, "data_samples": samples})
    # A token for which all pairs are alike, and one that two of the four share.
    assert found["0", "entropy"] == pytest.approx((1 + math.log(2) / math.log(4)) / 2, abs=1e-4)
    assert found["0", "kurtosis"] == pytest.approx(-2, abs=1e-4)  # two equal points


def test_models_with_one_stem_seed_differ_in_their_blocks_alone():
    stems = []
    for index, new in enumerate(({}, {"theta": "softmax", "num_ffn_param_tokens": 40}, VIT)):
        torch.manual_seed(index)
        state = as_timm_model(build(TOKENFORMER, **new, stem_seed=7)).state_dict()
        names = [name for name in state if not name.startswith(("blocks.", "head."))]
        stems.append({name: state[name] for name in names})
    assert {"patch_embed.proj.weight", "cls_token", "pos_embed", "norm.weight"} <= set(stems[0])
    for stem in stems[1:]:
        assert stem.keys() == stems[0].keys()
        assert all(torch.equal(tensor, stems[0][name]) for name, tensor in stem.items())


@torch.no_grad()
def test_lora_becomes_a_plain_model():
    targets = [{"type": name} for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]
    module = {**VIT, "type": "TimmClassificationBackbone"}
    lora = {"type": "LoRABackbone", "module": module, "alpha": 4, "rank": 2, "targets": targets}
    classifier, images = build(lora).eval(), torch.randn(4, 3, 16, 16)
    for name, parameter in classifier.named_parameters():
        assert parameter.requires_grad == ("lora_" in name or name.startswith("head.fc."))
        if "lora_up" in name:
            nn.init.normal_(parameter, std=0.1)
    expected = classifier(images, mode="tensor")
    torch.testing.assert_close(as_timm_model(classifier).eval()(images), expected)


def test_a_text_keeps_its_pairs_under_a_mask(tmp_path):
    pytest.importorskip("transformers")
    from masked_lm import MASKS, MaskedLM

    from tokenformer_vit.language import byte_tokenizer, save_language_model

    shape = {"vocab_size": 300, "context_length": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
    first = MaskedLM(config=shape, masks={"new": "en"})
    save_language_model(first.model, tmp_path, byte_tokenizer())
    torch.save(first.masks, tmp_path / MASKS)
    growth = {"num_qkv_param_tokens": 32, "num_proj_param_tokens": 32, "num_ffn_param_tokens": 128}
    more = {"masks": {"new": "fr"}, "growth": {**growth, "init": "random"}, "frozen_stem": True}
    second = MaskedLM(checkpoint=str(tmp_path), **more)
    second.sources = ("en", "fr")
    rows, source = torch.randint(300, (6, 9)), torch.tensor([1, 0, 1, 0, 0, 1])

    def losses(model):
        return torch.stack([row["losses"] for row in model(rows, source, mode="predict")])

    before, optimizer = losses(second), torch.optim.AdamW(second.parameters(), 0.01)
    for _ in range(3):
        optimizer.zero_grad()
        second(rows, mode="loss")["loss"].backward()
        optimizer.step()
    english = source == 0
    torch.testing.assert_close(losses(second)[english], losses(first)[english])
    assert losses(second)[~english].mean() < before[~english].mean()


def test_held_out_images_are_not_trained_on(tmp_path):
    for index in range(40):
        folder = tmp_path / "ab"[index % 2]
        folder.mkdir(exist_ok=True)
        (folder / f"{index}.png").touch()
    dataset = {"type": "CustomDataset", "data_root": str(tmp_path), "pipeline": []}
    parts = [HeldOutImages(dataset, held_out) for held_out in (False, True)]
    names = [{part.get_data_info(i)["img_path"] for i in range(len(part))} for part in parts]
    assert [*map(len, names)] == [36, 4]
    assert not names[0] & names[1]
    assert len(part_of(60_000, held_out=True)) == 5000


def test_a_wider_gpt2_computes_what_it_did():
    pytest.importorskip("transformers")
    from tokenformer_vit.language import transformer_lm

    model, tokens = transformer_lm(61, 40, 32, 2, 2, hidden_features=48), torch.randint(61, (2, 9))
    with torch.no_grad():  # so that every weight and bias tells
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    before, resumed = model.double().eval()(tokens).logits, copy.deepcopy(model)
    widen_mlp(model, 131)
    torch.testing.assert_close(model(tokens).logits, before, rtol=0, atol=1e-11)
    assert sum(131 in part.shape for part in model.parameters()) == 6  # of two blocks
    hub, log = SimpleNamespace(runtime_info={"seed": 0}), SimpleNamespace(info=print)
    runner = SimpleNamespace(model=resumed, optim_wrapper=None, message_hub=hub, hooks=[])
    runner.logger = log
    hook = Net2NetHook([{"iteration": 1, "hidden_features": 131}])
    hook.after_load_checkpoint(runner, {"state_dict": model.state_dict()})
    resumed.load_state_dict(model.state_dict())


def test_a_vit_and_its_optimizer_go_on():
    vit = timm.create_model("vit_tiny_patch16_224", **SIZES, num_classes=3).eval()
    optimizer, x = torch.optim.AdamW(vit.parameters(), lr=1e-3), torch.randn(4, 3, 16, 16)

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
    stack_blocks(vit, 5, optimizer=optimizer)
    assert {*optimizer.param_groups[0]["params"]} == {*vit.parameters()}
    step()
    assert not torch.equal(vit.blocks[2].mlp.fc1.weight, vit.blocks[0].mlp.fc1.weight)
