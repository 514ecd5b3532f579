"""The part of TensorFlow that a ps and a worker need: its servers, without Keras and the API.

A server runs what the coordinator sends it, with kernels of C++. So its Python needs a sixth of the imports, which
take a fifth of the time. Whatever imports TensorFlow in such a process later gets all of it.
"""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import SimpleNamespace

from trainer.telemetry.logs import without_chatter

NAMES = {
    "Server": "tensorflow.python.training.server_lib",
    "ClusterSpec": "tensorflow.python.training.server_lib",
    "ConfigProto": "tensorflow.core.protobuf.config_pb2",
    "list_physical_devices": "tensorflow.python.framework.config",
    "set_visible_devices": "tensorflow.python.framework.config",
}
# Where `import tensorflow` finds more kernels and devices, of which the servers' part knows nothing.
PLUGINS, KERNELS = "tensorflow-plugins", "core/kernels"
VARIABLES = ("TF_PLUGGABLE_DEVICE_LIBRARY_PATH", "TF_USE_MODULAR_FILESYSTEM")
# The one library of operations that TensorFlow's Python loads.
OPERATIONS = "lite/experimental/microfrontend/python/ops/_audio_microfrontend_op.so"


def import_server_library() -> SimpleNamespace:
    """Import it, and return its names (NAMES); it makes no context and looks for no device."""
    spec = None if "tensorflow" in sys.modules else find_spec("tensorflow")
    if spec is not None and has_plugins(spec):
        importlib.import_module("tensorflow")
    elif spec is not None:
        os.environ["TF2_BEHAVIOR"] = "1"  # as the package does before its parts are imported
        # Its parts import the package by its name, which runs no file of its own while this one stands for it.
        sys.modules["tensorflow"] = module_from_spec(spec)
        try:
            session = importlib.import_module("tensorflow.python.client.pywrap_tf_session")
            for place in spec.submodule_search_locations or ():
                if (library := Path(place, OPERATIONS)).exists():
                    session.TF_LoadLibrary(str(library))
            return _names()
        finally:
            del sys.modules["tensorflow"]
    return _names()


def load_server_library() -> SimpleNamespace:
    """Return it, as `load_tensorflow` does TensorFlow: it has looked for this machine's devices."""
    with without_chatter():
        library = import_server_library()
        library.list_physical_devices()
    return library


def is_loaded() -> bool:
    """Return whether this process has imported TensorFlow, or its servers alone."""
    return "tensorflow.python" in sys.modules


def has_plugins(spec: ModuleSpec) -> bool:
    """Return whether TensorFlow would load kernels or devices from elsewhere."""
    places = [*sys.path, *(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))]
    kernels = [Path(place, KERNELS) for place in spec.submodule_search_locations or ()]
    plugins = (*kernels, *(Path(place, PLUGINS) for place in places))
    return any(os.environ.get(name) for name in VARIABLES) or any(each.exists() for each in plugins)


def _names() -> SimpleNamespace:
    return SimpleNamespace(**{name: getattr(importlib.import_module(place), name) for name, place in NAMES.items()})
