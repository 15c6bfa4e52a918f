"""Several sizes of one model in a training step: what is drawn, computed and measured."""

import json
from types import SimpleNamespace

import pytest
import timm
import torch
import torch.nn.functional as F
from mmengine.config import Config
from mmengine.logging import MessageHub
from mmpretrain.registry import MODELS

from tokenformer_vit.benchmarking.costs import training_flops
from tokenformer_vit.models.sizes import at_size
from tokenformer_vit.training.data.sampler import Seeded
from tokenformer_vit.training.hooks import LazyRuntimeInfoHook
from tokenformer_vit.training.metrics import AccuracyAndLoss

from .conftest import BACKBONE, HEAD

pytestmark = pytest.mark.usefixtures("scope")
SIZES = (0.25, 0.5, 0.75, 1.0)
CLASSES = 3


def build(backbone=None, **more):
    model = {
        "type": "NestedClassifier",
        "backbone": {**BACKBONE, "nested": SIZES[:-1], **(backbone or {})},
        "head": HEAD,
        **more,
    }
    return MODELS.build(model)


@pytest.fixture
def at():
    """Set the iteration of a run of 100, and its seed."""
    info = MessageHub.get_current_instance().runtime_info
    before = dict(info)

    def set_to(iteration, seed=5):
        info.update(iter=iteration, max_iters=100, seed=seed)

    yield set_to
    info.clear()
    info.update(before)


@pytest.fixture
def batch():
    return torch.randn(12, 3, 8, 8), torch.randn(12, CLASSES).softmax(dim=1)


def logits(model, images, size):
    with at_size(model.sized, size):
        return model.head(model.extract_feat(images))


def test_the_sizes_of_a_step_depend_on_seed_and_iteration(at):
    model = build()

    def drawn(seed):
        found = []
        for iteration in range(50):
            at(iteration, seed)
            found.append(model.drawn_sizes())
        return found

    assert drawn(5) == drawn(5) != drawn(6)
    assert {(sizes[0], sizes[2], len(sizes)) for sizes in drawn(5)} == {(1.0, 0.25, 3)}
    assert {sizes[1] for sizes in drawn(5)} == {0.5, 0.75}
    assert build({"nested": (0.5,)}).drawn_sizes() == (1.0, 0.5)
    alone = build(distill=True)
    found = []
    for iteration in (0, 9, 10, 99):
        at(iteration)
        found.append(len(alone.drawn_sizes()))
    assert found == [1, 1, 3, 3]


def test_processes_draw_from_one_seed_whatever_their_own():
    cfg = Config({"randomness": {"seed": 5, "diff_rank_seed": True}})
    for rank in (0, 1):
        hub = MessageHub(f"rank {rank}")
        about = {"seed": 5 + rank, "experiment_name": "x", "rank": rank, "message_hub": hub}
        loader = SimpleNamespace(dataset=Seeded([0], seed=0))
        LazyRuntimeInfoHook().before_run(SimpleNamespace(cfg=cfg, train_dataloader=loader, **about))
        assert hub.get_info("seed") == loader.dataset.seed == 5


@pytest.mark.parametrize("distill", [False, True])
def test_a_size_learns_labels_and_if_asked_the_next_larger_size(distill, at, batch):
    model = build(distill=distill).double()
    torch.nn.init.normal_(model.head.fc.weight, std=0.3)
    at(50)
    images, scores = (each.double() for each in batch)
    found = model.loss(images, scores)["loss"]
    found.backward()
    own = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    losses, teacher = [], None
    for size in model.drawn_sizes():
        student = logits(model, images, size)
        losses.append(F.cross_entropy(student, 0.9 * scores + 0.1 / CLASSES))
        if distill and teacher is not None:
            distance = teacher * (teacher.log() - student.log_softmax(dim=1))
            losses[-1] = (losses[-1] + distance.sum(dim=1).mean()) / 2
        teacher = student.detach().softmax(dim=1)
    torch.testing.assert_close(found, torch.stack(losses).mean())
    torch.stack(losses).mean().backward()
    for each, parameter in zip(own, model.parameters(), strict=True):
        torch.testing.assert_close(each, parameter.grad, rtol=1e-4, atol=1e-6)
    assert model.sized.blocks[0].mlp.size == 1  # afterwards all pairs are in use


def test_predictions_and_metrics_of_every_size(batch):
    model = build().eval()
    torch.nn.init.normal_(model.head.fc.weight)
    images, labels = batch[0], torch.randint(0, CLASSES, (12,))
    metric = AccuracyAndLoss(topk=(1,))
    with torch.no_grad():
        samples = [sample.to_dict() for sample in model.predict(images)]
        for sample, label in zip(samples, labels, strict=True):
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


@pytest.mark.slow
def test_the_record_of_a_run_has_every_size_and_the_flops_of_those_drawn(train, own, tmp_path):
    config = own(
        "model = dict(type='NestedClassifier', backbone=dict(nested=(0.25, 0.5, 0.75)))\n"
        "train_cfg = dict(max_epochs=2)\ncustom_hooks = [dict(type='CostHook')]"
    )
    train.of(config)(tmp_path / "run", "--seed", "5")
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record.keys() >= {f"accuracy/top1_at_{size:g}" for size in SIZES[:-1]}
    model = timm.create_model(f"local-dir:{tmp_path / 'run'}", pretrained=True)
    model.reset_classifier(0)
    flops = 0
    for iteration in range(12):  # of 8 images
        MessageHub.get_current_instance().runtime_info.update(iter=iteration, seed=5)
        for size in build().drawn_sizes():
            model.set_size(size)
            flops += 8 * training_flops(model)
    assert record["flops"] == flops
