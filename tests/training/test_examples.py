"""The examples do what docs/examples.md says of them: each is trained once on a local cluster, and looked at."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from processes import MINUTE, Process, Runs

from trainer.examples import clicks, fashion_mnist, heroes, histories, recommender, sync_digits, two_towers

pytestmark = pytest.mark.timeout(300)
# Adam keeps two numbers for each one of the model.
WITH_SLOTS = 3
PACKED_NAMES = [f"{name}.gz" for names in fashion_mnist.FILES.values() for name in names]


def trained(runs: Runs, example: str, run: str, steps: int, *more: str) -> Process:
    process = runs.local(f"trainer.examples.{example}", run, steps, "--seed", "1", *more)
    assert process.wait(4 * MINUTE) == 0, process.output
    assert runs.status(run)["step"] == steps
    return process


def evaluated(runs: Runs, run: str) -> dict[str, float]:
    return runs.status(run)["evaluation"]["metrics"]


def serve(runs: Runs, run: str) -> Any:
    return tf.saved_model.load(str(runs.directory(run) / "export")).signatures["serving_default"]


def bytes_per_server(runs: Runs, run: str) -> list[int]:
    """Return the sizes of the newest checkpoint's data files: each ps writes its own, and so does the chief."""
    step = runs.checkpoints(run)[-1]
    files = (runs.directory(run) / "checkpoints").glob(f"ckpt-{step}.data-*")
    return sorted((path.stat().st_size for path in files), reverse=True)


def check_shared_out(sizes: list[int], tables: int) -> None:
    """Assert that two servers saved about half of the tables' bytes each."""
    whole = WITH_SLOTS * tables
    assert sum(sizes) >= whole
    assert all(0.45 * whole <= size <= 0.6 * whole for size in sizes[:2]), sizes


@pytest.fixture(scope="module")
def heroes_run(runs: Runs) -> Process:
    """Two starts of the trainer: the second one goes on, through the other API, with what the first one saved."""
    trained(runs, "heroes:Heroes", "heroes", 300, "--no-evaluator")
    return trained(runs, "heroes:Heroes", "heroes", 400, "--api", "fit")


@pytest.mark.matrix
def test_heroes_are_named_and_training_goes_on_from_a_checkpoint(heroes_run: Process, runs: Runs) -> None:
    assert "/ckpt-300" in heroes_run.search(r"restored (\S+)")[1]
    assert "going on at step 300 of 400" in heroes_run.output
    assert evaluated(runs, "heroes")["accuracy"] >= 0.85  # of six heroes


@pytest.mark.matrix
def test_table_of_clues_is_shared_out_over_both_ps(heroes_run: Process, runs: Runs) -> None:
    check_shared_out(bytes_per_server(runs, "heroes"), (len(heroes.CLUES) + 1) * heroes.EMBEDDING * 4)


@pytest.mark.matrix
def test_exported_heroes_take_strings_and_answer_with_a_name(heroes_run: Process, runs: Runs) -> None:
    name_hero = serve(runs, "heroes")
    clues, names = heroes.load("test")
    answer = name_hero(clues=tf.constant(clues))
    assert np.mean(answer["hero"].numpy().astype(str) == names) == pytest.approx(evaluated(runs, "heroes")["accuracy"])
    unknown = name_hero(clues=tf.constant([["never seen"] * heroes.CLUES_A_REPORT]))
    assert unknown["hero"].numpy()[0].decode() in heroes.HEROES
    assert unknown["chance"].numpy()[0] < answer["chance"].numpy().mean()


@pytest.fixture(scope="module")
def recommender_run(runs: Runs) -> Process:
    return trained(runs, "recommender:Recommender", "recommender", 800, "--api", "fit", "--workers", "1")


@pytest.mark.matrix
def test_recommender_knows_more_than_the_base_rate(recommender_run: Process, runs: Runs) -> None:
    _, liked = recommender.load("test")
    base_rate = max(liked.mean(), 1 - liked.mean())
    assert evaluated(runs, "recommender")["accuracy"] >= base_rate + 0.15


@pytest.mark.matrix
def test_tables_of_users_and_items_are_shared_out_over_both_ps(recommender_run: Process, runs: Runs) -> None:
    rows = recommender.USERS + 1 + recommender.ITEMS + 1
    check_shared_out(bytes_per_server(runs, "recommender"), rows * recommender.EMBEDDING * 4)


