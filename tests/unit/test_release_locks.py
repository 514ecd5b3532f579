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
    assert [name for name in read(f"cpu-{python}") if "nvidia" in name or "cuda" in name] == []


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


def test_there_is_a_cuda_lock_for_each_python_that_has_a_cpu_lock():
    def pythons(kind):
        return {file.stem.removeprefix(f"{kind}-") for file in LOCKS.glob(f"{kind}-*.txt")}

    assert pythons("cuda") == pythons("cpu") == set(PYTHONS)
