"""Turning data sets into the class folders that mmpretrain, timm and torchvision read."""

from .folders import check, folder_names, unpack
from .sources import Split, digits_splits, parquet_splits

__all__ = ["Split", "check", "digits_splits", "folder_names", "parquet_splits", "unpack"]
