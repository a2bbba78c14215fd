"""log pi(token): from logits, or from hidden states without ever holding all logits.

token_logprobs  logits in, log-probs out. Backward keeps the logits and (M,) numbers.
head_logprobs   hidden states in, log-probs out, a chunk of rows at a time; backward computes the logits again.
head_loss       hidden states in, loss out; the gradient of a chunk's logits overwrites them.

rows        rows of logits, by a kernel or in plain torch      divergence  the same rows beside a teacher's
head        chunks of hidden states through the head
"""

from snug.logprobs.divergence import Teacher
from snug.logprobs.head import head_logprobs, head_loss, head_loss_in_two_visits
from snug.logprobs.rows import token_logprobs
