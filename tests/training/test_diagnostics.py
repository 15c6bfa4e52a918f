"""Measurements of the Pattention layers are right, and leave the run as it is."""

import json
import math
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mmengine.registry import HOOKS, DefaultScope
from mmengine.runner import Runner
from mmpretrain.registry import MODELS
from mmpretrain.structures import DataSample

import tokenformer_vit.training.language  # noqa: F401  registers CausalLM
from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention
from tokenformer_vit.layers.split import is_split, split_tokens
from tokenformer_vit.training import DiagnosticsHook, read_diagnostics
from tokenformer_vit.training.config import load_config
from tokenformer_vit.training.diagnostics import (
    append_line,
    diagnose,
    measured_layers,
    probe_indices,
)
from tokenformer_vit.training.reports import read_scalars

HOOK = {"type": "DiagnosticsHook"}
FIGURES = {
    "key_grad_norm",
    "value_grad_norm",
    "key_norm",
    "value_norm",
    "entropy",
    "kurtosis",
    "tau",
}


@pytest.fixture(autouse=True)
def scope():
    with DefaultScope.overwrite_default_scope("mmpretrain"):
        yield


def build(**backbone):
    return MODELS.build(
        {
            "type": "ImageClassifier",
            "backbone": {
                "type": "TimmClassificationBackbone",
                "model_name": "tokenformer_tiny",
                "img_size": 16,
                "patch_size": 4,
                "embed_dim": 24,
                "depth": 2,
                "num_heads": 2,
                "drop_path_rate": 0.5,
                **backbone,
            },
            "head": {"type": "LinearClsHead", "num_classes": 5, "in_channels": 24},
            "data_preprocessor": {
                "type": "ClsDataPreprocessor",
                "mean": [9.0],
                "std": [2.0],
                "num_classes": 5,
            },
            "train_cfg": {"augments": [{"type": "Mixup", "alpha": 0.8}]},
        }
    )


def batch(images):
    return {
        "inputs": torch.randint(256, (images, 3, 16, 16), dtype=torch.uint8),
        "data_samples": [DataSample().set_gt_label(index % 5) for index in range(images)],
    }


def test_gradients_are_those_of_the_cross_entropy_of_all_images():
    classifier, whole = build().train(), batch(10)
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
        assert figures.keys() == FIGURES
        for part, parameter in (
            ("key", layer.key_param_tokens),
            ("value", layer.value_param_tokens),
        ):
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
    layers = measured_layers(model)
    assert list(layers)[4:6] == ["blocks.0.mlp", "blocks.1.attn.query"]
    for name, layer in layers.items():
        expected = layer.key_param_tokens.grad.norm().item()
        assert measured["layers"][name]["key_grad_norm"] == pytest.approx(expected, rel=1e-4)
        assert expected > 0


def one_layer(keys, theta):
    """A classifier that is a Pattention layer over single tokens of two channels."""
    layer = Pattention(2, 3, len(keys), theta=theta)
    with torch.no_grad():
        layer.key_param_tokens.copy_(keys)
    model = torch.nn.Sequential(layer)
    model.extract_feat, model.head = layer, torch.nn.Identity()
    model.data_preprocessor = lambda data, training: data
    return model


def measure_one_layer(keys, theta, tokens):
    data = {"inputs": tokens, "data_samples": [DataSample().set_gt_label(0) for _ in tokens]}
    return diagnose(one_layer(keys, theta), [data])["layers"]["0"]


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


def test_gates_and_masks_are_measured_as_the_layer_computes():
    classifier = build(theta="softmax", pattention_args={"gate": "learned"})
    layer, images = classifier.backbone.model.blocks[0].mlp, [batch(5)]
    seen = []
    layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    before = diagnose(classifier, images)["layers"]["blocks.0.mlp"]
    with torch.no_grad():
        layer.gate.copy_(torch.rand(96) ** 4)
        layer.gate[:40] = 0  # closed
    for active in (None, torch.arange(30, 90)):
        layer.active = active
        seen.clear()
        figures = diagnose(classifier, images)["layers"]["blocks.0.mlp"]
        weights = layer.weights(seen[0]).double().flatten(0, -2)
        shares = weights / weights.sum(dim=-1, keepdim=True)
        entropy = -torch.special.xlogy(shares, shares).sum(-1).mean() / math.log(shares.shape[1])
        assert figures["entropy"] == pytest.approx(entropy.item(), rel=1e-5)
        assert figures["entropy"] < before["entropy"] - 0.05


