"""Kernels and engine on a CUDA device, in at most 6 minutes, from a bare checkout: nothing is installed or fetched.

It needs torch with CUDA, triton, transformers and numpy, and makes random weights on the device. In this order: every
kernel in bfloat16 against float64; the bandwidth of paged decode as a share of a plain copy's; the arithmetic of paged
prefill as a share of a matrix product's; decode steps of an 8B-shaped Llama against the roofline, and one of them as a
graph against eager; transformers' `generate_batch` on the same model. What there is no time or memory for is named in a
line that begins with `skipped`.

Exits with 1 if a kernel is wrong or a part fails, and with `--check` if a bound does not hold; with 3 if there is no
CUDA device that Triton's kernels run on, or if with `--check` something that has a bound could not be measured.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Final

from figures import arguments, cannot_measure, machine

#: From the start of the process until the last part has to be done, and until the process ends itself, wherever it is.
SECONDS: Final = (325.0, 350.0)
QUICK_SECONDS: Final = (150.0, 175.0)


def see_checkout() -> None:
    """Makes `inferq` importable where it is not installed.

    A bare checkout has no folder of that name but `.typecheck/inferq`, whose links show the layers as an install would.
    The root itself must not be on the path: `cuda` there would hide NVIDIA's package of that name from torch.
    """
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".typecheck"))


def main() -> None:
    started = time.monotonic()
    quick = "end within 3 minutes: fewer batches and contexts"
    parser = arguments(__doc__ or "", quick=quick, needs_quiet=False)
    args = parser.parse_args()
    # Nothing here asks for a file from the network; with these no library does either.
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
    see_checkout()
    try:
        import torch

        if not torch.cuda.is_available():
            cannot_measure("torch finds no CUDA device here")
        from inferq.cuda.availability import why_no_triton

        if (reason := why_no_triton(torch.device("cuda"))) is not None:
            cannot_measure(reason)
        from gpu_parts.card import Card
        from gpu_parts.plan import FULL, QUICK
        from gpu_parts.run import Run
        from gpu_parts.versions import versions
    except ModuleNotFoundError as exc:
        cannot_measure(f"{exc}: this needs torch with CUDA, triton, transformers and numpy")

    end, hard_end = QUICK_SECONDS if args.quick else SECONDS
    card = Card()
    print(f"{card.describe()}; {machine()}\n{versions()}", flush=True)
    run = Run(card, QUICK if args.quick else FULL, seconds=end - (time.monotonic() - started))
    run.guarded(args, hard_seconds=hard_end - (time.monotonic() - started))


if __name__ == "__main__":
    main()
