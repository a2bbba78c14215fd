"""Models and tokenizers as Hugging Face lays them out: folders in and out, and LoRA adapters.

    shapes  config.json <-> GPTConfig       tensors  *.safetensors <-> parameters
    lora    adapters, weights frozen        chat     a tokenizer's chat template

Importing this does not import torch.
"""

from pretrained.shapes import is_pretrained, read_shape, stored_dtype
from pretrained.tensors import (
    fingerprint,
    load_pretrained,
    look_at_weights,
    read_weights,
    save_pretrained,
)
