"""`python -m snug grpo ...` is `snug grpo ...`, as torchrun needs it."""

from snug.home import main

main()
