"""Scripts that train the embedded models; see docs/embedded-models.md."""
