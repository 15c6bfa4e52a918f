"""The same as ``tokenformer-vit evaluate-lm``, from a clone."""

from tokenformer_vit.cli import run

if __name__ == "__main__":
    run("evaluate-lm")
