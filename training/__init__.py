"""What the two loops share.

loop     the run around the iterations               optimizer  AdamW, clipping, schedule
state    what an iteration works with, and its end   guard      steps that are dropped because they are not finite
dry_run  the same iteration for the planner          figures    what the log says of rollouts and steps
parallel several processes that train one model      frozen     models that do not train
"""
