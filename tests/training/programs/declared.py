"""A program whose layer asks for a dynamic table by itself."""

from keys import Keys

from trainer.examples.dynamic_embedding import dynamic_embedding


class Declared(Keys):
    def rows(self, ids):
        return dynamic_embedding(self.keras)(8, {"capacity": 200_000}, rows=100, name="items")(ids)
