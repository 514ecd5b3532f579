"""Updates of variables that several workers train: what an optimizer does to one, and how it is sent."""