def test_the_figures_of_a_split_layer_are_those_of_an_ordinary_one():
    classifier, images = build(), [batch(5)]
    expected = diagnose(classifier, images)
    for layer in measured_layers(classifier).values():
        split_tokens(layer, 10)
    assert diagnose(classifier, images) == expected
    assert all(map(is_split, measured_layers(classifier).values()))


def test_normal_scores_have_no_excess_kurtosis():
    figures = measure_one_layer(torch.randn(20_000, 2), "gelu_l2", torch.randn(8, 2))
    assert figures["kurtosis"] == pytest.approx(0, abs=0.2)


def test_what_is_undefined_does_not_count_and_is_no_nan():
    keys = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    tokens = torch.tensor([[0.0, 1.0], [1.0, 0.0]])  # the first meets scores of zero
    figures, alone = (measure_one_layer(keys, "gelu_l2", t) for t in (tokens, tokens[1:]))
    assert figures["entropy"] == alone["entropy"]
    assert figures["kurtosis"] == alone["kurtosis"]
    figures = measure_one_layer(torch.zeros(2, 2), "gelu_l2", tokens)
    assert (figures["entropy"], figures["kurtosis"]) == (None, None)
    assert figures["key_grad_norm"] > 0  # zero keys, random values: it learns


def test_the_model_is_left_as_it_is():
    classifier = build(compile=True).bfloat16().train()
    for name, parameter in classifier.named_parameters():
        parameter.requires_grad_("mlp" not in name)  # partly frozen
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    before = {name: tensor.clone() for name, tensor in classifier.state_dict().items()}
    frames = dict(torch._dynamo.utils.counters["frames"])
    images = [batch(5)]
    state = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        measured = diagnose(classifier, images)
    assert torch.equal(torch.get_rng_state(), state)
    assert dict(torch._dynamo.utils.counters["frames"]) == frames  # nothing was compiled
    assert all(block._compiled_call_impl for block in classifier.backbone.model.blocks)
    assert all(module.training for module in classifier.modules())
    assert not any(module._forward_pre_hooks for module in classifier.modules())
    for name, tensor in classifier.state_dict().items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor, before[name]), name
    for name, parameter in classifier.named_parameters():
        assert parameter.requires_grad is ("mlp" not in name)
        assert parameter.grad is None or (parameter.grad == 1).all()
    # What is frozen is measured as well, and float32 shows no trace of autocast.
    assert all(layer["key_grad_norm"] > 0 for layer in measured["layers"].values())
    assert measured == diagnose(classifier.float(), images)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([0, 0, 0, 1, 1, 1, 2, 2, 2], [0, 3, 6]),  # sorted, as folders of classes are
        ([0, 1, 2, 0, 1, 2, 0, 1, 2], [0, 1, 2]),  # even distances would be one class
        (None, [0, 3, 6]),
    ],
)
def test_images_are_of_many_classes(labels, expected):
    class Data(list):
        pass

    data = Data(range(9))
    if labels:
        data.get_gt_labels = lambda: np.array(labels)
    assert probe_indices(data, 3) == expected
    assert probe_indices(data, 100) == list(range(9))


def test_lines_of_a_resumed_run_are_merged(tmp_path):
    path = tmp_path / "diagnostics.jsonl"
    for iteration, loss in ((0, 3.0), (6, 2.0)):
        append_line(path, {"iteration": iteration, "loss": loss})
    with path.open("a") as file:
        file.write('{"iteration": 12, "lo')  # a killed run
    assert list(read_diagnostics(path)) == [0, 6]
    append_line(path, {"iteration": 6, "loss": 2.5})
    append_line(path, {"iteration": 12, "loss": 1.0})
    records = read_diagnostics(path)
    assert {step: record["loss"] for step, record in records.items()} == {0: 3.0, 6: 2.5, 12: 1.0}


def test_errors_have_one_line(tmp_path):
    for arguments in ({"interval": 0}, {"examples": 0}):
        (name,) = arguments
        with pytest.raises(InputError, match=f"{name} of DiagnosticsHook is 0; give at least 1"):
            HOOKS.build({**HOOK, **arguments})
    with pytest.raises(InputError, match=r"there is no file .*diagnostics"):
        read_diagnostics(tmp_path / "diagnostics.jsonl")
    with pytest.raises(InputError, match=r"cannot write .* \(Is a directory\)"):
        append_line(tmp_path, {})
    runner = SimpleNamespace(model=build(), val_loop=None)
    with pytest.raises(InputError, match="needs validation data, but the run"):
        DiagnosticsHook().before_train(runner)


