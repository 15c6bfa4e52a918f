"""The parts of timm's train.py that pip installs, put together as train.py does."""

import pytest
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.models import resume_checkpoint
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import CheckpointSaver, ModelEmaV3

from tokenformer_vit.models.checkpoints import load_model

from .conftest import LINEAR, SHAPE

CLASSES = 4
LEARNED = {"pattention_args": {"learn_tau": True}}


def optimizer_of(model, opt):
    return create_optimizer_v2(model, opt, lr=1e-3, weight_decay=0.3, layer_decay=0.75)


@pytest.mark.parametrize("opt", ["adamw", "muon"])
def test_train_save_resume(small, images, tmp_path, opt):
    model = small(num_classes=CLASSES, norm="bias", drop_path_rate=0.1).train()
    model.set_grad_checkpointing()
    ema = ModelEmaV3(model, decay=0.9)
    optimizer = optimizer_of(model, opt)
    scheduler, _ = create_scheduler_v2(optimizer, "cosine", num_epochs=2, updates_per_epoch=2)
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=CLASSES)
    saver = CheckpointSaver(model, optimizer, model_ema=ema, checkpoint_dir=str(tmp_path))
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for epoch in range(2):
        scheduler.step(epoch)
        for _ in range(2):
            batch, targets = mixup(images(batch=8), torch.arange(8) % CLASSES)
            with torch.autocast("cpu", torch.bfloat16):
                loss = SoftTargetCrossEntropy()(model(batch), targets)
            loss.backward()
            assert all(p.grad.isfinite().all() for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
            ema.update(model)
        saver.save_checkpoint(epoch, metric=float(epoch))
    unmoved = {name for name, tensor in model.state_dict().items() if tensor.equal(start[name])}
    assert unmoved == {name for name in start if name.endswith(".tau")}

    resumed = small(num_classes=CLASSES, norm="bias")
    again = optimizer_of(resumed, opt)
    assert resume_checkpoint(resumed, str(tmp_path / "last.pth.tar"), again) == 2
    x = images()
    assert torch.equal(resumed(x), model.eval()(x))
    for network, optim in ((model, optimizer), (resumed, again)):
        network.eval()(x).square().sum().backward()
        optim.step()
    assert torch.equal(resumed(x), model(x))
    last = tmp_path / "last.pth.tar"
    averaged = load_model("tokenformer_tiny", last, **SHAPE, norm="bias")
    assert torch.equal(averaged(x), ema.module.eval()(x))


@pytest.mark.parametrize("layer_decay", [None, 0.5])
@pytest.mark.parametrize("changes", [LEARNED, {"norm": "weight+bias", "pos_embed": "none"}, LINEAR])
def test_weight_decay_is_for_matrices(small, layer_decay, changes, parts):
    model = small(**{**parts, **changes})
    optimizer = create_optimizer_v2(model, "adamw", weight_decay=0.3, layer_decay=layer_decay)
    decays = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    matrices = {"patch_embed.proj.weight", "head.weight"}
    for name, parameter in model.named_parameters():
        decayed = name in matrices or name.endswith("param_tokens")
        assert decays[parameter] == (0.3 if decayed else 0), name
