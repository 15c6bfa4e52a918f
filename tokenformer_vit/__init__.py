"""TokenFormer vision transformers; importing the package registers its models with timm."""

from . import interrupts as interrupts  # isort: split  # first: the next import takes seconds

if not interrupts.IS_COMMAND:  # a command imports what it needs, so that --help answers at once
    from . import models as models

__version__ = "0.1.0"
