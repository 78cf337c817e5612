"""A second real model for the benchmarks: a class-conditional DiT that draws small emoji.

Scripts see it as `dit`, because their folder, `benchmarks`, is where Python looks first.
"""

from .load import class_names, load_class_pipeline
from .pipeline import ClassPipeline

__all__ = ["ClassPipeline", "class_names", "load_class_pipeline"]
