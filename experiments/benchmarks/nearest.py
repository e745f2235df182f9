"""Exact nearest neighbours of queries among millions of random vectors in a memory-mapped file.

Prints the seconds of the search, and the largest memory of the process: `anonymous` is the memory that only this
process can free; `resident` also counts the pages of the file that the kernel keeps in memory and can drop at any time.

Command:  python -m experiments.benchmarks.nearest --documents=10000000 --queries=1000 --repeats=3
          --width, --k and --folder (of the temporary file, which needs 4 bytes per number) change the other sizes
Needs:    nothing more
Hardware: 2 CPU cores, 3 GB of free disk
Score:    see RESULTS.md
"""

import argparse
import pathlib
import resource
import tempfile
import threading
import time

import numpy as np

from bertjax.embedding.neighbors import nearest

ROWS = 1 << 18  # rows that are generated together


def main() -> None:
    """Writes the vectors, searches, and prints a line per repeat."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("documents", 10_000_000), ("queries", 1000), ("width", 64), ("k", 100), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", default=None, help="of the temporary file")
    sizes = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=sizes.folder) as folder:
        path = pathlib.Path(folder) / "vectors.npy"
        _write_vectors(path, sizes.documents, sizes.width)
        documents = np.load(path, mmap_mode="r")
        queries = np.random.default_rng(1).standard_normal((sizes.queries, sizes.width), np.float32)
        for _ in range(sizes.repeats):
            began = time.monotonic()
            with _AnonymousMemory() as memory:
                neighbours = nearest(queries, documents, sizes.k)
            seconds = time.monotonic() - began
            resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
            print(
                f"{sizes.documents:,} documents, {sizes.queries:,} queries: {seconds:.1f} s, "
                f"anonymous {memory.largest / 1e6:.2f} GB, resident {resident:.2f} GB, "
                f"mean cosine {neighbours.cosines.mean():.6f}",
                flush=True,
            )


def _write_vectors(path: pathlib.Path, documents: int, width: int) -> None:
    vectors = np.lib.format.open_memmap(path, "w+", np.float32, (documents, width))
    rng = np.random.default_rng(0)
    for start in range(0, documents, ROWS):
        rows = vectors[start : start + ROWS]
        rows[:] = rng.standard_normal(rows.shape, np.float32)
    vectors.flush()


class _AnonymousMemory:
    """The largest anonymous memory of this process in kB, read from Linux's /proc ten times per second."""

    largest = 0

    def __enter__(self) -> "_AnonymousMemory":
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(0.1):
            lines = pathlib.Path("/proc/self/status").read_text().splitlines()
            (line,) = (line for line in lines if line.startswith("RssAnon"))
            self.largest = max(self.largest, int(line.split()[1]))


if __name__ == "__main__":
    main()
