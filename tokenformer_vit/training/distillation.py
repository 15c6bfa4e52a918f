"""Knowledge distillation: a classifier that also learns what a trained teacher predicts."""

import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import timm
import torch
import torch.nn.functional as F
from mmpretrain.models import ImageClassifier
from mmpretrain.registry import MODELS
from pydantic import BaseModel, ConfigDict, Field
from timm.data import resolve_input_data_config
from torch import Tensor, nn

from tokenformer_vit.errors import InputError, one_line
from tokenformer_vit.models.checkpoints import load_model

from .labels import DistilledHead


class Distillation(BaseModel):
    """How a classifier learns from a teacher.

    Args:
        teacher: Name of a timm model with pretrained weights, also ``hf-hub:OWNER/NAME``; an
            exported folder; or a checkpoint that describes its model.
        checkpoint_path: Weights of the timm model ``teacher``, as a local file.
        labels: ``hard``: the class that the teacher predicts; ``soft``: all its probabilities.
        weight: Share of the teacher in the loss. The true labels have the rest.
        temperature: Divisor of the logits of both models for soft labels.

    Source:
        arXiv:2012.12877, equations 2 and 3, which call the weight λ or, for hard labels, 1/2.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    teacher: Annotated[str, Field(min_length=1)]
    checkpoint_path: str = ""
    labels: Literal["hard", "soft"] = "hard"
    weight: Annotated[float, Field(gt=0, le=1)] = 0.5
    temperature: Annotated[float, Field(gt=0)] = 1.0

    def loss(self, logits: Tensor, teacher: Tensor) -> Tensor:
        """Compute the loss of the teacher's labels, a mean over images.

        Args:
            logits: (N, K) logits of the student.
            teacher: (N, K) logits of the teacher.
        """
        logits, teacher = logits.float(), teacher.float()
        if self.labels == "hard":
            return F.cross_entropy(logits, teacher.argmax(dim=1))
        # τ² keeps the size of the gradients, which the two divisions by τ make smaller.
        own, other = ((each / self.temperature).log_softmax(dim=1) for each in (logits, teacher))
        loss = F.kl_div(own, other, reduction="batchmean", log_target=True)
        return loss * self.temperature**2


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the names and values of tensors, in hexadecimal."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class Teacher:
    """A trained timm classifier that only predicts.

    It is not a module. Therefore checkpoints, averaged weights, exports and optimisers do not have
    it, and copies of a classifier share it.

    Args:
        settings: Settings with the name or path of the teacher.
        preprocessor: Preprocessor of the student, whose normalisation is replaced by the teacher's.
        num_classes: Number of classes of the student.

    Attributes:
        classes: Names of the classes in order; None if the teacher does not name them.
        digest: SHA-256 of the weights.

    Raises:
        InputError: If the teacher cannot be loaded, or has another number of classes.
    """

    def __init__(self, settings: Distillation, preprocessor: Any, num_classes: int) -> None:
        self._model: Any = _load(settings).requires_grad_(False).eval()
        if self._model.num_classes != num_classes:
            raise InputError(
                f"the teacher {settings.teacher} has {self._model.num_classes} classes, but "
                f"model.head.num_classes is {num_classes}: give a teacher of the same classes in "
                "model.distillation.teacher"
            )
        names = self._model.pretrained_cfg.get("label_names")
        named = isinstance(names, list | tuple) and len(names) == num_classes
        self.classes = [str(name) for name in names] if named else None
        self.digest = tensors_digest(self._model.state_dict())
        own = resolve_input_data_config(self._model)
        self._size = tuple(own["input_size"][1:])
        # The student's values are (v - mean) / std for v from 0 to 255, and timm's have v / 255.
        mean, std = (torch.tensor(own[key]).view(3, 1, 1) for key in ("mean", "std"))
        given = (getattr(preprocessor, key, default) for key, default in (("mean", 0), ("std", 1)))
        student_mean, student_std = (torch.as_tensor(each).cpu() / 255 for each in given)
        self._scale, self._shift = student_std / std, (student_mean - mean) / std

    def __deepcopy__(self, memo: dict[int, Any]) -> "Teacher":
        """Return the same teacher, because it never changes."""
        return self

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Predict the classes of a batch, at the image size of the teacher.

        Args:
            images: (N, 3, H, W) images as the student takes them, normalised and mixed.

        Returns:
            (N, K) logits.
        """
        if self._scale.device != images.device:
            self._model.to(images.device)
            self._scale, self._shift = (
                each.to(images.device) for each in (self._scale, self._shift)
            )
        images = images * self._scale + self._shift
        if images.shape[2:] != self._size:
            images = F.interpolate(images, self._size, mode="bicubic", antialias=True)
        return self._model(images)


def _load(settings: Distillation) -> nn.Module:
    """Load the teacher from a file, the package or a hub."""
    name, path = settings.teacher, Path(settings.teacher)
    if settings.checkpoint_path:
        return load_model(name, Path(settings.checkpoint_path))
    if path.exists():
        return load_model(None, path)
    if not (name.startswith("hf-hub:") or timm.is_model_pretrained(name)):
        raise InputError(
            f"the teacher {name!r} is no file, no folder and no timm model with pretrained "
            "weights: correct model.distillation.teacher, or give a file of weights in "
            "model.distillation.checkpoint_path"
        )
    try:
        return timm.create_model(name, pretrained=True)
    except Exception as error:  # the network and the hub may raise any error
        raise InputError(
            f"the weights of the teacher {name} cannot be downloaded ({one_line(error)}): give "
            "them as a file in model.distillation.checkpoint_path"
        ) from error


@MODELS.register_module()
class DistilledClassifier(ImageClassifier):
    """mmpretrain's ``ImageClassifier``, which also learns the predictions of a teacher.

    ::

        model = dict(
            type="DistilledClassifier",
            distillation=dict(teacher="regnety_160.deit_in1k", labels="hard"),
        )

    Student and teacher see the same augmented and mixed images. A resumed run loads the teacher
    again from where it came, and stops if its weights are others.

    Args:
        distillation: Arguments of :class:`Distillation`.
        **kwargs: Arguments of ``ImageClassifier``.

    Note:
        With a :class:`~tokenformer_vit.training.labels.DistilledHead` the teacher trains a head of
        its own, which reads the distillation token; with any other, the same head as the labels.
    """

    def __init__(self, distillation: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.distillation = Distillation(**distillation)

    @cached_property
    def teacher(self) -> Teacher:
        """The teacher, loaded at the first use: a test or an export does not need it."""
        head: Any = self.head
        return Teacher(self.distillation, self.data_preprocessor, head.num_classes)

    def loss(self, inputs: Tensor, data_samples: Any) -> dict[str, Tensor]:
        """Compute the loss of a batch.

        Args:
            inputs: (N, 3, H, W) images, already mixed.
            data_samples: Labels or scores of the images, as a tensor or a list.

        Returns:
            ``loss``, and for the log its two parts before they are weighted, ``from_labels`` and
            ``from_teacher``.
        """
        head: Any = self.head
        features = self.extract_feat(inputs)
        if isinstance(head, DistilledHead):
            of_labels, of_teacher = head.both(features)
            own = head._get_loss(of_labels, data_samples)["loss"]
        else:
            of_teacher, own = head(features), head.loss(features, data_samples)["loss"]
        taught = self.distillation.loss(of_teacher, self.teacher(inputs))
        weight = self.distillation.weight
        return {
            "loss": (1 - weight) * own + weight * taught,
            "from_labels": own.detach(),
            "from_teacher": taught.detach(),
        }
