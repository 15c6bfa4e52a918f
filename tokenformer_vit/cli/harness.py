"""Run the command of lm-evaluation-harness with the TokenFormer language models registered.

The harness finds only models that are imported. All arguments are passed to the harness::

    tokenformer-vit lm-eval run --model hf --model_args pretrained=work_dirs/run --tasks piqa boolq
    tokenformer-vit lm-eval ls tasks
"""

import sys
from collections.abc import Sequence
from importlib import import_module


def main(argv: Sequence[str] | None = None) -> None:
    """Run the harness with ``argv``, or else with the command line."""
    harness = import_module("lm_eval.__main__")  # of the extra [evaluation]
    from tokenformer_vit import language  # noqa: F401  # registers the models

    if argv is not None:
        sys.argv = [sys.argv[0], *argv]
    harness.cli_evaluate()
