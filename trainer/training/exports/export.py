"""The finished model as a SavedModel: unsharded, and servable without the program's code.

A run is finished before its model is exported, and stays so whatever becomes of the export: `export.json` says whether
one is due, and why it failed.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import math
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import tensorflow as tf

from trainer.core.contracts import ElementSpec, Model, Program
from trainer.core.failures import Infrastructure, UserError, explain, is_infrastructure
from trainer.core.memory_limit import check_room, room
from trainer.core.own_frames import exception_info
from trainer.core.program import build_model, program_file
from trainer.run.copies import alone, clear
from trainer.run.directory import RunDirectory
from trainer.run.records import read_record, sync, sync_tree, write_record
from trainer.run.saves.checkpoint_reader import read_model
from trainer.training.data.context import WHOLE
from trainer.training.export_changes import VARIABLES, write_changes
from trainer.training.exports.export_shards import LargeVariables, ReadsLarge, slices_of
from trainer.training.exports.export_tables import UNTRACKED, track_tables
from trainer.training.exports.reserved import least_bytes
from trainer.training.keras.adapters import keras_of
from trainer.training.keras.base import has_call, has_test_step
from trainer.training.tables.dynamic.served import ServedTables, key_bytes, piece_bytes
from trainer.training.tables.row_restores import open_checkpoint, reading
from trainer.training.tf_internals.saving import naming_arguments
from trainer.training.updates.optimizers import of_optimizers

log = logging.getLogger(__name__)
OWNER = re.compile(r"Trackable referencing this tensor = <(tf\.Variable|(?P<kind>[\w.]+))")
HELD = 4  # times a model's bytes are taken while it is exported as a whole: its values, what is read, and first values
MIN_HELD_TABLES = 3  # where it has several tables
COMPARED = 4  # times a tensor's: two of it, which bytes differ, and what is written
FIX = "when others on it have ended, or on a larger chief's host: fab export --run NAME"
WRITER = "SummaryWriter"  # in the type of its resource
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # what a file system says that knows none
TRIES = 3  # of processes that trouble of the infrastructure ends, or that die in it


def make_export_due(directory: RunDirectory, step: int) -> None:
    """Note that the model of this step is to be exported, unless it is noted already."""
    record = read_record(directory.export_record)
    if record is None or record["step"] != step or record["ended"]:
        write_record(directory.export_record, {"step": step, "tries": 0, "ended": False, "error": ""})


def export_what_is_due(
    program: Callable[[], Program], directory: RunDirectory, step: int, element_spec: ElementSpec | None = None
) -> str:
    """Export the model of this step and note how that ended; returns why it is not exported, nothing where it is.

    `program` loads it. Raises Infrastructure while another process may do better.
    """
    record = read_record(directory.export_record) or {}
    tries = int(record.get("tries", 0)) + 1
    error, loaded = "", None
    if tries > TRIES:
        error = f"{TRIES} processes have ended while they exported"
    else:
        write_record(directory.export_record, {"step": step, "tries": tries, "ended": False, "error": ""})
        try:
            loaded = program()
            export_model(loaded, directory, step, element_spec)
        except (Exception, SystemExit) as wrong:  # a program may say sys.exit
            file = program_file(loaded) if loaded is not None else None
            error = str(wrong) if isinstance(wrong, UserError | Infrastructure) else explain(wrong, file)
            if is_infrastructure(wrong, file) and tries < TRIES:
                raise Infrastructure(f"cannot export the model: {error}") from wrong
            info = None if isinstance(wrong, UserError) else exception_info(wrong, file)
            log.error("the model is not exported: %s", error, exc_info=info)
    write_record(directory.export_record, {"step": step, "tries": tries, "ended": True, "error": error})
    return error


def export_now(program: Callable[[], Program], directory: RunDirectory, step: int) -> str:
    """Export the model of this step, whatever became of it before; returns why it is not exported."""
    write_record(directory.export_record, {"step": step, "tries": 0, "ended": False, "error": ""})
    return export_what_is_due(program, directory, step)


def not_exported(run: str, error: str) -> str:
    """Say what became of the model, for the status."""
    return f"its model is not exported: {error}. Correct that, then: fab export --run {run}" if error else ""


def export_model(
    program: Program,
    directory: RunDirectory,
    step: int,
    element_spec: ElementSpec | None = None,
    target: Path | None = None,
) -> str:
    """Write the checkpoint's model to the run's export directory, or another; returns it, which is on disk then.

    The model is built again outside any strategy, so that its variables are whole. It keeps the layers that prepare
    its input. `serving_signature` of the program, where there is one, says what the SavedModel offers; without it the
    model's own call does, under the name serving_default. `element_spec` is that of the data, by default that of the
    evaluation's, or of the training's where there is no evaluation. Where the model as a whole has no room, large
    variables go from file to file. Raises UserError when there is nothing to export, or no room for that either.
    """
    target = target or directory.export
    temporary = target.with_name(f".{target.name}.new")
    if element_spec is None:
        dataset = getattr(program, "eval_dataset", None) or program.train_dataset
        element_spec = dataset(WHOLE).element_spec
    size, limit = bytes_of_checkpoint(directory, step), room(now=True)
    large = None
    if HELD * size > limit:
        check_room(least_bytes_of_checkpoint(directory, step), "the export", FIX, now=True)
        large = LargeVariables(target.with_name(f".{target.name}.rows"))
    with alone_at(target), removed_if_broken_off(temporary):
        try:
            write_model(program, directory, step, element_spec, temporary, large)
        except ReadsLarge:
            if MIN_HELD_TABLES * size > limit:
                raise
            write_model(program, directory, step, element_spec, temporary)
        sync_tree(temporary)
        replace_directory(temporary, target)
    log.info("exported the model of step %d to %s", step, target)
    return str(target)


def write_model(
    program: Program,
    directory: RunDirectory,
    step: int,
    element_spec: ElementSpec,
    path: Path,
    large: LargeVariables | None = None,
) -> None:
    """Write the checkpoint's model, as a whole or, with `large`, by shard; raises as `export_model`."""
    shutil.rmtree(path, ignore_errors=True)
    tables = ServedTables.from_directory(directory)
    tables.put_rows = large.put_rows if large else None
    with large.left_out() if large else contextlib.nullcontext():
        with tables.of_layers():
            model = build_model(program)

        def restore() -> None:
            read_model(directory, keras_of(model).trained(with_optimizers=False), step, tables, large, reading)

        save_model(program, model, str(path), element_spec, restore, tables)
        if large:
            large.write(path)


