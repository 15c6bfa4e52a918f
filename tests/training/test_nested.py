"""Several sizes of one model in a training step: what is drawn, computed, measured and refused."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
import torch.nn.functional as F
from mmengine.registry import DefaultScope
from mmpretrain.registry import MODELS

from tokenformer_vit.benchmarking.costs import training_flops
from tokenformer_vit.errors import InputError
from tokenformer_vit.models.sizes import at_size
from tokenformer_vit.training import AccuracyAndLoss, CompressionHook, GrowthHook, SizeRule
from tokenformer_vit.training.config import load_config
from tokenformer_vit.training.reports import read_scalars

ROOT = Path(__file__).resolve().parents[2]
SIZES = (0.25, 0.5, 0.75, 1.0)
CLASSES = 3
BACKBONE = {
    "type": "TimmClassificationBackbone",
    "model_name": "tokenformer_tiny",
    **{"img_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 1, "num_heads": 2},
}


def build(rule, backbone=None):
    model = {
        "type": "NestedClassifier",
        "size_rule": rule,
        "backbone": {**BACKBONE, "nested": SIZES[:-1], **(backbone or {})},
        "head": {
            "type": "LabelHead",
            **{"num_classes": CLASSES, "in_channels": 24},
            "loss": {"type": "LabelSmoothLoss", "label_smooth_val": 0.1, "mode": "original"},
        },
    }
    with DefaultScope.overwrite_default_scope("mmpretrain"):
        return MODELS.build(model)


@pytest.fixture
def batch():
    """Twelve images and their scores after a mixup."""
    return torch.randn(12, 3, 8, 8), torch.randn(12, CLASSES).softmax(dim=1)


def logits(model, images, size):
    with at_size(model.sized, size):
        return model.head(model.extract_feat(images))


@pytest.mark.parametrize("between", [False, True])
def test_the_sizes_of_a_step_depend_on_seed_and_iteration(between):
    rules = {name: SizeRule(rule=name, between=between) for name in ("one", "sandwich", "all")}
    rules["parts"] = SizeRule(rule="parts", between=between)
    for name, rule in rules.items():
        drawn = [rule.draw(SIZES, 5, iteration) for iteration in range(50)]
        assert drawn == [rule.draw(SIZES, 5, iteration) for iteration in range(50)]
        assert all(list(sizes) == sorted(sizes, reverse=True) for sizes in drawn)
        assert {len(sizes) for sizes in drawn} == {{"one": 1, "sandwich": 3}.get(name, 4)}
        if name != "one":
            assert all((sizes[0], sizes[-1]) == (1.0, 0.25) for sizes in drawn)
        found = {size for sizes in drawn for size in sizes}
        assert found == set(SIZES) if not between else found - set(SIZES)
        if between or name in ("one", "sandwich"):
            assert len(set(drawn)) > 1
            assert drawn != [rule.draw(SIZES, 6, iteration) for iteration in range(50)]
    assert len(SizeRule(inner=2).draw(SIZES, 0, 0)) == len(SizeRule(inner=9).draw(SIZES, 0, 0)) == 4


@pytest.mark.parametrize("count", [1, 2, 3, 12, 128])
def test_parts_divide_a_batch(count):
    parts = SizeRule(rule="parts", full_share=0.4).divide(SIZES[::-1], count)
    assert [index for _, part in parts for index in range(count)[part]] == list(range(count))
    for size, part in parts:
        assert abs(part.stop - part.start - count * (0.4 if size == 1 else 0.2)) <= 1


@pytest.mark.parametrize("rule", ["one", "sandwich", "all", "parts"])
def test_the_loss_is_the_mean_over_images_and_sizes(rule, batch):
    model = build({"rule": rule})
    images, scores = batch
    for iteration in range(3):
        model.draw_sizes(7, iteration)
        losses = []
        for size, part in SizeRule(rule=rule).divide(
            SizeRule(rule=rule).draw(SIZES, 7, iteration), len(images)
        ):
            own = logits(model, images[part], size)
            losses.append(-(0.9 * scores[part] + 0.1 / CLASSES) * own.log_softmax(dim=1))
        expected = torch.cat(losses).sum(dim=1).mean()
        torch.testing.assert_close(model.loss(images, scores)["loss"], expected)
    assert model.sized.blocks[0].mlp.size is None  # afterwards all pairs are in use


def test_smaller_sizes_learn_what_the_largest_predicts(batch):
    model = build({"rule": "all", "distill": True})
    images, scores = batch
    model.loss(images, scores)["loss"].backward()
    own = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    teacher = logits(model, images, 1.0)
    losses = [F.cross_entropy(teacher, 0.9 * scores + 0.1 / CLASSES)]
    for size in SIZES[:-1]:
        losses.append(F.cross_entropy(logits(model, images, size), teacher.detach().softmax(1)))
    (sum(losses) / 4).backward()
    for each, parameter in zip(own, model.parameters(), strict=True):
        torch.testing.assert_close(each, parameter.grad)


def test_predictions_and_metrics_of_every_size(batch):
    model = build({"rule": "parts"}).eval()
    torch.nn.init.normal_(model.head.fc.weight)
    images, labels = batch[0], torch.randint(0, CLASSES, (12,))
    metric = AccuracyAndLoss(topk=(1,))
    with torch.no_grad():
        for part in (slice(0, 8), slice(8, 12)):
            samples = [sample.to_dict() for sample in model.predict(images[part])]
            for sample, label in zip(samples, labels[part], strict=True):
                sample["gt_label"] = label[None]
            metric.process(None, samples)
        found = metric.evaluate(12)
        for size in SIZES:
            own = logits(model, images, size)
            name = "accuracy/top1" if size == 1 else f"accuracy/top1_at_{size:g}"
            right = (own.argmax(dim=1) == labels).float().mean()
            assert found.pop(name) == pytest.approx(100 * right.item())
    expected = F.cross_entropy(logits(model, images, 1.0), labels).item()
    assert found == {"cross_entropy": pytest.approx(expected, rel=1e-5)}


def test_tau_of_the_smaller_sizes_may_be_kept():
    for how, tau in (("scaled", 6**0.5), ("kept", 24**0.5)):
        layer = build({}, {"nested_tau": how}).sized.blocks[0].attn.query
        assert layer.nested_tau[0].item() == pytest.approx(tau)


@pytest.mark.parametrize(
    "backbone",
    [{"nested": ()}, {"nested": [{"qkv": 0.5}]}, {"model_name": "vit_tiny_patch16_224"}],
)
def test_a_model_without_shares_is_refused(backbone):
    nested = {} if "model_name" in backbone else {"nested": ()}
    model = {"type": "NestedClassifier", "size_rule": {}, "head": None}
    with (
        DefaultScope.overwrite_default_scope("mmpretrain"),
        pytest.raises(InputError, match=r"nested=\(0\.25, 0\.5, 0\.75\)"),
    ):
        MODELS.build({**model, "backbone": {**BACKBONE, **nested, **backbone}})


def test_a_batch_without_an_image_for_a_size_is_refused():
    model = build({"rule": "parts"})
    model.check_batch(6)
    with pytest.raises(InputError, match=r"batch_size is 4, .* 4 sizes: increase it"):
        model.check_batch(4)
    model.set_rule({"rule": "all"})
    model.check_batch(1)


def test_gradient_checkpointing_is_refused(batch):
    model = build({})
    model.sized.set_grad_checkpointing()
    with pytest.raises(InputError, match="gradient checkpointing is on"):
        model.loss(*batch)


@pytest.mark.parametrize("backbone", [{"model_name": "vit_tiny_patch16_224"}, None])
def test_what_cannot_be_compressed_is_refused_before_the_training(backbone):
    hook, model = CompressionHook([0.5]), torch.nn.Identity()
    if backbone:
        with DefaultScope.overwrite_default_scope("mmpretrain"):
            model.backbone = MODELS.build({**BACKBONE, **backbone})
    with pytest.raises(InputError, match="remove the hook"):
        hook.before_train(SimpleNamespace(model=model))
    with pytest.raises(InputError, match=r"\[0\.5, 1\.5\]: give shares"):
        CompressionHook([0.5, 1.5])


def test_a_step_costs_what_the_readme_says():
    cfg = load_config(ROOT / "configs" / "imagenet_base_nested.py")
    with torch.device("meta"), DefaultScope.overwrite_default_scope("mmpretrain"):
        model = MODELS.build({**cfg.model, "train_cfg": None})
    text = (ROOT / "configs" / "README.md").read_text(encoding="utf-8")
    stated = dict(re.findall(r"^\| `(\w+)` \|.*\| × ([\d.]+) \|", text, re.MULTILINE))
    assert set(stated) == {"sandwich", "all", "parts", "one"}
    for rule, times in stated.items():
        model.set_rule({"rule": rule})
        mean = model.mean_flops(64) / training_flops(model.sized)
        assert mean == pytest.approx(float(times), abs=0.01)


NESTED = """
model = dict(
    type="NestedClassifier",
    size_rule=dict(rule="sandwich", distill=True),
    backbone=dict(nested=(0.25, 0.5, 0.75)),
)
train_cfg = dict(max_epochs=2)
custom_hooks = [dict(type="CostHook")]
"""


@pytest.fixture
def nested(train, config, tmp_path):
    """Return the command `train` with a nested model, and the path of its config."""
    path = tmp_path / "nested.py"
    path.write_text(f"_base_ = {str(config)!r}\n{NESTED}")
    return train.of(path), path


@pytest.mark.slow
def test_a_run_is_resumed_exactly_and_its_record_has_every_size(nested, tmp_path):
    train, _ = nested
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train(whole)
    resumed.mkdir()
    shutil.copy(whole / "epoch_1.pth", resumed)
    train(resumed, "--resume", str(resumed / "epoch_1.pth"))
    states = [torch.load(each / "epoch_2.pth", weights_only=True) for each in (whole, resumed)]
    for part in ("state_dict", "ema_state_dict"):
        for name, tensor in states[0][part].items():
            assert torch.equal(tensor, states[1][part][name]), name
    records = [json.loads((each / "record.json").read_text()) for each in (whole, resumed)]
    keys = ["flops", "accuracy/top1", *(f"accuracy/top1_at_{size:g}" for size in SIZES[:-1])]
    assert [records[0][key] for key in keys] == [records[1][key] for key in keys]
    # FLOPs are those of the sizes that were drawn, in 6 batches of 8 images an epoch.
    model = timm.create_model(f"local-dir:{whole}", pretrained=True)
    assert model.sizes == SIZES
    model.reset_classifier(0)
    flops, seed = 0, states[0]["exact_resume"]["sampler_seed"]
    for iteration in range(12):
        for size in SizeRule().draw(SIZES, seed, iteration):
            model.set_size(size)
            flops += 8 * training_flops(model)
    assert records[0]["flops"] == flops
    _, val = read_scalars(whole.glob("*/vis_data/scalars.json"))
    assert keys[1:] == [key for key in val[2] if key.startswith("accuracy")]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("model['size_rule']['rule'] = 'parts'", "use 'sandwich' or 'all', or set distill=False"),
        ("model['size_rule']['rule'] = 'sand'", "size_rule.rule"),
        ("model['size_rule']['inner'] = 0", "size_rule.inner"),
        ("model['type'] = 'ImageClassifier'", "a NestedClassifier needs size_rule"),
        ("model['distillation'] = dict(teacher='x')", "a DistilledClassifier needs distillation"),
        ("model['size_rule']['full'] = 0.5", "size_rule.full"),
        ("activation_checkpointing = ['backbone.model.blocks.0']", r"blocks\.0.*remove one of"),
    ],
)
def test_a_wrong_rule_is_refused_before_the_run(nested, line, words):
    _, path = nested
    path.write_text(f"{path.read_text()}\n{line}\n")
    with pytest.raises(InputError, match=words):
        load_config(path)


def test_growth_during_nested_training_is_refused():
    hook = GrowthHook([{"epoch": 1, "num_ffn_param_tokens": 120}])
    with pytest.raises(InputError, match=r"remove one of the two, or .*`tokenformer-vit grow`"):
        hook.before_train(SimpleNamespace(model=build({})))


@pytest.mark.parametrize("model", ["plain", "nested"])
@pytest.mark.slow
def test_a_trained_model_is_measured_with_fewer_pairs_and_reordered(
    train, nested, config, tmp_path, model
):
    path = tmp_path / "compressed.py"
    base = config if model == "plain" else nested[1]
    hooks = "[dict(type='CompressionHook', keep=[0.25, 0.5], images=20)]"
    path.write_text(
        f"_base_ = {str(base)!r}\ntrain_cfg = dict(max_epochs=2)\ncustom_hooks = {hooks}\n"
    )
    train.of(path)(tmp_path / "run")
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    points = {(each["method"], each["keep"]): each for each in record["compression"]}
    assert set(points) == {(method, keep) for method in ("prune", "top-k") for keep in (0.25, 0.5)}
    assert points["prune", 0.25]["flops"] < points["prune", 0.5]["flops"]
    trained = timm.create_model(f"local-dir:{tmp_path / 'run'}", pretrained=True).eval()
    ordered = timm.create_model(f"local-dir:{tmp_path / 'run' / 'nested'}", pretrained=True).eval()
    assert ordered.sizes == (0.25, 0.5, 1.0)
    images = torch.randn(4, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(ordered(images), trained(images))
