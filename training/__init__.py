"""What the two loops share.

loop     the run around the iterations               optimizer  AdamW, clipping, schedule
state    what an iteration works with, and its end   guard      steps that are dropped because they are not finite
dry_run  the same iteration for the planner          figures    what the log says of rollouts and steps
parallel several processes that train one model      forward    passes without gradient: trainer, reference, teacher
"""

from training.figures import Scored, as_floats, join, mean_of_steps, rollout_metrics
from training.forward import reference_logprobs, teacher_outputs, trainer_logprobs
from training.guard import finite_columns
from training.loop import run
from training.optimizer import learning_rate_at, make_optimizer, optimizer_step
from training.parallel import score_together
from training.state import Training
