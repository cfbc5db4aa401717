"""The processes of a run are found by a variable in their environment, not by a text that mentions it."""

import subprocess
import sys

from waiting import wait_until

from rekindle_lab.runs import processes


def test_a_process_that_only_mentions_a_run_directory_is_not_ended(tmp_path):
    variable = f"REKINDLE_RUN_DIR={tmp_path / 'run'}"
    mentions = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", variable])
    try:
        wait_until(lambda: mentions.pid in processes.mentioning(variable))
        assert processes.with_variable(*variable.split("=")) == []
    finally:
        mentions.kill()
        mentions.wait()
