"""A target of a Sandbox that executes whatever it gets, and whose keeper can be told to misbehave."""

import os
import sys
import time

from snug.options import SnugError


class Evil:
    def __init__(self, wrong=""):
        if wrong:
            raise SnugError(wrong)
        self.texts = []

    # what a keeper does, unconfined

    def echo(self, item):
        return item

    def pid(self):
        return os.getpid()

    def environment(self):
        return dict(os.environ)

    def streams(self):
        return [os.readlink(f"/proc/self/fd/{file}") for file in range(3)]

    def modules(self):
        return sorted(sys.modules)

    def sleep(self):
        time.sleep(1000)

    def exit(self):
        os._exit(3)

    # what a worker does

    def plain(self, text):
        self.texts.append(text)
        return text == "4"

    def count(self, text):
        self.texts.append(text)
        return len(self.texts)

    def number(self, text):
        return float(text)

    def evaluate(self, text):
        return eval(text)

    def execute(self, text):
        """Returns the variable `result`, which the text may set."""
        names = {"result": None}
        exec(text, names)
        return names["result"]

    def sleepy(self, text):
        time.sleep(0.4)
        return self.execute(text)

    def any(self, kind, text):
        return getattr(self, kind)(text)

    def slow(self, message, ask):
        while True:
            time.sleep(1.2)
            message = ask(message)
