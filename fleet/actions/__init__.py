"""What the verbs are made of."""
