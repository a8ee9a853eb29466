"""What memory alone allows: a loop that reads and writes the bytes of an update, with one exclusive-or per element."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

_COMMAND = ("cc", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-x", "c", "-", "-o")


def stream(
    read: Tensor, changed: Sequence[Tensor], written: Sequence[Tensor] = (), *, threads: int
) -> Callable[[], None]:
    """The loop over tensors of one length, compiled here. A second call undoes the first, but in what is `written`.

    changed: is read and written. Raises RuntimeError where there is no C compiler that knows OpenMP.
    """
    tensors = (read, *changed, *written)
    types = [f"uint{8 * t.itemsize}_t" for t in tensors]
    arrays = "".join(f"{kind} *restrict a{i} = arrays[{i}]; " for i, kind in enumerate(types))
    body = "".join(f"a{i} [i] {'^=' if i <= len(changed) else '='} x; " for i in range(1, len(tensors)))
    source = (
        f"#include <stdint.h>\nvoid run(int64_t n, int threads, void **arrays) {{ {arrays}\n"
        "#pragma omp parallel for simd num_threads(threads)\n"
        f"for (int64_t i = 0; i < n; ++i) {{ {types[0]} x = a0[i]; {body} }} }}\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "loop.so"
        try:
            subprocess.run([*_COMMAND, str(library)], input=source, text=True, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise RuntimeError(f"the loop to compare with needs a C compiler with OpenMP: {error}") from error
        run = ctypes.CDLL(str(library)).run
    addresses = (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))

    def loop(_keep: Sequence[Tensor] = tensors) -> None:
        run(ctypes.c_int64(len(read)), threads, addresses)

    return loop