def export_version(program: Program, directory: RunDirectory, step: int, changes: bool = False) -> str:
    """Write a SavedModel to exports/<step>, or with `changes` what has changed since the newest one there.

    It takes nothing of a training that goes on but its newest checkpoint. Returns the directory, which may be there.
    """
    versions = directory.exports
    versions.mkdir(exist_ok=True)
    if not changes:
        whole = versions / str(step)
        return str(whole) if whole.exists() else export_model(program, directory, step, target=whole)
    steps = [int(path.name) for path in versions.iterdir() if path.name.isdecimal()]
    if not steps:
        raise UserError(f"{versions} has no whole export whose changes could be written: leave --changes out once")
    base = max(steps)
    if base == step:
        raise UserError(f"{versions / str(step)} is the export of step {step}, and there is no newer checkpoint")
    target, whole = versions / f"{step}.changes", versions / f".{step}.whole"
    if target.exists():
        return str(target)
    coming = versions / f".{step}.changes.new"
    with alone_at(target):
        shutil.rmtree(coming, ignore_errors=True)
        try:
            export_model(program, directory, step, target=whole)
            check_room(COMPARED * largest_bytes(whole), "the comparison of two exports", FIX, now=True)
            tables = ServedTables.from_directory(directory).saved_in(whole)
            with removed_if_broken_off(coming):
                write_changes(versions / str(base), whole, coming, (base, step), tables)
                sync_tree(coming)
        finally:
            shutil.rmtree(whole, ignore_errors=True)
        replace_directory(coming, target)
    return str(target)


def save_model(
    program: Program,
    model: Model,
    path: str,
    element_spec: ElementSpec,
    restore: Callable[[], None] = lambda: None,
    tables: ServedTables | None = None,
) -> None:
    """Save a model that is built outside any strategy; `restore` gives it its weights when it has all variables.

    `tables` are its dynamic ones.

    Raises UserError where there is nothing to export, or what it uses can't be exported.
    """
    if why := lacks_export(program, model):
        raise UserError(why)
    keras = keras_of(model)
    with tables.of_layers() if tables else contextlib.nullcontext():
        takes_data = keras.ensure_built(element_spec)
    restore()
    if tables is not None:
        tables.track()
    signature = getattr(program, "serving_signature", None)
    with tracked(program, model), naming_arguments():
        if signature is None:
            with contextlib.redirect_stdout(io.StringIO()):  # it prints a page of tensor numbers
                keras.export(path, element_spec)
        else:
            root = model
            if not has_call(keras) or not takes_data:  # Keras would trace its call
                root = tf.Module()
                root.kept = keras.variables
            signatures = signature(model)
            track_tables(root, signatures)
            tf.saved_model.save(root, path, signatures=signatures)


