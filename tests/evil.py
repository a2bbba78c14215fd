"""A target for data/gym/sandbox.py whose scorer executes whatever it is given, and whose keeper can be told to misbehave."""

import os
import sys
import time


class Evil:
    def __init__(self, wrong=""):
        if wrong:
            raise ValueError(wrong)
        self.state = []

    def make(self, item):
        """What an item says that the keeper should do, where nothing is confined."""
        if item == "pid":
            return os.getpid()
        if item == "environment":
            return dict(os.environ)
        if item == "streams":
            return [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)]
        if item == "modules":
            return sorted(sys.modules)
        if item == "sleep":
            time.sleep(1000)
        if item == "exit":
            os._exit(3)
        if item == "long":
            return "x" * 2**23
        if item == "print":
            print('{"id": 1, "value": 1.0}', flush=True)
        return item

    def prepare(self, item):
        return item

    def score(self, prepared, answer):
        if prepared == "exec":  # the answer may set its score
            names = {"score": 0.0}
            exec(answer, names)
            return names["score"]
        if prepared == "eval":
            return eval(answer) == 4
        if prepared == "number":
            return float(answer)
        self.state.append(answer)
        return len(self.state) if prepared == "count" else answer == "4"
