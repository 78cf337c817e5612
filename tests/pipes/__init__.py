"""Real diffusers pipelines with tiny random components, one entry a pipeline class."""
