"""Speed: real shapes, counted FLOPs and timings. Measurements live here, never in tests."""
