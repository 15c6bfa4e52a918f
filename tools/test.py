"""The same as ``tokenformer-vit test``, from a clone."""

from tokenformer_vit.cli import run, test

if __name__ == "__main__":
    run(test.main)
