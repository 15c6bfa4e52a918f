"""What experiments on pretrained ViTs share: images in memory, a linear probe, a training loop."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import timm.optim
import timm.scheduler
import torch
from mmpretrain.datasets.transforms import Cutout
from torch import Tensor, nn
from torch.utils.data import RandomSampler
from torchvision.transforms import v2
from tqdm import trange

from tokenformer_vit.files import whole_file
from tokenformer_vit.models.checkpoints import load_model
from tokenformer_vit.training.data.images import divide
from tokenformer_vit.vision.datasets import open_images
from tokenformer_vit.vision.images import read_pixels

Images = tuple[Tensor, Tensor]  # normalised images, and labels


def load(args: Namespace, split: str) -> Images:
    """Return the images of a split and their labels, in the order of the file, on the device."""
    rows = open_images(args.data, split)
    rows.keep(rows.rows.argsort()[: args.limit])
    pixels = (torch.from_numpy(read_pixels(s["img_path"], s["img_bytes"])) for s in rows)
    sized = [v2.functional.resize(each.permute(2, 0, 1), [args.image] * 2) for each in pixels]
    config: Any = timm.get_pretrained_cfg(args.vit)
    images = v2.functional.normalize(torch.stack(sized) / 255, config.mean, config.std)
    return images.to(args.device), rows.labels.to(args.device)


def pretrained(args: Namespace, data: Images) -> Any:
    """Return a timm model whose head is a linear probe (ridge regression) of the images."""
    timm.layers.set_fused_attn(args.device.type != "cpu")  # on CPUs 2.5 times slower in bfloat16
    vit: Any = load_model(args.vit, args.weights, img_size=args.image)
    vit.reset_classifier(0)
    features, labels = logits_of(vit.to(args.device), data[0]), nn.functional.one_hot(data[1])
    mean, number = features.mean(dim=0), labels.shape[1]
    rows = features - mean
    gram = rows.t() @ rows
    gram += 0.01 * gram.diagonal().mean() * torch.eye(len(gram), device=gram.device)
    weight = torch.linalg.solve(gram, rows.t() @ (labels - 1 / number).to(rows)).t()
    vit.reset_classifier(number)
    vit.head.load_state_dict({"weight": weight, "bias": -weight @ mean})
    return vit.to(args.device)


def train(
    model: Any, args: Namespace, data: Images, rate: float, seed: int, path: Path | None = None
) -> None:
    """Train for ``args.epochs`` with layer decay; it goes on from a checkpoint in ``path``."""
    steps = len(data[1]) // args.batch_size or 1
    warmup, last = args.epochs // 12 * steps, args.epochs * steps
    crop, hole = v2.RandomCrop(args.image, args.image // 8), Cutout(args.image // 4, 0, prob=1.0)
    augment = v2.Compose(divide([crop, v2.RandomHorizontalFlip(), hole])[1])
    how: Any = {"weight_decay": 0.05, "betas": (0.9, 0.99), "layer_decay": 0.75, "fused": True}
    optimizer = timm.optim.create_optimizer_v2(model, "adamw", lr=rate, **how)
    how = {"warmup_t": warmup, "warmup_prefix": True, "t_in_epochs": False}
    schedule = timm.scheduler.CosineLRScheduler(optimizer, last - warmup, **how)
    start = 0
    if path and path.exists():
        saved = torch.load(path, map_location=args.device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["epoch"]
    torch.compiler.reset()  # it compiles a module's code only eight times
    forward = torch.compile(model.train(), disable=not args.compile)
    for epoch in trange(start, args.epochs, desc="training", unit="epoch"):
        torch.manual_seed(seed + epoch)  # a resumed training draws the same
        order = torch.tensor([*RandomSampler(data[1], num_samples=steps * args.batch_size)])
        for step, index in enumerate(order.to(args.device).split(args.batch_size), epoch * steps):
            schedule.step_update(step)
            images, labels = augment(data[0][index]), data[1][index]
            with torch.autocast(args.device.type, torch.bfloat16):
                loss = nn.functional.cross_entropy(forward(images), labels, label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if path:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            with whole_file(path) as file:
                torch.save({**state, "epoch": epoch + 1}, file)


def logits_of(model: nn.Module, images: Tensor, bfloat16: bool = False) -> Tensor:
    """Return the logits in float64, of evaluation mode, in batches of 1,000 images."""
    with torch.no_grad(), torch.autocast(images.device.type, torch.bfloat16, bfloat16):
        return torch.cat([model.eval()(batch).double() for batch in images.split(1000)])
