"""The two Keras: a program's model is of tf_keras (keras2.py) or of Keras 3 (keras3/); base.py has their interface."""
