"""Quality: how far merging moves a picture, and whether it still shows what was asked for."""
