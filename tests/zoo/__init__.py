"""A small random instance of every transformer class in diffusers."""

from zoo import audio, image, image_joint, other, video, video_joint, ways
from zoo.base import ENTRIES

__all__ = ["ENTRIES", "audio", "image", "image_joint", "other", "video", "video_joint", "ways"]
