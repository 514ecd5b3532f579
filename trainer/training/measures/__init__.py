"""What steps return and what is measured of them: metrics, waits, and how old the weights were."""
