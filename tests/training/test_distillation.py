"""Distillation: what the teacher sees and says, and what learns."""

import copy

import pytest
import timm
import torch
import torch.nn.functional as F
from mmpretrain.registry import MODELS
from safetensors.torch import save_file

from tokenformer_vit.errors import InputError
from tokenformer_vit.models.checkpoints import save_model

from .conftest import BACKBONE, HEAD

pytestmark = pytest.mark.usefixtures("scope")
CLASSES = ["bright", "dark", "split"]
MEAN, STD = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
KINDS = {
    "vit": ("test_vit", {"img_size": 32}),
    "tokenformer": ("tokenformer_tiny", {"img_size": 8, "patch_size": 4, "embed_dim": 24}),
}


def export(folder, kind="vit", names=CLASSES, num_classes=3):
    name, kwargs = KINDS[kind]
    model = timm.create_model(name, num_classes=num_classes, **kwargs)
    torch.nn.init.normal_(model.get_classifier().weight)
    size = {"input_size": (3, 32, 32)} if kind == "vit" else {}  # any size fits timm's test_vit
    save_model(model, folder, names, {"mean": MEAN, "std": STD, **size})
    return model.eval().double()


def build(teacher, num_classes=3, token=False, **distillation):
    kind, head = ("small_distilled", "DistilledHead") if token else ("tiny", "LabelHead")
    model = {
        "type": "DistilledClassifier",
        "distillation": {"teacher": str(teacher), **distillation},
        "backbone": {**BACKBONE, "model_name": f"tokenformer_{kind}"},
        "head": {**HEAD, "type": head, "num_classes": num_classes},
        "data_preprocessor": {
            "type": "LabelPreprocessor",
            **{"mean": [100.0, 110.0, 120.0], "std": [50.0, 60.0, 70.0]},
        },
    }
    return MODELS.build(model)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    return folder, export(folder)


@pytest.fixture
def batch():
    return torch.randn(6, 3, 8, 8), torch.randn(6, 3).softmax(dim=1)


def expected_logits(model, images, size):
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((100, 110, 120), (50, 60, 70)))
    colours = (images.double() * std + mean) / 255
    own = (colours - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    if size != 8:
        own = F.interpolate(own, (size, size), mode="bicubic", antialias=True)
    with torch.no_grad():
        return model(own)


@pytest.mark.parametrize(("kind", "size"), [("vit", 32), ("tokenformer", 8)])
def test_the_teacher_sees_the_same_images_in_its_own_size_and_normalisation(
    kind, size, batch, tmp_path
):
    model = export(tmp_path, kind)
    predicted = build(tmp_path).train().teacher(batch[0])
    expected = expected_logits(model, batch[0], size)
    torch.testing.assert_close(predicted.double(), expected, rtol=1e-3, atol=1e-3)
    assert not predicted.requires_grad


@pytest.mark.parametrize(
    ("labels", "weight", "tau", "token"),
    [("soft", 0.3, 2.0, False), ("hard", 0.5, 1.0, False), ("hard", 0.5, 1.0, True)],
)
def test_the_loss_has_the_labels_and_the_teacher(labels, weight, tau, token, batch, teacher):
    """The teacher trains the head of a distillation token alone, if there is one."""
    model = build(teacher[0], token=token, labels=labels, weight=weight, temperature=tau)
    torch.nn.init.normal_(model.head.fc.weight)
    images, scores = batch
    losses = model.loss(images, scores)
    own = taught = model.head(model.extract_feat(images)).double()
    if token:
        tokens = model.backbone.model.forward_features(images)
        own, taught = model.head.fc(tokens[:, 0]), model.head.fc_dist(tokens[:, 1])
        torch.testing.assert_close(model(images, mode="tensor"), (own + taught) / 2)
    other = expected_logits(teacher[1], images, 32)
    label_loss = F.cross_entropy(own, (0.9 * scores + 0.1 / 3).to(own))
    if labels == "hard":
        teacher_loss = F.cross_entropy(taught, other.argmax(dim=1))
    else:
        p, q = ((each / tau).softmax(dim=1) for each in (other, taught))
        teacher_loss = tau**2 * (p * (p / q).log()).sum(dim=1).mean()
    close = {"rtol": 1e-3, "atol": 1e-4, "check_dtype": False}
    torch.testing.assert_close(losses["from_labels"], label_loss, **close)
    torch.testing.assert_close(losses["from_teacher"], teacher_loss, **close)
    losses["loss"].backward()
    gradients = [copy.deepcopy(each.grad) for each in model.head.parameters()]
    model.zero_grad()
    ((1 - weight) * label_loss + weight * teacher_loss).backward()
    for gradient, parameter in zip(gradients, model.head.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, **close)


def test_only_the_student_is_trained_saved_and_copied(batch, teacher):
    model = build(teacher[0])
    names = list(model.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        losses = model.train().loss(*batch)
    assert all(loss.isfinite() for loss in losses.values())
    assert list(model.state_dict()) == names
    assert all(name.startswith(("backbone.", "head.")) for name in names)
    assert copy.deepcopy(model).teacher is model.teacher
    other = model.teacher(batch[0])
    assert torch.equal(other, model.teacher(batch[0]))  # no dropout, no running statistics


def test_weights_from_a_file_and_from_the_package(batch, tmp_path):
    weights = timm.create_model("test_resnet", num_classes=3).state_dict()
    save_file(weights, tmp_path / "weights.safetensors")
    named = build("test_resnet", checkpoint_path=str(tmp_path / "weights.safetensors")).teacher
    assert all(torch.equal(each, weights[name]) for name, each in named._model.state_dict().items())
    assert named.classes is None
    packaged = build("tokenformer_cifar10_micro", num_classes=10).teacher
    assert packaged.classes[:2] == ["airplane", "automobile"]


def test_what_cannot_teach_is_refused(teacher, tmp_path):
    export(tmp_path, names=None, num_classes=4)
    with pytest.raises(InputError, match="give checkpoint_path, labels, teacher"):
        build(teacher[0], tau=2.0)
    with pytest.raises(InputError, match=r"4 classes, .*num_classes is 3"):
        _ = build(tmp_path).teacher
