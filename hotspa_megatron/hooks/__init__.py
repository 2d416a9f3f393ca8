"""The one room that touches Megatron."""