@contextlib.contextmanager
def tracked(program: Program, model: Model) -> Iterator[None]:
    """Raise UserError where what is exported uses something that is no part of the model."""
    try:
        yield
    except AssertionError as error:
        if UNTRACKED not in str(error):
            raise
        found = OWNER.search(str(error))
        what = f"a {(found['kind'] or 'tf.Variable').rpartition('.')[2]}" if found else "a table or a variable"
        has_own = getattr(program, "serving_signature", None) is not None
        by = f"{type(program).__name__}.serving_signature" if has_own else f"the call of {type(model).__name__}"
        if WRITER in str(error):
            raise UserError(f"{by} writes with tf.summary, which a SavedModel can't: write it in train_step") from error
        raise UserError(
            f"{by} uses {what} that is no part of the model, so that neither a checkpoint nor the SavedModel has it. "
            "Make it an attribute of the model in build_model, as in model.table = table"
        ) from error


def lacks_export(program: Program, model: Model) -> str:
    """Say why a model can't be exported, and what to do; nothing where it can."""
    if has_call(keras_of(model)) or getattr(program, "serving_signature", None) is not None:
        return ""
    return (
        f"{type(model).__name__} has no call, so that there is nothing to export: give the program a "
        "serving_signature(model), or set export: false"
    )


def lacks_evaluation(model: Model) -> str:
    """Say why a model can't be evaluated, and what to do; nothing where it can."""
    keras = keras_of(model)
    if has_call(keras) or has_test_step(keras):
        return ""
    return (
        f"{type(model).__name__} has no call, so that Keras can't evaluate it: give it a test_step, or set "
        "evaluation: none"
    )


def bytes_of_checkpoint(directory: RunDirectory, step: int) -> int:
    """Return what the model of a checkpoint takes, without its optimizer's slots."""
    return sum(pieces_of_checkpoint(directory, step)) + piece_bytes(*dynamic_tables(directory, step))


def least_bytes_of_checkpoint(directory: RunDirectory, step: int) -> int:
    """Return what an export of it holds at most where large variables go from file to file."""
    return least_bytes(pieces_of_checkpoint(directory, step)) + key_bytes(*dynamic_tables(directory, step))


def pieces_of_checkpoint(directory: RunDirectory, step: int) -> list[int]:
    """Return the bytes of the model's variables in a checkpoint, each shard by itself."""
    try:
        variables = open_checkpoint(directory.catalogue.prefix(step))
    except (tf.errors.OpError, IndexError):  # its reader says so
        return []
    types, shapes = variables.get_variable_to_dtype_map(), variables.get_variable_to_shape_map()
    slots, slices = of_optimizers(shapes), slices_of(variables)
    pieces = []
    for name, shape in shapes.items():
        if name.startswith("model/") and name not in slots and types[name] != tf.string:
            row = math.prod(shape[1:]) * types[name].size
            pieces += [rows * row for rows in slices.get(name, shape[:1] or [1])]
    return pieces


def largest_bytes(saved: Path) -> int:
    """Return the bytes of a SavedModel's largest tensor."""
    variables = tf.train.load_checkpoint(str(saved / VARIABLES))
    types = variables.get_variable_to_dtype_map()
    return max(math.prod(shape) * types[name].size for name, shape in variables.get_variable_to_shape_map().items())


def dynamic_tables(directory: RunDirectory, step: int) -> tuple[str, Collection[str]]:
    """Return where a checkpoint has its dynamic tables, and their names."""
    return directory.catalogue.prefix(step), directory.dynamic_tables


@contextlib.contextmanager
def alone_at(target: Path) -> Iterator[None]:
    """Keep other processes from the same export; raises Infrastructure where one is at it.

    Each would remove what the other has written, and move what is half written to its place.
    """
    with contextlib.ExitStack() as stack:
        try:
            held = stack.enter_context(alone(target.with_name(f".{target.name}.lock")))
            stack.callback(clear, held)
        except UserError as error:
            raise Infrastructure(str(error)) from error
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise
        yield


@contextlib.contextmanager
def removed_if_broken_off(path: Path) -> Iterator[None]:
    """Remove what there is of a directory where writing it fails: it would only make a full disk fuller."""
    try:
        yield
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise


def replace_directory(new: Path, target: Path) -> None:
    """Move a directory to its place; the old one is gone only when the new one is there."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    new.rename(target)
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)
