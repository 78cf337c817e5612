"""`python -m magcache` is the `magcache` command."""

from magcache.cli import app

app(prog_name="magcache")
