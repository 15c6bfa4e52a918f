"""Package metadata of tokenformer-vit; every tool's settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(
    r'^__version__ = "(.+)"$',
    (ROOT / "tokenformer_vit/__init__.py").read_text(encoding="utf-8"),
    re.MULTILINE,
).group(1)

# Before 14.0.1 a Parquet file ran code (CVE-2023-47248); before 23.0.1 Arrow's own reader of IPC
# files wrote to freed memory (CVE-2026-25087). CVE-2026-92287 is about key servers, unused here.
PYARROW = "pyarrow>=23.0.1"
SCIKIT_LEARN = "scikit-learn>=1.6"
TENSORBOARD = "tensorboard>=2.18"
LANGUAGE = [
    "transformers>=5.15",  # before, GPT-2 starts without its smaller residual weights
    "tokenizers>=0.22",
    "datasets>=4.0",  # 3 still had code of data sets that it could run
    "zstandard>=0.23",  # the Pile is compressed by it
]
EVALUATION = ["lm_eval>=0.4.13", "accelerate>=1.3"]  # transformers.Trainer needs accelerate

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
    entry_points={"console_scripts": ["tokenformer-vit = tokenformer_vit.cli:main"]},
    python_requires=">=3.10",
    # `nox -s floor` runs the tests with the lowest versions that fit. The bounds without a comment
    # are from about the time of Python 3.13, the newest that is tested.
    install_requires=[
        # torch.load(weights_only=True) ran code before 2.6 (CVE-2025-32434) and corrupted memory
        # before 2.10 (CVE-2026-24747). torchvision 0.25 is the release for torch 2.10.
        "torch>=2.10",
        "torchvision>=0.25",
        "timm>=1.0.31",
        # Before 13.0 a crafted JPEG overflows the decoder's buffer (CVE-2026-112403). 12.3 is the
        # last release for Python 3.10: there, read images from people you trust only.
        'pillow>=13.0; python_version >= "3.11"',
        'pillow>=12.3; python_version < "3.11"',
        # mmengine 0.10.7, the last final release, cannot resume under torch >= 2.6; naming the
        # release candidate here is what lets pip choose it.
        "mmengine>=0.11.0rc3,<1.0",
        "mmcv-lite>=2.2.0,<2.4",
        "mmpretrain>=1.2.0,<2.0",
        "matplotlib>=3.10",
        "numpy>=2.1",
        "pydantic>=2.10",
        "pyyaml>=6.0.2",
        "rich>=13.9",
        "safetensors>=0.5",
        "tqdm>=4.67",
        "typing_extensions>=4.12",
    ],
    extras_require={
        "data": [PYARROW],
        "demo": [SCIKIT_LEARN],
        "language": [*LANGUAGE, PYARROW],
        "evaluation": EVALUATION,
        "tensorboard": [TENSORBOARD],
        "dev": [
            "pytest>=8.2",
            "pytest-xdist>=3.6",
            "hypothesis>=6.120",
            "nox[uv]>=2025.2.9",
            "ruff>=0.14",
            "pyright[nodejs]>=1.1.400",
            "import-linter>=2.5",
            "onnxscript>=0.7",  # what torch.onnx.export needs
            "onnxruntime>=1.23",
            PYARROW,
            SCIKIT_LEARN,
            TENSORBOARD,
            *LANGUAGE,
            *EVALUATION,
        ],
    },
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
