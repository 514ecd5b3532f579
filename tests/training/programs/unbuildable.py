"""A program that has every method, and fails in build_model."""

from __future__ import annotations


class Unbuildable:
    def build_model(self) -> None:
        raise ValueError("no such column")

    def train_dataset(self, context: object) -> None:
        pass

    def eval_dataset(self, context: object) -> None:
        pass
