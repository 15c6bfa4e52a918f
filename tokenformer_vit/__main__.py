"""The program ``tokenformer-vit COMMAND``, also ``python -m tokenformer_vit COMMAND``."""

import os
import sys

from tokenformer_vit import cli


def main() -> None:
    """Run a command; for ``train``, first start the program again with a setting of OpenMP."""
    # Threads of OpenMP that spin while they wait take the CPU from data loading workers, and more
    # time than a small training itself. OpenMP reads the variable when PyTorch is imported, which
    # the import of this package has done.
    if sys.argv[1:2] == ["train"] and "OMP_WAIT_POLICY" not in os.environ and os.name == "posix":
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    cli.main()


if __name__ == "__main__":
    main()
