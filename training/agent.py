"""`python -m training.agent ...`: torchrun, ended together with the supervisor that started it.

Leaves each failed rank's exit code in the file that CONVOY_EXIT_CODES names.
"""

import json
import os
import signal
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

from training.process import die_with_parent
from training.spec import EXIT_CODES_VARIABLE

if __name__ == "__main__":
    die_with_parent(signal.SIGTERM)
    try:
        main()
    except ChildFailedError as error:
        codes = {str(rank): failure.exitcode for rank, failure in error.failures.items()}
        Path(os.environ[EXIT_CODES_VARIABLE]).write_text(json.dumps(codes))
        sys.exit(1)
