"""The operators in C++, compiled for a processor that can do less than this one, pass the same tests."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest
from test_kernels import needs_operators

PROGRAM = """
import sys
from pathlib import Path

import pytest

from xinfer.backends.torch import kernels

given, tests = sys.argv[1].split(), sys.argv[2:]
kernels._FLAGS = (*(each for each in kernels._FLAGS if not each.startswith("-march")), *given)
code = pytest.main(["-q", "-p", "no:cacheprovider", *tests])
assert kernels.build_key() in Path("/proc/self/maps").read_text(), "other operators were tested"
sys.exit(code)
"""


@needs_operators
@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the flags are those of x86-64")
@pytest.mark.parametrize("flags", ["-march=native -mno-avx512bf16", "-march=x86-64-v3", "-march=x86-64-v2"])
def test_operators_of_lesser_processors_pass_the_same_tests(flags: str) -> None:
    tests = [Path(__file__).with_name(f"test_{name}.py") for name in ("kernels", "codes", "cache_codes", "invariant")]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, flags, *map(str, tests)], capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
