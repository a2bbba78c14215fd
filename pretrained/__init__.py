"""Models and tokenizers as Hugging Face lays them out: folders in and out.

shapes  config.json <-> GPTConfig       tensors  *.safetensors <-> parameters       hub  owner/name -> a folder
"""
