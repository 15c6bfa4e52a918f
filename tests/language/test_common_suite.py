"""transformers' own common tests of models, run on TokenFormer.

They are in the source distribution of transformers (pip download --no-deps --no-binary :all:), not
in its wheel. TRANSFORMERS_SOURCE names its unpacked folder, or a clone of the same version: only a
clone has the tests of generation and of export.
"""

import os
import sys
import types
import unittest
from importlib import import_module
from pathlib import Path

import pytest
import torch

if not (SOURCE := os.environ.get("TRANSFORMERS_SOURCE")):
    pytest.skip("TRANSFORMERS_SOURCE is not set; see the top of the file", allow_module_level=True)
pytest.importorskip("parameterized", reason="transformers' own tests need parameterized")

from tokenformer_vit.language import TokenFormerConfig, TokenFormerForCausalLM, TokenFormerModel
from tokenformer_vit.language.modeling import TokenFormerForSequenceClassification

# One test looks for a FutureWarning.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("always::FutureWarning")]
PACKAGE = "tests_of_transformers"
# Files that the tests import, and the source distribution lacks.
ABSENT = {
    "generation.test_utils": "GenerationTesterMixin",
    "exporters.test_export": "ExportTesterMixin",
}


def import_tests(folder: Path) -> types.ModuleType:
    """Import the common tests as a package; absent files become empty classes."""
    for name in (PACKAGE, *(f"{PACKAGE}.{each.partition('.')[0]}" for each in ABSENT)):
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
    for name, mixin in ABSENT.items():
        if not folder.joinpath(*name.split(".")).with_suffix(".py").is_file():
            module = sys.modules[f"{PACKAGE}.{name}"] = types.ModuleType(name)
            setattr(module, mixin, type(mixin, (), {}))
    return import_module(f"{PACKAGE}.test_modeling_common")


class Tester:
    """What the common tests ask about a model."""

    is_training = True
    batch_size, seq_length = 5, 7
    vocab_size, hidden_size, num_hidden_layers, num_attention_heads = 99, 32, 2, 2
    causal_lm_class = TokenFormerForCausalLM

    def get_config(self):
        shape = {"vocab_size": 99, "embed_dim": 32, "depth": self.num_hidden_layers, "num_heads": 2}
        tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        return TokenFormerConfig(**shape, **tokens, context_length=512, rotary_share=0.5)

    def prepare_config_and_inputs_for_common(self):
        tokens = torch.randint(self.vocab_size, (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def make_suite(folder: Path) -> type[unittest.TestCase]:
    """Make the class of all common tests."""
    common = import_tests(folder)
    auto = import_module("transformers.models.auto.modeling_auto")
    models = (TokenFormerModel, TokenFormerForCausalLM, TokenFormerForSequenceClassification)
    tasks = ("", "FOR_CAUSAL_LM_", "FOR_SEQUENCE_CLASSIFICATION_")
    for task, model in zip(tasks, models, strict=True):  # they tell which labels a model needs
        getattr(auto, f"MODEL_{task}MAPPING_NAMES")["tokenformer"] = model.__name__
    mixins = dict.fromkeys((common.ModelTesterMixin, common.GenerationTesterMixin))
    names = {"all_model_classes": models, "model_tester": Tester()}
    names["test_can_init_all_missing_weights_before_2023"] = True
    return type("Suite", (*mixins, unittest.TestCase), names)


TestOfTransformers = make_suite(Path(SOURCE, "tests"))
