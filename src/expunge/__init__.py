"""Make a causal language model forget given training examples."""
