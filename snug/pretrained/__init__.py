"""Reads and writes Hugging Face folders, bit for bit; owner/name on the hub becomes a local folder.

    shapes        read_config, read_shape, config_of, is_pretrained, stored_dtype
    tensors       look_at_weights, then read_weights; save_pretrained, entries, appearing, fingerprint
    hub           local_folder, hub_name
    adapters      find_base, save_adapters: PEFT's folders

A shape is a dict of the keywords of model.GPTConfig; a model needs only parameters with GPT's names. Nothing here
imports torch before tensors are read or written. Left out: the model, pickles, quantized weights,
architectures that families.toml does not have.
"""
