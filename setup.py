"""Package metadata of tokenformer-vit; every tool's settings are in pyproject.toml."""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
SOURCE = (ROOT / "tokenformer_vit/__init__.py").read_text(encoding="utf-8")
(VERSION,) = re.findall(r'^__version__ = "(.+)"$', SOURCE, re.MULTILINE)

TRAIN = [
    # The maintained forks of mmengine, mmcv and mmpretrain, which import by the same names: the
    # originals cannot train on Python 3.14. pip builds onedl-mmcv without compiled operators.
    "onedl-mmengine>=0.10.12,<1.0",
    "onedl-mmcv>=2.3.6,<2.4",
    "onedl-mmpretrain>=1.3.6,<2.0",
    "opencv-python>=4.11",  # copies and resizes pixels; mmcv needs it, too
    "simplejpeg>=1.9",  # decodes JPEGs; without it Pillow does
    "matplotlib>=3.10",
    "pandas>=2.2.3",  # the tables of tests and ablations
    "scikit-learn>=1.6",  # the digits of the demonstration
]
# Before 14.0.1 a Parquet file ran code (CVE-2023-47248); before 23.0.1 Arrow's own reader of IPC
# files wrote to freed memory (CVE-2026-25087). CVE-2026-92287 is about key servers, unused here.
ARROW = [
    "pyarrow>=23.0.1",
    "datasets>=4.0",  # 3 still had code of data sets that it could run
    "huggingface_hub>=0.34",  # its command is `hf` since then
]
LANGUAGE = [
    "transformers>=5.24",  # before, caches had another name; it needs Python 3.11
    "tokenizers>=0.22",
    "zstandard>=0.23",  # reads the Pile
]
EVALUATION = ["lm_eval>=0.4.13", "accelerate>=1.3"]  # transformers.Trainer needs accelerate


class BuildWithConfigs(build_py):
    """Copy configs/ to where OpenMMLab's packages have theirs."""

    def run(self) -> None:
        """Build the package; an editable one finds configs/ in the clone."""
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "tokenformer_vit", ".mim", "configs")
            shutil.rmtree(target, ignore_errors=True)
            ignored = shutil.ignore_patterns("__pycache__", "results", "*.md")
            shutil.copytree(ROOT / "configs", target, ignore=ignored)


setup(
    name="tokenformer-vit",
    version=VERSION,
    description="TokenFormer vision transformers for timm, mmengine and mmpretrain",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    cmdclass={"build_py": BuildWithConfigs},
    packages=find_packages(include=["tokenformer_vit", "tokenformer_vit.*"]),
    package_data={"tokenformer_vit": ["py.typed", "models/pretrained/*/*"]},
    entry_points={"console_scripts": ["tokenformer-vit = tokenformer_vit.__main__:main"]},
    python_requires=">=3.10",
    # `nox -s floor` runs the tests with the lowest versions that fit. The bounds without a comment
    # are from about the time of Python 3.13.
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
        "numpy>=2.1",
        "safetensors>=0.5",
        "filelock>=3.16",  # before, a lock in a lock of one process waited
        "tqdm>=4.67",
    ],
    extras_require={
        "train": [*TRAIN, *ARROW],
        "language": [*LANGUAGE, *ARROW],
        "evaluation": [*LANGUAGE, *ARROW, *EVALUATION],
        "dev": [
            "pytest>=9",
            "pytest-xdist>=3.6",
            "parameterized>=0.9",  # transformers' own tests need it
            "nox[uv]>=2025.2.9",
            "ruff>=0.14",
            "pyright[nodejs]>=1.1.400",
            "import-linter>=2.5",
            "onnxscript>=0.7",  # torch.onnx.export needs it
            "onnxruntime>=1.23",
            "tensorboard>=2.18",  # training writes for it if it is installed
            *TRAIN,
            *ARROW,
            *LANGUAGE,
            *EVALUATION,
        ],
    },
    classifiers=[
        "Programming Language :: Python :: 3",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 15)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
