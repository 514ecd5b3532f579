"""Whose error it is, and which line of the user's."""

from __future__ import annotations

import json
import socket
import sys
import textwrap
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.core.failures import EmptyPart, Infrastructure, UserError, explain, is_infrastructure, naming_port
from trainer.core.own_frames import exception_info


def raised(path: Path, source: str) -> BaseException:
    """Run a user's source and return what it raises."""
    path.write_text(textwrap.dedent(source))
    scope: dict[str, Any] = {}
    with pytest.raises(Exception) as caught:  # noqa: PT011
        exec(compile(path.read_text(), str(path), "exec"), scope)
    return caught.value


def test_line_is_the_users_and_not_the_librarys(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    error = raised(path, "import json\n\njson.loads('{')\n")
    assert isinstance(error, json.JSONDecodeError)
    assert explain(error).startswith(f"{path}:3: JSONDecodeError: ")


def test_trainers_own_line_is_not_shown_as_the_users() -> None:
    with pytest.raises(ValueError, match="steps") as caught:
        __import__("trainer.core.settings.config").core.settings.config.Config(program="a:b", steps=0)
    assert "config.py" not in explain(caught.value)


def test_autograph_message_is_cut_to_the_error_and_its_line() -> None:
    error = TypeError(
        'in user code:\n\n    File "/home/me/mine.py", line 12, in train_step  *\n        x = 1 + "a"\n\n'
        "    TypeError: unsupported operand\n"
    )
    assert explain(error) == "/home/me/mine.py:12: TypeError: unsupported operand"


OF_KERAS3 = (
    "Exception encountered when calling Noise.call().\n\n\x1b[1mno such thing\x1b[0m\n\n"
    "Arguments received by Noise.call():\n  • inputs=tf.Tensor(shape=(None, 44), dtype=float32)"
)


@pytest.mark.parametrize("kind", [UserError, EmptyPart])
def test_what_the_trainer_refuses_in_a_step_is_told_without_a_traceback(kind: type[UserError]) -> None:
    in_step = (
        f'in user code:\n\n    File "/home/me/mine.py", line 12, in train_step  *\n\n    {kind.__name__}: why: so\n'
    )
    assert (str(kind(in_step)), str(kind("why: so"))) == ("why: so", "why: so")
    in_layer = (
        "Exception encountered when calling A.call().\n\n\x1b[1mwhy: so\x1b[0m\n\nArguments received by A.call():"
    )
    assert str(kind(in_layer)) == "why: so (in the call of A.call())"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (OF_KERAS3, "no such thing (in the call of Noise.call())"),
        (
            'in user code:\n\n    File "/lib/layer.py", line 9, in call\n        x = 1\n\n    ValueError: '
            + OF_KERAS3.replace("\n", "\n    "),
            "no such thing (in the call of Noise.call())",
        ),
        (
            "Exception encountered when calling layer 'noise' (type Noise).\n\nin user code:\n\n"
            '    File "/lib/layer.py", line 9, in call  *\n        x = 1\n\n    ValueError: no such thing\n\n\n'
            "Call arguments received by layer 'noise' (type Noise):\n  • inputs=1",
            "no such thing (in the call of layer 'noise' (type Noise))",
        ),
        ("Exception encountered when calling Noise.call().", "Exception encountered when calling Noise.call()."),
        (OF_KERAS3.replace("no such", "Error:\n\nno such"), "Error: no such thing (in the call of Noise.call())"),
    ],
)
def test_what_goes_wrong_in_a_layer_is_told_and_not_only_where(text: str, expected: str) -> None:
    assert explain(RuntimeError(text)).endswith(f"RuntimeError: {expected}")


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("`merge_call` called while defining a new graph or a tf.function. This can", "add them up within a step"),
        ("`merge_call` called while defining a new graph or a tf.function. This can", "for _ in range(3)"),
        (
            "Unknown variable: <Variable path=dense_2/kernel, shape=(8, 8), dtype=float32>. This optimizer can only be "
            "called for the variables it was originally built with. When working with a new set of variables",
            "build it in build_model",
        ),
        (
            "Exception encountered when calling Cap.call(). Could not automatically infer the output shape / dtype of "
            "'cap' (of type Cap). Either the `Cap.call()` method is incorrect, or",
            "call it once in build_model",
        ),
        ("Serialization error while trying to register a dataset with tf.data service. The", "set input to local"),
        ("None values not supported", "have the dataset give (features, labels)"),
        ("Input 0 of layer 'a' is incompatible with the layer: expected min_ndim=2, found ndim=1", "lack batch()"),
        ("Invalid input shape. Expected shape (None, 6), but input has incompatible shape (6,)", "lack batch()"),
        ("Failed to convert a NumPy array to a Tensor (Unsupported object type float)", 'fillna("")'),
        ("Can't convert Python sequence with mixed types to Tensor", "give the column one type"),
        ("Please use `tf.keras.losses.Reduction.SUM` or `tf.keras.losses.Reduction.NONE` for", 'reduction="none"'),
        ("<tf.Tensor 'x:1' shape=(None, 1) dtype=float32> is out of scope and cannot be used here", "add_weight"),
        ("Timestamp cannot be called when determinism is enabled", "enable_op_determinism out"),
        (
            "Stateful RNNs (created with `stateful=True`) are not yet supported with tf.distribute.Strategy",
            "leave stateful out",
        ),
        (
            "Detected unsupported operations when trying to compile graph step[] on XLA_CPU_JIT: AsString",
            "leave jit_compile=True out of compile",
        ),
        ("Method requires being in cross-replica context, use get_replica_context", "without strategy.run"),
        (
            "'_DefaultDistributionStrategy' object has no attribute '_cluster_coordinator'",
            "return the dataset itself",
        ),
        ("/data/a.tfrecord; No such file or directory", "on the host of each task that reads, under the same path"),
        ("/data/a.tfrecord; Permission denied", "the user trainer, which must be allowed"),
        ("No files match `file_pattern` /data/*.csv", "on the host of each task that reads, under the same path"),
        ("Python int 2791210558679442012 too large to convert to np.int32", "dtype_conversion_mode"),
    ],
)
def test_what_a_library_refuses_without_a_fix_gets_one(text: str, fix: str) -> None:
    message = explain(RuntimeError(text))
    assert message.startswith(f"RuntimeError: {text}: ")
    assert fix in message


