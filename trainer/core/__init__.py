"""What everything else uses: settings, names, errors and states. Nothing here imports TensorFlow."""
