"""Two small text-to-image models of our own, and what it takes to train them."""
