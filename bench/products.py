"""How fast are the int8 products beside oneDNN's and torch's? All in one sitting, alternately.

    python bench/products.py --rounds 9

Multiplies 1, 8, 32 and 512 rows with the matrices of a layer of Qwen2.5 1.5B. Each shape has so
many weights that no cache holds them (256 MB); medians over the rounds. ``of the best`` is what the
native kernels reach of the fastest of all. The last row of each size is a whole layer: the times of
its four shapes added up, where the best is the best of each shape.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict

import torch
from rich.console import Console
from rich.table import Table

from tokenpath.bench.engine.products import Shape, int8_ways
from tokenpath.engine.cpus import default_threads

WEIGHTS_BYTES = 256 << 20
LAYER = {
    "q, k, v": (1536, 2048),
    "output": (1536, 1536),
    "gate, up": (1536, 17920),
    "down": (8960, 1536),
}
"""Width and outputs."""
PAUSE_S = 0.03
"""Between two libraries, so that the threads of one no longer wait for work on their CPUs."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", default="1,8,32,512", help="numbers of rows (1,8,32,512)")
    options = parser.parse_args()
    threads = default_threads()
    torch.set_num_threads(threads)
    table = Table(title=f"int8 products, Tops/s (GB/s of weights), {threads} threads")
    table.add_column("rows", justify="right")
    table.add_column("product")
    for rows in (int(part) for part in options.rows.split(",")):
        layer: dict[str, float] = defaultdict(float)
        best_s = 0.0
        for name, (width, outputs) in LAYER.items():
            shape = Shape(rows, width, outputs, count=-(-WEIGHTS_BYTES // (width * outputs)))
            seconds = {way: s / shape.count for way, s in measured(shape, options.rounds).items()}
            if not table.columns[2:]:
                for way in (*seconds, "of the best"):
                    table.add_column(way, justify="right")
            for way, one_s in seconds.items():
                layer[way] += one_s
            best_s += min(seconds.values())
            table.add_row(str(rows), name, *cells(seconds, width * outputs, rows))
        weights = sum(width * outputs for width, outputs in LAYER.values())
        ours_s = next(s for way, s in layer.items() if way.startswith("native"))
        row = cells(layer, weights, rows)[:-1]
        table.add_row(str(rows), "layer", *row, f"{best_s / ours_s:.0%}", end_section=True)
    Console(width=120).print(table)


@torch.inference_mode()
def measured(shape: Shape, rounds: int) -> dict[str, float]:
    """Median seconds of all products of a shape, by library."""
    calls = {way: make() for way, make in int8_ways(shape).items()}
    times: dict[str, list[float]] = {way: [] for way in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for way, call in calls.items():
            time.sleep(PAUSE_S)
            started = time.perf_counter()
            call()
            times[way].append(time.perf_counter() - started)
    return {way: statistics.median(found) for way, found in times.items()}


def cells(seconds: dict[str, float], weights: int, rows: int) -> list[str]:
    """A row's figures; ``seconds`` for one product with so many ``weights``, by library."""
    ours_s = next(s for way, s in seconds.items() if way.startswith("native"))
    figures = [
        f"{2 * rows * weights / s / 1e12:.2f} ({weights / s / 1e9:.1f})" for s in seconds.values()
    ]
    return [*figures, f"{min(seconds.values()) / ours_s:.0%}"]


if __name__ == "__main__":
    main()
