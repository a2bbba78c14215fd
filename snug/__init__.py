"""What GRPO stands on, for use in any project; it imports nothing of the rest of this repository.

    from snug.logprobs import head_loss, token_logprobs

options    configs, command lines       device     the device and the host     memory     meter, plan, retries
kernels    Triton kernels and twins     logprobs   log-probs of tokens         tokenizer  text to ids and back
pretrained Hugging Face folders         sandbox    a confined child process    decoding   the decode batch and its cache
lora       adapters
"""
