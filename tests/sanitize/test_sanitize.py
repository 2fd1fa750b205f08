"""All C++ under the sanitizers: addresses and undefined behaviour in tests that use it, threads in a driver of its own.

The libraries are built anew with the sanitizers in the command of the compiler, into a folder of their own; Python
itself is as ever, so the sanitizer's library is loaded before it.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TORCH = Path(torch.__file__).parent
SECONDS = 1800  # the longest takes some minutes on a machine that does nothing else
FLAGS = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer")
COMPLAINTS = ("ERROR: AddressSanitizer", "WARNING: ThreadSanitizer", "runtime error:", "Assertion '")

# What runs, and what of our C++ it is there for.
TESTS = {
    "plan: doors": ("tests/pure/test_doors.py",),
    "plan: searches": ("tests/pure/test_exact.py", "tests/pure/test_plan.py", "tests/pure/test_loop.py"),
    "plan: layout": ("tests/pure/test_layout.py",),
    "kernels": ("tests/cpu/test_own_kernels_fuzz.py", "tests/cpu/test_own_kernels.py"),
    "attention and updates": ("tests/cpu/test_attention.py", "tests/cpu/test_joined_updates.py"),
    "products": (
        "tests/cpu/test_products.py::test_products_have_the_bits_of_torchs",
        "tests/cpu/test_products.py::test_what_a_kernel_does_not_know_is_torchs",
    ),
    "allocator: steps": ("tests/cpu/test_arena.py", "tests/cpu/test_failed_steps.py"),
    "allocator: meters": ("tests/cpu/test_meter.py",),
}
# A test of the meter is about addresses that come back; elsewhere the sanitizer keeps freed blocks for a while.
REUSED = {"allocator: meters": ":quarantine_size_mb=0:thread_local_quarantine_size_kb=0"}

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        shutil.which("g++") is None or platform.system() != "Linux", reason="the sanitizers are those of g++ on Linux"
    ),
]


def library(name: str) -> str:
    """Where g++ has the library of a sanitizer."""
    found = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = found.stdout.strip()
    if path == name:
        pytest.skip(f"g++ has no {name} here")
    return path


def assert_clean(result: subprocess.CompletedProcess[str]) -> None:
    said = result.stdout + result.stderr
    complaint = next((said.index(word) for word in COMPLAINTS if word in said), None)
    assert complaint is None, said[max(0, (complaint or 0) - 500) : (complaint or 0) + 5000]
    assert result.returncode == 0, said[-5000:]


@pytest.mark.parametrize("what", TESTS)
def test_addresses_and_undefined_behaviour(what: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    cache = tmp_path_factory.getbasetemp() / "sanitized"
    cache.mkdir(mode=0o700, exist_ok=True)
    environment = os.environ | {
        "CXX": f"g++ {' '.join(FLAGS)} -D_GLIBCXX_ASSERTIONS",
        "LOWTIDE_CACHE": str(cache),
        "LD_PRELOAD": " ".join(library(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so")),
        "ASAN_OPTIONS": "detect_leaks=0:handle_abort=1:allocator_may_return_null=1" + REUSED.get(what, ""),
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-s", "-m", "not long", "-p", "no:faulthandler"]
    result = subprocess.run(
        [*command, "-p", "no:cacheprovider", *TESTS[what]],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=SECONDS,
        check=False,
    )
    assert_clean(result)
    assert " passed" in result.stdout


def test_threads(tmp_path: Path) -> None:
    library("libtsan.so")
    driver = tmp_path / "stress"
    abi = int(torch.compiled_with_cxx11_abi())
    build = [
        *("g++", "-g", "-O1", "-std=c++20", "-fsanitize=thread", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"),
        *("-isystem", str(TORCH / "include"), f"-I{ROOT / 'lowtide' / 'allocator'}", str(HERE / "stress.cpp")),
        *(f"-L{TORCH / 'lib'}", "-lc10", f"-Wl,-rpath,{TORCH / 'lib'}", "-o", str(driver)),
    ]
    subprocess.run(build, check=True)
    found = subprocess.run([str(driver)], capture_output=True, text=True, timeout=SECONDS, check=False)
    if "unexpected memory mapping" in found.stderr and (setarch := shutil.which("setarch")):  # of a hardened kernel
        found = subprocess.run(
            [setarch, "-R", str(driver)], capture_output=True, text=True, timeout=SECONDS, check=False
        )
    assert_clean(found)
    assert "installed: 0" in found.stdout
