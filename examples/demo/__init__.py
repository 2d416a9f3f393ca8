"""The demo that scripts/demo.sh runs: the same training twice, static and with length groups, compared step by step."""
