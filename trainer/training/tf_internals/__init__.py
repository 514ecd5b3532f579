"""Private names of TensorFlow and both Keras that this project builds on; test_tf_internals.py holds them.

No other module names any, but warm_start.py and server_library.py, which come before all this.
"""
