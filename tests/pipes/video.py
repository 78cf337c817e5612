"""Video pipelines."""

from pipes import (  # noqa: F401 - they register their own
    video_animate,
    video_cog,
    video_cosmos,
    video_hunyuan,
    video_kandinsky,
    video_ltx,
    video_more,
    video_wan,
    video_wan_more,
)
