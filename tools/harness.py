"""The same as ``tokenformer-vit lm-eval``, from a clone."""

from tokenformer_vit.cli import run

if __name__ == "__main__":
    run("lm-eval")
