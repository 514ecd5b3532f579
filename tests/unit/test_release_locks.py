"""What the shipped locks promise of one another: no CUDA on a CPU host, and the same TensorFlow everywhere."""

from pathlib import Path

import pytest
import wheelhouse

LOCKS = Path(__file__).parents[2] / "locks"
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]


def read(name):
    return wheelhouse.read_lock((LOCKS / f"{name}.txt").read_text())


@pytest.mark.parametrize("python", PYTHONS)
def test_a_cpu_host_never_gets_a_cuda_wheel(python):
    for kind in ("cpu", "cpu-no-gpu"):
        assert [name for name in read(f"{kind}-{python}") if "nvidia" in name or "cuda" in name] == []


@pytest.mark.parametrize("python", PYTHONS)
def test_a_cluster_without_gpus_has_the_same_with_the_smaller_wheel_of_tensorflow(python):
    cpu, smaller = read(f"cpu-{python}"), read(f"cpu-no-gpu-{python}")
    (whole,) = (name for name in cpu if name.startswith("tensorflow=="))
    hashes = smaller.pop(whole.replace("tensorflow==", "tensorflow-cpu=="))
    assert hashes
    assert not hashes & cpu.pop(whole)
    assert smaller == cpu


@pytest.mark.parametrize("python", PYTHONS)
def test_a_gpu_host_has_what_a_cpu_host_has_and_nvidias_libraries(python):
    cpu, cuda = read(f"cpu-{python}"), read(f"cuda-{python}")
    assert {name: cuda.get(name) for name in cpu} == cpu
    more = [name.partition("==")[0] for name in cuda.keys() - cpu.keys()]
    assert all(name.startswith("nvidia-") for name in more)
    assert {"nvidia-cublas-cu12", "nvidia-cudnn-cu12", "nvidia-cuda-nvcc-cu12", "nvidia-nccl-cu12"} <= set(more)


@pytest.mark.parametrize("python", PYTHONS)
def test_every_wheel_has_its_hash(python):
    assert [name for name, hashes in read(f"cuda-{python}").items() if not hashes] == []


def test_each_python_that_has_a_cpu_lock_has_the_others():
    def pythons(kind):
        return {file.stem.removeprefix(f"{kind}-") for file in LOCKS.glob(f"{kind}-3.*.txt")}

    assert pythons("cuda") == pythons("cpu") == pythons("cpu-no-gpu") == set(PYTHONS)
