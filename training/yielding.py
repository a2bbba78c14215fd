"""A memory budget that moves: before each phase a run asks what it may use now, and yields, or waits.

    python grpo.py config/grpo_small.py --memory_budget_gb=auto     # what the device has free, or the host of a CPU
    echo 0.5 > out/grpo_small/budget                                # from outside, any run: GiB or auto. 0: wait
    rm out/grpo_small/budget                                        # the option holds again

If less is left than the plan takes, the run takes the options that `fit` finds, and goes on. If no options fit, it is
saved and waits. If more is left, it goes back: one option by one step, the most expensive first, after CALM iterations
in a row that had room for it in each phase. None of these options changes results, except by rounding.

Left out: what changes inside a phase, which an out-of-memory finds (snug/memory/limits.py); fsdp.
Tests: tests/test_yielding.py
"""

import math
import time
from dataclasses import replace
from pathlib import Path

from runs.saver import newest_name
from snug.device.cuda import empty_cache
from snug.device.host import HOST
from snug.device.kinds import MIB
from snug.device.streams import settle
from snug.memory.fit import Room, asked, changes, fit, need, plan_of, room_for, step_back
from snug.memory.plan import GIB
from snug.options import SnugError
from training.frozen import relocate

CALM = 3
MINUTE = 60  # seconds


class Yielding:
    """Holds a Training within its budget."""

    def __init__(self, training, dry_run, own):
        """own: the settings that hold if no budget is asked for."""
        self.training, self.dry_run, self.own = training, dry_run, replace(own)
        self.folder = Path(own.out_dir).absolute()  # a reward function may change the working folder
        self.budget, self.warned = own.memory_budget_gb, ""
        training.limits.begin_phase = self.begin_phase

    def room(self) -> Room | None:
        """What the run may use now: in several processes what each of them has. None: no budget."""
        training = self.training
        settings, processes = training.settings, training.processes
        if processes.size > 1 and not settings.memory_budget_gb:
            return None  # asking would cost them time in each phase
        budget = processes.first(asked(settings, self.folder, self.warn))
        if budget != self.budget:
            self.budget = budget
            number = training.prepared.global_step
            training.log.say(f"iteration {number}: memory_budget_gb={budget} from now on")
        held = training.meter.allocated() + HOST.current
        room = room_for(budget, settings, training.model.device, held)
        rooms = processes.from_all_ranks(lambda: room)
        return room and Room(*map(min, zip(*rooms, strict=True)))

    def warn(self, text: str):
        if text != self.warned:
            self.training.log.say(text)
        self.warned = text

    def begin_phase(self, name: str):
        """Make room for the phase that comes."""
        training = self.training
        for _ in range(2):
            if (room := self.room()) is None:
                return
            training.budgets[f"mem_budget_mb_{name}"] = round(room.device / MIB, 3)
            if room.holds(plan_of(self.dry_run, training.settings)):
                return
            empty_cache()  # now and then this is enough
        fitted, planned = fit(self.dry_run, training.settings, room)
        training.calm = 0
        self.change(fitted, f"{gib(room.device)} may be used from {self.place(name)} on")
        if not room.holds(planned):
            self.wait(name, planned)

    def place(self, name):
        return f"{name} of iteration {self.training.prepared.global_step}"

    def go_back(self):
        """After an iteration: take more, if there was room for it for a while."""
        training, room, target = self.training, self.room(), self.own
        settings = training.settings
        if room is not None:
            least = min(training.budgets.values(), default=math.inf) * MIB
            room = room._replace(device=min(room.device, least))
            target = step_back(self.dry_run, settings, room)
        training.calm = 0 if target == settings else training.calm + 1
        if training.calm == CALM:
            training.calm = 0
            self.change(target, f"{CALM} iterations had room for more")

    def change(self, fitted, why: str):
        """Give the run the options of `fitted`, between two phases."""
        training = self.training
        settings, model, device = training.settings, training.model, training.model.device
        if fitted == settings:
            return
        training.log.say(f"{why}: changed {changes(settings, fitted)}")
        vars(settings).update(vars(fitted))  # in place: an iteration that is going on has them too
        model.checkpoint_blocks = settings.checkpoint_blocks
        model.activation_offload = settings.activation_offload
        training.limits.follow(settings)
        reference = training.reference, getattr(settings, "reference", "")
        teacher = training.teacher, getattr(settings, "teacher_device", "")
        for frozen, place in (reference, teacher):
            if place == "host":  # before anything comes from there
                relocate(frozen, place, device)
        training.optimizer.follow(settings)
        for frozen, place in (reference, teacher):
            relocate(frozen, place, device)
        settle()
        empty_cache()

    def wait(self, name: str, planned):
        """Until the smallest plan fits. Raises SnugError after wait_for_memory minutes, or at a signal."""
        training, seconds = self.training, 0
        limit = training.settings.wait_for_memory
        while (room := self.room()) is not None and not room.holds(planned):
            if seconds == 0:
                training.saver.rescue("a wait for memory")
            least = gib(need(planned))
            problem = (
                f"{gib(room.device)} may be used before {self.place(name)}; an iteration takes {least}"
            )
            stop = training.noted[-1] if training.noted else None
            if limit is not None and seconds >= MINUTE * limit:
                stop = f"{limit:g} minutes without memory"
            if stop := training.processes.agreed(stop):
                newest = newest_name(training.saver.folder)
                raise SnugError(f"stopped by {stop}: {problem}; --resume=auto goes on from {newest}")
            if seconds % MINUTE == 0:
                training.log.say(f"waiting: {problem}")
            time.sleep(1)
            seconds += 1
        if seconds:
            training.log.say(f"going on after {seconds} s")


def gib(size) -> str:
    return f"{size / GIB:.3f} GiB"
