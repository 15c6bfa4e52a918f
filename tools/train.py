"""The same as ``tokenformer-vit train``, from a clone."""

from tokenformer_vit.cli import run, train

if __name__ == "__main__":
    run(train.main)
