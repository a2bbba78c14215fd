"""Models and tokenizers as Hugging Face lays them out: folders in and out.

shapes  config.json <-> GPTConfig       tensors        *.safetensors <-> parameters
hub     owner/name -> a folder          bitsandbytes   matrices in 4 bits -> a GPT's         adapters   -> PEFT's folder
"""
