"""Questions, plans, runs, records, tables and charts of ablations.

A file in ``ablations/`` asks a question: it makes an object of one of the kinds below, and calls
:func:`main` with it. ``ablations/README.md`` says how.
"""

from .budgets import Budgets
from .fields import Field, Measure
from .first_steps import FirstSteps
from .image_models import (
    IMAGES,
    attention_share,
    pattention_args,
    share_of_pairs,
    to_matched_vit,
    with_frozen_norms,
)
from .language_models import LANGUAGE
from .nested_sizes import Line, NestedSizes
from .pretraining import Pretraining
from .questions import Baseline, Question, Steps
from .sweep import main
from .texts import Texts
from .training_cost import TrainingCost
from .tuning import Tuning
from .variants import ModelChange, Outside, Part, Shape, Variant, arguments, in_stages, lasting

__all__ = [
    "IMAGES",
    "LANGUAGE",
    "Baseline",
    "Budgets",
    "Field",
    "FirstSteps",
    "Line",
    "Measure",
    "ModelChange",
    "NestedSizes",
    "Outside",
    "Part",
    "Pretraining",
    "Question",
    "Shape",
    "Steps",
    "Texts",
    "TrainingCost",
    "Tuning",
    "Variant",
    "arguments",
    "attention_share",
    "in_stages",
    "lasting",
    "main",
    "pattention_args",
    "share_of_pairs",
    "to_matched_vit",
    "with_frozen_norms",
]
