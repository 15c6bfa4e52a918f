"""The two heads of a model with a distillation token."""

from typing import Any

from mmpretrain.registry import MODELS
from torch import Tensor, nn

from .data.mixing import LabelHead


@MODELS.register_module()
class DistilledHead(LabelHead):
    """The two heads of a model with a distillation token, such as ``tokenformer_small_distilled``.

    Scores are the mean of both. Under a
    :class:`~tokenformer_vit.training.distillation.DistilledClassifier` labels train the first head,
    and the teacher the second; otherwise labels train the mean.

    Args:
        num_classes: Number of classes K.
        in_channels: Width C of the tokens.
        **kwargs: As for ``LinearClsHead``.

    Shape:
        A tuple of the class token and the distillation token, (N, C) each -> (N, K).

    Source:
        DeiT, arXiv:2012.12877, Section 4.
    """

    def __init__(self, num_classes: int, in_channels: int, **kwargs: Any) -> None:
        super().__init__(num_classes, in_channels, **kwargs)
        self.fc_dist = nn.Linear(in_channels, num_classes)

    def forward(self, feats: tuple[Tensor, ...]) -> Tensor:
        """Return the mean of the scores of both heads."""
        of_labels, of_teacher = self.both(feats)
        return (of_labels + of_teacher) / 2

    def both(self, feats: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return the scores of each head: that of the labels, and that of the teacher."""
        class_token, distillation_token = feats
        return self.fc(class_token), self.fc_dist(distillation_token)
