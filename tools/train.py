"""The same as ``tokenformer-vit train``, from a clone."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before PyTorch is imported: see __main__.py

from tokenformer_vit.cli import run, train

if __name__ == "__main__":
    run(train.main)
