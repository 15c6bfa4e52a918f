"""Pytest plugin that runs timm's own test-suite on this package's models.

timm chooses the models of each test by patterns on their names (``vit_*``) and module names
(``vision_transformer``), which no outside model matches. The plugin therefore puts our names in
the place of a stock ViT: whatever timm runs for ``vit_tiny_patch16_224``, it runs for the models
named in the environment variable ``TIMM_SUITE_MODELS``, and nothing else. Left out is the one test
that downloads weights.
"""

import os

import pytest

import tokenformer_vit  # noqa: F401

STAND_IN = "vit_tiny_patch16_224"
MODELS = os.environ.get("TIMM_SUITE_MODELS", "tokenformer_tiny").split(",")


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for mark in metafunc.definition.iter_markers("parametrize"):
        argnames, argvalues = mark.args
        if argnames == "model_name":
            runs = any(str(name).split(".")[0] == STAND_IN for name in argvalues)
            runs = runs and metafunc.function.__name__ != "test_model_load_pretrained"
            argvalues[:] = MODELS if runs else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if any(name in item.name for name in MODELS)]
