"""The parts of timm's train.py that pip installs, put together as train.py does."""

import pytest
import torch
from PIL import Image
from timm.data import Mixup, create_dataset, create_loader, resolve_model_data_config
from timm.loss import SoftTargetCrossEntropy
from timm.models import resume_checkpoint
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import CheckpointSaver, ModelEmaV3

CLASSES = 4


@pytest.fixture
def folder(tmp_path):
    for label in range(CLASSES):
        directory = tmp_path / "train" / f"class_{label}"
        directory.mkdir(parents=True)
        for index in range(4):
            pixels = torch.randint(256, (80, 72, 3), dtype=torch.uint8).numpy()
            Image.fromarray(pixels).save(directory / f"{index}.png")
    return tmp_path


def loader(folder, model):
    config = resolve_model_data_config(model)
    return create_loader(
        create_dataset("", root=str(folder), split="train"),
        input_size=(3, 64, 64),
        batch_size=8,
        is_training=True,
        auto_augment="rand-m9-mstd0.5",
        re_prob=0.25,
        interpolation=config["interpolation"],
        mean=config["mean"],
        std=config["std"],
        num_workers=0,
        persistent_workers=False,
        use_prefetcher=False,
    )


def optimizer_of(model, opt):
    return create_optimizer_v2(model, opt, lr=1e-3, weight_decay=0.3, layer_decay=0.75)


@pytest.mark.parametrize("opt", ["adamw", "muon"])
def test_train_save_resume(small, folder, opt):
    model = small(num_classes=CLASSES, drop_path_rate=0.1).train()
    model.set_grad_checkpointing()
    ema = ModelEmaV3(model, decay=0.9)
    optimizer = optimizer_of(model, opt)
    scheduler, _ = create_scheduler_v2(
        optimizer, "cosine", num_epochs=2, warmup_epochs=1, warmup_lr=1e-6, updates_per_epoch=2
    )
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=CLASSES)
    criterion = SoftTargetCrossEntropy()
    saver = CheckpointSaver(model, optimizer, model_ema=ema, checkpoint_dir=str(folder))
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    for epoch in range(2):
        scheduler.step(epoch)
        for images, labels in loader(folder, model):
            images, targets = mixup(images, labels)
            with torch.autocast("cpu", torch.bfloat16):
                loss = criterion(model(images), targets)
            assert loss.isfinite()
            loss.backward()
            assert all(p.grad.isfinite().all() for p in model.parameters())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            ema.update(model)
        saver.save_checkpoint(epoch, metric=float(epoch))

    unmoved = {name for name, tensor in model.state_dict().items() if tensor.equal(start[name])}
    assert unmoved == {name for name in start if name.endswith(".tau")}

    resumed = small(num_classes=CLASSES)
    resumed_optimizer = optimizer_of(resumed, opt)
    assert resume_checkpoint(resumed, str(folder / "last.pth.tar"), resumed_optimizer) == 2
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(resumed(images), model.eval()(images))
    for old, new in zip(optimizer.param_groups, resumed_optimizer.param_groups, strict=True):
        assert (old["lr"], old["weight_decay"]) == (new["lr"], new["weight_decay"])

    for network, optim in ((model, optimizer), (resumed, resumed_optimizer)):
        network.eval()(images).square().sum().backward()
        optim.step()
    assert torch.equal(resumed(images), model(images))


@pytest.mark.parametrize("opt", ["adamw", "muon"])
def test_a_few_steps_learn_a_batch(small, opt):
    model = small(num_classes=CLASSES).train()
    optimizer = optimizer_of(model, opt)
    images, labels = torch.randn(CLASSES, 3, 64, 64), torch.arange(CLASSES)
    losses = []
    for _ in range(24):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
