"""Private names of TensorFlow and both Keras that this project builds on; test_tf_internals.py holds them.

No other module imports any, but warm_start.py, which comes before all this.
"""
