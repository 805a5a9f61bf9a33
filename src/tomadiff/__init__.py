"""Faster diffusion pipelines by merging tokens: `tomadiff.apply(pipe, ratio=0.5)`."""

from tomadiff.config import MergeConfig, preset
from tomadiff.patching.apply import apply, merged, remove, supported_models
from tomadiff.patching.summary import summary

__version__ = "0.1.0"
__all__ = ["MergeConfig", "apply", "merged", "preset", "remove", "summary", "supported_models"]
