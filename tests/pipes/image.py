"""Pipelines that make pictures, by family."""

from pipes import image_dit, image_flux, image_joint, image_more, image_new, image_qwen, image_sd3  # noqa: F401 - they register the entries
