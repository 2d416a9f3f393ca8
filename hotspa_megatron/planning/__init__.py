"""Pure decisions: no torch, no Megatron, no process group."""
