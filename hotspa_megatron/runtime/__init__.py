"""Carries plans out on torch.distributed; knows nothing of Megatron."""
