"""HotSPa for stock Megatron-LM: one exact training step under several parallel strategies."""
