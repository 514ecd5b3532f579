"""The training's loop: when calls are given, and what is due beside them."""
