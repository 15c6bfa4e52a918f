"""Knowledge distillation: a classifier that also learns what a trained teacher predicts."""

from functools import cached_property
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.data import resolve_input_data_config
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.models.checkpoints import load_model
from tokenformer_vit.vision.prediction import load_for_images

from ..data.mixing import LabelHead
from ..engine import MODELS, ImageClassifier


class Teacher:
    """A trained timm classifier that only predicts; ``classes`` are the names of its classes.

    It is not a module: checkpoints, averaged weights, exports and optimisers do not have it. timm's
    ``DistillationTeacher`` compares its normalisation with the student's in each step, and so waits
    for the GPU.
    """

    def __init__(self, name: str, checkpoint_path: str, student: Any) -> None:
        if checkpoint_path:
            model: Any = load_for_images(name, Path(checkpoint_path))
        elif Path(name).exists():
            model = load_model(None, Path(name))
        else:
            model = timm.create_model(name, pretrained=True)
        self._model = model.requires_grad_(False).eval()
        if model.num_classes != student.head.num_classes:
            raise InputError(
                f"the teacher has {model.num_classes} classes, but model.head.num_classes is "
                f"{student.head.num_classes}: give a teacher of the same classes"
            )
        names = model.pretrained_cfg.get("label_names") or ()
        self.classes = list(names) if len(names) == model.num_classes else None
        own, theirs = student.data_preprocessor, resolve_input_data_config(model)
        self._size = tuple(theirs["input_size"][1:])
        # The student's values are (v - mean) / std for v from 0 to 255, and timm's have v / 255.
        mean, std = (torch.tensor(theirs[key]).view(3, 1, 1) for key in ("mean", "std"))
        own_mean = torch.as_tensor(getattr(own, "mean", 0.0)).cpu() / 255
        own_std = torch.as_tensor(getattr(own, "std", 1.0)).cpu() / 255  # 1: not normalised
        self._scale, self._shift = own_std / std, (own_mean - mean) / std

    def __deepcopy__(self, memo: dict[int, Any]) -> "Teacher":
        """Return the same teacher, because it never changes."""
        return self

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Predict at the teacher's image size; (N, 3, H, W) images of the student -> (N, K)."""
        if self._scale.device != images.device:
            self._model.to(images.device)
            self._scale, self._shift = (x.to(images.device) for x in (self._scale, self._shift))
        images = images * self._scale + self._shift
        if images.shape[2:] != self._size:
            images = F.interpolate(images, self._size, mode="bicubic", antialias=True)
        return self._model(images)


@MODELS.register_module()
class DistilledHead(LabelHead):
    """The two heads of a model with a distillation token, such as ``tokenformer_small_distilled``.

    Scores are the mean of both. Under a :class:`DistilledClassifier` labels train the first head,
    and the teacher the second; otherwise labels train the mean. Arguments: as ``LinearClsHead``.
    """

    def __init__(self, num_classes: int, in_channels: int, **kwargs: Any) -> None:
        super().__init__(num_classes, in_channels, **kwargs)
        self.fc_dist = nn.Linear(in_channels, num_classes)

    def forward(self, feats: tuple[Tensor, ...]) -> Tensor:
        """Return the mean of the scores of both heads; of the class token alone, its scores."""
        scores = [head(each) for head, each in zip((self.fc, self.fc_dist), feats, strict=False)]
        return torch.stack(scores).mean(dim=0)


@MODELS.register_module()
class DistilledClassifier(ImageClassifier):
    """mmpretrain's ``ImageClassifier``, which also learns what a teacher predicts, as in DeiT.

    Student and teacher see the same augmented and mixed images. With a :class:`DistilledHead` the
    teacher trains a head of its own, which reads the distillation token; with any other, the same
    head as the labels.

    Args:
        distillation: ``teacher``, the name of a pretrained timm model (also ``hf-hub:...``), an
            exported folder, or a checkpoint that describes its model. ``checkpoint_path``: local
            weights of the timm model. ``labels``: ``hard`` (default), the class that the teacher
            predicts; or ``soft``, all its probabilities. ``weight``: share of the teacher in the
            loss, 0.5. ``temperature``: divisor of the logits of both models for soft labels, 1.
    """

    def __init__(self, distillation: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        defaults = {"checkpoint_path": "", "labels": "hard", "weight": 0.5, "temperature": 1.0}
        self.distillation = {**defaults, **distillation}
        labels, keys = self.distillation["labels"], {*defaults, "teacher"}
        if labels not in ("hard", "soft") or self.distillation.keys() != keys:
            raise InputError(
                f"distillation is {self.distillation}: give {', '.join(sorted(keys))}, with labels "
                "'hard' or 'soft'"
            )

    @cached_property
    def teacher(self) -> Teacher:
        """The teacher, loaded at the first use: a test or an export does not need it."""
        how = self.distillation
        return Teacher(how["teacher"], how["checkpoint_path"], self)

    def loss(self, inputs: Tensor, data_samples: Any) -> dict[str, Tensor]:
        """Compute the loss of mixed images, and for the log its parts before their weights."""
        head: Any = self.head
        features = self.extract_feat(inputs)
        if isinstance(head, DistilledHead):
            of_teacher, of_labels = head.fc_dist(features[1]), features[:1]
        else:
            of_teacher, of_labels = head(features), features
        own = head.loss(of_labels, data_samples)["loss"]
        taught, weight = self._taught(of_teacher, self.teacher(inputs)), self.distillation["weight"]
        return {
            "loss": (1 - weight) * own + weight * taught,
            "from_labels": own.detach(),
            "from_teacher": taught.detach(),
        }

    def _taught(self, logits: Tensor, teacher: Tensor) -> Tensor:
        """Compute the loss of the teacher's labels: arXiv:2012.12877, equations 2 and 3."""
        logits, teacher = logits.float(), teacher.float()
        if self.distillation["labels"] == "hard":
            return F.cross_entropy(logits, teacher.argmax(dim=1))
        # τ² keeps the size of the gradients, which the two divisions by τ make smaller.
        temperature = self.distillation["temperature"]
        own, other = ((each / temperature).log_softmax(dim=1) for each in (logits, teacher))
        return F.kl_div(own, other, reduction="batchmean", log_target=True) * temperature**2
