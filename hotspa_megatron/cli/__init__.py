"""The `hotspa` command."""
