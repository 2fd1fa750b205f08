"""The process in which ops run alone: a specimen a line in, its costs a line out."""

from __future__ import annotations

import json
import sys

import torch

from lowtide import allocator, private
from lowtide.measure.bench_call import bench


def main() -> None:
    """Answer specimens until the input ends."""
    torch.set_num_threads(int(sys.argv[1]))
    torch.manual_seed(0)
    answers = sys.stdout
    sys.stdout = sys.stderr
    metered = allocator.available()
    with private.below_autograd():
        for line in sys.stdin:
            try:
                answer = bench(json.loads(line), metered=metered)
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