@pytest.mark.parametrize(
    ("text", "node", "is_table"),
    [
        ("partitions[0] = 2", "while/step/m/embedding/rows_asked_for_once/DynamicPartition_1", True),
        ("partitions[0] = 2", "while/step/m/embedding/embedding_lookup_1/DynamicPartition", True),
        ("indices[5] = 25", "while/step/m/e/rows_asked_for_once_1/embedding_lookup_1", True),
        ("indices[3,1] = -1", "while/step/m/e/embedding_lookup", True),
        ("partitions[0] = 2", "while/step/gradient_tape/m_1/DynamicPartition", False),
        ("indices[0] = 2", "GatherV2", False),
    ],
)
def test_only_an_id_outside_of_a_table_gets_the_tables_fix(text: str, node: str, is_table: bool) -> None:
    message = explain(RuntimeError(f"{text} is not in [0, 2)\n\t [[{{{{node {node}}}}}]]"))
    assert ("ids modulo them" in message) is is_table


def test_operation_is_named_where_there_is_no_line() -> None:
    error = RuntimeError("indices[0] = 99 is not in [0, 8)\n\t [[{{node GatherV2}}]]\n\t [[IteratorGetNext]]")
    assert explain(error) == "RuntimeError: indices[0] = 99 is not in [0, 8) (in the operation GatherV2)"


def test_missing_data_of_the_user_is_the_users_error(tmp_path: Path) -> None:
    error = raised(tmp_path / "mine.py", "open('/nowhere/data')\n")
    assert not is_infrastructure(error)


def test_storage_trouble_of_the_trainer_is_not() -> None:
    assert is_infrastructure(OSError(28, "No space left on device"))


@pytest.mark.parametrize(("error", "expected"), [(Infrastructure("x"), True), (UserError("x"), False)])
def test_own_errors_say_whose_they_are(error: Exception, expected: bool) -> None:
    assert is_infrastructure(error) is expected


def test_wrapped_error_is_looked_into() -> None:
    wrapper = RuntimeError("Input has an error")
    wrapper.original_exception = Infrastructure("a member went away")  # type: ignore[attr-defined]
    assert is_infrastructure(wrapper)
    assert explain(wrapper) == "Infrastructure: a member went away"


def test_a_missing_package_is_to_be_installed_wherever_the_program_imports_it() -> None:
    error = ModuleNotFoundError("No module named 'tensorflow_text'", name="tensorflow_text")
    assert explain(error).startswith("ModuleNotFoundError: No module named 'tensorflow_text': install it; release_lock")


def test_error_without_a_message_is_named() -> None:
    assert explain(KeyError()) == "KeyError: no message"


def test_the_first_of_several_root_errors_is_told() -> None:
    roots = ["2 root error(s) found.", "  (0) INVALID_ARGUMENT:  the loss : Tensor had NaN values", "  (1) CANCELLED:"]
    text = "\n".join(roots)
    assert explain(ValueError(text)) == "ValueError: the loss : Tensor had NaN values"


def test_what_is_behind_a_heading_is_said_with_it() -> None:
    lines = [
        "Graph execution error:",
        "Error in user-defined function passed to Map:",
        "!!! Detected NaN !!!",
        "  shape: (4)",
    ]
    text = "\n\n".join(lines)
    assert explain(ValueError(text)) == "ValueError: Error in user-defined function passed to Map: !!! Detected NaN !!!"


