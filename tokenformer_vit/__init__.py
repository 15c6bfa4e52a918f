"""TokenFormer vision transformers; importing the package registers its models with timm."""

from . import models as models

__version__ = "0.1.0"
