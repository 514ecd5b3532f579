"""Which errors of TensorFlow are the network's or a server's, by messages that people have met."""

from __future__ import annotations

import pytest

from trainer.core.transport_errors import TABLE, transport_error

# Class, message, and a part of the reason. Where one was found: an issue on GitHub.
MET = [
    # tensorflow/tensorflow#57760
    (
        "UnavailableError",
        "Graph execution error:\n\nSocket closed\n"
        "Additional GRPC error information from remote target /job:ps/replica:0/task:0/device:CPU:0:\n"
        ':{"created":"@1663638747.953042461","description":"Error received from peer ipv4:10.244.14.61:2222",'
        '"file":"external/com_github_grpc_grpc/src/core/lib/surface/call.cc","file_line":1056,'
        '"grpc_message":"Socket closed","grpc_status":14} [Op:__inference_train_step_fn_459862]',
        "ended from outside",
    ),
    # tensorflow/tensorflow#38257
    ("UnavailableError", "Connection reset by peer [Op:DeleteIterator]", "ended from outside"),
    ("AbortedError", "Unable to find a context_id matching the specified one (1).", "ended from outside"),
    # grpc/grpc#34076
    (
        "UnknownError",
        "Stream removed\nAdditional GRPC error information from remote target /job:worker/replica:0/task:1 while "
        "calling /tensorflow.eager.EagerService/RunComponentFunction:\n"
        ':UNKNOWN:Error received from peer  {grpc_message:"Stream removed", grpc_status:2}',
        "before the answer",
    ),
    (
        "UnknownError",
        "2 root error(s) found.\n  (0) UNKNOWN:  Stream removed\nAdditional GRPC error information from remote target "
        "/job:ps/replica:0/task:0:\n\t [[{{node RecvTensor}}]]\n  (1) CANCELLED:  RPC Request was cancelled",
        "before the answer",
    ),
    # grpc/grpc#16550
    ("InternalError", "Received RST_STREAM with error code 2", "reset the call"),
    # authzed/authzed-node#77
    ("InternalError", "Received RST_STREAM with code 2 (Internal server error)", "reset the call"),
    # tensorflow/tensorflow#8846
    (
        "InternalError",
        '{"created":"@1490890419.097000000","description":"RST_STREAM","file":"C:\\tf_jenkins\\home\\workspace\\grpc'
        '\\src\\core\\ext\\transport\\chttp2\\transport\\frame_rst_stream.c","file_line":107,"http2_error":1}',
        "reset the call",
    ),
    ("UnknownError", "{{function_node __inference_train_call_1}} Socket closed [Op:Call]", "has ended"),
    ("InternalError", "Connection reset by peer", "has ended"),
    ("UnknownError", "recvmsg:Connection timed out", "socket failed"),
    ("InternalError", "GOAWAY received; Error code: 2; Debug Text: max_age", "no more calls"),
    # of a data service whose dispatcher began without its journal
    ("NotFoundError", "Failed to get tasks: Iteration client id not found: 3008 [Op:IteratorGetNext]", "its jobs"),
    # ray-project/ray#16059
    ("UnknownError", "keepalive watchdog timeout", "was silent"),
    # tensorflow/tensorflow#62880
    (
        "UnknownError",
        "failed to connect to all addresses\nAdditional GRPC error information from remote target "
        "/job:ps/replica:0/task:0/device:CPU:0 while calling /tensorflow.eager.EagerService/Enqueue:",
        "no process listens",
    ),
    ("UnknownError", "Could not start gRPC server", "port is taken"),
    # tensorflow/models#7802
    (
        "InvalidArgumentError",
        "Unable to find a context_id matching the specified one (5257814775637030071). Perhaps the worker was "
        "restarted, or the context was GC'd?",
        "a new process",
    ),
    # tensorflow/tensorflow#39296
    (
        "InvalidArgumentError",
        "Unable to find the relevant tensor remote_handle: Op ID: 3940, Output num: 0",
        "a new process",
    ),
    ("InvalidArgumentError", "/job:ps/replica:0/task:0/device:CPU:0 unknown device.", "a new process"),
    ("InvalidArgumentError", "Primary device is not remote", "a new process"),
    (
        "NotFoundError",
        "'__inference_train_call_417' is neither a type of a primitive operation nor a name of a function registered "
        "in binary running on host. Make sure the operation or function is registered in the binary.",
        "without the traced functions",
    ),
    # A coordinator that thaws after another one has taken its place.
    (
        "InvalidArgumentError",
        "Graph execution error:\n\nInvalid rendezvous key (src): /job:ps/replica:0/task:0/device:CPU:0;a94d51b00bd92;"
        "/job:chief/replica:0/task:0/device:CPU:0;edge_1145_atomic_update/ReadVariableOp;0:0 @ @",
        "another coordinator's",
    ),
    (
        "FailedPreconditionError",
        "Could not find variable dense/kernel. This could mean that the variable has been deleted. In TF1, it can also "
        "mean the variable is uninitialized.",
        "without the variables",
    ),
    ("NotFoundError", "Container localhost does not exist. (Could not find resource: localhost/x)", "the variables"),
]
# A program's own errors, from a py_function, an assertion or an op of its own: trying again would not help.
OWN = [
    ("UnknownError", "ConnectionResetError: [Errno 104] Connection reset by peer\nTraceback (most recent call last):"),
    ("UnknownError", "RuntimeError: Stream removed\nTraceback (most recent call last):\n  File 'mine.py', line 3"),
    ("UnknownError", "OSError: recvmsg: the reader of mine is closed"),
    ("InternalError", "my op: the stream got RST_STREAM from its source"),
    ("InternalError", "Failed to process GOAWAY received by the data service of mine"),
    ("InternalError", "Socket closed by the program's own reader"),
    ("InternalError", "Blas GEMM launch failed : a.shape=(64, 8)"),
    ("UnknownError", "Graph execution error:\n\nValueError: Socket closed\n\n\t [[{{node PyFunc}}]]"),
    ("InvalidArgumentError", "indices[0] = 99 is not in [0, 8)\n\t [[{{node GatherV2}}]]"),
    ("ResourceExhaustedError", "OOM when allocating tensor with shape[10000,10000] and type float"),
    ("InvalidArgumentError", "Socket closed"),
]


@pytest.mark.parametrize(("kind", "message", "why"), MET)
def test_an_error_that_people_have_met_is_the_transports(kind: str, message: str, why: str) -> None:
    row = transport_error((kind, "OpError", "Exception"), message)
    assert row is not None
    assert why in row.why


def test_each_row_has_been_met() -> None:
    met = {transport_error((kind, "OpError", "Exception"), message) for kind, message, _ in MET}
    assert met == set(TABLE)


@pytest.mark.parametrize(("kind", "message"), OWN)
def test_a_programs_own_error_is_not(kind: str, message: str) -> None:
    assert transport_error((kind, "OpError", "Exception"), message) is None


def test_what_is_no_error_of_tensorflow_is_not() -> None:
    assert transport_error(("ConnectionError", "OSError", "Exception"), "Socket closed") is None