class OpError(Exception):
    """As tf.errors has them."""


class InternalError(OpError): ...


@pytest.mark.parametrize(
    ("message", "expected"), [("Received RST_STREAM with error code 2", True), ("Blas GEMM launch failed", False)]
)
def test_errors_of_transport_are_infrastructure(monkeypatch: pytest.MonkeyPatch, message: str, expected: bool) -> None:
    tensorflow = SimpleNamespace(errors=SimpleNamespace(OpError=OpError, InternalError=InternalError))
    monkeypatch.setitem(sys.modules, "tensorflow", tensorflow)  # type: ignore[arg-type]
    assert is_infrastructure(InternalError(message)) is expected


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("/job:localhost/replica:0/task:0/device:CPU:0", False),  # made before this process joined the cluster
        ("/job:ps/replica:0/task:0/device:CPU:0", True),  # a server that is a new process
    ],
)
def test_an_unknown_device_of_the_program_is_no_trouble_of_a_server(
    monkeypatch: pytest.MonkeyPatch, device: str, expected: bool
) -> None:
    tensorflow = SimpleNamespace(errors=SimpleNamespace(OpError=OpError, InternalError=InternalError))
    monkeypatch.setitem(sys.modules, "tensorflow", tensorflow)  # type: ignore[arg-type]
    error = OpError(f"{device} unknown device.")
    assert is_infrastructure(error) is expected
    assert ("make it in build_model" in explain(error)) is not expected


@pytest.mark.parametrize(
    ("message", "helps"),
    [
        ("failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.3.21:2300: Connection refused", True),
        ("Socket closed", True),
        ("Cast int64 to uint8 is not supported", False),
    ],
)
def test_a_value_that_a_server_can_not_convert_is_the_networks_error_where_the_network_says_so(
    message: str, helps: bool
) -> None:
    assert is_infrastructure(TypeError(f"Error while casting from dtype int64 to uint8. {message}")) is helps
    assert not is_infrastructure(TypeError(message))


def test_a_traceback_has_the_programs_lines_and_what_they_called_at_last(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    between = raised(path, "import json\n\njson.loads('{}', object_hook=lambda read: read['missing'])\n")
    lines = "".join(traceback.format_exception(*exception_info(between, path)))
    assert lines.count(f'File "{path}", line 3, in ') == 2
    assert "raw_decode" not in lines
    below = raised(path, "import json\n\njson.loads('{')\n")
    assert "raw_decode" in "".join(traceback.format_exception(*exception_info(below, path)))


def test_where_autograph_names_the_programs_lines_no_librarys_frame_is_shown() -> None:
    message = (
        'in user code:\n\n    File "/home/me/mine.py", line 12, in train_step  *\n        x = 1\n\n    TypeError: no'
    )
    library = compile("raise TypeError(message)", json.__file__, "exec")
    with pytest.raises(TypeError, match="in user code") as caught:
        exec(library, {"message": message})
    lines = traceback.format_exception(*exception_info(caught.value, None))
    assert lines[-1] == f"TypeError: {message}\n"
    assert json.__file__ not in "".join(lines[:-1])


def test_an_error_that_no_line_of_the_programs_took_part_in_keeps_all_frames() -> None:
    scope: dict[str, Any] = {}
    exec(compile("def fail():\n    raise TypeError('no')\n", json.__file__, "exec"), scope)
    with ThreadPoolExecutor() as pool:  # whose frames are Python's alone
        error = pool.submit(scope["fail"]).exception()
    assert error is not None
    assert exception_info(error, None)[2] is error.__traceback__


NO_SERVER = "Could not start gRPC server"  # TensorFlow's words for each cause


def test_a_port_is_named_only_where_another_process_has_it() -> None:
    with socket.create_server(("", 0)) as held:
        port = held.getsockname()[1]
        named = f"another process has ps-0's port {port}"
        with pytest.raises(Infrastructure, match=named), naming_port("ps-0", f"192.0.2.1:{port}"):
            raise RuntimeError(NO_SERVER)
    with pytest.raises(RuntimeError, match=NO_SERVER), naming_port("ps-0", f"192.0.2.1:{port}"):
        raise RuntimeError(NO_SERVER)


def test_a_port_that_needs_rights_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(address: tuple[str, int]) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket, "create_server", refused)
    with pytest.raises(RuntimeError, match=NO_SERVER), naming_port("ps-0", "192.0.2.1:80"):
        raise RuntimeError(NO_SERVER)


@pytest.mark.parametrize(
    "text",
    [
        "SymbolicTensor' object has no attribute 'assign'",
        "'ShardedVariable' object has no attribute 'scatter_nd_update'",
    ],
)
def test_rows_are_written_by_a_method_that_a_split_variable_has_too(text: str) -> None:
    assert "variable.scatter_update(tf.IndexedSlices(rows, ids))" in explain(AttributeError(text))
