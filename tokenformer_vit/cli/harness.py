"""Run the command of lm-evaluation-harness with the TokenFormer language models registered.

The harness finds only models that are imported. All arguments are passed to the harness::

    tokenformer-vit lm-eval run --model hf --model_args pretrained=work_dirs/run --tasks piqa boolq
    tokenformer-vit lm-eval ls tasks
"""

import sys
from collections.abc import Sequence

from tokenformer_vit.errors import InputError


def main(argv: Sequence[str] | None = None) -> None:
    """Run the harness with ``argv``, or else with the command line.

    Raises:
        InputError: If the harness is not installed.
    """
    from tokenformer_vit import language  # noqa: F401  # registers the models

    try:
        from lm_eval.__main__ import cli_evaluate
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("lm_eval"):
            raise
        raise InputError(
            "lm-eval needs lm-evaluation-harness: pip install 'tokenformer-vit[evaluation]'"
        ) from error
    if argv is not None:
        sys.argv = [sys.argv[0], *argv]
    cli_evaluate()
