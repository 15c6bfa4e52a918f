"""Run lm-evaluation-harness, which finds only models that are imported, with our models."""

import sys

from lm_eval.__main__ import cli_evaluate

from tokenformer_vit import language  # noqa: F401  # registers the models


def main(argv: list[str]) -> None:
    """Run the harness with its own words."""
    sys.argv = ["lm-eval", *argv]
    cli_evaluate()
