"""`python -m training.agent ...`: torchrun, ended together with the supervisor that started it.

Leaves each failed rank's exit code in the file that CONVOY_EXIT_CODES names.
"""

import json
import os
import signal
import sys
from pathlib import Path

from training.process import PARENT_VARIABLE, die_with_parent, read_parent
from training.spec import EXIT_CODES_VARIABLE

if __name__ == "__main__":
    # Before the seconds that torch takes to load.
    die_with_parent(signal.SIGTERM, read_parent())
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # for the workers
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    try:
        main()
    except ChildFailedError as error:
        codes = {str(rank): failure.exitcode for rank, failure in error.failures.items()}
        Path(os.environ[EXIT_CODES_VARIABLE]).write_text(json.dumps(codes))
        sys.exit(1)
