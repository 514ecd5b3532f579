"""`ids` whose worker 0 finds no more data while the file ENDING is there, as on an iterator that a fault cancelled."""

import os

import tensorflow as tf
from ids import Ids


class Ending(Ids):
    def train_dataset(self, context):
        number = context.input_pipeline_id

        def there(*element):
            # The name depends on the element: TensorFlow would read a constant one's file once, before it trains.
            nothing = tf.strings.substr(tf.strings.as_string(element[0][0, 0]), 0, 0)
            files = tf.io.matching_files(tf.strings.join([os.environ["ENDING"], nothing]))
            return tf.logical_or(number > 0, tf.equal(tf.size(files), 0))

        return super().train_dataset(context).take_while(there)