def run(config, data_root, work_dir, *hooks, **options):
    """Train three epochs of six iterations in this process; return the runner and the losses."""
    cfg = load_config(config, options, str(data_root), work_dir=str(work_dir))
    for loader in (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader):
        loader.update(num_workers=0, persistent_workers=False)
    # Draws a random number for each image that is read, and leaves the image.
    cfg.val_dataloader.dataset.pipeline.insert(1, {"type": "RandomFlip", "prob": 0.0})
    cfg.custom_hooks = list(hooks)
    cfg.experiment_name = f"{work_dir.name}_{time.monotonic_ns()}"
    cfg.log_level = "ERROR"
    runner = Runner.from_cfg(cfg)
    runner.train()
    train, val = read_scalars(sorted(work_dir.glob("*/vis_data/scalars.json")))
    return runner, {step: record["loss"] for step, record in train.items()}, val


def state_of(runner):
    return torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002


@pytest.fixture(scope="module")
def plain(config, data_root, tmp_path_factory):
    work_dir = tmp_path_factory.mktemp("runs") / "plain"
    with DefaultScope.overwrite_default_scope("mmpretrain"):
        runner, losses, val = run(config, data_root, work_dir)
    return losses, val, state_of(runner), (work_dir / "model.safetensors").read_bytes()


def test_a_run_is_the_same_with_and_without(config, data_root, tmp_path, plain):
    runner, losses, val = run(config, data_root, tmp_path, {**HOOK, "interval": 2, "examples": 20})
    expected, expected_val, states, weights = plain
    assert list(losses) == list(range(1, 19))
    assert losses == expected
    assert {k: v["accuracy/top1"] for k, v in val.items()} == {
        k: v["accuracy/top1"] for k, v in expected_val.items()
    }
    torch_state, *others = state_of(runner)
    assert torch.equal(torch_state, states[0])
    assert others == list(states[1:])
    assert (tmp_path / "model.safetensors").read_bytes() == weights

    records = read_diagnostics(tmp_path / "diagnostics.jsonl")
    steps = [(record["iteration"], record["epoch"]) for record in records.values()]
    assert steps == [(0, 0), (6, 1), (12, 2), (18, 3)]  # every second, the first and the last
    first, *_, last = records.values()
    assert first["examples"] == last["examples"] == 20
    assert first["loss"] == pytest.approx(math.log(3), abs=1e-5)  # the head starts at zero
    assert len(first["layers"]) == 10
    for layer in last["layers"].values():
        assert layer.keys() == FIGURES
        assert all(isinstance(number, float) for number in layer.values())
    # It is the trained model of the end, not its average, that the last line is of.
    keys = runner.model.backbone.model.blocks[1].mlp.key_param_tokens
    measured = last["layers"]["blocks.1.mlp"]["key_norm"]
    assert measured == pytest.approx(keys.norm().item(), rel=1e-6)
    assert measured != first["layers"]["blocks.1.mlp"]["key_norm"]

    # Resumed at its end, the run measures its last epoch again, with the same result.
    text = (tmp_path / "diagnostics.jsonl").read_text()
    last_checkpoint = (tmp_path / "last_checkpoint").read_text()
    run(
        config,
        data_root,
        tmp_path,
        {**HOOK, "interval": 2, "examples": 20},
        resume=True,
        load_from=last_checkpoint,
    )
    again = (tmp_path / "diagnostics.jsonl").read_text()
    assert again.startswith(text)
    lines = [json.loads(line) for line in again.splitlines()]
    assert len(lines) == 5
    assert lines[-1] == lines[-2]


def test_a_model_without_pattention_is_trained_and_not_measured(config, data_root, tmp_path):
    vit = config.parent / "vit.py"
    vit.write_text(
        f'_base_ = "{config}"\n'
        "model = dict(backbone=dict(_delete_=True, type='TimmClassificationBackbone', "
        "model_name='vit_tiny_patch16_224', img_size=8, patch_size=4, embed_dim=24, depth=1, "
        "num_heads=2))\n"
    )
    run(vit, data_root, tmp_path, HOOK, **{"train_cfg.max_epochs": 2})
    assert (tmp_path / "model.safetensors").is_file()
    assert not (tmp_path / "diagnostics.jsonl").exists()


@pytest.mark.slow
def test_two_processes_compiled_under_autocast(train, config, tmp_path):
    path = tmp_path / "measured.py"
    path.write_text(f'_base_ = "{config}"\ncustom_hooks = [dict(type="DiagnosticsHook")]\n')
    train.arguments[0] = str(path)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    try:
        train(tmp_path, "--launcher", "pytorch", "--amp", "--compile", launcher=launcher)
    finally:
        train.arguments[0] = str(config)
    lines = (tmp_path / "diagnostics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [0, 3, 6, 9]  # once, not by each
    assert json.loads(lines[-1])["examples"] == 48
