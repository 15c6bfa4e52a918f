"""Package metadata of tokenformer-vit; every tool's settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(
    r'^__version__ = "(.+)"$', (ROOT / "tokenformer_vit" / "__init__.py").read_text(), re.MULTILINE
).group(1)

setup(
    name="tokenformer-vit",
    version=VERSION,
    description="TokenFormer vision transformers for timm, mmengine and mmpretrain",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["tokenformer_vit", "tokenformer_vit.*"]),
    package_data={"tokenformer_vit": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=[
        # The lower bounds of torch, torchvision and timm are the oldest that the tests were run on.
        "torch>=2.5",
        "torchvision>=0.20",
        "timm>=1.0.31",
        "pillow>=10",
        # mmengine 0.10.7, the last final release, cannot resume under torch >= 2.6; naming the
        # release candidate here is what lets pip choose it.
        "mmengine>=0.11.0rc3,<1.0",
        "mmcv-lite>=2.2.0,<2.4",
        "mmpretrain>=1.2.0,<2.0",
        "matplotlib",
        "rich",
        "tqdm",
    ],
    extras_require={
        "data": ["pyarrow"],
        "demo": ["scikit-learn"],
        "language": [
            "transformers>=5.0",
            "tokenizers",
            "safetensors",
            "datasets>=3.0",
            "pyarrow",
            "zstandard",  # the Pile is compressed by it
        ],
        "evaluation": ["lm_eval>=0.4.13", "accelerate"],
        "tensorboard": ["tensorboard"],
        "dev": [
            "pytest>=8",
            "pytest-xdist",
            "ruff",
            "pyright[nodejs]",
            "import-linter",
            "pyarrow",
            "scikit-learn",
            "tensorboard",
            "transformers>=5.0",
            "tokenizers",
            "datasets>=3.0",
            "zstandard",
            "lm_eval>=0.4.13",
            "accelerate",  # transformers' Trainer and the harness need it
        ],
    },
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
