"""``python -m tokenformer_vit COMMAND`` is ``tokenformer-vit COMMAND``."""

from tokenformer_vit.cli import main

if __name__ == "__main__":
    main()
