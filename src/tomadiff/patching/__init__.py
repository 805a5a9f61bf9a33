"""How a plan gets into a live model, and out of it again."""
