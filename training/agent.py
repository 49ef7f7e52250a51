"""`python -m training.agent ...`: torchrun, ended together with the supervisor that started it."""

import signal

from torch.distributed.run import main

from training.process import die_with_parent

if __name__ == "__main__":
    die_with_parent(signal.SIGTERM)
    main()
