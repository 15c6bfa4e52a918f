"""Run lm-evaluation-harness, which finds only models that are imported, with our models.

tokenformer-vit lm-eval run --model hf --model_args pretrained=work_dirs/run --tasks piqa boolq
"""

import sys

from lm_eval.__main__ import cli_evaluate

from tokenformer_vit import language  # noqa: F401  # registers the models


def main(argv: list[str]) -> None:
    """Run the harness with its own arguments."""
    sys.argv = ["lm-eval", *argv]
    cli_evaluate()