def test_popular_items_do_not_all_lie_on_one_ps() -> None:
    asked, _ = recommender.load("test")

    def first_half(ids: np.ndarray) -> float:
        """Return the part of all opinions that is about the first half of the rows."""
        return float(np.mean(np.isin(asked["item"], ids[: len(ids) // 2])))

    assert first_half(recommender.ITEM_IDS) > 0.9
    assert 0.3 < first_half(recommender.in_random_order(recommender.ITEM_IDS)) < 0.7


@pytest.mark.matrix
def test_exported_recommender_takes_a_shops_ids(recommender_run: Process, runs: Runs) -> None:
    asked, liked = recommender.load("test")
    inputs = {name: tf.constant(ids) for name, ids in asked.items()}
    [scores] = serve(runs, "recommender")(**inputs).values()
    accuracy = np.mean((np.squeeze(scores) > 0) == liked)
    assert accuracy == pytest.approx(evaluated(runs, "recommender")["accuracy"], abs=1e-3)


@pytest.mark.matrix
def test_clicks_are_learnt_with_one_table_for_hashed_ids(runs: Runs) -> None:
    trained(runs, "clicks:Clicks", "clicks", 400, "--lazy-optimizers", "true")
    _, clicked = clicks.load("test")
    base_rate = max(clicked.mean(), 1 - clicked.mean())
    assert evaluated(runs, "clicks")["accuracy"] >= base_rate + 0.2
    check_shared_out(bytes_per_server(runs, "clicks"), clicks.Clicks().rows * clicks.EMBEDDING * 4)


@pytest.mark.matrix
def test_two_towers_find_what_a_user_takes(runs: Runs) -> None:
    trained(runs, "two_towers:TwoTowers", "towers", 300)
    assert evaluated(runs, "towers")["top_10"] >= 0.2  # by chance 10 of 512
    tables = (two_towers.USERS + two_towers.ITEMS) * two_towers.EMBEDDING * 4
    check_shared_out(bytes_per_server(runs, "towers"), tables)
    towers = tf.saved_model.load(str(runs.directory("towers") / "export")).signatures
    taken = {
        name: towers[name](**{name: tf.constant(ids)})["direction"] for name, ids in two_towers.load("test").items()
    }
    agreement, others = (tf.reduce_sum(taken["user"] * tf.roll(taken["item"], by, axis=0), axis=1) for by in (0, 1))
    assert np.mean(agreement) > np.mean(others) + 0.1


@pytest.mark.matrix
def test_histories_are_learnt_with_their_padding(runs: Runs) -> None:
    trained(runs, "histories:Histories", "histories", 400)
    features, clicked = histories.load("test")
    base_rate = max(clicked.mean(), 1 - clicked.mean())
    assert evaluated(runs, "histories")["accuracy"] >= base_rate + 0.1
    serving = serve(runs, "histories")

    def scores(**changed: np.ndarray) -> np.ndarray:
        [found] = serving(**{name: tf.constant(ids) for name, ids in {**features, **changed}.items()}).values()
        return np.squeeze(found)

    accuracy = np.mean((scores() > 0) == clicked)
    assert accuracy == pytest.approx(evaluated(runs, "histories")["accuracy"], abs=1e-3)
    # A weight of what only fills up counts nothing.
    padded = np.where(features["tags"] == 0, np.float32(9), features["tag_weights"])
    np.testing.assert_allclose(scores(tag_weights=padded), scores(), atol=1e-5)


@pytest.mark.matrix
def test_topics_are_learnt_with_keras_3(runs: Runs) -> None:
    process = trained(runs, "topics:Topics", "topics", 300, "--epoch-steps", "150", "--evaluation", "distributed")
    assert evaluated(runs, "topics")["accuracy"] >= 0.5  # of eight topics
    words, topics = topics_data()
    [scores] = serve(runs, "topics")(words=tf.constant(words)).values()
    accuracy = np.mean(np.argmax(scores, axis=1) == topics)
    assert accuracy == pytest.approx(evaluated(runs, "topics")["accuracy"], abs=1e-3)
    assert process.search(r"variables: .* on 2 ps")
    table = 20_000 * 32 * 4
    check_shared_out(bytes_per_server(runs, "topics"), table)


def topics_data() -> tuple[np.ndarray, np.ndarray]:
    """Return the example's data: to import it is to import Keras 3."""
    from trainer.examples import topics

    assert topics.WORDS * topics.EMBEDDING == 20_000 * 32
    return topics.load("test")


@pytest.mark.matrix
def test_digits_are_learnt_in_step(runs: Runs) -> None:
    process = trained(
        runs, "sync_digits:SyncDigits", "in-step", 200, "--strategy", "multi_worker_mirrored", "--workers", "1"
    )
    assert evaluated(runs, "in-step")["accuracy"] >= 0.9
    assert process.pids("worker-0")
    assert not process.pids("ps-0")


def test_global_batch_is_divided_among_the_replicas() -> None:
    program = sync_digits.SyncDigits()
    for replicas in (1, 2, 3):
        [(images, _)] = program.train_dataset(tf.distribute.InputContext(replicas, 0, replicas)).take(1)
        assert images.shape == (sync_digits.GLOBAL_BATCH // replicas, 8, 8)


def write_idx(path: Path, numbers: np.ndarray) -> None:
    """Write bytes as the files of Fashion-MNIST are written: type, dimensions, numbers; packed when it ends in .gz."""
    header = struct.pack(f">BBBB{numbers.ndim}I", 0, 0, 8, numbers.ndim, *numbers.shape)
    content = header + numbers.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_clothes(directory: Path) -> None:
    """Write four small files like the real ones, two of them packed: a class is a bright bar in its own place."""
    random = np.random.default_rng(1)
    for part, count, ending in (("train", 640, ".gz"), ("test", 200, "")):
        images, labels = random.integers(0, 100, size=(count, 28, 28)), np.arange(count) % 10
        if part == "train":  # every worker's part has all classes, since a slow worker may do few of the steps
            labels = np.arange(count) // 2 % 10
        for image, label in zip(images, labels, strict=True):
            image[2 * label + 4 : 2 * label + 6] += 150
        for name, numbers in zip(fashion_mnist.FILES[part], (images, labels), strict=True):
            write_idx(directory / f"{name}{ending}", numbers)


@pytest.fixture
def clothes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    write_clothes(tmp_path / "fashion_mnist")
    return tmp_path / "fashion_mnist"


def test_clothes_are_told_apart_from_files_on_the_shared_path(runs: Runs) -> None:
    write_clothes(runs.shared / "data" / "fashion_mnist")
    trained(runs, "fashion_mnist:FashionMnist", "clothes", 60)
    assert evaluated(runs, "clothes")["accuracy"] >= 0.9


def test_each_picture_keeps_its_label(clothes: Path) -> None:
    [(images, labels)] = fashion_mnist.read("test").batch(1000).map(fashion_mnist.decode)
    assert images.shape == (200, 28, 28)
    assert labels.numpy().tolist() == [number % 10 for number in range(200)]
    brightest = images.numpy().mean(axis=2).reshape(200, 14, 2).mean(axis=2).argmax(axis=1) - 2
    assert brightest.tolist() == labels.numpy().tolist()


def test_workers_share_the_pictures_without_overlap(clothes: Path) -> None:
    program = fashion_mnist.FashionMnist()
    parts = []
    for number in (0, 1):
        dataset = program.eval_dataset(tf.distribute.InputContext(2, number, 1))
        parts.append(np.concatenate([labels.numpy() for _, labels in dataset]).tolist())
    assert parts == [[0, 2, 4, 6, 8] * 20, [1, 3, 5, 7, 9] * 20]


def test_missing_files_end_the_training_with_their_names(runs: Runs) -> None:
    nowhere = runs.shared / "nowhere"
    arguments = ["-m", "trainer", "local", "--shared-dir", str(nowhere), "--strategy", "one_device"]
    process = runs.start([*arguments, "--program", "trainer.examples.fashion_mnist:FashionMnist"])
    assert process.wait() == 78, process.output
    assert f"{nowhere}/data/fashion_mnist lacks {', '.join(PACKED_NAMES)}" in process.output


def test_missing_files_are_named_with_their_directory(clothes: Path) -> None:
    (clothes / PACKED_NAMES[0]).unlink()
    (clothes / PACKED_NAMES[3].removesuffix(".gz")).unlink()
    with pytest.raises(FileNotFoundError) as caught:
        fashion_mnist.read("train")
    assert f"{clothes} lacks {PACKED_NAMES[0]}, {PACKED_NAMES[3]}: put the four files" in str(caught.value)
    assert "DATA_DIR" in str(caught.value)


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda path: write_idx(path, np.zeros(640)), "begins with 0x00000801, not with 0x00000803"),
        (lambda path: write_idx(path, np.zeros((640, 8, 8))), "holds images of 8 by 8 pixels, not of 28 by 28"),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "can't be unpacked"),
        (lambda path: path.write_bytes(b"<html>not found</html>"), "can't be unpacked"),
        (lambda path: path.write_bytes(gzip.compress(bytes([0, 0, 8, 3]))), "is not an IDX file: it has 4 bytes"),
        (
            lambda path: path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-100])),
            "announces 640 records of 784 bytes and holds 501660 bytes",
        ),
        (lambda path: write_idx(path, np.zeros((600, 28, 28))), "holds 600 images, but"),
    ],
)
def test_wrong_file_is_refused_by_name(clothes: Path, spoil: Any, expected: str) -> None:
    path = clothes / PACKED_NAMES[0]
    spoil(path)
    with pytest.raises(ValueError, match=expected) as caught:
        fashion_mnist.read("train")
    assert str(path) in str(caught.value)
