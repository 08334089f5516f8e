"""How many seconds of the processor something takes, whatever else the machine does."""

import time


def takes_less(limit_s, work, tries=3):
    """Whether one try of several takes less than so many seconds of the processor.

    Other work on the machine, its clock rate and threads that an earlier test has left can only make a try slower.
    """
    for _ in range(tries):
        begun_s = time.process_time()
        work()
        if time.process_time() - begun_s < limit_s:
            return True
    return False
