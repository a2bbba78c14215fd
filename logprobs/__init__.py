"""log pi(token) of logits, or of hidden states without ever holding all logits.

token_logprobs  logits in, log-probs out. Keeps for backward the logits it was given and one number a row.
head_logprobs   hidden states in, log-probs out, a chunk of rows at a time; backward makes each chunk's logits again.
head_loss       hidden states in, loss out: while a chunk's logits exist they are turned into their own gradient.

kernels  the Triton kernels      rows  rows of logits, by a kernel or in plain torch      head  chunks of the head
"""

from logprobs.head import head_logprobs, head_loss, rows_per_chunk
from logprobs.rows import token_logprobs
