"""Turning data sets into the class folders that mmpretrain, timm and torchvision read."""

from .folders import check, class_folders, unpack
from .sources import Split, digits_splits, parquet_splits

__all__ = ["Split", "check", "class_folders", "digits_splits", "parquet_splits", "unpack"]
